"""Select the model's tensors in a torch.distributed.checkpoint, and give them their Hugging Face names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.formats.dcp.metadata import Entry
from model.checkpoint.formats.dcp.names import TRAINING_STATE, FrameworkNames, layer_norms
from model.checkpoint.formats.expected_shapes import Shape, expected_shapes
from model.checkpoint.formats.torch_file import DTYPES, check_name
from model.checkpoint.tied import LM_HEAD
from model.common.checks import config_size
from model.common.errors import CheckpointError


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model: its entry in the checkpoint, and the selection and order of its heads."""

    name: str
    entry: Entry
    shape: Shape
    head_dim: int = 0
    heads: tuple[int, ...] | None = None
    """The heads of the entry that belong to this tensor; None if all do."""
    is_interleaved: bool = False
    """Whether the rows of each head are in Meta's rotary order."""

    @property
    def is_verbatim(self) -> bool:
        return self.heads is None and not self.is_interleaved


@dataclass(frozen=True)
class _Model:
    """The sizes in config.json."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    shapes: dict[str, Shape]
    """Hugging Face name → shape, in Hugging Face's order."""

    def fused_shape(self, hidden: Shape) -> Shape:
        return ((self.n_heads + 2 * self.n_kv_heads) * self.head_dim, *hidden)

    def split(self) -> list[tuple[int, ...] | None]:
        """Return the heads in a fused tensor that belong to Q, K and V."""
        heads_per_group = self.n_heads // self.n_kv_heads
        starts = range(0, self.n_heads + 2 * self.n_kv_heads, heads_per_group + 2)
        queries = tuple(start + i for start in starts for i in range(heads_per_group))
        keys, values = (tuple(start + heads_per_group + i for start in starts) for i in (0, 1))
        return [queries, keys, values]


def own_names(
    path: Path, entries: Mapping[str, Entry], prefix: str, framework: FrameworkNames | None
) -> dict[str, Entry]:
    """Return the model's tensors under their names without the prefix.

    Raises CheckpointError for an entry that belongs neither to the model nor to the training state.
    """
    chosen = {}
    buffers = framework.buffers if framework else ()
    for name, entry in entries.items():
        own = name.removeprefix(prefix)
        if TRAINING_STATE.search(name) or (name.startswith(prefix) and own in buffers):
            continue
        check_name(path, name)
        if not name.startswith(prefix) or entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{path} holds {name} ({entry.dtype}), which belongs neither to the model (prefix {prefix!r}) nor to "
                "its optimizer; refused."
            )
        chosen[own] = entry
    return chosen


def renamed(
    path: Path, entries: Mapping[str, Entry], framework: FrameworkNames | None, config: Mapping[str, Any]
) -> dict[str, ModelTensor]:
    """Return the model's tensors under their Hugging Face names.

    Tensors with a framework's names must be exactly those that the config describes. Raises CheckpointError otherwise.
    """
    if framework is None:
        return {name: ModelTensor(name, entry, entry.shape) for name, entry in entries.items()}
    model = _model(path, framework, config)
    parts: dict[str, ModelTensor] = {}
    for name, entry in entries.items():
        hf_names = framework.rename(name)
        if not hf_names or hf_names[0] not in model.shapes:
            raise CheckpointError(
                f"{path} holds {name} of shape {entry.shape}, which {framework.title} does not have in a "
                f"{config['model_type']} of config.json's sizes; refused."
            )
        expected, is_fused = model.shapes[hf_names[0]], len(hf_names) > 1
        if is_fused:
            expected = model.fused_shape(expected[1:])
        if entry.shape != expected:
            raise CheckpointError(
                f"{path} holds {name} of shape {entry.shape}, where config.json implies {expected}; they do not match."
            )
        heads: list[tuple[int, ...] | None] = model.split() if is_fused else [None]
        for new, selection in zip(hf_names, heads, strict=True):
            if new in parts:
                raise CheckpointError(f"{path} holds {parts[new].name} and {name}, two names of the same tensor.")
            is_interleaved = any(f".{part}." in new for part in framework.interleaved)
            parts[new] = ModelTensor(name, entry, model.shapes[new], model.head_dim, selection, is_interleaved)
    for name in model.shapes:
        if name not in parts and not (name == LM_HEAD and config.get("tie_word_embeddings") is True):
            raise CheckpointError(
                f"{path} lacks the tensor for {name}; it is incomplete, or config.json is another model's."
            )
    return {name: parts[name] for name in model.shapes if name in parts}


def _model(path: Path, framework: FrameworkNames, config: Mapping[str, Any]) -> _Model:
    """Return the sizes in a Hugging Face config. Raises CheckpointError if the framework has no such model."""
    model_type = config.get("model_type")
    if model_type not in framework.model_types:
        raise CheckpointError(
            f"{path} has {framework.title}'s names of tensors, which are known for model_type "
            f"{' and '.join(framework.model_types)}; its config.json says {model_type!r}."
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise CheckpointError(
                f"{path}: config.json says {key} = {config[key]}, but {framework.title} has no biases."
            )
    n_layers, vocab_size, hidden_size, n_mlp, n_heads = (
        config_size(config, key)
        for key in ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    )
    n_kv_heads = n_heads if config.get("num_key_value_heads") is None else config_size(config, "num_key_value_heads")
    head_dim = hidden_size // n_heads if config.get("head_dim") is None else config_size(config, "head_dim")
    if head_dim % 2 or n_heads % n_kv_heads or n_layers > 100_000:
        raise CheckpointError(
            f"{path}: config.json implies {n_layers} layers of {n_heads} query and {n_kv_heads} K/V heads of "
            f"{head_dim}; correct it."
        )
    n_q, n_kv = n_heads * head_dim, n_kv_heads * head_dim
    norms = layer_norms(model_type, hidden_size, n_q, n_kv)
    shapes = expected_shapes(n_layers, vocab_size, hidden_size, n_mlp, n_q, n_kv, norms)
    return _Model(n_heads, n_kv_heads, head_dim, shapes)
