"""What commands print fits a terminal of 80 columns, and no name is cut."""

import json
import subprocess
import sys

import pytest
import real_runs
import tiny
import written_runs
from llama_2_7b import write_llama_2_7b
from tiny_tokenizers import make_tokenizer

PLAN = (
    "--alpha", "0.05", "--original-tokens", "2T", "--lr", "1e-3", "--global-batch-tokens", "4M", "--seq-len", "4000",
    "--teacher", "parent", "--processes", "8",
)  # fmt: skip


LONG = "-".join(f"part{number}" for number in range(16))
"""A name of more than 80 columns."""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder with a tiny model of 32 layers and 32 heads, and a run of it that has finished."""
    folder = tmp_path_factory.mktemp("large")
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 128}
    for seed, name in enumerate(("s", "parent")):
        tiny.save(tiny.build(seed=seed, intermediate_size=32, **shape), folder / name)
    make_tokenizer(folder / "s", 300)
    (folder / f"{LONG}.txt").write_text("A text to read. " * 100)
    records = [written_runs.with_teacher(0, 5.0), *(written_runs.step(n + 1, 3.0) for n in range(50))]
    records.append(written_runs.with_teacher(50, 2.75))
    written_runs.write_run(folder / "run", records, {"status": "finished", "step": 50, "reason": "finished", "pid": 1})
    return folder


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        ("convert", ["inspect", "s"], [" kind ", "%  1 2 4 8 16 32 ", "tensor-parallel"]),
        ("convert", ["inspect", "s", "--heads"], ["\n    31 ", "GQA-16 %", "largest loss"]),
        (
            "convert",
            ["mha-to-gqa", "s", "o", "--groups", "8", "--method", "mean", "--dry-run"],
            ["to merge", "64 tensors"],
        ),
        ("convert", ["mha-to-gqa", "s", "o", "--groups", "8", "--method", "mean"], ["merged", "\n  uptrain run o "]),
        ("uptrain", ["plan", "s", *PLAN], ["100,000,000,000"]),
        ("uptrain", ["plan", "s", *PLAN, "--details"], ["host, while reading", "8 A100"]),
        (
            "uptrain",
            ["prepare", "--data", f"{LONG}.txt", "--tokenizer", "s", "--seq-len", "16", "--out", "cache"],
            ["part0-part1", "-part15.txt "],
        ),
        ("uptrain", ["status", "run"], ["50 of 50", "recovered fraction"]),
    ],
)
def test_output_fits_80_columns(large, program, arguments, words):
    command, environment = [sys.executable, "-m", program, *arguments], {**real_runs.environment(), "COLUMNS": "80"}
    shown = subprocess.run(command, cwd=large, env=environment, capture_output=True, text=True, check=True).stdout
    assert max(map(len, shown.splitlines())) <= 80, shown
    assert "…" not in shown
    assert all(word in shown for word in words), shown


@pytest.mark.parametrize("options", [(), ("--memory", "24GB"), ("--memory", "24GB", "--processes", "16")])
def test_a_plan_fits_a_screen_of_40_lines(tmp_path, options):
    model, teacher = write_llama_2_7b(tmp_path)
    command = [sys.executable, "-m", "uptrain", "plan", model.name, "--teacher", teacher.name, "--alpha", "0.0025"]
    environment = {**real_runs.environment(), "COLUMNS": "80"}
    ran = subprocess.run(
        [*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    lines = ran.stdout.splitlines()
    assert len(lines) <= 36 and max(map(len, lines)) <= 80, ran.stdout


@pytest.mark.parametrize("columns", ["0", "40", "66"])
def test_a_narrower_terminal_loses_no_number(large, columns):
    """It wraps the lines of 80 columns."""
    command = [sys.executable, "-m", "convert", "inspect", "s", "--heads"]
    shown = [
        subprocess.run(
            command, cwd=large, env={**real_runs.environment(), "COLUMNS": each}, capture_output=True, check=True
        ).stdout
        for each in (columns, "80")
    ]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "llava", "qwen3_moe", "phi3"])
def test_tables_fit_80_columns_with_whole_names(tmp_path, family):
    tiny.save(tiny.build(family), tmp_path / "s")
    command = [sys.executable, "-m", "convert", "mha-to-gqa", "s", "o", "--groups", "2", "--method", "mean"]
    environment = {**real_runs.environment(), "COLUMNS": "80"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    for entry in json.loads((tmp_path / "o/groupwise.json").read_text())["merge_report"]:
        parts = entry["tensor"].removesuffix(".weight").split(".")
        assert ".".join(parts[-2:]) in result.stdout, (entry["tensor"], result.stdout)
