"""Check for the compiler that torch.compile needs."""

import os
from shutil import which

from model.common.errors import InputError


def check_compiler(option: str, instead: str) -> None:
    """Raise InputError if torch.compile, which an option uses, finds no compiler of C and C++."""
    named = (os.environ.get(variable, "") for variable in ("CXX", "CC"))
    if not any(which(name) for name in (*named, "g++", "clang++", "gcc", "clang") if name):
        raise InputError(f"{option} needs a C++ compiler, such as g++: install one, or {instead}.")
