"""Run `uptrain report`: write the report of runs as an HTML page and a PNG."""

from pathlib import Path

import click

from model.common.command_options import PathType
from model.common.console import echo


@click.command("report")
@click.argument("runs", type=PathType(), nargs=-1, required=True, metavar="RUN…")
@click.option(
    "--out",
    type=PathType(),
    metavar="FILE.html",
    help="File of the page. The picture is written beside it.  [default: RUN/report.html]",
)
def command(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write a report of RUN: a page and a picture.

    They show losses, recovered fraction, learning rate, speed and events. Several runs are compared in the same
    panels, and need --out. A report can be written while the run trains; a new report replaces the old one.
    """
    from uptrain.report.report import write_report

    page, picture = write_report(runs, out)
    echo(f"Wrote {page} and {picture}.")
