"""Make config.json and generation_config.json from the metadata of a GGUF file."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint.hf_config import dtype_settings, llama3_scaling, llama_config, qwen2_config, rope_entries
from model.checkpoint.tensor import Array, TensorInfo
from model.common import checks
from model.common.errors import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
END_OF_TEXT = "<|endoftext|>"

QKV, MLP = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
ARCHITECTURES = ("llama", "qwen2")

# The supported keys of an architecture (`llama.*`). Any other key may change the model's output, and is refused.
KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length",
    "attention.value_length", "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear",
}  # fmt: skip


class ArchitectureKeys:
    """The keys of a file's architecture, such as `llama.block_count`. Errors name the file and the key."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self.path, self.fields = path, fields
        self.architecture = fields.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path} is a GGUF of architecture {checks.short_repr(self.architecture)}; supported are "
                f"{' and '.join(map(repr, ARCHITECTURES))}."
            )
        if fields.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{path} is one of {checks.short_repr(fields['split.count'])} parts; join them first, with llama.cpp's "
                "llama-gguf-split --merge FIRST_PART WHOLE.gguf."
            )
        for key in fields:
            prefix, _, rest = key.partition(".")
            if prefix == self.architecture and rest not in KEYS:
                raise CheckpointError(
                    f"{path} has the setting {key} = {checks.short_repr(fields[key])}, which is not supported."
                )

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        return checks.whole_number(value, f"{self.path} has {self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a float32 field as its shortest decimal: 1e-05, not 9.999999747378752e-06."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 < value < 1e30:
            raise CheckpointError(
                f"{self.path} has {self.architecture}.{key} = {checks.short_repr(value)}; it must be a positive number."
            )
        return float(str(np.float32(value)))

    def _get(self, key: str, default: Any) -> Any:
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks {self.architecture}.{key}; the file is incomplete.")
        return value


def build_config(
    keys: ArchitectureKeys, tensors: Mapping[str, TensorInfo], rope_factors: Array | None
) -> dict[str, Any]:
    """Return config.json. `rope_factors`: those of the rotary frequencies, if the file has a tensor of them."""
    n_heads, hidden_size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // n_heads)
    _check_heads(keys, n_heads, head_dim, hidden_size)
    theta = keys.number("rope.freq_base", 10000.0)
    has = tensors.__contains__
    if keys.architecture == "qwen2":
        of_qwen2 = "A Qwen 2 has biases of queries, keys and values, and no others."
        _check_biases(keys.path, tensors, QKV, of_qwen2)
        build = qwen2_config
    else:
        kinds = {"attention_bias": (*QKV, "self_attn.o_proj"), "mlp_bias": MLP}
        biases = {key: any(_is_bias(name, parts) for name in tensors) for key, parts in kinds.items()}
        biased = tuple(part for key, parts in kinds.items() if biases[key] for part in parts)
        of_llama = (
            "In the Llama of transformers, all four projections of attention have biases or none has, and so it is "
            "with the three of the MLP; nothing else has one."
        )
        _check_biases(keys.path, tensors, biased, of_llama)
        build = partial(llama_config, **biases)
    intermediate_size = keys.integer("feed_forward_length")
    _check_mlp(keys.path, tensors, intermediate_size)
    config = build(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=keys.integer("block_count"),
        num_attention_heads=n_heads,
        num_key_value_heads=keys.integer("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        max_position_embeddings=keys.integer("context_length"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        vocab_size=tensors["model.embed_tokens.weight"].shape[0],
        tie_word_embeddings=not has("lm_head.weight"),
        **rope_entries(theta, _rope_scaling(keys, rope_factors, head_dim, theta)),
        **dtype_settings(tensors.values()),
    )
    return {**config, **special_tokens(keys)}


def _check_heads(keys: ArchitectureKeys, n_heads: int, head_dim: int, hidden_size: int) -> None:
    """Raise CheckpointError for heads that the class in transformers does not have."""
    if head_dim % 2:
        raise CheckpointError(f"{keys.path} has heads of {head_dim} dimensions; RoPE needs an even number.")
    for key in ("rope.dimension_count", "attention.value_length"):
        if keys.integer(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{keys.path}: {keys.architecture}.{key} differs from the head size {head_dim}; not supported."
            )
    if keys.architecture == "qwen2" and n_heads * head_dim != hidden_size:
        raise CheckpointError(
            f"{keys.path} has {n_heads} heads of {head_dim}, which is not the width {hidden_size}; Qwen 2 has no other."
        )


def _check_mlp(path: Path, tensors: Mapping[str, TensorInfo], intermediate_size: int) -> None:
    """Raise CheckpointError if a matrix of an MLP has another width."""
    for name, tensor in tensors.items():
        axis = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.get(name.split(".")[-2])
        is_matrix = axis is not None and name.endswith(".weight")
        if is_matrix and tensor.shape[axis:][:1] != (intermediate_size,):
            raise CheckpointError(
                f"{path} says feed_forward_length = {intermediate_size}, but {name} is {tensor.shape}."
            )


def _is_bias(name: str, parts: tuple[str, ...]) -> bool:
    return name.endswith(tuple(f"{part}.bias" for part in parts))


def _check_biases(path: Path, tensors: Mapping[str, TensorInfo], parts: tuple[str, ...], rule: str) -> None:
    """Raise CheckpointError, with the rule, unless these parts of each layer have biases, and nothing else has."""
    biased = {name.removesuffix("bias") for name in tensors if name.endswith(".bias")}
    ends = tuple(f"{part}.weight" for part in parts)
    expected = {name.removesuffix("weight") for name in tensors if name.endswith(ends)}
    if wrong := sorted(biased ^ expected):
        raise CheckpointError(f"{path} {'holds' if wrong[0] in biased else 'lacks'} {wrong[0]}bias. {rule}")


def special_tokens(keys: ArchitectureKeys) -> dict[str, int]:
    """Return the ids of special tokens, as config.json names them."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    fields = keys.fields
    return {key: fields[f"tokenizer.ggml.{g}"] for key, g in names.items() if f"tokenizer.ggml.{g}" in fields}


def generation_config(keys: ArchitectureKeys) -> dict[str, Any]:
    """Return the special tokens. A Qwen 2 that answers chats ends a text with either of two tokens."""
    tokens, fields = special_tokens(keys), keys.fields
    vocabulary: list[str] = fields["tokenizer.ggml.tokens"]
    end = vocabulary.index(END_OF_TEXT) if END_OF_TEXT in vocabulary else None
    chats = keys.architecture == "qwen2" and end not in (None, tokens.get("eos_token_id"))
    both = {"eos_token_id": [tokens["eos_token_id"], end]} if chats and "eos_token_id" in tokens else {}
    return {"_from_model_config": True, **tokens, **both}


def _check_no_scaling(keys: ArchitectureKeys) -> None:
    """Raise CheckpointError for scaling by a key beside a tensor of factors; config.json has one of the two."""
    kind = keys.fields.get(f"{keys.architecture}.rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind != "none" and (kind, factor) != ("linear", 1.0):
        raise CheckpointError(
            f"{keys.path} scales the rotary embedding twice, by {ROPE_FACTORS} and by the type "
            f"{checks.short_repr(kind)} with factor {factor:g}; not supported."
        )


def _rope_scaling(
    keys: ArchitectureKeys, factors: Array | None, head_dim: int, theta: float
) -> dict[str, Any] | None:  # fmt: skip
    if factors is not None:
        _check_no_scaling(keys)
        return _scaling_from_factors(keys.path, factors, head_dim, theta)
    kind = keys.fields.get(f"{keys.architecture}.rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise CheckpointError(
        f"{keys.path}: the RoPE scaling {checks.short_repr(kind)} is not supported; none, linear and yarn are."
    )


def _scaling_from_factors(path: Path, factors: Array, head_dim: int, theta: float) -> dict[str, Any]:
    """Recover Llama 3.1's RoPE scaling from the per-frequency factors that llama.cpp stores.

    All released Llama 3.1 to 3.3 models use low 1, high 4 and an original context of 8192. Raises CheckpointError for
    anything else.
    """
    refusal = f"{path} has {ROPE_FACTORS} that are not Llama 3.1's; this RoPE is not supported."
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(refusal)
    factor, low, high, context = float(str(np.float32(factors.max()))), 1.0, 4.0, 8192
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / (smooth + (1 - smooth) / factor), rtol=1e-5):
        raise CheckpointError(refusal)
    return llama3_scaling(factor, low, high, context)
