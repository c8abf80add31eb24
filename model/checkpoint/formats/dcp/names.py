"""What training frameworks call the tensors of a decoder, where that is not Hugging Face's names.

The names of torchtitan are those of Meta's Llama, and so is the rotary order of its Q and K rows (pytorch/torchtitan,
`models/llama3/state_dict_adapter.py`). Since version 0.5 q, k and v lie in `attention.qkv_linear`, possibly fused, and
the head is `lm_head` (`protocols/state_dict_adapter.py`). The buffer `freqs_cis` was saved for a time
(`components/checkpoint.py`). OLMo-core's models have Hugging Face's rotary order; its names are those of OLMo 2 and 3
where the norms follow attention and MLP (allenai/OLMo-core, `nn/hf/convert.py`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint.decoder_shapes import Shape
from model.checkpoint.formats.meta_llama.model_parallel import FUSED_PARTS, LAYER, PAIRS, TOP
from model.checkpoint.tied import EMBEDDING, EMBEDDINGS
from model.common.errors import CheckpointError

# What training saves beside the model.
OTHERS = re.compile(r"(?:^|\.)(?:optim|optimizers?|(?:lr_)?schedulers?|data_?loader|train_state|rng|rng_state)\.")


FUSED = tuple(LAYER[part][0] for part in FUSED_PARTS)


@dataclass(frozen=True)
class Naming:
    """A framework's names of modules, and Hugging Face's. All tensors are weights; there are no biases."""

    title: str
    model_types: tuple[str, ...]
    """The models that have these names. Others may share them and mean something else."""
    top: Mapping[str, str]
    layers: str
    """What comes before the number of a layer."""
    layer: Mapping[str, str]
    fused: str = ""
    """A module of a layer that holds, for each K/V head, the query heads of its group, then its K, then its V."""
    pairs: tuple[str, ...] = ()
    """Hugging Face's modules whose rows are in Meta's rotary order here."""
    buffers: tuple[str, ...] = ()
    """Tables that follow from config.json."""
    writes_config: bool = False
    """Whether the framework's own config.json stands beside its checkpoints."""

    @property
    def landmarks(self) -> tuple[str, str]:
        """The names that tell the scheme: the embedding, and a norm of the first layer."""
        embedding = next(name for name, hf_name in self.top.items() if f"{hf_name}.weight" == EMBEDDING)
        return f"{embedding}.weight", f"{self.layers}.0.attention_norm.weight"

    def rename(self, name: str) -> list[str]:
        """Return the Hugging Face name; of a fused tensor those of Q, K and V; of an unknown one none."""
        match = re.fullmatch(rf"(?:{self.layers}\.(?P<layer>0|[1-9]\d*)\.)?(?P<part>.+)\.weight", name)
        layer, part = match.group("layer", "part") if match else (None, "")
        if layer is None:
            return [f"{self.top[part]}.weight"] if part in self.top else []
        parts = FUSED if part == self.fused else [self.layer[part]] if part in self.layer else []
        return [f"model.layers.{layer}.{part}.weight" for part in parts]


# The two spellings of what has been renamed.
_QKV = {f"attention.qkv_linear.{part}": f"attention.{part}" for part in ("wq", "wk", "wv")}

TORCHTITAN = Naming(
    "torchtitan",
    ("llama",),
    {**TOP, "lm_head": TOP["output"]},
    "layers",
    {part: LAYER[_QKV.get(part, part)][0] for part in (*LAYER, *_QKV)},
    fused="attention.qkv_linear.wqkv",
    pairs=tuple(LAYER[part][0] for part in PAIRS),
    buffers=("freqs_cis",),
)

OLMO_CORE = Naming(
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

NAMINGS = (TORCHTITAN, OLMO_CORE)


def layer_norms(model_type: str, hidden_size: int, n_q: int, n_kv: int) -> dict[str, Shape]:
    """Return the norms inside a layer of one of these models."""
    if model_type == "llama":
        return {"input_layernorm": (hidden_size,), "post_attention_layernorm": (hidden_size,)}
    return {
        "self_attn.q_norm": (n_q,), "self_attn.k_norm": (n_kv,),
        "post_attention_layernorm": (hidden_size,), "post_feedforward_layernorm": (hidden_size,),
    }  # fmt: skip


def find_naming(path: Path, names: Iterable[str]) -> tuple[Naming | None, str]:
    """Return how the tensors are named, None for Hugging Face's names, and the prefix of the model's.

    Raises CheckpointError if that is not certain.
    """
    names = {name for name in names if not OTHERS.search(name)}
    found: list[tuple[Naming | None, str]] = [
        (None, p) for embedding in EMBEDDINGS for p in _prefixes(names, embedding)
    ]
    for naming in NAMINGS:
        embedding, norm = naming.landmarks
        found += [(naming, prefix) for prefix in _prefixes(names, embedding) if prefix + norm in names]
    if len(found) != 1:
        prefixes = [repr(prefix) for _, prefix in found]
        told = ", ".join(prefixes) if prefixes else f"names like {', '.join(sorted(names)[:3])}"
        raise CheckpointError(
            f"{path}: a model has one tensor {EMBEDDING}, after some prefix; here are {len(found)} ({told}). "
            "Save one model under its Hugging Face names, as torchtitan names a Llama, or as OLMo-core names an OLMo 2."
        )
    return found[0]


def _prefixes(names: Iterable[str], last: str) -> list[str]:
    return [name.removesuffix(last) for name in names if name == last or name.endswith(f".{last}")]
