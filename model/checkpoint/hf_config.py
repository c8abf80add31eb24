"""Build a `config.json` (Llama, Qwen 2) for formats without one, in the spellings of transformers 4 and 5."""

from collections.abc import Iterable
from typing import Any

from model.checkpoint.tensor import TORCH_DTYPES, TensorInfo


def llama_config(**settings: Any) -> dict[str, Any]:
    """Return a Llama's config with these settings."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **settings}


def qwen2_config(**settings: Any) -> dict[str, Any]:
    """Return a Qwen 2's config with these settings, and attention to all positions in every layer."""
    fixed = {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False}
    return {"architectures": ["Qwen2ForCausalLM"], **fixed, **settings}


def rope_entries(theta: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return the entries of `config.json` on RoPE. transformers 4 reads the first two, version 5 the third."""
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters}


def llama3_scaling(factor: float, low: float = 1.0, high: float = 4.0, context: int = 8192) -> dict[str, Any]:
    """Return the RoPE scaling of Llama 3.1 and later. All released models have these defaults."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def dtype_settings(tensors: Iterable[TensorInfo]) -> dict[str, str]:
    """Return the dtype of all matrices, or float32 if they differ, under the key of transformers 4 and that of 5."""
    dtypes = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    name = TORCH_DTYPES.get(dtypes.pop(), "float32") if len(dtypes) == 1 else "float32"
    return {"torch_dtype": name, "dtype": name}
