"""docs/json.md names every key of every file and of every output of `--json`; the keys of its tables exist."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
import tiny
from pages import ROOT
from tiny_tokenizers import SENTENCES, make_tokenizer

PAGE = (ROOT / "docs/json.md").read_text()
BY_VALUE = {
    "bytes_by_dtype", "dropped", "kv_cache_bytes_per_token", "learning_rates", "default_peak_lrs", "rounded", "sha256",
    "versions", "settings", "identities", "files", "sharded_bytes_per_process", "flops", "hours", "device_hours",
}  # fmt: skip
"""Keys of objects whose own keys are values, such as dtypes and files, or are described in words."""


def section(heading: str) -> str:
    """Return the part of the page below a heading that begins with `heading`."""
    (text,) = (part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE) if part.startswith(heading))
    return text


def named(heading: str) -> set[str]:
    return {name for words in re.findall(r"`([^`\n]+)`", section(heading)) for name in re.split(r"\W+", words)}


def first_column(heading: str) -> set[str]:
    """Return the keys that begin the rows of a section's tables; `layers[].lost` is `lost`."""
    rows = re.findall(r"^\| (`[^|]*) \|", section(heading), re.MULTILINE)
    return {name.rpartition(".")[2] for row in rows for name in re.findall(r"`([^`]+)`", row)}


def keys_of(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from keys_of(each)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not key.isdecimal():  # a number of devices
                yield key
            if key not in BY_VALUE:
                yield from keys_of(inner)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Return what each command prints with `--json`, and each file, by the beginning of its section's heading."""
    found: dict[str, list[object]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("json"))
        make_tokenizer(tiny.save(tiny.build(vocab_size=302, hidden_size=64), Path("parent")), 300)
        Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES * 8))

        def run(command: str) -> str:
            program = pages.find_program(shlex.split(command))
            assert program is not None
            result = program.run()
            assert result.exit_code == 0, (command, result.output)
            return result.stdout

        text = "--calibration-tokens 1024"
        budget = "--original-tokens 40k --alpha 0.05 --global-batch-tokens 256 --lr 1e-3"
        for heading, command in (
            ("`convert inspect", "convert inspect parent --heads --json"),
            ("`convert mha-to-gqa", f"convert mha-to-gqa parent gqa --groups 2 {text} --json"),
            (
                "`convert mha-to-gqa",
                f"convert mha-to-mla parent mla --latent 32 --rope 8 {text} --json",
            ),
            ("`convert verify", "convert verify parent gqa --json"),
            ("`uptrain prepare", "uptrain prepare --data text.jsonl --tokenizer gqa --seq-len 64 --out cache --json"),
            ("`uptrain plan", f"uptrain plan gqa --data cache {budget} --memory 80GB --json"),
            ("`uptrain teach", "uptrain teach parent --data cache --top-k 4 --out logits --json"),
        ):
            found.setdefault(heading, []).append(json.loads(run(command)))
        run(f"uptrain run gqa --teacher parent --data cache --eval-data cache {budget} --out run")
        for heading, command in (
            ("`uptrain status", "uptrain status run --verify --json"),
            ("`uptrain evaluate", "uptrain evaluate gqa --teacher parent --data text.jsonl --json"),
            ("`uptrain export", "uptrain export run exported --json"),
        ):
            found.setdefault(heading, []).append(json.loads(run(command)))
        (checkpoint, *_) = Path("run/checkpoints").iterdir()
        for heading, path in (
            ("`groupwise.json`", Path("gqa/groupwise.json")),
            ("`groupwise.json`", Path("mla/groupwise.json")),
            ("A token cache", Path("cache/manifest.json")),
            ("A folder of logits", Path("logits/manifest.json")),
            ("The folder RUN", Path("run/run.json")),
            ("The folder RUN", Path("run/run_state.json")),
            ("The folder RUN", checkpoint / "manifest.json"),
        ):
            found.setdefault(heading, []).append(json.loads(path.read_text()))
        lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
        found["The folder RUN"].append(lines)
    return found


REFERS_TO = {
    "`convert mha-to-gqa": ("`groupwise.json`", "`convert inspect"),
    "A token cache": ("`uptrain prepare",),
    "A folder of logits": ("`uptrain teach",),
    "`uptrain export": ("`uptrain status", "The folder RUN"),
}
"""Sections whose keys are named in others."""
HEADINGS = (
    "`convert inspect", "`convert mha-to-gqa", "`convert verify", "`groupwise.json`",
    "`uptrain plan", "`uptrain prepare", "A token cache", "`uptrain teach", "A folder of logits",
    "The folder RUN", "`uptrain status", "`uptrain evaluate", "`uptrain export",
)  # fmt: skip


@pytest.mark.parametrize("heading", HEADINGS)
def test_every_key_is_named(outputs: dict[str, list[object]], heading: str) -> None:
    words = named(heading).union(*map(named, REFERS_TO.get(heading, ())))
    assert sorted(set(keys_of(outputs[heading])) - words) == []


@pytest.mark.parametrize("heading", [heading for heading in HEADINGS if heading != "The folder RUN"])
def test_every_key_exists(outputs: dict[str, list[object]], heading: str) -> None:
    assert sorted(first_column(heading) - set(keys_of(outputs[heading]))) == []
