"""A Llama's `config.json` for the formats that have none, in the spellings of transformers 4 and of 5."""

from collections.abc import Iterable
from typing import Any

from model.checkpoint.tensor import Tensor

TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def llama_config(**settings: Any) -> dict[str, Any]:
    """Return the settings with what makes them a Llama's."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **settings}


def rope_settings(theta: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return RoPE's settings: transformers 4 reads the first two, 5 the third."""
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters}


def llama3_scaling(factor: float, low: float = 1.0, high: float = 4.0, context: int = 8192) -> dict[str, Any]:
    """Return the RoPE scaling of Llama 3.1 and later; all released models have these defaults."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def dtype_settings(tensors: Iterable[Tensor]) -> dict[str, str]:
    """Return the dtype that all matrices have, or float32 where they differ: `torch_dtype` for transformers 4."""
    dtypes = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    name = TORCH_DTYPES.get(dtypes.pop(), "float32") if len(dtypes) == 1 else "float32"
    return {"torch_dtype": name, "dtype": name}
