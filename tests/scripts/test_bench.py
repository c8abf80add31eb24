"""Every benchmark that the pages name runs, with the options given there, on sizes that take seconds."""

import json
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import forks
import pages
import pytest
from matplotlib.figure import Figure
from pages import ROOT

from scripts.bench import convert as convert_bench
from scripts.bench import decode, serving

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
    "calibrate": "calibrate.SHAPE = type(calibrate.SHAPE)('small', 64, 3, 16, 64, 8192); "
    "calibrate.DEFAULT_TOKENS = 4096",
    "at_scale": "at_scale.SHAPES = at_scale.SHAPES[:1]",
    "convert": "convert.SHAPE = type(convert.SHAPE)('small', 64, 1, 32, 64, 256)",
    "decode": f"decode.SHAPES['study'].update({SHAPE})",
    "latent_decode": "latent_decode.COMMON.update(hidden_size=64, intermediate_size=64, vocab_size=256)",
    "loss": "import forks, types; loss.subprocess = types.SimpleNamespace(run=forks.fork_modules)",
    "serving": "import stand_in_engine; stand_in_engine.install()",
    "train_loop": "import multiprocessing, types; "
    "train_loop.multiprocessing = types.SimpleNamespace(get_context=lambda _: multiprocessing.get_context('fork'))",
    "to_hf": "convert = to_hf.convert_bench; convert.SHAPE = type(convert.SHAPE)('small', 64, 1, 32, 64, 256)",
    "training_checkpoint": "config = training_checkpoint.LlamaConfig; training_checkpoint.FAR = 100; "
    f"training_checkpoint.LlamaConfig = lambda **given: config(**given | {SHAPE})",
}
"""By benchmark: what makes its models small, and its processes forks, where that is no option."""
QUICK = {
    "at_scale": "--out TMP/out",
    "calibrate": "--tokens 4096 4352 --work TMP/work --json TMP/out.json",
    "convert": "--gb 0.001 --rounds 1 --slow-rounds 0 --work TMP/work --json TMP/out.json",
    "decode": "--shape study --batches 1 --contexts 16 --steps 10 --out TMP/out",
    "serving": "--models llama-1b --batches 1 --contexts 16 --turns 1 --threads 1 --work TMP/work --out TMP/out",
    "latent_decode": "--batch 1 --context 16 --steps 2 --out TMP/out",
    "to_hf": "--gb 0.001 --rounds 1 --work TMP/work --json TMP/out.json",
    "train_step": "--rounds 1 --length 16 --batch 1 --compile no --json TMP/out.json",
    "train_loop": "--steps 3 --json TMP/out.json",
    "train_ways": "--rounds 1 --steps 2 --json TMP/out.json",
    "training_checkpoint": "--rounds 1 --folder TMP --json TMP/out.json",
    "prepare": "--texts TMP/texts --megabytes 0.05 --rounds 1 --json TMP/out.json",
    "loss": "--tokens 512 --vocab 3000 --rounds 1 --json TMP/out.json",
}
"""Options that come after those of the page, and win."""


def test_every_benchmark_is_on_a_page():
    named = {command.split()[0] for command in COMMANDS}
    helpers = {"__init__", "llama_checkpoint", "machine", "rounds", "training_inputs"}
    assert named | helpers == {path.stem for path in BENCH.glob("*.py")}


SLOW = ("calibrate", "decode --compile", "train_loop", "train_ways", "training_checkpoint")
CASES = [pytest.param(c, marks=pytest.mark.slow) if c.startswith(SLOW) else c for c in COMMANDS]


@pytest.mark.parametrize("command", [*CASES, "train_loop --documents short --precision fp32"])
@pytest.mark.timeout(600)
def test_runs(tmp_path, command):
    run_quickly(tmp_path, command)


def test_figures_of_decoding_begin_with_mha_on_the_left(tmp_path, monkeypatch):
    cells = [{"batch": 1, "context": 8, "task": "decode", "n_kv_heads": n} for n in (32, 8, 4, 1)]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    decode.draw([cell | {"theirs_s": 2.0, "ours_s": 1.0} for cell in cells], tmp_path / "figure.png")
    of_engine = {"engine": "vllm", "model": "llama-1b", "speedups": [1.0]}
    serving.draw([cell | of_engine for cell in cells], tmp_path / "figure.png")
    for figure in drawn:
        (axes,) = figure.axes
        places = [axes.transData.transform((tick, 1))[0] for tick in axes.get_xticks()]
        labels = [label.get_text() for _, label in sorted(zip(places, axes.get_xticklabels(), strict=True))]
        assert labels == ["32\nMHA", "8", "4", "1\nMQA"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_compiled_step_runs(tmp_path):
    run_quickly(tmp_path, "train_step --sizes 7M --precision fp32", "--compile yes")


def run_quickly(tmp_path, command, last=""):
    """Run a benchmark at a small size, with more options at the end."""
    name, *options = shlex.split(command)
    if "litgpt" in options and find_spec("litgpt") is None:
        options[options.index("litgpt")] = "transformers"  # the rest of the command is the same
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "one.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 2000)
    options += shlex.split(f"{QUICK[name]} {last}".replace("TMP", str(tmp_path)))
    small = f"[shape.update({SHAPE}) for shape in training_inputs.SIZES.values()]; {SMALL.get(name, 'pass')}"
    result = forks.call(
        run, name, small, options, output=tmp_path / "output", environment={"ACCELERATE_USE_CPU": "true"}
    )
    assert result.code == 0, result.out + result.err
    results = json.loads((tmp_path / "out.json").read_text())
    assert results if isinstance(results, list) else results["rows"]


def run(name, small, options):
    """Run a benchmark in this process, which serves for nothing else."""
    inputs, benchmark = (import_module(f"scripts.bench.{module}") for module in ("training_inputs", name))
    exec(small, {"training_inputs": inputs, name: benchmark})
    sys.argv = [name, *options]
    benchmark.main()


def test_no_digest_computes_no_checksums(source, tmp_path):
    command = convert_bench.commands(source, tmp_path / "out")["no-digest"]
    subprocess.run(command, check=True, capture_output=True)
    record = json.loads((tmp_path / "out/groupwise.json").read_text())
    assert {file["sha256"] for file in record["source"]["files"]} == {"0" * 64}
