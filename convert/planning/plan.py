"""Define what all plans of a conversion have, and what they depend on; `merge_plan` and `latent_plan` make them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from convert.layer_tensors.converted_layer import LayerConversion
from convert.planning.remote_code import Code
from convert.planning.tensors import OutputTensor
from convert.recipe import Recipe
from model.attention_layout import Heads
from model.checkpoint import Checkpoint, Shard, TensorInfo
from model.checkpoint.safetensors_writer import DEFAULT_SHARD_SIZE, divide, header_bytes, name_shards
from model.checkpoint.same_bytes import digest_of_samples
from model.geometry import Geometry

MERGE_MEMORY = 256_000_000
"""Maximum bytes of all merges at the same time (`Plan.largest_merge_bytes`)."""
_INTERPRETER = 44_000_000
CALIBRATION_PROGRAM_BYTES = 450_000_000
"""Memory of a process that runs layers with torch, besides weights, states and the source's reader."""
_SCRATCH, _SCRATCH_REWRITTEN = 4_000_000, 40_000_000
"""Bytes of a worker besides its merge; the second number if source tensors must be rewritten (`Plan.rewrites`)."""


@dataclass(frozen=True)
class Plan(ABC):
    """One conversion: the source's geometry, the output's tensors and shards, and the recipe."""

    geometry: Geometry
    n_kv_heads: int
    """K/V heads of the output. With latent attention each query head has its own."""
    recipe: Recipe
    max_shard_size: int | None
    tensors: dict[str, TensorInfo]
    """Every tensor of the output."""
    shards: tuple[Shard, ...]
    computed: dict[str, OutputTensor]
    """The tensors that differ from the source's: merged, repeated, rescaled, or of latent attention. All others are
    copied."""
    conversions: tuple[LayerConversion, ...]
    """The layers that are computed as a whole, in order."""
    config_json: bytes
    """The output's `config.json`."""
    code: Code | None
    """Model code that the output needs beside the weights."""
    notes: tuple[str, ...]
    """Notes for the user on the source and the recipe, in sentences."""
    rewrites: bool
    """Whether copied tensors must be rewritten, because the source stores them in another form."""
    reader_bytes: int
    """Memory of the source's reader, in bytes."""

    @property
    @abstractmethod
    def model_type(self) -> str:
        """The output's `model_type`."""

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """Whether the output computes what the source does, whatever its weights."""

    @property
    @abstractmethod
    def kv_cache_bytes(self) -> tuple[int, int]:
        """Bytes of one token in the KV cache of all layers at 16 bits a number, before and after."""

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages on which the numbers of the conversion depend."""
        return ("groupwise", "numpy", "ml-dtypes", *(("torch", "transformers") if self.recipe.text else ()))

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the attention, in float64, of the largest layer that is computed as a whole; 0 if none is."""
        return max((conversion.nbytes for conversion in self.conversions), default=0)

    @cached_property
    def largest_merge_bytes(self) -> int:
        """Bytes of the largest unit that is merged at a time: a group of heads in one tensor, or a layer.

        A layer counts twice, because copies and products take as many bytes again.
        """
        groups = (merge.group_nbytes(output.tensor) for output in self.computed.values() for merge in output.merges)
        return max([2 * self.largest_layer_bytes, *groups])

    @cached_property
    def output_bytes(self) -> int:
        headers = (header_bytes([self.tensors[n] for n in s.tensors], s.metadata) for s in self.shards)
        return sum(map(len, headers)) + sum(t.nbytes for t in self.tensors.values())

    @property
    def bytes_computed(self) -> int:
        return sum(self.tensors[name].nbytes for name in self.computed)

    @property
    def bytes_copied(self) -> int:
        return sum(t.nbytes for t in self.tensors.values()) - self.bytes_computed

    @property
    def scratch_bytes(self) -> int:
        """Temporary bytes on the disk: a text's states before and after a layer, and the merged layers."""
        if self.recipe.text is None or not self.conversions:
            return 0
        states = 3 * 4 * self.recipe.text.n_tokens * self.geometry.hidden_size
        return states + sum(
            self.tensors[name].nbytes for conversion in self.conversions for name in conversion.tensor_names
        )

    @property
    def reported_heads(self) -> list[Heads]:
        """All merged heads, in the order of layers."""
        return [heads for output in self.computed.values() for heads in output.reported_heads]

    def in_layer(self, name: str) -> bool:
        """Return whether a tensor belongs to one of the layers, and not to an encoder or a vision tower."""
        return name.startswith(self.geometry.attention.layer_prefixes)

    @property
    def mean_layer_bytes(self) -> int:
        """Mean bytes of a layer in the output, all its tensors together."""
        return sum(t.nbytes for name, t in self.tensors.items() if self.in_layer(name)) // self.geometry.n_layers

    def workers(self, requested: int) -> int:
        """Return the number of workers: fewer than requested if their merges exceed MERGE_MEMORY."""
        return max(1, min(requested, MERGE_MEMORY // max(self.largest_merge_bytes, 1)))

    def peak_memory(self, requested_workers: int) -> int:
        """Estimate the peak anonymous memory in bytes: per worker a merge, its result and scratch."""
        per_worker = 2 * self.largest_merge_bytes + (_SCRATCH_REWRITTEN if self.rewrites else _SCRATCH)
        merging = _INTERPRETER + self.reader_bytes + self.workers(requested_workers) * per_worker
        text = self.recipe.text
        if text is None:
            return merging
        generation = CALIBRATION_PROGRAM_BYTES + text.generation_bytes if text.generated else 0
        return max(merging, self._calibration_memory(), generation)

    @abstractmethod
    def _calibration_memory(self) -> int:
        """Estimate the bytes to run one layer of the model on a text."""

    def _embedding_memory(self) -> int:
        """Estimate the bytes of the embedding."""
        return max(t.nbytes for name, t in self.tensors.items() if not self.in_layer(name))

    def added_files(self, checkpoint: Checkpoint) -> dict[str, Path | bytes]:
        """Return the files beside the weights that are not the source's, or replace the source's, by name.

        Raises CheckpointError if a file of the source that they are made of is damaged.
        """
        return dict(self.code.files) if self.code is not None else {}

    def summary(self, requested_workers: int) -> dict[str, Any]:
        """Return the plan's numbers, for `--dry-run` and `--json`."""
        before, after = self.kv_cache_bytes
        return {
            "model_type": self.geometry.model_type,
            "n_heads": self.geometry.n_heads,
            "n_kv_heads_in": self.geometry.n_kv_heads,
            **self.recipe.record,
            "n_computed": len(self.computed),
            "bytes_computed": self.bytes_computed,
            "n_copied": len(self.tensors) - len(self.computed),
            "bytes_copied": self.bytes_copied,
            "output_bytes": self.output_bytes,
            "n_shards": len(self.shards),
            "kv_cache_bytes_per_token": {"before": before, "after": after},
            "workers": self.workers(requested_workers),
            "peak_memory_bytes": self.peak_memory(requested_workers),
            "notes": self.notes,
        }


def lay_out(
    checkpoint: Checkpoint, replaced: Mapping[str, tuple[str, ...]], computed: Mapping[str, OutputTensor],
    max_shard_size: int | None,
) -> tuple[dict[str, TensorInfo], tuple[Shard, ...], bool]:  # fmt: skip
    """Return the output's tensors, its shards, and `Plan.rewrites`.

    The shards are the source's, or new ones of at most `max_shard_size` bytes. `replaced`: the names that take the
    place of a tensor of the source; all others keep their names.
    """
    changed = (
        replace(shard, tensors=tuple(new for name in shard.tensors for new in replaced.get(name, (name,))))
        for shard in checkpoint.shards
    )
    shards = tuple(shard for shard in changed if shard.tensors)
    names = [name for shard in shards for name in shard.tensors]
    tensors = {name: computed[name].tensor if name in computed else checkpoint.tensors[name] for name in names}
    if max_shard_size is not None or not checkpoint.keep_source_shards:
        metadata = {key: value for shard in shards for key, value in shard.metadata.items()}
        shards = name_shards(divide(list(tensors.values()), max_shard_size or DEFAULT_SHARD_SIZE), metadata)
    rewrites = any(checkpoint.span(name) is None for name in tensors.keys() - computed.keys())
    return tensors, shards, rewrites


def inputs_of(checkpoint: Checkpoint, plan: Plan) -> dict[str, object]:
    """Return everything the output depends on, each under its name for users; cheap enough for every conversion.

    Of the source's files it has names and versions as they were opened; of its tensors names, dtypes, shapes and
    samples.
    """
    recipe = dict(plan.recipe.record)
    recipe.pop("calibration", None)  # it has the name of the text, which may be written in several ways
    return {
        "set of package versions": {name: version(name) for name in plan.packages},
        "SOURCE": [
            checkpoint.config_bytes.decode(errors="replace"),
            [[path.name, *checkpoint.version(path)] for path in checkpoint.weight_files],
            [[shard.name, shard.tensors, dict(shard.metadata)] for shard in checkpoint.shards],
            [[tensor.name, tensor.dtype, tensor.shape] for tensor in checkpoint.tensors.values()],
            digest_of_samples(checkpoint),
            plan.code and plan.code.settings,
        ],
        "number of K/V heads": plan.n_kv_heads,
        "--calibration": plan.recipe.text and plan.recipe.text.identity,
        "--max-shard-size": plan.max_shard_size,
        **{"latent attention" if name == "latent" else f"--{name}": value for name, value in recipe.items()},
    }
