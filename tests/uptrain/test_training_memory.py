"""The anonymous memory that training takes on the CPU is what `uptrain plan` estimates."""

import subprocess
import sys

import caches
import numpy as np
import pytest
import real_runs
import tiny

from model.decoder.chunk_size import MIN_CHUNK_LOGITS
from scripts.bench.convert import measure
from uptrain.estimates.memory import LOGIT_BYTES, MemoryEstimator, MemoryOptions

SIZES = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 18,
    "num_attention_heads": 16, "max_position_embeddings": 512,
}  # fmt: skip
"""220 M parameters in 4 groups."""
FEWER_LAYERS = {**SIZES, "num_hidden_layers": 12}
"""152 M."""


def make_pair(folder, sizes):
    """Return the paths of a model in 4 groups and its parent."""
    sizes = {"num_key_value_heads": sizes["num_attention_heads"], **sizes}
    paths = {"parent": tiny.save(tiny.build(**sizes), folder / "parent", "bfloat16")}
    paths["model"] = folder / "model"
    convert = [sys.executable, "-m", "convert", "mha-to-gqa", "--method", "mean", "--groups", "4"]
    subprocess.run([*convert, paths["parent"], paths["model"]], check=True, stdout=subprocess.DEVNULL)
    return paths


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 8192, 512).tolist() for _ in range(40)]
    paths = {"data": caches.write_cache(folder / "data", [documents], 512, 8192)}
    paths["empty"] = tiny.save(tiny.build(vocab_size=8192, max_position_embeddings=512), folder / "tiny", "bfloat16")
    paths |= make_pair(folder, SIZES)
    paths["latent"] = folder / "latent"
    latent = [
        "mha-to-mla",
        "--latent",
        "448",
        "--rope",
        "64",
        "--calibration",
        "none",
        paths["parent"],
        paths["latent"],
    ]
    subprocess.run([sys.executable, "-m", "convert", *latent], check=True, stdout=subprocess.DEVNULL)
    return paths


@pytest.fixture(scope="module")
def inputs_of_fewer_layers(inputs, tmp_path_factory):
    return {**inputs, **make_pair(tmp_path_factory.mktemp("fewer"), FEWER_LAYERS)}


@pytest.fixture(scope="module")
def programs(inputs, tmp_path_factory):
    """Return the bytes of the programs alone: of a run of a tiny model, without its chunk of logits."""
    return peak(inputs, "empty", tmp_path_factory.mktemp("programs") / "run") - LOGIT_BYTES * MIN_CHUNK_LOGITS


APART = "import uptrain.runs.build as build; build.equal_tensors = lambda *_: []; from uptrain.cli import main; main()"
"""`uptrain`, whose students and teachers share nothing."""


def peak(inputs, model, out, *options, apart=False):
    """Return the bytes of two steps of two micro-batches each: gradients are there while activations are.

    Without the limit, glibc keeps freed blocks of up to 32 MB: another 500 MB for `all`.
    """
    fixed = ["run", inputs[model], "--data", inputs["data"], "--out", out, "--steps", 2, "--lr", 1e-4]
    fixed += ["--global-batch-tokens", 2048, "--micro-batch", 2, "--precision", "bf16", *options]
    program = ["-c", APART] if apart else ["-m", "uptrain"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")
        patch.setenv("OMP_NUM_THREADS", "1")
        return 1e6 * measure([sys.executable, *program, *map(str, fixed)])["anon_mb"]


PARTS = ("all", "attention", "kv", "lora")
CELLS = [
    *((part, teacher, False, "adamw") for part in PARTS for teacher in ("none", "live")),
    *((part, "apart", False, "adamw") for part in PARTS[1:]),
    *((part, "logits", False, "adamw") for part in PARTS),
    *((part, "live", True, "adamw") for part in PARTS),
    *((part, "none", False, "adafactor") for part in PARTS),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("part", "teacher", "recompute", "optimizer"), CELLS)
def test_training_takes_what_is_planned(inputs, programs, tmp_path, part, teacher, recompute, optimizer):
    compare(inputs, programs, tmp_path, part, teacher, recompute, optimizer)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_fewer_layers_take_what_is_planned(inputs_of_fewer_layers, programs, tmp_path, part):
    compare(inputs_of_fewer_layers, programs, tmp_path, part, "live", False, "adamw")


def compare(inputs, programs, tmp_path, part, teacher, recompute, optimizer):
    """Compare a run without a teacher; with one that shares the student's body, or not (`apart`); with its logits."""
    options = ["--trainable", part, "--optimizer", optimizer, *(["--activation-checkpointing"] if recompute else [])]
    if teacher == "logits":
        logits = tmp_path / "logits"
        command = [
            sys.executable,
            "-m",
            "uptrain",
            "teach",
            inputs["parent"],
            "--data",
            inputs["data"],
            "--out",
            logits,
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        options += ["--teacher-logits", logits]
    live = teacher in ("live", "apart")
    options += ["--teacher", inputs["parent"]] if live else []
    used = peak(inputs, "model", tmp_path / "run", *options, apart=teacher == "apart") - programs
    estimator = MemoryEstimator.read(inputs["model"], inputs["parent"] if live else None, 512, optimizer=optimizer)
    needed = estimator.memory(MemoryOptions(part, 2, recompute))
    planned = needed.replicated() + (needed.shared if teacher == "apart" else 0)
    check(f"{part}, {optimizer}, teacher {teacher}{', recomputed' * recompute}", used, planned)


def check(name, used, planned):
    print(f"{name}: {used / 1e6:.0f} MB, plan {planned / 1e6:.0f} ({used / planned - 1:+.1%})")
    assert used == pytest.approx(planned, rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_training_of_latent_attention_takes_what_is_planned(inputs, programs, tmp_path, part, recompute):
    options = ["--trainable", part, *(["--activation-checkpointing"] if recompute else [])]
    used = peak(inputs, "latent", tmp_path / "run", *options, "--teacher", inputs["parent"]) - programs
    planned = (
        MemoryEstimator.read(inputs["latent"], inputs["parent"], 512)
        .memory(MemoryOptions(part, 2, recompute))
        .replicated()
    )
    check(f"latent attention, {part}{', recomputed' * recompute}", used, planned)


SMALL = {**SIZES, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
"""63 M parameters in 4 groups."""


def peaks_of_shards(inputs, model, out, *options):
    """Return the bytes of each of two processes with FSDP2, while they train."""
    out.mkdir()
    fixed = ["run", inputs[model], "--data", inputs["data"], "--out", out / "run", "--steps", 2, "--lr", 1e-4]
    fixed += ["--global-batch-tokens", 2048, "--micro-batch", 1, "--precision", "bf16", *options]
    script = [str(real_runs.HERE / "measured_shards.py"), str(out), *map(str, fixed)]
    environment = real_runs.environment(sharded=True, on_cpu=True) | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    subprocess.run(real_runs.command(script, 2), env=environment, check=True, capture_output=True)
    return [int((out / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("part", "vocab"), [("attention", 8192), ("attention", 32768), ("all", 8192), ("all", 32768)])
def test_shards_take_what_is_planned(inputs, tmp_path, part, vocab):
    """Also that the body that student and teacher share is in shards once; and what a large vocabulary takes."""
    inputs = {**inputs, **make_pair(tmp_path, {**SMALL, "vocab_size": vocab})}
    inputs["empty"] = tiny.save(
        tiny.build(vocab_size=vocab, max_position_embeddings=512), tmp_path / "tiny", "bfloat16"
    )
    documents = [np.random.default_rng(i).integers(0, vocab, 512).tolist() for i in range(40)]
    inputs["data"] = caches.write_cache(tmp_path / "data", [documents], 512, vocab)
    logits = LOGIT_BYTES * 512 * vocab
    programs = max(peaks_of_shards(inputs, "empty", tmp_path / "empty")) - logits
    for teacher in (None, inputs["parent"]):
        options = ["--trainable", part, *(["--teacher", teacher] if teacher else [])]
        used = max(peaks_of_shards(inputs, "model", tmp_path / f"run-{bool(teacher)}", *options)) - programs
        planned = MemoryEstimator.read(inputs["model"], teacher, 512).memory(MemoryOptions(part, 1)).sharded(2)
        name = f"shard, {part}, vocabulary {vocab}, {'live' if teacher else 'no'} teacher"
        print(f"{name}: {used / 1e6:.0f} MB, plan {planned / 1e6:.0f} ({used / planned - 1:+.1%})")
        assert used == pytest.approx(planned, rel=0.1)
