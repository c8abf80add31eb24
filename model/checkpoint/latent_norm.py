"""Take the norm of the latent out of a checkpoint of latent attention in which `convert mha-to-mla` has undone it.

transformers' DeepseekV3Attention divides the latent by its root mean square. The conversion makes that a division by a
constant (`convert.latent.stock_tensors`), by rows of tiny numbers or by a constant channel of the latent. Neither can
be trained. `WithoutLatentNorm` presents the latent's rows in their usual size, and `WithLatentNorm` the tensors of the
stock class again. `config.json` says how the norm was undone.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from model.checkpoint.interface import Checkpoint
from model.checkpoint.tensor import FLOAT_DTYPES, Array, Span, TensorInfo
from model.checkpoint.view import CheckpointView
from model.common import checks
from model.common.errors import CheckpointError

LATENT_NORM_KEY = "groupwise_latent_norm"
"""The key of `config.json`: an object with `kind` (eps or bias) and `weight` (the weight of the norms)."""
LATENT_NORM_EPSILON = 1e-6
"""Of the latent's norm in transformers, whatever the config says; other engines take `rms_norm_eps`, which is made
equal."""
LATENT_SHRINK = 2.0**-30
"""Factor of the latent's rows with `eps`. A power of two, so that it is exact in every dtype."""
LATENT_CONSTANT = 4096.0
"""Value of the latent's last dimension with `bias`; exact in float16."""
KV_A, KV_A_NORM, KV_B = "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
_PARTS = re.compile(rf"(.*\.)?self_attn\.({KV_A}|{KV_A_NORM}|{KV_B}|o_proj)\.(weight|bias)")


@dataclass(frozen=True)
class LatentNorm:
    """The way to undo the norm of the latent, and the sizes that this concerns."""

    kind: Literal["eps", "bias"]
    weight: float
    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def latent_dim(self) -> int:
        """`kv_lora_rank` without the constant channel."""
        return self.kv_lora_rank - n_constants(self.kind)

    @property
    def gain(self) -> float:
        """Total factor of the latent, apart from that of its rows: 1 but for the rounding of `weight`."""
        return self.weight / norm_weight(self.kind, self.kv_lora_rank)

    @property
    def shrink(self) -> float:
        """The size of the latent's rows in the files, as a share of their usual one."""
        return LATENT_SHRINK if self.kind == "eps" else 1.0


def n_constants(kind: str) -> int:
    """Return how many dimensions of the latent, its last ones, are constant to undo the norm."""
    return 1 if kind == "bias" else 0


def norm_weight(kind: str, kv_lora_rank: int) -> float:
    """Return the norm's weight that undoes it exactly, before rounding."""
    if kind == "eps":
        return math.sqrt(LATENT_NORM_EPSILON) / LATENT_SHRINK
    return math.sqrt(LATENT_CONSTANT**2 / kv_lora_rank + LATENT_NORM_EPSILON)


def read_latent_norm(config: Mapping[str, Any]) -> LatentNorm | None:
    """Return how a `config.json` says that the norm of the latent is undone; None if it does not.

    Raises CheckpointError for a damaged entry.
    """
    if config.get("model_type") != "deepseek_v3" or config.get(LATENT_NORM_KEY) is None:
        return None
    entry = checks.table(config[LATENT_NORM_KEY], f"config.json has {LATENT_NORM_KEY}")
    if entry.get("kind") not in ("eps", "bias"):
        raise CheckpointError(
            f"config.json has {LATENT_NORM_KEY} = {checks.short_repr(entry)}; its kind must be eps or bias."
        )
    return LatentNorm(
        entry["kind"],
        checks.number(entry.get("weight"), f"config.json has {LATENT_NORM_KEY}.weight", above=0.0),
        checks.config_size(config, "kv_lora_rank"),
        checks.config_size(config, "qk_rope_head_dim"),
    )


class _LatentNormView(CheckpointView):
    """A view that adds or removes what undoes the norm of the latent: tensors, constant channels, factors of rows."""

    def __init__(self, inner: Checkpoint, norm: LatentNorm) -> None:
        super().__init__(inner)
        self._norm = norm

    def span(self, name: str) -> Span | None:
        return None if _part(name) else super().span(name)


class WithoutLatentNorm(_LatentNormView):
    """A checkpoint of the stock class, with the latent's rows in their usual size and without the norm.

    Raises CheckpointError if what is left out is not what `WithLatentNorm` writes: norms, biases and constant channels.
    """

    def __init__(self, inner: Checkpoint, norm: LatentNorm) -> None:
        super().__init__(inner, norm)
        for name, tensor in inner.tensors.items():
            part = _part(name)
            if part == KV_A_NORM and name.endswith(".weight"):
                _check_values(inner, tensor, norm.weight)
                del self.tensors[name]
            elif part in (KV_A, "o_proj") and name.endswith(".bias") and norm.kind == "bias":
                _check_values(inner, tensor, _bias(norm, part, tensor.shape))
                del self.tensors[name]
            elif part in (KV_A, KV_B) and name.endswith(".weight"):
                if len(tensor.shape) != 2:
                    raise CheckpointError(f"{inner.path}: the tensor {name} has shape {tensor.shape}, not two axes.")
                rows, columns = tensor.shape
                dropped = norm.kv_lora_rank - norm.latent_dim
                shape = (rows - dropped, columns) if part == KV_A else (rows, columns - dropped)
                self.tensors[name] = replace(tensor, shape=shape)

    def rows(self, name: str, start: int, stop: int) -> Array:
        norm = self._norm
        if _part(name) == KV_A:
            rows = self._inner.rows(name, 0, norm.kv_lora_rank + norm.qk_rope_head_dim)
            self._check_zeros(name, rows[norm.latent_dim : norm.kv_lora_rank])
            kept = np.delete(np.arange(len(rows)), np.arange(norm.latent_dim, norm.kv_lora_rank))[start:stop]
            return _scaled(rows[kept], max(0, norm.latent_dim - start), 1 / norm.shrink)
        rows = self._inner.rows(name, start, stop)
        if _part(name) != KV_B:
            return rows
        self._check_zeros(name, rows[:, norm.latent_dim :])
        return rows[:, : norm.latent_dim]

    def _check_zeros(self, name: str, values: Array) -> None:
        """Raise CheckpointError unless the constant channel of the latent has no weights."""
        if values.any():
            raise _changed(self._inner, name)


def without_latent_norm(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint as the native model reads it: without the norm of a latent, if it has one that is undone."""
    norm = read_latent_norm(checkpoint.config)
    if norm is None or isinstance(checkpoint, WithoutLatentNorm):
        return checkpoint
    return WithoutLatentNorm(checkpoint, norm)


class WithLatentNorm(_LatentNormView):
    """A checkpoint as `WithoutLatentNorm` presents it, with the tensors of the stock class."""

    def __init__(self, inner: Checkpoint, norm: LatentNorm) -> None:
        super().__init__(inner, norm)
        added = norm.kv_lora_rank - norm.latent_dim
        for name, tensor in inner.tensors.items():
            part, prefix = _part(name), name.rpartition("self_attn.")[0] + "self_attn."
            if part == KV_A:
                rows, columns = tensor.shape
                self.tensors[name] = replace(tensor, shape=(rows + added, columns))
                self._add(f"{prefix}{KV_A_NORM}.weight", tensor, (norm.kv_lora_rank,))
                if added:
                    self._add(f"{prefix}{KV_A}.bias", tensor, (norm.kv_lora_rank + norm.qk_rope_head_dim,))
                    self._add(f"{prefix}o_proj.bias", tensor, (columns,))
            elif part == KV_B:
                self.tensors[name] = replace(tensor, shape=(tensor.shape[0], norm.kv_lora_rank))

    def _add(self, name: str, like: TensorInfo, shape: tuple[int, ...]) -> None:
        self.tensors[name] = TensorInfo(name, like.dtype, shape)

    def rows(self, name: str, start: int, stop: int) -> Array:
        norm, part = self._norm, _part(name)
        if part == KV_A_NORM:
            return np.full(stop - start, norm.weight, dtype=self._dtype(name))
        if part and name.endswith(".bias"):
            return _bias(norm, part, self.tensors[name].shape)[start:stop].astype(self._dtype(name))
        if part == KV_A:
            rows = self._inner.rows(name, 0, norm.latent_dim + norm.qk_rope_head_dim)
            rows = _scaled(rows, norm.latent_dim, norm.shrink)
            empty = np.zeros((norm.kv_lora_rank - norm.latent_dim, rows.shape[1]), dtype=rows.dtype)
            return np.concatenate([rows[: norm.latent_dim], empty, rows[norm.latent_dim :]])[start:stop]
        rows = self._inner.rows(name, start, stop)
        return np.pad(rows, ((0, 0), (0, norm.kv_lora_rank - norm.latent_dim))) if part == KV_B else rows

    def _dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(FLOAT_DTYPES[self.tensors[name].dtype])


def _part(name: str) -> str | None:
    """Return which part of latent attention a tensor belongs to; None for all tensors that are not wrapped."""
    match = _PARTS.fullmatch(name)
    return match[2] if match and (match[2] != "o_proj" or match[3] == "bias") else None


def _scaled(rows: Array, n: int, factor: float) -> Array:
    """Return rows with the first n multiplied by a power of two."""
    scaled = rows.copy()
    scaled[:n] = (rows[:n].astype(np.float64) * factor).astype(rows.dtype)
    return scaled


def _bias(norm: LatentNorm, part: str, shape: tuple[int, ...]) -> Array:
    """Return a bias of the stock class, which makes the latent's constant channel."""
    values = np.zeros(shape, dtype=np.float32)
    if part == KV_A and shape:  # a scalar, of a damaged file, is refused
        values[norm.latent_dim : norm.kv_lora_rank] = LATENT_CONSTANT
    return values


def _check_values(checkpoint: Checkpoint, tensor: TensorInfo, expected: float | Array) -> None:
    """Raise CheckpointError if a tensor of one axis does not hold what the conversion wrote."""
    if len(tensor.shape) != 1 or tensor.dtype not in FLOAT_DTYPES:
        raise _changed(checkpoint, tensor.name)
    values = checkpoint.all_rows(tensor.name).astype(np.float64)
    if not np.allclose(values, expected, rtol=1e-6, atol=0.0):
        raise _changed(checkpoint, tensor.name)


def _changed(checkpoint: Checkpoint, name: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path}: the tensor {name} holds other values than the conversion wrote (config.json, "
        f"{LATENT_NORM_KEY}), so the norm of the latent is not undone; convert the model again."
    )
