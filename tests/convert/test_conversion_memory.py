"""How much anonymous memory converting takes, whatever the format of the source."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from gguf_files import write_gguf, write_zeros
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer
from torch_files import cut, meta_name, save_bins, write_dcp
from transformers import LlamaConfig

from scripts.bench import convert as bench
from scripts.bench.llama_checkpoint import LLAMA_2_7B, TINY_LLAMA, write_random

LIMIT_MB = 350

# How many bytes of the output a value takes.
BYTES_PER_VALUE = {"safetensors": 2, "bin": 2, "meta": 2, "dcp": 2, "torchtitan": 2, "F32": 4, "Q8_0": 4}


@pytest.fixture
def place():
    """Return a folder on the disk, for up to 12 GB. `scripts/test` keeps other tests' files in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def large_model(gigabytes):
    """Return config and tensors of a Llama of zeros, in memory."""
    shape = TINY_LLAMA.of_size(gigabytes * 1e9)
    config = LlamaConfig(
        hidden_size=shape.hidden, intermediate_size=shape.mlp, num_hidden_layers=shape.layers, vocab_size=shape.vocab,
        num_attention_heads=shape.heads, num_key_value_heads=shape.heads, rms_norm_eps=1e-5,
    )  # fmt: skip
    return config, {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in shape.tensors(shape.heads)}


def write(kind, folder, config, tensors):
    folder.mkdir()
    if kind == "bin":
        save_bins(folder, tensors, 4)
    elif kind == "safetensors":
        save_safetensors(folder, tensors)
    elif kind == "torchtitan":
        write_dcp(folder, {meta_name(name): tensor for name, tensor in tensors.items()}, 4)
    elif kind in ("F32", "Q8_0"):
        write_zeros(folder / "x.gguf", config, {name: tuple(t.shape) for name, t in tensors.items()}, kind)
        return folder / "x.gguf"
    elif kind == "dcp":
        write_dcp(folder, {f"model.{name}": tensor for name, tensor in tensors.items()}, 4)
    else:
        for i in range(4):
            save_part(folder / f"consolidated.{i:02d}.pth", i, config, tensors)
        params = {"dim": config.hidden_size, "n_layers": config.num_hidden_layers, "norm_eps": config.rms_norm_eps}
        (folder / "params.json").write_text(json.dumps({**params, "n_heads": config.num_attention_heads}))
        return folder
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def save_safetensors(folder, tensors, n_shards=4):
    weight_map = {}
    for i in range(n_shards):
        file = f"model-{i + 1:05d}-of-{n_shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::n_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def save_part(path, number, config, tensors):
    named = {meta_name(name): tensor for name, tensor in tensors.items()}
    pieces = {n: cut(t, n.removesuffix(".weight").split(".", 2)[-1], 4, config, True) for n, t in named.items()}
    torch.save({name: piece[number].clone() for name, piece in pieces.items()}, path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("gigabytes", [0.5, 4.1])
@pytest.mark.parametrize("kind", list(BYTES_PER_VALUE))
def test_memory_does_not_grow_with_the_source(place, kind, gigabytes):
    source = write(kind, place / "source", *large_model(gigabytes * 2 / BYTES_PER_VALUE[kind]))
    size, out = sum(path.stat().st_size for path in (place / "source").iterdir()), place / "out"
    assert size > 0.9e9 * gigabytes * (34 / 32 / 4 if kind == "Q8_0" else 1)
    check_memory(source, out)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_where_the_kernel_does_not_copy(place):
    """Between two file systems, the bytes to copy pass through the process."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == place.stat().st_dev or shutil.disk_usage(memory).free < 1e9:
        pytest.skip("needs a second file system with 1 GB free at /dev/shm")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        check_that_the_kernel_does_not_copy(place, Path(folder))
        check_memory(write("safetensors", place / "source", *large_model(0.5)), Path(folder) / "out")


def check_that_the_kernel_does_not_copy(folder, other):
    with (folder / "from").open("wb+") as source, (other / "to").open("wb") as target:
        source.write(b"bytes")
        source.flush()
        with pytest.raises(OSError, match="cross-device"):
            os.copy_file_range(source.fileno(), target.fileno(), 5, 0)


def test_memory_with_a_large_vocabulary(place):
    """Opening a GGUF file of Qwen's vocabulary takes no more than the plan says."""
    source = write_gguf(place / "x.gguf", tiny.build("qwen2", vocab_size=151_936))
    check_memory(source, place / "out", groups=1)


def check_memory(source, out, groups=8):
    command = [sys.executable, "-m", "convert", "mha-to-gqa", str(source), str(out), "--groups", str(groups)]
    command += ["--method", "mean"]
    used = bench.measure(command)
    print(f"{source}: {used['anon_mb']:.0f} MB of anonymous memory, {used['seconds']:.1f} s")
    assert used["anon_mb"] <= LIMIT_MB
    planned = json.loads(subprocess.check_output([*command, "--overwrite", "--dry-run", "--json"]))
    assert used["anon_mb"] <= planned["peak_memory_bytes"] / 1e6 <= LIMIT_MB + 50


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("groups", "refine", "limit"), [(8, [], 6000), (8, ["--refine", "0"], 4000), (1, ["--refine", "0"], 4400)]
)
def test_memory_of_calibrating_a_7b_shape(place, groups, refine, limit):
    """At most 6 GB in all, 4 GB without refining; neither more layers nor more text add to it."""
    source = place / "source"
    write_random(replace(LLAMA_2_7B, layers=2), source, layers_per_shard=1)
    make_tokenizer(source)
    command = [sys.executable, "-m", "convert", "mha-to-gqa", str(source), str(place / "out"), "--groups", str(groups)]
    command += [*refine, "--calibration-tokens", "8192"]
    planned = json.loads(subprocess.check_output([*command, "--dry-run", "--json"]))
    resident = bench.peak_rss_mb(command)
    print(f"{groups} groups: {resident:.0f} MB resident, estimate {planned['peak_memory_bytes'] / 1e6:.0f} MB")
    assert resident <= limit
    assert resident <= planned["peak_memory_bytes"] / 1e6


def test_storing_the_tokens_takes_little_memory():
    """At its highest preset, xz would reserve 674 MB, after hours of calibration."""
    code = """
import resource
import numpy as np
import psutil
from convert.calibration_text.read import stored_tokens
from convert.calibration_text.text import CalibrationText
text = CalibrationText("a text", 64, 1024, np.arange(1 << 16).reshape(64, 1024) % 49_152)
limit = psutil.Process().memory_info().vms + 150_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
stored_tokens(text)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
