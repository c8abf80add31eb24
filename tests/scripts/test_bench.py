"""Every benchmark that the pages name runs, with the options given there, on sizes that take seconds."""

import json
import shlex
import subprocess
import sys
from importlib.util import find_spec

import pages
import pytest
import real_runs
from pages import ROOT

BENCH = ROOT / "scripts/bench"
COMMANDS = sorted(
    {
        command.text.removeprefix("python -m scripts.bench.")
        for command in pages.commands()
        if command.begins_with("python -m scripts.bench")
    }
)
SHAPE = "dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)"
SMALL = {
    "convert": "convert.HEAD_DIM, convert.HIDDEN, convert.MLP, convert.VOCAB = 2, 64, 64, 256",
    "decode": f"decode.SHAPES['study'].update({SHAPE})",
    "train_step": f"[shape.update({SHAPE}) for shape in train_step.SIZES.values()]",
}
"""By benchmark: what makes its models small, where that is no option."""
QUICK = {
    "convert": "--gb 0.001 --rounds 1 --slow-rounds 1 --work TMP/work --json TMP/out.json",
    "decode": "--shape study --batches 1 --contexts 16 --steps 10 --out TMP/out",
    "train_step": "--rounds 1 --length 16 --batch 1 --compile no --json TMP/out.json",
    "train_loop": "--steps 3 --json TMP/out.json",
    "training_checkpoint": "--rounds 1 --folder TMP --json TMP/out.json",
    "prepare": "--texts TMP/texts --megabytes 0.05 --rounds 1 --json TMP/out.json",
    "loss": "--tokens 32 --vocab 300 --rounds 1 --json TMP/out.json",
}
"""Options that come after those of the page, and win."""


def test_every_benchmark_is_on_a_page():
    named = {command.split()[0] for command in COMMANDS}
    assert named | {"__init__", "machine", "runs"} == {path.stem for path in BENCH.glob("*.py")}


SLOW = "train_loop"
CASES = [pytest.param(c, marks=pytest.mark.slow) if c.startswith(SLOW) else c for c in COMMANDS]


@pytest.mark.parametrize("command", [*CASES, f"{SLOW} --documents short --precision fp32"])
@pytest.mark.timeout(600)
def test_runs(tmp_path, command):
    name, *options = shlex.split(command)
    if "litgpt" in options and find_spec("litgpt") is None:
        options[options.index("litgpt")] = "transformers"  # the rest of the command is the same
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "one.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 2000)
    options += shlex.split(QUICK[name].replace("TMP", str(tmp_path)))
    code = f"import sys; from scripts.bench import runs, {name}; "
    code += f"runs.SHAPE.update({SHAPE}); {SMALL.get(name, 'pass')}; {name}.main()"
    result = subprocess.run(
        [sys.executable, "-c", code, *options], cwd=ROOT, env=real_runs.environment(on_cpu=True), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert results if isinstance(results, list) else results["rows"]
