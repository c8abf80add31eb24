"""Hold the options that name a calibration text, and read that text."""

from dataclasses import dataclass, replace

from convert.calibration_text.choices import DEFAULT_TOKENS, NONE, SELF, SHIPPED
from convert.calibration_text.read import read_calibration_text
from convert.calibration_text.text import CalibrationText, split_name
from convert.errors import NO_TORCH, UnsupportedMethodError
from convert.recipe import Recipe
from model.checkpoint import Checkpoint
from model.common import console
from model.common.command_options import AUTO_DEVICE


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """The options of a conversion that name its calibration text. None: not set by the user."""

    calibration: str | None = None
    """`none`, `shipped`, `self`, the path of a text, `hub:NAME…`, or several joined by +."""
    calibration_tokens: int | None = None
    device: str = AUTO_DEVICE
    seed: int | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of the calibration text to use."""
        return self.calibration_tokens or DEFAULT_TOKENS

    @property
    def calibration_options(self) -> list[str]:
        """The options that were given and need a calibration text."""
        given = {
            "--calibration": self.calibration not in (None, NONE),
            "--calibration-tokens": self.calibration_tokens is not None,
            "--device": self.device != AUTO_DEVICE,
        }
        return [option for option, is_given in given.items() if is_given]


def warn_of_unused_seed(options: CalibrationOptions, recipe: Recipe) -> None:
    """Warn if a seed was given that changes nothing."""
    if options.seed is not None and not recipe.uses_seed:
        console.warn("--seed has no effect here: nothing is drawn at random.")


def read_text(checkpoint: Checkpoint, options: CalibrationOptions) -> tuple[CalibrationText, str]:
    """Return the calibration text, and the device.

    Raises UnsupportedMethodError if the model cannot be run, or has no tokenizer that can be opened; CheckpointError if
    the text is missing, too short or of another model's tokens, or if there is too little memory to write it;
    InputError if the device is not available, or a file of the text cannot be read.
    """
    try:
        from convert.calibration.generated_text import TextGeneration
        from convert.layers.incremental_decoder import check_can_generate
        from convert.layers.layer_stream import check_tokens, open_checked
    except ImportError as error:
        raise UnsupportedMethodError(NO_TORCH) from error
    layers = open_checked(checkpoint, options.device)
    name = SHIPPED if options.calibration is None else options.calibration
    if SELF in split_name(name):
        check_can_generate(checkpoint)
    text = read_calibration_text(checkpoint, name, options.n_tokens)
    check_tokens(layers, text)
    if text.generated:
        generated = TextGeneration.of(checkpoint, text, options.seed or 0, str(layers.device))
        generated.check_memory(layers.n_embeddings)
        text = replace(
            text,
            generation_bytes=generated.memory(layers.n_embeddings),
            generation_steps=generated.n_steps,
            generation_inputs=generated.inputs_sha256,
        )
    return text, str(layers.device)
