"""The anonymous memory that training takes on the CPU is what `uptrain plan` estimates."""

import subprocess
import sys

import caches
import numpy as np
import pytest
import tiny

from scripts.bench.convert import measure
from uptrain.budget.memory import LOGIT_BYTES, MIN_CHUNK_LOGITS, Models, Way

SIZES = {
    "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16, "max_position_embeddings": 512,
}  # fmt: skip
"""150 M parameters in 4 groups."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 8192, 512).tolist() for _ in range(40)]
    paths = {"data": caches.write_cache(folder / "data", [documents], 512, 8192)}
    paths["parent"] = tiny.save(tiny.build(num_key_value_heads=16, **SIZES), folder / "parent", "bfloat16")
    paths["empty"] = tiny.save(tiny.build(vocab_size=8192, max_position_embeddings=512), folder / "tiny", "bfloat16")
    paths["model"] = folder / "model"
    convert = [sys.executable, "-m", "convert", "mha-to-gqa", "--method", "mean", "--groups", "4"]
    subprocess.run([*convert, paths["parent"], paths["model"]], check=True, stdout=subprocess.DEVNULL)
    return paths


def peak(inputs, model, out, *options):
    """Return the bytes of two steps of two micro-batches each: gradients are there while activations are."""
    fixed = ["run", inputs[model], "--data", inputs["data"], "--out", out, "--steps", 2, "--lr", 1e-4]
    fixed += ["--global-batch-tokens", 2048, "--micro-batch", 2, "--precision", "bf16", *options]
    return 1e6 * measure([sys.executable, "-m", "uptrain", *map(str, fixed)])["anon_mb"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("part", ["all", "attention", "kv"])
def test_training_takes_what_is_planned(inputs, tmp_path, monkeypatch, part, taught, recompute):
    # Without this limit, glibc keeps freed blocks of up to 32 MB: another 500 MB for `all`.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "262144")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--teacher", inputs["parent"]] if taught else []
    options += ["--activation-checkpointing"] if recompute else []
    programs = peak(inputs, "empty", tmp_path / "tiny") - LOGIT_BYTES * MIN_CHUNK_LOGITS
    used = peak(inputs, "model", tmp_path / "run", "--trainable", part, *options) - programs
    models = Models.read(inputs["model"], inputs["parent"] if taught else None, 512)
    planned = models.memory(Way(part, 2, recompute)).replicated()
    print(f"{part}, {taught=}, {recompute=}: {used / 1e6:.0f} MB beside {programs / 1e6:.0f}, plan {planned / 1e6:.0f}")
    assert used == pytest.approx(planned, rel=0.1)
