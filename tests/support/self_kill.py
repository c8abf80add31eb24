"""Build command lines that kill themselves at a chosen disk operation."""

import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forks


def start_self_killing(n: int, program: str, *arguments: object, output: Path, before: str = "") -> BaseProcess:
    """Start a program that kills itself just before the nth time something reaches the disk for good.

    It has a session of its own. `before` is code to run in it first.
    """
    return forks.start(_die, n, program, [str(x) for x in arguments], before, output=output)


def run_self_killing(n: int, program: str, *arguments: object, output: Path, before: str = "") -> int:
    """Run such a program to its end; return its exit code."""
    process = start_self_killing(n, program, *arguments, output=output, before=before)
    return forks.finish([process], [output])[0].code


def _die(target: int, program: str, arguments: list[str], before: str) -> None:
    count = 0

    def kill_at_target(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == target:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*given, **options)

        return call

    for name in ("fsync", "rename", "truncate", "copy_file_range"):
        setattr(os, name, kill_at_target(getattr(os, name)))
    forks.run_program(program, arguments, before)
