"""Command lines that kill themselves at a chosen moment."""

import sys

_CODE = """
import os, signal, sys
count, target = 0, int(sys.argv.pop(1))
def dying(real):
    def call(*arguments, **options):
        global count
        count += 1
        if count == target:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
for name in ("fsync", "rename", "truncate", "copy_file_range"):
    setattr(os, name, dying(getattr(os, name)))
{before}
from {program}.cli import main
main()
"""


def dying_at(n: int, program: str, *arguments: object, before: str = "") -> list[str]:
    """Return how to run a program that kills itself just before the nth time something reaches the disk for good.

    `before` is code to run first.
    """
    return [sys.executable, "-c", _CODE.format(program=program, before=before), str(n), *map(str, arguments)]
