"""The calibration text that ships: a mixture all through, and nothing in it that must not be shipped."""

import json
import lzma
import re
from itertools import accumulate
from pathlib import Path

import pytest

import convert

FOLDER = Path(convert.__file__).parent / "calibration_text/sample_texts"
PACKED = FOLDER / "mixture.jsonl.xz"
PARTS = 16
BEGINNING = 425_000
"""Characters: about 131,072 tokens."""
FORBIDDEN = {
    "an e-mail address": r"[\w.+-]+@[\w-]+\.\w+",
    "a cloud key": r"AKIA[0-9A-Z]{12,}",
    "a private key": r"-----BEGIN",
    "a token": r"\b(gh[pousr]_\w{8,}|sk-\w{8,}|hf_\w{8,})",
    "an address with a token": r"https?://\S*[?&](token|key)=",
    "a long run that may be a key": r"[A-Za-z0-9+/_]{41,}",
}


@pytest.fixture(scope="module")
def lines() -> list[dict[str, str]]:
    return [json.loads(line) for line in lzma.decompress(PACKED.read_bytes()).decode().splitlines()]


def test_every_line_has_its_kind_source_and_text(lines: list[dict[str, str]]) -> None:
    assert all(set(line) == {"kind", "source", "text"} and all(line.values()) for line in lines)


def test_every_part_holds_every_kind(lines: list[dict[str, str]]) -> None:
    kinds = {line["kind"] for line in lines}
    assert len(kinds) >= 10
    for part in range(PARTS):
        piece = lines[len(lines) * part // PARTS : len(lines) * (part + 1) // PARTS]
        assert {line["kind"] for line in piece} == kinds


def test_the_beginning_holds_every_kind(lines: list[dict[str, str]]) -> None:
    beginning, characters = set(), 0
    for line in lines:
        if characters >= 60_000:
            break
        beginning.add(line["kind"])
        characters += len(line["text"])
    assert beginning == {line["kind"] for line in lines}


@pytest.mark.parametrize(("kind", "share"), [("languages", 0.06), ("stories", 0.10), ("encyclopaedia", 0.15)])
def test_prose_and_languages_have_their_share_of_the_beginning(
    kind: str, share: float, lines: list[dict[str, str]]
) -> None:
    ends = list(accumulate(len(line["text"]) for line in lines))
    beginning = [line for line, end in zip(lines, ends, strict=True) if end <= BEGINNING]
    assert sum(len(line["text"]) for line in beginning if line["kind"] == kind) >= share * BEGINNING


def test_countries_are_at_most_half_of_the_encyclopaedia(lines: list[dict[str, str]]) -> None:
    sizes: dict[bool, int] = {True: 0, False: 0}
    for line in lines:
        if line["kind"] == "encyclopaedia":
            sizes[line["source"].startswith("factbook:")] += len(line["text"])
    assert sizes[True] <= 1.05 * sizes[False]


def test_it_is_long_and_packs_small(lines: list[dict[str, str]]) -> None:
    assert sum(len(line["text"]) for line in lines) >= 1_000_000
    assert PACKED.stat().st_size <= 1_500_000


def test_most_pieces_are_neither_short_nor_long(lines: list[dict[str, str]]) -> None:
    usual = [line for line in lines if 400 <= len(line["text"]) <= 1_100]
    assert len(usual) >= 0.85 * len(lines)


def test_no_piece_is_there_twice(lines: list[dict[str, str]]) -> None:
    assert len({line["text"] for line in lines}) == len(lines)


@pytest.mark.parametrize("what", FORBIDDEN)
def test_it_holds_no(what: str, lines: list[dict[str, str]]) -> None:
    assert [line["source"] for line in lines if re.search(FORBIDDEN[what], line["text"])] == []


def test_the_page_of_sources_names_every_kind(lines: list[dict[str, str]]) -> None:
    page = (FOLDER / "SOURCES.md").read_text()
    assert all(f"| {kind} |" in page for kind in {line["kind"] for line in lines})
