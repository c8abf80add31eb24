"""Describe one way to convert heads to latent attention, and read it from the record of a conversion."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convert.latent import (
    FREQUENCIES,
    LATENT_DTYPES,
    LATENT_METHODS,
    LATENT_NORMS,
    Frequencies,
    LatentDtype,
    LatentMethod,
    LatentNormKind,
)
from convert.latent.frequencies import SourceRope, are_stock, even_pair_indices, stock_pair_indices
from convert.latent.sizes import LatentSizes
from convert.recipe import Recipe
from model.common.checks import is_finite
from model.common.errors import CheckpointError, InputError
from model.common.typed_json import check_types

LATENT = "latent"
"""Recorded as the method of a conversion to latent attention."""


@dataclass(frozen=True, kw_only=True)
class LatentRecipe(Recipe):
    """One way to convert to latent attention. The sizes are those of `LatentSizes`."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    norm: LatentNormKind = "eps"
    frequencies: Frequencies
    """The kind requested; once the pair indices are chosen, the kind that these need (`with_pair_indices`)."""
    latent_method: LatentMethod = "fit"
    """The method of the latent and the rotated key; all but `fit` are for comparison (`convert.latent.baselines`)."""
    pair_indices: tuple[float, ...] | None = None
    """Of the rotated key's channels (`convert.latent.frequencies`); None before they are chosen."""
    dtype: LatentDtype | None = None
    """The dtype of all weights; None for the source's own."""

    @property
    def method_name(self) -> str:
        return self.latent_method

    @property
    def tensor_dtype(self) -> str | None:
        """`dtype` in the words of `TensorInfo`."""
        return None if self.dtype is None else "BF16"

    def with_pair_indices(self, source_rope: SourceRope, pair_indices: tuple[float, ...]) -> "LatentRecipe":
        """Return the recipe with chosen pair indices.

        Those of `longrope` may happen to be equally spaced. Then stock classes compute them, so they are `stock`.
        """
        frequencies: Frequencies = "stock" if are_stock(source_rope, pair_indices) else "longrope"
        return replace(self, pair_indices=pair_indices, frequencies=frequencies)

    @property
    def record(self) -> dict[str, Any]:
        return {
            **super().record,
            "latent": {
                "latent": self.kv_lora_rank, "rope": self.qk_rope_head_dim, "norm": self.norm,
                "frequencies": self.frequencies, "method": self.latent_method,
                "pair_indices": None if self.pair_indices is None else list(self.pair_indices),
                **({} if self.dtype is None else {"dtype": self.dtype}),
            },
        }  # fmt: skip


def is_exact(sizes: LatentSizes) -> bool:
    """Return whether latent attention of these sizes computes the source's function for any weights."""
    rank = min(sizes.n_kv_heads * sizes.head_dim, sizes.hidden_size)  # of the values
    return _rotates_all_keys(sizes) and sizes.latent_dim >= rank


def can_choose_frequencies(sizes: LatentSizes) -> bool:
    """Return whether a text can show which pair indices are best; else they are the default ones.

    A rotated key that holds all keys has each of their frequencies. One stock channel has that of the fastest pair.
    """
    is_one_stock_channel = sizes.frequencies == "stock" and sizes.qk_rope_head_dim == 2
    return not _rotates_all_keys(sizes) and not is_one_stock_channel


def _rotates_all_keys(sizes: LatentSizes) -> bool:
    """Return whether the rotated key holds the keys of all heads, each pair with its frequency."""
    has_frequencies = sizes.n_kv_heads == 1 or sizes.frequencies == "longrope"
    return sizes.qk_rope_head_dim == sizes.n_kv_heads * sizes.head_dim and has_frequencies


def default_pair_indices(source_rope: SourceRope, sizes: LatentSizes) -> tuple[float, ...]:
    """Return pair indices spread evenly over all pairs, whatever the model."""
    n_channels = sizes.qk_rope_head_dim // 2
    if sizes.frequencies == "longrope":
        return even_pair_indices(source_rope.n_rotary_pairs, n_channels)
    return stock_pair_indices(source_rope.n_rotary_pairs / n_channels, n_channels)


def read_latent_recipe(record: dict[str, Any], recipe: Recipe, path: Path) -> LatentRecipe:
    """Return the recipe in a `groupwise.json`, whose other entries are in `recipe`.

    Raises CheckpointError if it is damaged.
    """
    latent = record.get("latent")
    try:
        if not isinstance(latent, dict):
            raise InputError("latent is missing")
        if recipe.text is None and (recipe.refit or recipe.refine):
            raise InputError("refit and refine need a calibration, which is missing")
        check_types(latent, {"latent": int, "rope": int, "norm": str, "frequencies": str, "method": str})
        pair_indices = latent.get("pair_indices")
        n_channels = latent["rope"] // 2
        if not isinstance(pair_indices, list) or n_channels < 1 or len(pair_indices) != n_channels:
            raise InputError("latent.pair_indices does not fit latent.rope")
        if not all(is_finite(index) and 0 <= index < 1 << 16 for index in pair_indices):
            raise InputError("latent.pair_indices holds another value than a number of at least 0")
        for key, known in (("norm", LATENT_NORMS), ("frequencies", FREQUENCIES), ("method", LATENT_METHODS)):
            if latent[key] not in known:
                raise InputError(f"latent.{key} has an unknown value")
        if latent.get("dtype") not in (None, *LATENT_DTYPES):
            raise InputError("latent.dtype has an unknown value")
    except InputError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    return LatentRecipe(
        method=recipe.method,
        seed=recipe.seed,
        refit=recipe.refit,
        refine=recipe.refine,
        text=recipe.text,
        device=recipe.device,
        kv_lora_rank=latent["latent"],
        qk_rope_head_dim=latent["rope"],
        norm=latent["norm"],
        frequencies=latent["frequencies"],
        latent_method=latent["method"],
        pair_indices=tuple(map(float, pair_indices)),
        dtype=latent.get("dtype"),
    )
