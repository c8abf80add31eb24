"""Read the recipe that a converted folder records, with the tokens that it was calibrated on."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from convert.calibration_text.choices import MAX_TOKENS
from convert.calibration_text.read import read_stored
from convert.calibration_text.text import CalibrationText
from convert.errors import NO_TORCH, UnsupportedMethodError
from convert.latent.latent_recipe import LATENT, read_latent_recipe
from convert.merging.merge_recipe import MergeRecipe
from convert.merging.methods import HEAD_METHODS, LAYER_METHODS, REPEAT
from convert.recipe import Recipe
from convert.verification.comparison import Findings
from model.checkpoint import Checkpoint
from model.common.checks import short_repr
from model.common.errors import CheckpointError
from model.files.names import CALIBRATION_TOKENS, CONVERSION_RECORD


def recorded_recipe(
    source: Checkpoint, out_path: Path, record: dict[str, Any], device: str, findings: Findings
) -> Recipe:
    """Return the recipe that OUT records, for a device.

    If OUT's calibration tokens are not usable, add to `findings.unchecked`.
    """
    path = out_path / CONVERSION_RECORD
    if record["method"] not in (*HEAD_METHODS, *LAYER_METHODS, REPEAT, LATENT):
        raise CheckpointError(
            f"{path} records the method {short_repr(record['method'])}, which this version does not know; verify it "
            "with the version of Groupwise that made it."
        )
    refit, refine = record.get("refit", False), record.get("refine", 0)
    if type(refine) is not int or not 0 <= refine <= MAX_TOKENS:
        raise CheckpointError(f"{path} records that layers were refined on {refine!r} tokens.")
    if type(refit) is not bool:
        raise CheckpointError(f"{path} records refit = {short_repr(refit)}, which must be true or false.")
    if record["seed"] < 0:
        raise CheckpointError(f"{path} records seed = {record['seed']}, which must be at least 0.")
    recorded = record.get("calibration")
    text = None if recorded is None else _stored_text(source, out_path, recorded, device, findings)
    entries = (record["method"], record["seed"], refit, refine, text, device)
    if record["method"] == LATENT:
        return read_latent_recipe(record, Recipe(*entries), path)
    recipe = MergeRecipe(*entries)
    try:
        recipe.check()
    except UnsupportedMethodError as error:
        raise CheckpointError(f"{path} records a recipe that is not possible: {error}") from error
    return recipe


def _stored_text(
    source: Checkpoint, out_path: Path, recorded: dict[str, Any], device: str, findings: Findings
) -> CalibrationText:
    """Return OUT's calibration text, with the tokens stored in OUT if they match the record.

    Tokens that are there and do not match are a difference.
    """
    try:
        text = read_stored(out_path, recorded)
        if find_spec("torch") is None:
            raise UnsupportedMethodError(NO_TORCH)
        from convert.layers.layer_stream import check_tokens, open_layers

        check_tokens(open_layers(source, text.window_tokens, device), text)
        return text
    except UnsupportedMethodError as error:  # the layers cannot be run here
        reason = str(error)
    except CheckpointError as error:
        reason = str(error)
        if (out_path / CALIBRATION_TOKENS).exists():
            findings.differences.append(reason)
    findings.unchecked.append(f"the converted layers, since the calibration cannot be repeated: {reason}")
    return CalibrationText(recorded["text"], recorded["windows"], recorded["window"], None)
