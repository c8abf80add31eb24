"""How much anonymous memory converting takes, where the weights are in files that torch.save wrote."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from torch_files import cut, meta_name, save_bins, write_dcp
from transformers import LlamaConfig

LIMIT_MB = 350


@pytest.fixture
def bench():
    spec = importlib.util.spec_from_file_location("bench_convert", "scripts/bench/convert.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def large_model(bench, gigabytes):
    """Return config and tensors of a Llama of zeros, which take no memory until they are written."""
    n_layers = max(1, round((gigabytes * 1e9 - 4 * bench.VOCAB * bench.HIDDEN) / bench.LAYER_BYTES))
    top = {"model.embed_tokens": (bench.VOCAB, bench.HIDDEN), "lm_head": (bench.VOCAB, bench.HIDDEN)}
    shapes = {**top, "model.norm": (bench.HIDDEN,)}
    for layer in range(n_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in bench.layer_shapes().items()}
    config = LlamaConfig(
        hidden_size=bench.HIDDEN, intermediate_size=bench.MLP, num_hidden_layers=n_layers, vocab_size=bench.VOCAB,
        num_attention_heads=bench.HEADS, num_key_value_heads=bench.HEADS, rms_norm_eps=1e-5,
    )  # fmt: skip
    return config, {f"{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def write(kind, folder, config, tensors):
    folder.mkdir()
    if kind == "bin":
        save_bins(folder, tensors, 4)
    elif kind == "dcp":
        write_dcp(folder, {f"model.{name}": tensor for name, tensor in tensors.items()}, 4)
    else:
        for i in range(4):
            save_part(folder / f"consolidated.{i:02d}.pth", i, config, tensors)
        params = {"dim": config.hidden_size, "n_layers": config.num_hidden_layers, "norm_eps": config.rms_norm_eps}
        (folder / "params.json").write_text(json.dumps({**params, "n_heads": config.num_attention_heads}))
        return
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


def save_part(path, number, config, tensors):
    named = {meta_name(name): tensor for name, tensor in tensors.items()}
    pieces = {n: cut(t, n.removesuffix(".weight").split(".", 2)[-1], 4, config, True) for n, t in named.items()}
    torch.save({name: piece[number].clone() for name, piece in pieces.items()}, path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("gigabytes", [0.5, 4.1])
@pytest.mark.parametrize("kind", ["bin", "meta", "dcp"])
def test_memory_does_not_grow_with_the_source(bench, tmp_path, kind, gigabytes):
    source, out = tmp_path / "source", tmp_path / "out"
    write(kind, source, *large_model(bench, gigabytes))
    assert sum(path.stat().st_size for path in source.iterdir()) > 0.9e9 * gigabytes
    command = [sys.executable, "-m", "convert", "mha-to-gqa", str(source), str(out), "--groups", "8"]
    used = bench.measure(command)
    print(f"{kind}, {gigabytes} GB: {used['anon_mb']:.0f} MB of anonymous memory, {used['seconds']:.1f} s")
    assert used["anon_mb"] <= LIMIT_MB
    planned = json.loads(subprocess.check_output([*command, "--overwrite", "--dry-run", "--json"]))
    assert used["anon_mb"] <= planned["peak_memory_bytes"] / 1e6 <= LIMIT_MB + 50
