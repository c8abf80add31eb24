"""Define the errors of conversions besides those of checkpoints."""

from model.common.console import INSTALL_EXTRA
from model.common.errors import CheckpointError

NO_TORCH = f"calibrating runs the model, which needs torch, transformers, accelerate and tokenizers; {INSTALL_EXTRA}."


class UnsupportedMethodError(CheckpointError):
    """Raised if this checkpoint or the installed packages do not support a recipe. Another recipe may be supported."""
