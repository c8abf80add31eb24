"""Checkpoints of Pythia hold causal masks, which are no parameters: they are trained and planned like those without."""

import json

import pytest
import tiny
import torch
from real_runs import VOCAB, arguments, make_inputs
from safetensors.torch import save_file

SIZE = ("--steps", 4, "--lr", 1e-3, "--global-batch-tokens", 256, "--seq-len", 32)


def with_masks(folder, dtype):
    tensors = tiny.tensors(folder)
    for layer in range(2):
        place = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{place}.bias"] = torch.ones(1, 1, 64, 64).tril().to(dtype)
        tensors[f"{place}.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_masks_in_the_files(uptrain, convert, tmp_path, dtype):
    inputs, plans = make_inputs(tmp_path), []
    for kind in ("plain", "masked"):
        parent = tiny.save(tiny.build("gpt_neox", vocab_size=VOCAB), tmp_path / kind, "float16")
        if kind == "masked":
            with_masks(parent, dtype)
        child = tmp_path / f"{kind}-child"
        convert("mha-to-gqa", parent, child, "--groups", 2, "--method", "mean").succeeded()
        planned = uptrain("plan", child, "--teacher", parent, *SIZE, "--json").succeeded()
        plans.append({k: v for k, v in json.loads(planned.out).items() if k in ("n_params", "memory", "time")})
    assert plans[0] == plans[1]
    inputs |= {"model": child, "parent": parent}
    uptrain(*arguments(inputs, tmp_path / "run", "--trainable", "attention", loss="distill", steps=4)).succeeded()
    uptrain("export", tmp_path / "run", tmp_path / "out").succeeded()
