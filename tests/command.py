"""The command line of `uptrain`, run in this process."""

import contextlib
import io
import sys
from unittest import mock

from conftest import Result


def uptrain(*arguments: object) -> Result:
    from uptrain.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["uptrain", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Result(code, out.getvalue(), err.getvalue())
