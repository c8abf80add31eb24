"""Resolve merge options into a MergeRecipe, and choose the default method."""

from dataclasses import dataclass, replace

from convert.calibration_text.choices import NONE
from convert.errors import UnsupportedMethodError
from convert.merging.clipping import find_clip
from convert.merging.merge_recipe import MergeRecipe
from convert.merging.methods import CALIBRATED, HEAD_METHODS, LAYER_METHODS
from convert.planning.calibration_options import CalibrationOptions, read_text
from convert.planning.merge_plan import check_n_kv_heads
from convert.planning.tensors import check_layer_merge
from convert.planning.vocabulary import check_vocabulary
from model.checkpoint import Checkpoint
from model.common import checks, console
from model.common.errors import CheckpointError
from model.geometry import Geometry, read_geometry

DEFAULT_METHOD = "fit"
"""The method, with refit and refine, if none is requested: the best by docs/study.md."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions(CalibrationOptions):
    """The options of a merge. None: not set by the user."""

    method: str | None = None
    refit: bool = False
    refine: int | None = None

    @property
    def merge_options(self) -> list[str]:
        """The options that were given and change only how heads are merged."""
        given = {"--method": self.method, "--refit": self.refit, "--refine": self.refine}
        return [*(option for option, value in given.items() if value), *self.calibration_options]


def resolve_merge(checkpoint: Checkpoint, n_kv_heads: int | None, options: MergeOptions) -> MergeRecipe:
    """Return the recipe of a conversion to `n_kv_heads`; None keeps their number.

    Raises CheckpointError if the model does not support the options, if the options are incompatible, or if the
    embedding does not fit the vocabulary. If the model does not support the default method, another one must be
    requested: the others cost far more quality.
    """
    if options.calibration == NONE and options.calibration_options:
        raise CheckpointError(
            f"{options.calibration_options[0]} needs a calibration text, but --calibration none was given."
        )
    geometry = read_geometry(checkpoint)
    n_kv_heads = geometry.n_kv_heads if n_kv_heads is None else n_kv_heads
    check_n_kv_heads(geometry, n_kv_heads, options.method)
    check_vocabulary(checkpoint)  # before a text is read, or downloaded
    if n_kv_heads == geometry.n_kv_heads:
        if unused := options.merge_options:
            have = "have" if len(unused) > 1 else "has"
            console.warn(f"{', '.join(unused)} {have} no effect: the model has {n_kv_heads} K/V heads already.")
        return MergeRecipe("mean")
    if options.method is not None:
        _check_method(checkpoint, geometry, options.method)
        return _recipe(checkpoint, geometry, options)
    if options.calibration == NONE:
        return _recipe(checkpoint, geometry, replace(options, method="mean"))
    refine = options.n_tokens if options.refine is None else options.refine
    try:
        check_layer_merge(geometry, checkpoint.tensors, DEFAULT_METHOD)  # before a text is read, or downloaded
        return _recipe(checkpoint, geometry, replace(options, method=DEFAULT_METHOD, refit=True, refine=refine))
    except UnsupportedMethodError as error:
        reason = str(error).rstrip(".")
        raise UnsupportedMethodError(
            f"the default merge is not possible: {reason}. --method mean is the paper's merge; its loss starts much "
            "higher, so it needs more uptraining."
        ) from error


def _check_method(checkpoint: Checkpoint, geometry: Geometry, method: str) -> None:
    """Raise UnsupportedMethodError if a requested method cannot merge this model's heads."""
    if method not in LAYER_METHODS:
        return
    try:
        check_layer_merge(geometry, checkpoint.tensors, method)
    except UnsupportedMethodError as error:
        raise UnsupportedMethodError(f"{str(error).rstrip('.')}; choose {', '.join(HEAD_METHODS)}.") from error


def _recipe(checkpoint: Checkpoint, geometry: Geometry, options: MergeOptions) -> MergeRecipe:
    """Return the recipe of a requested method, with its calibration text."""
    assert options.method is not None
    by_layer = options.method in LAYER_METHODS
    if not by_layer and options.calibration_options:
        raise UnsupportedMethodError(
            f"{options.calibration_options[0]} cannot be combined with --method {options.method}, which needs no text."
        )
    recipe = MergeRecipe(options.method, options.seed or 0, options.refit, options.refine or 0)
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
    clip = find_clip(checkpoint)
    if clip is not None:
        raise UnsupportedMethodError(
            f"config.json has clip_qkv = {checks.short_repr(clip)}, which --method {method} cannot take into account "
            "by the weights alone; calibrate it on a text, or use --method mean."
        )
