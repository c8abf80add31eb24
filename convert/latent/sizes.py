"""Define the sizes of latent attention, and check that a model can have them."""

from contextlib import suppress
from dataclasses import dataclass

from convert.latent import DEFAULT_CACHED, Frequencies, LatentNormKind
from model.checkpoint.latent_norm import n_constants
from model.common.errors import CheckpointError
from model.geometry import Geometry

DEEPSEEK_SIZES = (512, 64)
"""Sizes of the latent and the rotated key in DeepSeek's own models, the only ones that vLLM takes on a CPU."""
FAST_KERNEL_SIZES = (DEEPSEEK_SIZES, (256, 64))
"""Sizes for which vLLM has fast kernels, the second on some GPUs only (vLLM 0.11 to 0.32, read in source)."""
_NOPE_PADDING = 32
"""vLLM's own code of DeepSeek-V3 mistakes equal unrotated and rotated sizes of a query head for attention without a
latent. Unrotated dimensions are then padded by this many zeros. That code computes stock frequencies only, so with
others nothing is padded: a query head of more than 256 dimensions, such as 160 + 128 where heads have 128, has no flash
attention, and trains slowly on a GPU."""
_DEFAULT_ROPE = (64, 256)
"""The sizes of heads between which the rotated key is as large as a head, if its size is not given. For others it has
64 dimensions, or those of all keys if they are fewer."""


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a model's latent attention, in the words of DeepSeek's config class.

    The source and the options of `convert mha-to-mla` decide on them. The native decoder reads what it needs of them
    from the output's `config.json` (`model.decoder.config.LatentShape`).
    """

    n_heads: int
    n_kv_heads: int
    """Of the source."""
    head_dim: int
    """Of the source; values keep it (`v_head_dim`)."""
    hidden_size: int
    kv_lora_rank: int
    """Dimensions of the latent, from which unrotated keys and values are computed."""
    qk_rope_head_dim: int
    """Dimensions of the rotated key that all heads share."""
    norm: LatentNormKind
    frequencies: Frequencies
    """Only `qk_nope_head_dim` depends on it."""

    @property
    def qk_nope_head_dim(self) -> int:
        """Unrotated dimensions of a query or key head."""
        padded = self.frequencies == "stock" and self.qk_rope_head_dim == self.head_dim
        return self.head_dim + (_NOPE_PADDING if padded else 0)

    @property
    def qk_head_dim(self) -> int:
        """Dimensions of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """`kv_lora_rank` without the constant channel (of `--latent-norm bias`)."""
        return self.kv_lora_rank - n_constants(self.norm)

    @property
    def cached(self) -> int:
        """Elements in the KV cache for each token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def source_cached(self) -> int:
        """The same of the source."""
        return 2 * self.n_kv_heads * self.head_dim

    def kv_cache_bytes_per_token(self, n_layers: int) -> int:
        """Return the bytes of one token in the KV cache of all layers, at 16 bits an element."""
        return 2 * n_layers * self.cached


def suggested_sizes(geometry: Geometry) -> list[LatentSizes]:
    """Return common sizes, the largest cache first: the default, vLLM's kernels', and those of 4, 2 and 1 K/V heads.

    They cache less than the source does.
    """
    heads = ((n * geometry.head_dim, n * geometry.head_dim) for n in (4, 2, 1))
    useful = {}
    for kv_lora_rank, qk_rope_head_dim in (default_sizes(geometry, None, None), *FAST_KERNEL_SIZES, *heads):
        with suppress(CheckpointError):
            sizes = checked_sizes(geometry, kv_lora_rank, qk_rope_head_dim, "eps", "longrope")
            if sizes.cached < sizes.source_cached:
                useful[kv_lora_rank, qk_rope_head_dim] = sizes
    return sorted(useful.values(), key=lambda sizes: -sizes.cached)


def largest_latent(geometry: Geometry, norm: LatentNormKind) -> int:
    """Return the largest size of the latent that a model can use."""
    most = min(2 * geometry.n_kv_heads * geometry.head_dim, geometry.hidden_size)
    return most + n_constants(norm)


def default_sizes(geometry: Geometry, kv_lora_rank: int | None, qk_rope_head_dim: int | None) -> tuple[int, int]:
    """Return the sizes of the latent and the rotated key, of which one or both may be given.

    A rotated key as large as a head can hold every frequency of the source, which keys need more than the latent needs
    the dimensions. What is left of DEFAULT_CACHED is the latent: 448 + 128 for heads of 128, 512 + 64 for heads of 64.
    """
    if qk_rope_head_dim is None:
        least, most = _DEFAULT_ROPE
        qk_rope_head_dim = geometry.head_dim if least <= geometry.head_dim <= most else least
        qk_rope_head_dim = min(qk_rope_head_dim, geometry.n_kv_heads * geometry.head_dim)
    return DEFAULT_CACHED - qk_rope_head_dim if kv_lora_rank is None else kv_lora_rank, qk_rope_head_dim


def checked_sizes(
    geometry: Geometry, kv_lora_rank: int, qk_rope_head_dim: int, norm: LatentNormKind, frequencies: Frequencies,
) -> LatentSizes:  # fmt: skip
    """Return the sizes of a model's latent attention. Raises CheckpointError for sizes that it cannot have or use."""
    keys = geometry.n_kv_heads * geometry.head_dim
    if qk_rope_head_dim % 2:
        raise CheckpointError(
            f"--rope {qk_rope_head_dim} is odd, but dimensions are rotated in pairs; give an even number."
        )
    if qk_rope_head_dim > keys:
        raise CheckpointError(
            f"--rope {qk_rope_head_dim} is more than the {keys} dimensions of all keys ({geometry.n_kv_heads} K/V "
            f"heads of {geometry.head_dim}); give at most {keys}."
        )
    if kv_lora_rank <= n_constants(norm):
        raise CheckpointError(
            f"--latent {kv_lora_rank} leaves nothing for values with --latent-norm {norm}; give more."
        )
    most = largest_latent(geometry, norm)
    if kv_lora_rank > most:
        raise CheckpointError(
            f"--latent {kv_lora_rank} is more than keys and values of {geometry.n_kv_heads} K/V heads of "
            f"{geometry.head_dim} and a hidden size of {geometry.hidden_size} can use; give at most {most}."
        )
    return LatentSizes(
        n_heads=geometry.n_heads,
        n_kv_heads=geometry.n_kv_heads,
        head_dim=geometry.head_dim,
        hidden_size=geometry.hidden_size,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        norm=norm,
        frequencies=frequencies,
    )
