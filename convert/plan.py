"""What a conversion will do, decided in full before anything is written."""

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

from convert.merge import Merge
from model.checkpoint import Checkpoint, Shard, Tensor
from model.checkpoint.writer import divide, header_bytes, name_shards
from model.config import Geometry, read_geometry
from model.errors import CheckpointError

DEFAULT_SHARD_SIZE = 5_000_000_000
MERGE_MEMORY = 256_000_000
"""Bytes that the groups being merged at the same moment may take together."""
_INTERPRETER = 40_000_000
_SCRATCH, _SCRATCH_REWRITTEN = 4_000_000, 40_000_000
"""What a worker needs beside its group, and where the source stores tensors in another form than the output."""


@dataclass(frozen=True)
class Plan:
    """One conversion: what goes in, what comes out, and how."""

    geometry: Geometry
    n_kv_heads: int
    method: str
    seed: int
    max_shard_size: int | None
    tensors: dict[str, Tensor]
    """Every tensor as it will be written."""
    shards: tuple[Shard, ...]
    merged: dict[str, tuple[Merge, ...]]
    """What to compute in which tensors, row by row; all others are copied. Empty when the number of heads stays."""
    largest_group: int
    """Bytes of the largest group of heads in one tensor."""
    rewrites: bool
    """Whether tensors beside the merged ones must be written anew, being stored in another form."""

    reader_bytes: int
    """Memory that the source's reader takes by itself."""

    @cached_property
    def output_bytes(self) -> int:
        headers = (header_bytes([self.tensors[n] for n in s.tensors], s.metadata) for s in self.shards)
        return sum(map(len, headers)) + sum(t.nbytes for t in self.tensors.values())

    @property
    def bytes_merged(self) -> int:
        return sum(self.tensors[name].nbytes for name in self.merged)

    @property
    def bytes_copied(self) -> int:
        return sum(t.nbytes for t in self.tensors.values()) - self.bytes_merged

    @property
    def merges(self) -> list[Merge]:
        """All merges, in the order of layers."""
        return [merge for merges in self.merged.values() for merge in merges]

    def copied_rows(self, name: str) -> int:
        """Return how many of a merged tensor's first rows are copied: the queries of a fused projection."""
        return self.merged[name][0].first_row

    def copied(self, tensor: Tensor) -> Tensor:
        """Return what is copied of a source's tensor: all of it, or its first rows."""
        if tensor.name not in self.merged:
            return tensor
        return replace(tensor, shape=(self.copied_rows(tensor.name), *tensor.shape[1:]))

    def workers(self, wanted: int) -> int:
        """Return how many workers to use: fewer than wanted where their groups would not fit in memory together."""
        return max(1, min(wanted, MERGE_MEMORY // max(self.largest_group, 1)))

    def peak_memory(self, wanted_workers: int) -> int:
        """Estimate the peak of anonymous memory in bytes: per worker a group, its merged head and some scratch."""
        per_worker = 2 * self.largest_group + (_SCRATCH_REWRITTEN if self.rewrites else _SCRATCH)
        return _INTERPRETER + self.reader_bytes + self.workers(wanted_workers) * per_worker

    def summary(self, wanted_workers: int) -> dict[str, Any]:
        """Return the plan in numbers, for `--dry-run` and `--json`."""
        cache = self.geometry.kv_cache_bytes_per_token
        return {
            "model_type": self.geometry.model_type,
            "n_heads": self.geometry.n_heads,
            "n_kv_heads_in": self.geometry.n_kv_heads,
            "groups": self.n_kv_heads,
            "method": self.method,
            "seed": self.seed,
            "n_merged": len(self.merged),
            "bytes_merged": self.bytes_merged,
            "n_copied": len(self.tensors) - len(self.merged),
            "bytes_copied": self.bytes_copied,
            "output_bytes": self.output_bytes,
            "n_shards": len(self.shards),
            "kv_cache_bytes_per_token": {"before": cache(self.geometry.n_kv_heads), "after": cache(self.n_kv_heads)},
            "workers": self.workers(wanted_workers),
            "peak_memory_bytes": self.peak_memory(wanted_workers),
        }


def make_plan(
    checkpoint: Checkpoint, groups: int | None, method: str, seed: int, max_shard_size: int | None
) -> Plan:  # fmt: skip
    """Decide how to convert `checkpoint` to `groups` K/V heads, or to as many as it has.

    Raises CheckpointError where that is impossible.
    """
    geometry = read_geometry(checkpoint)
    groups = geometry.n_kv_heads if groups is None else groups
    _check_groups(geometry, groups, checkpoint)
    merged = _plan_merges(geometry, groups) if groups != geometry.n_kv_heads else {}
    dropped = {name for heads in geometry.kv_heads for name in heads.tensors[groups:]} if merged else set()
    tensors = {
        name: replace(tensor, shape=_merged_shape(tensor, merged[name])) if name in merged else tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in dropped
    }
    return Plan(
        geometry=geometry,
        n_kv_heads=groups,
        method=method,
        seed=seed,
        max_shard_size=max_shard_size,
        tensors=tensors,
        shards=_plan_shards(checkpoint, tensors, max_shard_size),
        merged=merged,
        rewrites=any(checkpoint.span(name) is None for name in tensors.keys() - merged.keys()),
        reader_bytes=checkpoint.reader_bytes,
        largest_group=max(
            (merge.group_nbytes(checkpoint.tensors[name]) for name, merges in merged.items() for merge in merges),
            default=0,
        ),
    )


def _plan_merges(geometry: Geometry, groups: int) -> dict[str, tuple[Merge, ...]]:
    """Return what to compute, by the output's tensors. Of tensors for single heads, the first `groups` remain."""
    merged: dict[str, list[Merge]] = defaultdict(list)
    for heads in geometry.kv_heads:
        n_outputs = 1 if len(heads.tensors) == 1 else groups
        per_output = len(heads.tensors) // n_outputs
        n_in, n_out = geometry.n_kv_heads // n_outputs, groups // n_outputs
        for i, name in enumerate(heads.tensors[:n_outputs]):
            sources = heads.tensors[i * per_output : (i + 1) * per_output]
            merged[name].append(Merge(heads.kind, name, sources, heads.first_row, heads.rows_per_head, n_in, n_out))
    return {name: tuple(merges) for name, merges in merged.items()}


def _merged_shape(tensor: Tensor, merges: tuple[Merge, ...]) -> tuple[int, ...]:
    rows = merges[0].first_row + sum(merge.n_out * merge.rows_per_head for merge in merges)
    return rows, *tensor.shape[1:]


def _check_groups(geometry: Geometry, groups: int, checkpoint: Checkpoint) -> None:
    legal = ", ".join(map(str, geometry.legal_n_kv_heads))
    if groups not in geometry.legal_n_kv_heads:
        raise CheckpointError(
            f"--groups {groups} is not possible: the model has {geometry.n_kv_heads} K/V heads, and groups "
            f"(the K/V heads to keep) must divide them; choose one of {legal}."
        )
    config = checkpoint.config if geometry.text_config is None else checkpoint.config[geometry.text_config]
    slices = config.get("pretraining_tp") or 1
    if type(slices) is not int or slices < 1 or groups * geometry.head_dim % slices:
        raise CheckpointError(
            f"config.json has pretraining_tp = {slices!r}, which does not divide {groups} x {geometry.head_dim} rows; "
            "set it to 1 (it only changes how products are split)."
        )


def _plan_shards(
    checkpoint: Checkpoint, tensors: dict[str, Tensor], max_shard_size: int | None
) -> tuple[Shard, ...]:  # fmt: skip
    if max_shard_size is None and checkpoint.is_sharded_by_user:
        kept = (replace(shard, tensors=tuple(n for n in shard.tensors if n in tensors)) for shard in checkpoint.shards)
        return tuple(shard for shard in kept if shard.tensors)
    in_order = [tensors[name] for shard in checkpoint.shards for name in shard.tensors if name in tensors]
    metadata = {key: value for shard in checkpoint.shards for key, value in shard.metadata.items()}
    return name_shards(divide(in_order, max_shard_size or DEFAULT_SHARD_SIZE), metadata)


def fingerprint(checkpoint: Checkpoint, plan: Plan) -> str:
    """Return a digest of everything the output depends on, cheap enough to take before and after the work.

    Source files enter by name, size and time of change, tensors by their names, dtypes and shapes.
    """
    stats = {path.name: path.stat() for path in checkpoint.weight_files}
    facts = {
        "version": version("groupwise"),
        "groups": plan.n_kv_heads,
        "method": plan.method,
        "seed": plan.seed,
        "shards": [[shard.name, shard.tensors, dict(shard.metadata)] for shard in plan.shards],
        "tensors": [[t.name, t.dtype, t.shape] for t in plan.tensors.values()],
        "config": checkpoint.config_text.decode(errors="replace"),
        "files": [[name, s.st_size, s.st_mtime_ns, s.st_ino] for name, s in stats.items()],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
