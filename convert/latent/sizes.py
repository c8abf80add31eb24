"""Define the sizes of latent attention, and check that a model can have them."""

from contextlib import suppress
from dataclasses import dataclass

from convert.latent import DEFAULT_CACHED, Frequencies, LatentNormKind
from model.checkpoint.latent_norm import n_constants
from model.common.errors import CheckpointError
from model.geometry import Geometry

FAST_KERNEL_SIZES = ((512, 64), (256, 64))
"""Sizes of the latent and the rotated key for which vLLM has fast kernels (vLLM 0.11 to 0.32, read in source)."""
_NOPE_PADDING = 32
"""vLLM's own code of DeepSeek-V3 mistakes equal unrotated and rotated sizes of a query head for attention without a
latent. Unrotated dimensions are then padded by this many zeros. That code computes stock frequencies only."""
_DEFAULT_ROPE = (64, 256)
"""The sizes of heads between which the rotated key is as large as a head, if its size is not given; 64 for others."""


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a model's latent attention, in the words of DeepSeek's config class."""

    n_heads: int
    n_kv_heads: int
    """Of the source."""
    head_dim: int
    """Of the source; values keep it (`v_head_dim`)."""
    hidden_size: int
    latent: int
    """`kv_lora_rank`: dimensions of the latent, which keys without rotation and values are made of."""
    rope_dims: int
    """`qk_rope_head_dim`: dimensions of the rotated key that all heads share."""
    norm: LatentNormKind
    frequencies: Frequencies = "longrope"
    """What `nope` depends on; every other size does not."""

    @property
    def has_fast_kernel(self) -> bool:
        """Whether vLLM has a fast kernel for these sizes."""
        return (self.latent, self.rope_dims) in FAST_KERNEL_SIZES

    @property
    def nope(self) -> int:
        """`qk_nope_head_dim`: unrotated dimensions of a query or key head."""
        padded = self.frequencies == "stock" and self.rope_dims == self.head_dim
        return self.head_dim + (_NOPE_PADDING if padded else 0)

    @property
    def query(self) -> int:
        """Dimensions of a query head."""
        return self.nope + self.rope_dims

    @property
    def usable(self) -> int:
        """Dimensions of the latent that carry something: all, but for the constant channel of `--latent-norm bias`."""
        return self.latent - n_constants(self.norm)

    @property
    def cached(self) -> int:
        """Numbers in the KV cache for each token and layer."""
        return self.latent + self.rope_dims

    @property
    def source_cached(self) -> int:
        """The same of the source."""
        return 2 * self.n_kv_heads * self.head_dim

    def kv_cache_bytes_per_token(self, n_layers: int) -> int:
        """Return the bytes of one token in the KV cache of all layers, at 16 bits a number."""
        return 2 * n_layers * self.cached


def suggested_sizes(geometry: Geometry) -> list[LatentSizes]:
    """Return common sizes, the largest cache first: the default, vLLM's kernels', and those of 4, 2 and 1 K/V heads.

    They cache less than the source does.
    """
    heads = ((n * geometry.head_dim, n * geometry.head_dim) for n in (4, 2, 1))
    useful = {}
    for latent, rope_dims in (default_sizes(geometry, None, None), *FAST_KERNEL_SIZES, *heads):
        with suppress(CheckpointError):
            sizes = choose_sizes(geometry, latent, rope_dims, "eps")
            if sizes.cached < sizes.source_cached:
                useful[latent, rope_dims] = sizes
    return sorted(useful.values(), key=lambda sizes: -sizes.cached)


def largest_latent(geometry: Geometry, norm: LatentNormKind) -> int:
    """Return the largest size of the latent that a model can use."""
    most = min(2 * geometry.n_kv_heads * geometry.head_dim, geometry.hidden_size)
    return most + n_constants(norm)


def default_sizes(geometry: Geometry, latent: int | None, rope_dims: int | None) -> tuple[int, int]:
    """Return the sizes of the latent and the rotated key, of which one or both may be given.

    A rotated key as large as a head can hold every frequency of the source, which keys need more than the latent needs
    the dimensions. What is left of DEFAULT_CACHED is the latent: 448 + 128 for heads of 128, 512 + 64 for heads of 64.
    """
    if rope_dims is None:
        least, most = _DEFAULT_ROPE
        rope_dims = geometry.head_dim if least <= geometry.head_dim <= most else least
    return DEFAULT_CACHED - rope_dims if latent is None else latent, rope_dims


def choose_sizes(
    geometry: Geometry, latent: int, rope_dims: int, norm: LatentNormKind, frequencies: Frequencies = "longrope"
) -> LatentSizes:
    """Return the sizes of a model's latent attention. Raises CheckpointError for sizes that it cannot have or use."""
    keys = geometry.n_kv_heads * geometry.head_dim
    if rope_dims % 2:
        raise CheckpointError(f"--rope {rope_dims} is odd, but dimensions are rotated in pairs; give an even number.")
    if rope_dims > keys:
        raise CheckpointError(
            f"--rope {rope_dims} is more than the {keys} numbers of all keys ({geometry.n_kv_heads} K/V heads of "
            f"{geometry.head_dim}); give at most {keys}."
        )
    if latent <= n_constants(norm):
        raise CheckpointError(f"--latent {latent} leaves nothing for values with --latent-norm {norm}; give more.")
    most = largest_latent(geometry, norm)
    if latent > most:
        raise CheckpointError(
            f"--latent {latent} is more than keys and values of {geometry.n_kv_heads} K/V heads of "
            f"{geometry.head_dim} and a hidden size of {geometry.hidden_size} can use; give at most {most}."
        )
    return LatentSizes(
        n_heads=geometry.n_heads,
        n_kv_heads=geometry.n_kv_heads,
        head_dim=geometry.head_dim,
        hidden_size=geometry.hidden_size,
        latent=latent,
        rope_dims=rope_dims,
        norm=norm,
        frequencies=frequencies,
    )
