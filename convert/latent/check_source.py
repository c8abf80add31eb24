"""Check whether latent attention can hold a checkpoint, from its config and tensor names, without torch.

The target is transformers' DeepseekV3ForCausalLM with dense layers: Llama's decoder, but for attention.
"""

from convert.latent import LATENT_SOURCES
from model.checkpoint import FLOAT_DTYPES, Checkpoint
from model.checkpoint.tensor import is_rope_buffer
from model.checkpoint.tied import EMBEDDING, LM_HEAD
from model.common import checks
from model.common.errors import CheckpointError
from model.decoder.config import LlamaConfig, read_llama_config
from model.families import FamilyMatch, find_family

_TARGET = "the class of latent attention (DeepSeek-V3)"
_REASONS = {
    "qwen2": f"its queries have biases, and {_TARGET} has none there",
    "gemma": "its norms add 1 to their weights, and its activation is not SwiGLU",
    "gemma2": "its logits are capped",
    "cohere": "its attention and MLP are parallel",
    "granite": "it has multipliers, which is not implemented",
    "phi3": "its projections are fused, which is not implemented",
    "ernie4_5": "it rotates neighbouring numbers of a head as pairs, which is not implemented",
    "smollm3": "some of its layers have no rotary embedding",
}


def check_latent_source(checkpoint: Checkpoint) -> LlamaConfig:
    """Return the settings of a source. Raises CheckpointError with the reason if latent attention cannot compute it."""
    match = find_family(checkpoint.config)
    if match.text_config is not None or match.model_type not in LATENT_SOURCES:
        raise CheckpointError(
            f"model_type {match.model_type!r} cannot be converted to latent attention: {_reason(match)}. "
            f"Implemented are {' and '.join(LATENT_SOURCES)}; mha-to-gqa merges the heads of this one."
        )
    architectures = checkpoint.config.get("architectures") or []
    for architecture in architectures if isinstance(architectures, list) else [architectures]:
        if not str(architecture).endswith("ForCausalLM"):
            raise CheckpointError(
                f"config.json has the architecture {checks.short_repr(architecture)}; only causal language models can "
                "be converted to latent attention."
            )
    config = read_llama_config(checkpoint.config)
    _check_settings(config)
    _check_tensors(checkpoint, config)
    return config


def _reason(match: FamilyMatch) -> str:
    family = match.family
    if match.text_config is not None:
        return f"it reads more than text, and {_TARGET} does not"
    if family.model_type in _REASONS:
        return _REASONS[family.model_type]
    if family.positions.rotary_fraction != 1.0 or family.positions.alibi:
        return "its positions do not enter by rotating whole heads"
    if family.head_norms is not None:
        return f"it normalises queries and keys after their projections, and {_TARGET} does not"
    return f"{_TARGET} computes Llama's decoder, and its decoder differs"


def _check_settings(config: LlamaConfig) -> None:
    if config.qkv_bias or config.o_bias:
        raise CheckpointError(
            f"config.json has attention_bias = true, but {_TARGET} has no bias for queries and values; latent "
            "attention cannot compute this model."
        )
    if config.mlp_bias:
        raise CheckpointError(f"config.json has mlp_bias = true, but {_TARGET} has no such biases.")
    context = config.rope.max_positions
    window = next((window for window in config.windows if window is not None and window < context), None)
    if window is not None:
        raise CheckpointError(
            f"config.json has a sliding window of {window} tokens, but {_TARGET} has none. If your texts are no longer "
            "than the window, set sliding_window to null, and remove layer_types."
        )
    if config.rope.needs_lengths:
        raise CheckpointError(
            "config.json has RoPE of type dynamic, whose frequencies depend on the length of the text; latent "
            "attention needs fixed ones: remove the scaling if your texts are no longer than max_position_embeddings."
        )
    if config.rms_norm_eps <= 0:
        raise CheckpointError("config.json has rms_norm_eps = 0, which cannot be made equal to the latent norm's 1e-6.")


def _check_tensors(checkpoint: Checkpoint, config: LlamaConfig) -> None:
    if EMBEDDING not in checkpoint.tensors:
        raise CheckpointError(
            f"{checkpoint.path} lacks the tensor {EMBEDDING}: a base model saved without its head cannot be converted; "
            "save it as a causal language model."
        )
    if not config.tied and LM_HEAD not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.path} lacks the tensor {LM_HEAD}, and config.json does not tie it.")
    vocab_size = checkpoint.tensors[EMBEDDING].shape[0]
    if vocab_size != config.vocab_size:
        raise CheckpointError(
            f"config.json has vocab_size = {config.vocab_size}, but {EMBEDDING} has {vocab_size} rows; make them equal."
        )
    others = checkpoint.tensors.keys() - {EMBEDDING, LM_HEAD, "model.norm.weight"}
    for name in sorted(others):
        if not name.startswith("model.layers.") and not is_rope_buffer(name):
            raise CheckpointError(
                f"{checkpoint.path} holds the tensor {name}, which {_TARGET} does not have; only causal language "
                "models can be converted to latent attention."
            )
    for name, tensor in checkpoint.tensors.items():
        if not is_rope_buffer(name) and tensor.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"the tensor {name} is {tensor.dtype}; latent attention is computed from weights in "
                f"{', '.join(FLOAT_DTYPES)}."
            )
