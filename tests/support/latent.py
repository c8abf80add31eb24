"""Sources of conversions to latent attention, and what is compared of source and output."""

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

HIDDEN, HEAD_DIM = 64, 8


def make_source(folder: Path, family: str = "llama", dtype: str = "float32", **changes: Any) -> Path:
    """Write a random model whose attention is far from uniform, in several shards."""
    return tiny.save(make_model(family, **changes), folder, dtype, max_shard_size="60KB")


def make_model(family: str = "llama", **changes: Any) -> PreTrainedModel:
    window = {"sliding_window": None} if family == "mistral" else {}
    model = tiny.build(family, **{"hidden_size": HIDDEN, **window, **changes})
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 4
    return model


def make_unfolded(folder: Path, rank: int, **changes: Any) -> Path:
    """Write MHA that is latent attention unfolded: keys are complex multiples of one, values have a rank."""
    model = make_model(**changes)
    n_heads, half = tiny.N_HEADS, HEAD_DIM // 2
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        attention = layer.self_attn
        shared = torch.complex(*attention.k_proj.weight.data.view(n_heads, 2, half, HIDDEN)[0])
        factors = torch.complex(*torch.randn(2, n_heads, half, 1, generator=generator))
        keys = factors * shared
        attention.k_proj.weight.data = torch.cat([keys.real, keys.imag], dim=1).flatten(0, 1)
        u, s, v = torch.linalg.svd(attention.v_proj.weight.data.double())
        attention.v_proj.weight.data = ((u[:, :rank] * s[:rank]) @ v[:rank]).float()
    return tiny.save(model, folder, max_shard_size="60KB")


def open_stock(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Open a folder in transformers' stock class, which must find every tensor."""
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"], loading
    return model


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the logits of a folder in transformers' stock class, in float64."""
    model = open_stock(folder, dtype)
    ids = torch.randint(0, 67, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(ids).logits.double()


def divergence(parent: torch.Tensor, student: torch.Tensor) -> float:
    """Return the mean KL divergence in nats per token."""
    log_p, log_q = parent.log_softmax(-1), student.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())
