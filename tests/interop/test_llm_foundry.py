"""llm-foundry's grouped-query attention, which MPT checkpoints bring, computes what we say from what we write."""

import json
from pathlib import Path

import interop
import numpy as np
import pytest
import tiny
import torch
from families_without_gqa import HEAD_DIM, HIDDEN, N_HEADS, mpt
from safetensors.torch import save_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def with_a_kv_head_for_each(out: Path, groups: int, folder: Path) -> Path:
    """Write the model `out` as multi-head attention: each K/V head is there for every query head that reads it."""
    tensors = tiny.tensors(out)
    for name, tensor in tensors.items():
        if "Wqkv" in name or "k_ln" in name:
            q = tensor[:HIDDEN] if "Wqkv" in name else tensor[:0]
            kv = tensor[len(q) :].view(-1, HEAD_DIM, *tensor.shape[1:])
            tensors[name] = torch.cat([q, kv.repeat_interleave(N_HEADS // groups, 0).flatten(0, 1)])
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    del config["attn_config"]["kv_n_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_replicated_heads_oracle(tmp_path, figure):
    environment, source = interop.need("llm_foundry"), mpt(tmp_path / "source")
    folders = {"source 8": source}
    for groups, out in interop.convert_to_all(source, tmp_path / "out").items():
        folders[f"grouped {groups}"] = out
        if groups < N_HEADS:
            folders[f"repeated {groups}"] = with_a_kv_head_for_each(out, groups, tmp_path / f"repeated-{groups}")
    answer, outputs = interop.ask(environment, "llm_foundry_attention", tmp_path / "asked", folders=folders)
    assert answer["version"] == "0.22.0"
    for groups in (4, 2, 1):
        for layer in (0, 1):
            grouped, repeated = (outputs[f"{kind} {groups} {layer}"] for kind in ("grouped", "repeated"))
            figure("llm-foundry 0.22: attention, relative", float(np.abs(grouped - repeated).max() / grouped.std()))
            assert np.abs(grouped - repeated).max() <= 1e-5 * grouped.std()
            assert np.abs(grouped - outputs[f"source 8 {layer}"]).max() > 0.1 * grouped.std()
