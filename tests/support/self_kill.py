"""Build command lines that kill themselves at a chosen disk operation."""

import sys

_CODE = """
import os, signal, sys
count, target = 0, int(sys.argv.pop(1))
def kill_at_target(real):
    def call(*arguments, **options):
        global count
        count += 1
        if count == target:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
for name in ("fsync", "rename", "truncate", "copy_file_range"):
    setattr(os, name, kill_at_target(getattr(os, name)))
{before}
from {program}.cli import main
main()
"""


def self_killing(n: int, program: str, *arguments: object, before: str = "") -> list[str]:
    """Return a command line that kills itself just before its nth fsync, rename, truncate or copy_file_range.

    `before` is code to run first.
    """
    return [sys.executable, "-c", _CODE.format(program=program, before=before), str(n), *map(str, arguments)]
