"""Summarise a checkpoint, and the sizes after merging its heads."""

from collections import Counter
from typing import Any

from convert.latent.check_source import check_latent_source
from convert.latent.sizes import FAST_KERNEL_SIZES, suggested_sizes
from convert.planning.notes import notes_of_checkpoint, notes_on_opening
from convert.planning.remote_code import find_code
from model.checkpoint import Checkpoint
from model.checkpoint.latent_norm import read_latent_norm
from model.common import checks
from model.common.errors import CheckpointError, prefix_path
from model.geometry import Geometry, read_geometry, read_sizes

# Common sizes: powers of two. vLLM and similar servers require that they divide the query heads (vLLM, `ModelConfig`,
# `get_num_kv_heads` and `verify_with_parallel_config`).
TENSOR_PARALLEL = (1, 2, 4, 8, 16, 32, 64)
MLA = "MLA"
"""The kind of attention of an output of `mha-to-mla`."""


def inspect(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the geometry, dtypes and sizes of a checkpoint, and the sizes that it would have with other attention.

    These are the sizes with each possible number of groups, and with latent attention. An output of `mha-to-mla` has no
    groups, and its own latent sizes.
    """
    if read_latent_norm(checkpoint.config) is not None:
        return _inspect_latent(checkpoint)
    geometry = read_geometry(checkpoint)
    latent_sizes = suggested_sizes(geometry) if _can_be_latent(checkpoint) else []
    return {
        **_source(checkpoint),
        "model_type": geometry.model_type,
        "attention": attention_kind(geometry.n_heads, geometry.n_kv_heads),
        "n_layers": geometry.n_layers,
        "n_heads": geometry.n_heads,
        "n_kv_heads": geometry.n_kv_heads,
        "heads_per_group": geometry.heads_per_group,
        "head_dim": geometry.head_dim,
        "hidden_size": geometry.hidden_size,
        **_content(checkpoint),
        "notes": _notes(checkpoint, geometry),
        "repeats": list(geometry.legal_repeats),
        "latent": [
            _latent_row(geometry.n_layers, geometry.head_dim, sizes.kv_lora_rank, sizes.qk_rope_head_dim)
            for sizes in latent_sizes
        ],
        "groups": [_group_row(checkpoint, geometry, n) for n in reversed(geometry.legal_n_kv_heads)],
    }


def _inspect_latent(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the same of an output of `mha-to-mla`."""
    with prefix_path(checkpoint.config_folder):
        sizes = read_sizes(checkpoint)
        head_dim = checks.size(checkpoint.config.get("v_head_dim"), "config.json has v_head_dim")
    assert sizes.latent is not None
    return {
        **_source(checkpoint),
        "model_type": checkpoint.config["model_type"],
        "attention": MLA,
        "n_layers": sizes.n_layers,
        "n_heads": sizes.n_heads,
        "n_kv_heads": sizes.n_kv_heads,
        "heads_per_group": 1,
        "head_dim": head_dim,
        "hidden_size": sizes.hidden_size,
        **_content(checkpoint),
        "notes": list(checkpoint.notes),
        "repeats": [],
        "latent": [_latent_row(sizes.n_layers, head_dim, *sizes.latent)],
        "groups": [],
    }


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"source": str(checkpoint.path), "format": checkpoint.format}


def _content(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the facts of tensors and files."""
    dtypes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        dtypes[tensor.dtype] += tensor.nbytes
    return {
        "n_tensors": len(checkpoint.tensors),
        "tensor_bytes": sum(dtypes.values()),
        "bytes_by_dtype": dict(dtypes.most_common()),
        "files": [path.name for path in checkpoint.weight_files],
        "side_files": sorted(checkpoint.side_files),
        "skipped_files": list(checkpoint.skipped_files),
    }


def _notes(checkpoint: Checkpoint, geometry: Geometry) -> list[str]:
    family = geometry.family
    notes = [*notes_of_checkpoint(checkpoint, family)]
    if geometry.n_kv_heads > 1:
        try:
            find_code(checkpoint, family)
            notes += notes_on_opening(family)
        except CheckpointError as error:
            notes.append(f"its heads cannot be merged: {error}")
    return notes


def _can_be_latent(checkpoint: Checkpoint) -> bool:
    try:
        check_latent_source(checkpoint)
    except CheckpointError:
        return False
    return True


def attention_kind(n_heads: int, n_kv_heads: int) -> str:
    """Return MHA, MQA or GQA-G."""
    return "MHA" if n_kv_heads == n_heads > 1 else group_label(n_kv_heads)


def group_label(n_kv_heads: int) -> str:
    """Return MQA or GQA-G, for a model with more query heads."""
    return "MQA" if n_kv_heads == 1 else f"GQA-{n_kv_heads}"


def _latent_row(n_layers: int, head_dim: int, kv_lora_rank: int, qk_rope_head_dim: int) -> dict[str, Any]:
    """Return what latent attention of these sizes caches. `head_dim`: of the K/V heads to compare it with."""
    cached = kv_lora_rank + qk_rope_head_dim
    return {
        "latent": kv_lora_rank,
        "rope": qk_rope_head_dim,
        "kv_cache_bytes_per_token": 2 * n_layers * cached,
        "as_groups": cached / (2 * head_dim),
        "vllm_kernel": (kv_lora_rank, qk_rope_head_dim) in FAST_KERNEL_SIZES,
    }


def _group_row(checkpoint: Checkpoint, geometry: Geometry, groups: int) -> dict[str, Any]:
    kv_bytes = 0
    for heads in geometry.attention.heads(geometry.n_kv_heads):
        if heads.kind != "q":
            tensor = checkpoint.tensors[heads.tensor_names[0]]  # any of the tensors that hold them, for its row size
            kv_bytes += heads.n * heads.rows_per_head * (tensor.nbytes // tensor.shape[0])
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    sizes = [n for n in TENSOR_PARALLEL if geometry.n_heads % n == 0]
    norms = geometry.family.head_norms
    # A norm over all heads together would count the copies of a head, too (vLLM, `olmo2.py`, `_apply_qk_norm`).
    can_copy = norms is None or norms.per_head
    return {
        "groups": groups,
        "attention": attention_kind(geometry.n_heads, groups),
        "tensor_bytes": total - kv_bytes + kv_bytes * groups // geometry.n_kv_heads,
        "kv_cache_bytes_per_token": geometry.kv_cache_bytes_per_token(groups),
        "tensor_parallel_split": [n for n in sizes if groups % n == 0],
        "tensor_parallel_replicated": [n for n in sizes if groups % n and n % groups == 0 and can_copy],
    }
