"""Check early that a figure can be drawn and written."""

import os
from importlib.util import find_spec
from pathlib import Path

from model.common.errors import InputError


def check(path: Path) -> None:
    """Raise InputError if no figure can be drawn and written to `path`."""
    if find_spec("matplotlib") is None:
        raise InputError("--figure needs matplotlib: pip install 'groupwise[torch]'; or leave --figure out.")
    if path.suffix.lower() != ".png" or path.is_dir():
        raise InputError(f"--figure {path}: the name must end in .png.")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} for {path.name}; create it first.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"the folder {path.parent} is not writable, so {path.name} cannot be created there.")
