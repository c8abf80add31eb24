"""Build command lines that kill themselves at a chosen disk operation."""

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forks
import tiny
from waiting import processes_of, wait_until


def start_self_killing(n: int, program: str, *arguments: object, output: Path, before: str = "") -> BaseProcess:
    """Start a program that kills itself just before the nth time something reaches the disk for good.

    It has a session of its own. `before` is code to run in it first.
    """
    return forks.start(_die, n, program, [str(x) for x in arguments], before, output=output)


def run_self_killing(n: int, program: str, *arguments: object, output: Path, before: str = "") -> int:
    """Run such a program to its end; return its exit code."""
    process = start_self_killing(n, program, *arguments, output=output, before=before)
    return forks.finish([process], [output])[0].code


def kill_at_every_step(
    folder: Path,
    program: str,
    arguments: Callable[[Path], Sequence[object]],
    finish: Callable[[Path], object],
    expected: dict[str, bytes],
    before: str = "",
    every: int = 1,
) -> int:
    """Kill a command at every step to the disk, or every third and so on, until it ends by itself; return how often.

    `arguments`: of the command, for a folder OUT. `finish`: continue the command, or begin anew, until OUT is there.
    OUT must be absent or complete after each kill, and complete afterwards. `before` is as in `start_self_killing`.
    """
    for kills in itertools.count():
        n = (kills + 1) * every
        out = folder / f"killed-{n}/out"
        out.parent.mkdir()
        output = out.with_name("output")
        process = start_self_killing(n, program, *arguments(out), output=output, before=before)
        (result,) = forks.finish([process], [output])
        if result.code != -signal.SIGKILL:
            result.succeeded()
            break
        wait_until(lambda session=process.pid: not processes_of(session))
        assert not out.exists() or tiny.snapshot(out) == expected, n
        finish(out)
        assert tiny.snapshot(out) == expected, n
        shutil.rmtree(out.parent)
    return kills


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
