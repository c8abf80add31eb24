"""Resolve the options of a conversion to latent attention into a recipe."""

import shlex
from dataclasses import dataclass, replace

from convert.calibration_text.choices import NONE
from convert.latent import DEFAULT_CACHED, Frequencies, LatentDtype, LatentMethod, LatentNormKind
from convert.latent.frequencies import SourceRope
from convert.latent.latent_recipe import LATENT, LatentRecipe, can_choose_frequencies, default_pair_indices, is_exact
from convert.latent.sizes import LatentSizes, checked_sizes, default_sizes, largest_latent, suggested_sizes
from convert.planning.calibration_options import CalibrationOptions, read_text
from convert.planning.latent_source import read_source
from model.checkpoint import Checkpoint
from model.common.errors import CheckpointError
from model.geometry import Geometry


@dataclass(frozen=True, kw_only=True)
class LatentOptions(CalibrationOptions):
    """The options of `convert mha-to-mla`. None: not set by the user.

    `method`, which the help does not show, is for comparison with published methods: they are not refined by default.
    """

    latent: int | None
    rope: int | None
    latent_norm: LatentNormKind
    dtype: LatentDtype | None
    frequencies: Frequencies | None
    method: LatentMethod
    refine: int | None


def resolve_latent(checkpoint: Checkpoint, options: LatentOptions) -> LatentRecipe:
    """Return the recipe of a conversion to latent attention. Raises CheckpointError if the model or a size prevents it.

    The rotated key's pair indices are chosen here unless a text chooses among several.
    """
    source = read_source(checkpoint)
    kv_lora_rank, qk_rope_head_dim = default_sizes(source.geometry, options.latent, options.rope)
    if options.latent is None:
        _check_default(checkpoint, source.geometry, kv_lora_rank, qk_rope_head_dim, options)
    stock = checked_sizes(source.geometry, kv_lora_rank, qk_rope_head_dim, options.latent_norm, "stock")
    sizes = replace(stock, frequencies=_frequencies(source.rope, stock, options))
    recipe = LatentRecipe(
        LATENT,
        kv_lora_rank=sizes.kv_lora_rank,
        qk_rope_head_dim=sizes.qk_rope_head_dim,
        norm=sizes.norm,
        frequencies=sizes.frequencies,
        latent_method=options.method,
        dtype=options.dtype,
    )
    with_default_indices = recipe.with_pair_indices(source.rope, default_pair_indices(source.rope, sizes))
    if options.method != "fit":
        _check_baseline(options, sizes, source.rope)
    if options.calibration == NONE or (options.method == "fit" and is_exact(sizes)):
        _refuse_unused(options, sizes)
        return with_default_indices
    text, device = read_text(checkpoint, options)
    if options.method != "fit":
        refine = options.refine or 0
        return replace(with_default_indices, refine=refine, text=text, device=device, seed=options.seed or 0)
    refine = options.n_tokens if options.refine is None else options.refine
    recipe = recipe if can_choose_frequencies(sizes) else with_default_indices
    return replace(recipe, refit=True, refine=refine, text=text, device=device, seed=options.seed or 0)


def _check_default(
    checkpoint: Checkpoint, geometry: Geometry, default: int, qk_rope_head_dim: int, options: LatentOptions
) -> None:
    """Raise CheckpointError if the default size of the latent does not fit a model, or saves nothing.

    The message names sizes that fit.
    """
    if default < 1:
        raise CheckpointError(
            f"--rope {options.rope} leaves nothing of the {DEFAULT_CACHED} elements to cache by default; give --latent."
        )
    most, cached = largest_latent(geometry, options.latent_norm), 2 * geometry.n_kv_heads * geometry.head_dim
    if most >= default and default + qk_rope_head_dim < cached:
        return
    heads = f"{geometry.n_kv_heads} K/V heads of {geometry.head_dim}"
    problem = (
        f"is too large for this model, which can use at most {most} ({heads}, hidden size {geometry.hidden_size})"
        if most < default
        else f"saves nothing here: with --rope {qk_rope_head_dim} it caches {default + qk_rope_head_dim} elements, and "
        f"the model's own KV cache holds {cached} ({heads})"
    )
    fitting = suggested_sizes(geometry)
    advice = (
        f"give --latent and --rope, such as --latent {fitting[0].kv_lora_rank} --rope {fitting[0].qk_rope_head_dim}; "
        f"convert inspect {shlex.quote(str(checkpoint.path))} lists sizes"
        if fitting
        else "the KV cache of this model is small already; give --latent and --rope to convert it all the same"
    )
    raise CheckpointError(f"the default of --latent, {default}, {problem}; {advice}.")


def _check_baseline(options: LatentOptions, sizes: LatentSizes, source_rope: SourceRope) -> None:
    """Raise CheckpointError if a method for comparison does not have these options.

    Every c-th frequency of the source is a power of a base, unless they are scaled. Then `longrope` lists them.
    """
    if options.calibration == NONE and options.method != "svd":
        raise CheckpointError(
            f"--method {options.method} is for comparison, and computes second moments of activations on a calibration "
            "text; leave out --calibration none, or give --method svd, which needs the weights alone."
        )
    if not source_rope.is_plain and sizes.head_dim % sizes.qk_rope_head_dim:
        raise CheckpointError(
            f"--method {options.method} is for comparison, and has a rotated key whose size divides the heads' "
            f"{sizes.head_dim}; give --rope {sizes.head_dim}, or a divisor."
        )
    if source_rope.is_plain and (sizes.frequencies != "stock" or sizes.head_dim % sizes.qk_rope_head_dim):
        raise CheckpointError(
            f"--method {options.method} is for comparison, and has stock frequencies and a rotated key whose size "
            f"divides the heads' {sizes.head_dim}; give --frequencies stock and --rope {sizes.head_dim}, or a divisor."
        )


def _frequencies(source_rope: SourceRope, stock: LatentSizes, options: LatentOptions) -> Frequencies:
    """Return which frequencies to choose for the rotated key. `stock`: the sizes with stock ones.

    Those of a scaled rotation are not the powers of any base.
    """
    requested = options.frequencies
    if requested == "stock" and not source_rope.is_plain:
        raise CheckpointError(
            "--frequencies stock cannot express the source's scaled rotary embedding; give --frequencies longrope."
        )
    prefers_stock = is_exact(stock) or options.method != "fit"
    return requested or ("stock" if source_rope.is_plain and prefers_stock else "longrope")


def _refuse_unused(options: LatentOptions, sizes: LatentSizes) -> None:
    """Raise CheckpointError for an option of the calibration where there is none."""
    given = [*options.calibration_options, *(["--refine"] if options.refine else [])]
    if not given:
        return
    if options.calibration == NONE:
        raise CheckpointError(f"{given[0]} needs a calibration text, but --calibration none was given.")
    raise CheckpointError(
        f"{given[0]} has no use: latent attention of {sizes.kv_lora_rank} + {sizes.qk_rope_head_dim} with "
        f"{sizes.frequencies} frequencies computes what the source does, without calibration; leave it out."
    )
