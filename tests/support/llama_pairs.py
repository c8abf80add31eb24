"""Llamas of transformers beside ours."""

from pathlib import Path
from typing import Any

import tiny
import torch

from model import load_model

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0},
    "yarn-tuned": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0,
        "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 500000.0,
    },
}  # fmt: skip
LAYOUTS = {
    "llama": [{}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 24}],
    "mistral": [{"sliding_window": None}, {"sliding_window": 7}],
    "qwen2": [{}, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}],
}
FAMILIES = [(family, layout) for family, layouts in LAYOUTS.items() for layout in layouts]
SIZE = {"hidden_size": 64, "max_position_embeddings": 32}


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 67, shape, generator=torch.Generator().manual_seed(seed))


def pair(tmp_path: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Any]:
    """Return transformers' model and ours, from the same folder."""
    hf_model = tiny.build(family, **{**SIZE, **changes})
    for parameter in hf_model.parameters():  # larger than at initialisation, so that attention is not flat
        if parameter.ndim == 2:
            parameter.data *= 4
    return hf_model, load_model(tiny.save(hf_model, tmp_path / "model"), dtype)
