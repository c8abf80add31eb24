"""Plan a conversion completely, before anything is written."""

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from itertools import chain
from math import prod
from typing import Any

from convert.merging.layer import LayerConversion, LayerMerge
from convert.merging.methods import REPEAT
from convert.merging.recipe import Recipe
from convert.planning.notes import notes_of_checkpoint, notes_of_recipe
from convert.planning.remote_code import Code, find_code
from convert.planning.tensors import OutputTensor, Reported, regroup
from model.checkpoint import Checkpoint, Shard, Tensor
from model.checkpoint.safetensors_writer import divide, header_bytes, name_shards
from model.common.errors import CheckpointError
from model.families import NATIVE_FAMILIES
from model.geometry import Geometry, read_geometry

DEFAULT_SHARD_SIZE = 5_000_000_000
MERGE_MEMORY = 256_000_000
"""Maximum bytes of all groups merged at the same time."""
_INTERPRETER, TORCH_BYTES, _TRANSFORMERS = 44_000_000, 450_000_000, 200_000_000
_SCRATCH, _SCRATCH_REWRITTEN = 4_000_000, 40_000_000
"""Bytes of a worker besides its group; the second number if source tensors must be rewritten (`Plan.rewrites`)."""


@dataclass(frozen=True)
class Plan:
    """One conversion: the source's geometry, the output's tensors and shards, and the recipe."""

    geometry: Geometry
    n_kv_heads: int
    recipe: Recipe
    max_shard_size: int | None
    tensors: dict[str, Tensor]
    """Every tensor of the output."""
    shards: tuple[Shard, ...]
    regrouped: dict[str, OutputTensor]
    """The tensors that change with the K/V heads. All others are copied. Empty if the number of heads stays."""
    code: Code | None
    """Model code that the output needs beside the weights."""
    notes: tuple[str, ...]
    """Notes for the user on the source and the recipe, in sentences."""
    largest_group: int
    """Bytes of the largest unit merged at a time: a group of heads in one tensor, or a layer."""
    rewrites: bool
    """Whether copied tensors must be rewritten, because the source stores them in another form."""
    reader_bytes: int
    """Memory of the source's reader, in bytes."""

    @cached_property
    def output_bytes(self) -> int:
        headers = (header_bytes([self.tensors[n] for n in s.tensors], s.metadata) for s in self.shards)
        return sum(map(len, headers)) + sum(t.nbytes for t in self.tensors.values())

    @property
    def bytes_regrouped(self) -> int:
        return sum(self.tensors[name].nbytes for name in self.regrouped)

    @property
    def bytes_copied(self) -> int:
        return sum(t.nbytes for t in self.tensors.values()) - self.bytes_regrouped

    @property
    def scratch_bytes(self) -> int:
        """Temporary bytes on the disk: a text's states before and after a layer, and the merged layers."""
        if self.recipe.text is None or not self.conversions:
            return 0
        states = 3 * 4 * self.recipe.text.n_tokens * self.geometry.hidden_size
        return states + sum(self.tensors[name].nbytes for conversion in self.conversions for name in conversion.tensors)

    @property
    def conversions(self) -> list[LayerConversion]:
        """The layers that are computed as a whole, in order."""
        return list(dict.fromkeys(output.layer for output in self.regrouped.values() if output.layer is not None))

    @property
    def layers(self) -> list[LayerMerge]:
        """The layers whose heads are merged as a whole, in order."""
        return [conversion for conversion in self.conversions if isinstance(conversion, LayerMerge)]

    @property
    def reported(self) -> list[Reported]:
        """All merged heads, in the order of layers."""
        return [heads for regrouped in self.regrouped.values() for heads in regrouped.reported]

    def in_layer(self, name: str) -> bool:
        """Return whether a tensor belongs to one of the layers."""
        return f".{self.geometry.attention.family.layers}." in f".{name}"

    def workers(self, requested: int) -> int:
        """Return the number of workers: fewer than requested if their groups exceed MERGE_MEMORY."""
        return max(1, min(requested, MERGE_MEMORY // max(self.largest_group, 1)))

    def peak_memory(self, requested_workers: int) -> int:
        """Estimate the peak anonymous memory in bytes: per worker a group, its merged head and scratch."""
        per_worker = 2 * self.largest_group + (_SCRATCH_REWRITTEN if self.rewrites else _SCRATCH)
        merging = _INTERPRETER + self.reader_bytes + self.workers(requested_workers) * per_worker
        text = self.recipe.text
        if text is None:
            return merging
        return max(merging, self._calibration_memory(), TORCH_BYTES + text.generation_bytes if text.generated else 0)

    def _calibration_memory(self) -> int:
        """Estimate the bytes to run one layer: its weights in float32, its attention and its moments in float64."""
        layer = sum(t.nbytes for name, t in self.tensors.items() if self.in_layer(name)) // self.geometry.n_layers
        width = self.geometry.n_kv_heads // self.n_kv_heads * self.geometry.head_dim
        moments = 8 * self.n_kv_heads * width**2
        # Of attention and moments: original and merged candidates, or sums for least squares. Refining holds the merged
        # layer, and in float32 its gradients, Adam's moments and temporaries, and two versions of the weights.
        copies = 8 if self.recipe.refine else 5
        running = 2 * layer + copies * (self.largest_group // 2 + moments)
        program = TORCH_BYTES
        if self.geometry.model_type not in NATIVE_FAMILIES:
            program += _TRANSFORMERS
            running = max(running, 4 * layer)  # transformers joins the experts' matrices, from copies in float32
        if self.geometry.alibi and self.recipe.text is not None:
            running += 2 * 4 * self.geometry.n_heads * self.recipe.text.window**2  # masks and weights of all heads
        if len(self.geometry.attention.family.attention) > 1:  # an encoder, in float32, reads the text as a whole
            encoder = sum(4 * prod(t.shape) for name, t in self.tensors.items() if name.startswith("encoder."))
            running = max(running, encoder)
        return program + self.reader_bytes + max(running, self._embedding_memory())

    def _embedding_memory(self) -> int:
        """Estimate the bytes of the embedding."""
        return max(t.nbytes for name, t in self.tensors.items() if not self.in_layer(name))

    def summary(self, requested_workers: int) -> dict[str, Any]:
        """Return the plan's numbers, for `--dry-run` and `--json`."""
        cache = self.geometry.kv_cache_bytes_per_token
        return {
            "model_type": self.geometry.model_type,
            "n_heads": self.geometry.n_heads,
            "n_kv_heads_in": self.geometry.n_kv_heads,
            "groups": self.n_kv_heads,
            **self.recipe.record,
            "n_regrouped": len(self.regrouped),
            "bytes_regrouped": self.bytes_regrouped,
            "n_copied": len(self.tensors) - len(self.regrouped),
            "bytes_copied": self.bytes_copied,
            "output_bytes": self.output_bytes,
            "n_shards": len(self.shards),
            "kv_cache_bytes_per_token": {"before": cache(self.geometry.n_kv_heads), "after": cache(self.n_kv_heads)},
            "workers": self.workers(requested_workers),
            "peak_memory_bytes": self.peak_memory(requested_workers),
            "notes": self.notes,
        }


def make_plan(
    checkpoint: Checkpoint, n_kv_heads: int | None, recipe: Recipe, max_shard_size: int | None
) -> Plan:  # fmt: skip
    """Plan a conversion of `checkpoint` to `n_kv_heads` K/V heads; None keeps their number.

    Raises CheckpointError if that is impossible.
    """
    geometry = read_geometry(checkpoint)
    family = geometry.attention.family
    n_kv_heads = geometry.n_kv_heads if n_kv_heads is None else n_kv_heads
    check_n_kv_heads(geometry, n_kv_heads, recipe.method)
    _check_slices(checkpoint, geometry, n_kv_heads)
    changes = n_kv_heads != geometry.n_kv_heads
    regrouped = regroup(geometry, checkpoint.tensors, n_kv_heads, recipe) if changes else {}
    shards = _keep_shards(checkpoint, geometry, regrouped)
    names = (name for shard in shards for name in shard.tensors)
    tensors = {name: regrouped[name].tensor if name in regrouped else checkpoint.tensors[name] for name in names}
    return Plan(
        geometry=geometry,
        n_kv_heads=n_kv_heads,
        recipe=recipe,
        max_shard_size=max_shard_size,
        tensors=tensors,
        shards=plan_shards(checkpoint, shards, tensors, max_shard_size),
        regrouped=regrouped,
        code=find_code(checkpoint, family) if regrouped else None,
        notes=(*notes_of_checkpoint(checkpoint, family), *(notes_of_recipe(recipe) if regrouped else ())),
        rewrites=any(checkpoint.span(name) is None for name in tensors.keys() - regrouped.keys()),
        reader_bytes=checkpoint.reader_bytes,
        largest_group=max(map(_group_nbytes, regrouped.values()), default=0),
    )


def _group_nbytes(regrouped: OutputTensor) -> int:
    """Return the bytes merged at a time."""
    if regrouped.layer is not None:
        return 2 * regrouped.layer.nbytes  # twice: as many bytes again in copies and products
    return max((merge.group_nbytes(regrouped.tensor) for merge in regrouped.merges), default=0)


def check_n_kv_heads(geometry: Geometry, n_kv_heads: int, method: str | None) -> None:
    """Raise CheckpointError if the model cannot have this number of K/V heads. REPEAT makes more, all others fewer."""
    n = geometry.n_kv_heads
    if method == REPEAT:
        _check_repeats(geometry, n_kv_heads)
    elif n_kv_heads not in geometry.legal_n_kv_heads:
        legal = ", ".join(map(str, geometry.legal_n_kv_heads))
        if n % max(n_kv_heads, 1) == 0 < n_kv_heads:
            reason = f"the class of {geometry.model_type} holds a K/V head for each query head, or one"
        else:
            reason = f"the model has {n} K/V heads, and groups (the K/V heads to keep) must divide them"
        raise CheckpointError(f"--groups {n_kv_heads} is not possible: {reason}; choose one of {legal}.")


def _check_repeats(geometry: Geometry, n_kv_heads: int) -> None:
    legal = geometry.legal_repeats
    if n_kv_heads in legal:
        return
    problem = f"--groups {n_kv_heads} is not possible: the model has {geometry.n_kv_heads} K/V heads"
    if legal:
        raise CheckpointError(
            f"{problem}, and repeating makes a multiple of {geometry.n_kv_heads} that divides the {geometry.n_heads} "
            f"query heads; choose one of {', '.join(map(str, legal))}."
        )
    if geometry.n_kv_heads == geometry.n_heads:
        raise CheckpointError(f"{problem}, one for each query head already; there is nothing to repeat.")
    raise CheckpointError(f"{problem}, and the class of {geometry.model_type} cannot hold another number of them.")


def _check_slices(checkpoint: Checkpoint, geometry: Geometry, n_kv_heads: int) -> None:
    config = checkpoint.config if geometry.text_config is None else checkpoint.config[geometry.text_config]
    slices = config.get("pretraining_tp") or 1
    if type(slices) is not int or slices < 1 or n_kv_heads * geometry.head_dim % slices:
        raise CheckpointError(
            f"config.json has pretraining_tp = {slices!r}, which does not divide {n_kv_heads} x {geometry.head_dim} "
            "rows; set it to 1 (it only changes how products are split)."
        )


def _keep_shards(
    checkpoint: Checkpoint, geometry: Geometry, regrouped: dict[str, OutputTensor]
) -> tuple[Shard, ...]:  # fmt: skip
    """Return the source's shards with the output's tensors.

    The names are the source's, except where each head has its own tensor: then tensors are dropped or added.
    """
    with_heads = {name for heads in geometry.attention.heads(geometry.n_kv_heads) for name in heads.tensors}
    dropped = with_heads - regrouped.keys() if regrouped else set()
    added = defaultdict(list)
    for name, output in regrouped.items():
        if name not in checkpoint.tensors:
            added[output.copies[0].source].append(name)
    shards = []
    for shard in checkpoint.shards:
        names = chain.from_iterable((name, *added[name]) for name in shard.tensors)
        shards.append(replace(shard, tensors=tuple(name for name in names if name not in dropped)))
    return tuple(shard for shard in shards if shard.tensors)


def plan_shards(
    checkpoint: Checkpoint, shards: tuple[Shard, ...], tensors: dict[str, Tensor], max_shard_size: int | None
) -> tuple[Shard, ...]:  # fmt: skip
    if max_shard_size is None and checkpoint.keep_source_shards:
        return shards
    metadata = {key: value for shard in shards for key, value in shard.metadata.items()}
    return name_shards(divide(list(tensors.values()), max_shard_size or DEFAULT_SHARD_SIZE), metadata)


def fingerprint(checkpoint: Checkpoint, plan: Plan) -> str:
    """Return a digest of everything the output depends on, cheap enough to compute before and after the conversion.

    It includes the name, size and modification time of source files, and the names, dtypes and shapes of tensors. It
    excludes inode numbers, which sshfs, s3fs and similar file systems may change while a file is read.
    """
    stats = {path.name: path.stat() for path in checkpoint.weight_files}
    facts = {
        "version": version("groupwise"),
        "groups": plan.n_kv_heads,
        "recipe": plan.recipe.record,
        "calibration": plan.recipe.text and plan.recipe.text.facts,
        "shards": [[shard.name, shard.tensors, dict(shard.metadata)] for shard in plan.shards],
        "tensors": [[t.name, t.dtype, t.shape] for t in plan.tensors.values()],
        "code": plan.code and plan.code.settings,
        "config": checkpoint.config_text.decode(errors="replace"),
        "files": [[name, s.st_size, s.st_mtime_ns] for name, s in stats.items()],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
