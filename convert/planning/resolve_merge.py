"""Resolve merge options into a Recipe, and choose the default method."""

from dataclasses import dataclass, replace

from convert.calibration_text.choices import DEFAULT_TOKENS, NONE, SELF, SHIPPED
from convert.calibration_text.read import read_calibration_text
from convert.calibration_text.text import CalibrationText, split_name
from convert.errors import NO_TORCH, UnsupportedMethodError
from convert.merging.methods import CALIBRATED, LAYER_METHODS
from convert.merging.recipe import Recipe
from convert.planning.merge_plan import check_n_kv_heads
from convert.planning.tensors import check_layer_merge
from model.checkpoint import Checkpoint
from model.common import checks, console
from model.common.command_options import AUTO_DEVICE
from model.common.errors import CheckpointError
from model.families import find_family
from model.geometry import Geometry, read_geometry

DEFAULT_METHOD = "fit"
"""The method, with refit and refine, if none is requested: the best by docs/study.md."""


@dataclass(frozen=True)
class MergeOptions:
    """The options of a merge. None: not set by the user."""

    method: str | None = None
    seed: int = 0
    refit: bool = False
    refine: int | None = None
    calibration: str | None = None
    """`none`, `shipped`, `self`, the path of a text, `hub:NAME…`, or several joined by +."""
    calibration_tokens: int | None = None
    device: str = AUTO_DEVICE

    @property
    def calibration_option(self) -> str | None:
        """An option that was given and needs a calibration text."""
        given = {
            "--calibration": self.calibration not in (None, NONE),
            "--calibration-tokens": self.calibration_tokens is not None,
            "--device": self.device != AUTO_DEVICE,
        }
        return next((option for option, is_given in given.items() if is_given), None)

    @property
    def training_option(self) -> str | None:
        """An option that was given and only changes a merge that is fitted."""
        given = self.calibration_option or ("--refine" if self.refine else None)
        return given or ("--refit" if self.refit else None)


def resolve_merge(checkpoint: Checkpoint, n_kv_heads: int | None, options: MergeOptions) -> Recipe:
    """Return the recipe of a conversion to `n_kv_heads`; None keeps their number.

    Raises CheckpointError if the model does not support the options, or the options are incompatible. If it does not
    support the default method, another one must be requested: the others cost far more quality.
    """
    if options.calibration == NONE and options.calibration_option:
        raise CheckpointError(
            f"{options.calibration_option} needs a calibration text, but --calibration none was given."
        )
    geometry = read_geometry(checkpoint)
    n_kv_heads = geometry.n_kv_heads if n_kv_heads is None else n_kv_heads
    check_n_kv_heads(geometry, n_kv_heads, options.method)
    if n_kv_heads == geometry.n_kv_heads:
        if options.training_option:
            console.warn(f"{options.training_option} has no effect: the model has {n_kv_heads} K/V heads already.")
        return Recipe("mean")
    if options.method is not None:
        return _recipe(checkpoint, geometry, options)
    if options.calibration == NONE:
        return _recipe(checkpoint, geometry, replace(options, method="mean"))
    refine = options.calibration_tokens or DEFAULT_TOKENS if options.refine is None else options.refine
    try:
        return _recipe(checkpoint, geometry, replace(options, method=DEFAULT_METHOD, refit=True, refine=refine))
    except UnsupportedMethodError as error:
        reason = str(error).rstrip(".")
        raise UnsupportedMethodError(
            f"The default merge is not possible: {reason}. --method mean is the paper's merge; its loss starts much "
            "higher, so it needs more uptraining."
        ) from error


def _recipe(checkpoint: Checkpoint, geometry: Geometry, options: MergeOptions) -> Recipe:
    """Return the recipe of a requested method, with its calibration text."""
    assert options.method is not None
    by_layer = options.method in LAYER_METHODS
    if not by_layer and options.calibration_option:
        raise UnsupportedMethodError(
            f"{options.calibration_option} cannot be combined with --method {options.method}, which needs no text."
        )
    recipe = Recipe(options.method, options.seed, options.refit, options.refine or 0)
    if by_layer:
        check_layer_merge(geometry, checkpoint.tensors, options.method)  # before a text is read, or downloaded
    if by_layer and options.calibration == NONE:
        _check_clipping(checkpoint, options.method)
    if by_layer and options.calibration != NONE:
        try:
            text, device = read_text(checkpoint, options)
        except UnsupportedMethodError as error:
            if options.refit or options.refine or options.method in CALIBRATED:
                raise
            raise UnsupportedMethodError(f"{error} --calibration none merges by the weights alone.") from error
        recipe = replace(recipe, text=text, device=device)
    recipe.check()
    return recipe


def _check_clipping(checkpoint: Checkpoint, method: str) -> None:
    """Raise UnsupportedMethodError if queries, keys and values are clipped: the weights do not tell how often."""
    config = find_family(checkpoint.config).config
    for settings in (config, config.get("attn_config")):  # of OLMo, and of MPT
        if isinstance(settings, dict) and settings.get("clip_qkv") is not None:
            raise UnsupportedMethodError(
                f"config.json has clip_qkv = {checks.short_repr(settings['clip_qkv'])}, which --method {method} "
                "cannot take into account by the weights alone; calibrate it on a text, or use --method mean."
            )


def read_text(checkpoint: Checkpoint, options: MergeOptions) -> tuple[CalibrationText, str]:
    """Return the calibration text, and the device. Raises UnsupportedMethodError if the model cannot be run on it."""
    try:
        from convert.calibration.generated_text import TextGeneration
        from convert.layers.incremental_decoder import check_writes_text
        from convert.layers.layer_stream import check_tokens, open_checked
    except ImportError as error:
        raise UnsupportedMethodError(NO_TORCH) from error
    layers = open_checked(checkpoint, options.device)
    name = SHIPPED if options.calibration is None else options.calibration
    n_tokens = options.calibration_tokens or DEFAULT_TOKENS
    if SELF in split_name(name):
        check_writes_text(checkpoint)
    text = read_calibration_text(checkpoint, name, n_tokens)
    check_tokens(layers, text)
    if text.generated:
        generated = TextGeneration.of(checkpoint, text, options.seed, str(layers.device))
        generated.check_memory(layers.n_embeddings)
        text = replace(
            text,
            generation_bytes=generated.memory(layers.n_embeddings),
            generation_steps=generated.n_steps,
            generation_inputs=generated.inputs_sha256,
        )
    return text, str(layers.device)
