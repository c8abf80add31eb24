"""Fingerprints of texts, and that the calibration text which is shipped holds none of the held-out texts."""

import json
import lzma
import random
import re
from pathlib import Path

import pytest

from scripts.study.text_kind_sources import PARTS
from scripts.study.winnowing import RUN, WINDOW, fingerprints

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "convert/calibration_text/sample_texts").glob("*.xz"))
RECORD = ROOT / "docs/study/text_kinds.json"


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=6)) for _ in range(count))


def test_texts_with_a_run_in_common_share_a_fingerprint():
    shared = words(0, RUN + WINDOW - 1)
    one, other = f"{words(1, 333)} {shared} {words(2, 77)}", f"{words(3, 50)}\n\n{shared.title()}, {words(4, 500)}"
    assert fingerprints(one) & fingerprints(other)


def test_unrelated_texts_share_none():
    assert not fingerprints(words(1, 2000)) & fingerprints(words(2, 2000))


def test_spaces_case_and_punctuation_do_not_count():
    text = words(0, 100)
    assert fingerprints(text) == fingerprints(f"«{text.upper().replace(' ', ',_ ')}»")


def test_a_text_shorter_than_a_run_has_none():
    assert not fingerprints(words(0, RUN - 1))
    assert len(fingerprints(words(0, RUN))) == 1


def test_characters_are_words_where_there_are_no_spaces():
    assert not fingerprints("汉" * (RUN - 1))
    shared = "".join(chr(0x4E00 + i) for i in range(RUN + WINDOW - 1))
    assert fingerprints(f"一二三{shared}") & fingerprints(f"{shared}四五")


def test_the_record_has_every_text_kind():
    record = json.loads(RECORD.read_text())
    assert (record["run"], record["window"]) == (RUN, WINDOW)
    assert list(record["text_kinds"]) == ["novels", *PARTS]
    for text_kind in record["text_kinds"].values():
        assert re.fullmatch(r"[0-9a-f]{12}( [0-9a-f]{12})+", text_kind["fingerprints"])


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_the_shipped_calibration_text_holds_no_held_out_text(file: Path):
    text = lzma.decompress(file.read_bytes()).decode()
    texts = [json.loads(line)["text"] for line in text.splitlines()] if ".jsonl" in file.name else [text]
    shipped = set[str]().union(*map(fingerprints, texts))
    assert shipped
    for name, text_kind in json.loads(RECORD.read_text())["text_kinds"].items():
        assert not shipped & set(text_kind["fingerprints"].split()), name
