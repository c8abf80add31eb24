"""Translate the tensor names of training frameworks into Hugging Face's.

torchtitan has the names of Meta's Llama, and the same rotary order of Q and K rows (pytorch/torchtitan,
`models/llama3/state_dict_adapter.py`). Since version 0.5 q, k and v are in `attention.qkv_linear`, possibly fused, and
the LM head is `lm_head` (`protocols/state_dict_adapter.py`). Some versions saved the buffer `freqs_cis`
(`components/checkpoint.py`). OLMo-core's models have Hugging Face's rotary order. Its names are known for OLMo 2 and 3,
whose norms follow attention and MLP (allenai/OLMo-core, `nn/hf/convert.py`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint.formats.expected_shapes import Shape
from model.checkpoint.formats.meta_llama.names import FUSED_PARTS, INTERLEAVED, LAYER, TOP
from model.checkpoint.tied import EMBEDDING, EMBEDDINGS
from model.common.errors import CheckpointError

TRAINING_STATE = re.compile(
    r"(?:^|\.)(?:optim|optimizers?|(?:lr_)?schedulers?|data_?loader|train_state|rng|rng_state)\."
)
"""Names of the entries that are saved with the model to resume its training."""

PART_OF_STUDENT = "model.student."
"""Begins the names of tensors in the checkpoints of `uptrain run`."""

FUSED = tuple(LAYER[part][0] for part in FUSED_PARTS)


@dataclass(frozen=True)
class FrameworkNames:
    """A framework's module names → Hugging Face's. All tensors are weights; there are no biases."""

    title: str
    model_types: tuple[str, ...]
    """The models for which these names are known. In other models the same names can have another meaning."""
    top: Mapping[str, str]
    layers: str
    """The name before the number of a layer."""
    layer: Mapping[str, str]
    fused: str = ""
    """The module of a layer that holds, for each K/V head, the query heads of its group, then K, then V."""
    interleaved: tuple[str, ...] = ()
    """Hugging Face's names of modules whose rows the framework stores in Meta's rotary order."""
    buffers: tuple[str, ...] = ()
    """Tables that can be computed from config.json."""
    writes_config: bool = False
    """Whether the framework writes its own config.json beside its checkpoints."""

    @property
    def landmarks(self) -> tuple[str, str]:
        """Two tensor names that identify the framework: the embedding, and a norm of the first layer."""
        embedding = next(name for name, hf_name in self.top.items() if f"{hf_name}.weight" == EMBEDDING)
        return f"{embedding}.weight", f"{self.layers}.0.attention_norm.weight"

    def rename(self, name: str) -> list[str]:
        """Return the Hugging Face name; for a fused tensor those of Q, K and V; for an unknown tensor none."""
        match = re.fullmatch(rf"(?:{self.layers}\.(?P<layer>0|[1-9]\d*)\.)?(?P<part>.+)\.weight", name)
        layer, part = match.group("layer", "part") if match else (None, "")
        if layer is None:
            return [f"{self.top[part]}.weight"] if part in self.top else []
        parts = FUSED if part == self.fused else [self.layer[part]] if part in self.layer else []
        return [f"model.layers.{layer}.{part}.weight" for part in parts]


# torchtitan's spelling since version 0.5 → the spelling before.
_QKV = {f"attention.qkv_linear.{part}": f"attention.{part}" for part in ("wq", "wk", "wv")}

TORCHTITAN = FrameworkNames(
    "torchtitan",
    ("llama",),
    {**TOP, "lm_head": TOP["output"]},
    "layers",
    {part: LAYER[_QKV.get(part, part)][0] for part in (*LAYER, *_QKV)},
    fused="attention.qkv_linear.wqkv",
    interleaved=tuple(LAYER[part][0] for part in INTERLEAVED),
    buffers=("freqs_cis",),
)

OLMO_CORE = FrameworkNames(
    "OLMo-core",
    ("olmo2", "olmo3"),
    {"embeddings": "model.embed_tokens", "lm_head.norm": "model.norm", "lm_head.w_out": "lm_head"},
    "blocks",
    {
        "attention.w_q": "self_attn.q_proj", "attention.w_k": "self_attn.k_proj", "attention.w_v": "self_attn.v_proj",
        "attention.w_out": "self_attn.o_proj", "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm", "attention_norm": "post_attention_layernorm",
        "feed_forward_norm": "post_feedforward_layernorm", "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
    },
    writes_config=True,
)  # fmt: skip

FRAMEWORKS = (TORCHTITAN, OLMO_CORE)


def layer_norms(model_type: str, hidden_size: int, n_q: int, n_kv: int) -> dict[str, Shape]:
    """Return the norms inside a layer of one of these models."""
    if model_type == "llama":
        return {"input_layernorm": (hidden_size,), "post_attention_layernorm": (hidden_size,)}
    return {
        "self_attn.q_norm": (n_q,), "self_attn.k_norm": (n_kv,),
        "post_attention_layernorm": (hidden_size,), "post_feedforward_layernorm": (hidden_size,),
    }  # fmt: skip


def find_framework(path: Path, names: Iterable[str]) -> tuple[FrameworkNames | None, str]:
    """Return the framework of the tensors (None for Hugging Face's) and the prefix of the model's tensors.

    Raises CheckpointError if they are not unambiguous.
    """
    names = {name for name in names if not TRAINING_STATE.search(name)}
    candidates: list[tuple[FrameworkNames | None, str]] = [
        (None, p) for embedding in EMBEDDINGS for p in _prefixes(names, embedding)
    ]
    for framework in FRAMEWORKS:
        embedding, norm = framework.landmarks
        candidates += [(framework, prefix) for prefix in _prefixes(names, embedding) if prefix + norm in names]
    if not candidates and any(name.startswith(PART_OF_STUDENT) for name in names):
        raise CheckpointError(
            f"{path} holds only the tensors that a run of `uptrain` has trained; `uptrain export RUN OUT` writes the "
            "whole model."
        )
    if len(candidates) != 1:
        prefixes = [repr(prefix) for _, prefix in candidates]
        listing = ", ".join(prefixes) if prefixes else f"names like {', '.join(sorted(names)[:3])}"
        raise CheckpointError(
            f"{path}: a model has one tensor {EMBEDDING}, with any prefix; found {len(candidates)} ({listing}). "
            "Save one model under its Hugging Face names, as torchtitan names a Llama, or as OLMo-core names an OLMo 2."
        )
    return candidates[0]


def _prefixes(names: Iterable[str], last: str) -> list[str]:
    return [name.removesuffix(last) for name in names if name == last or name.endswith(f".{last}")]
