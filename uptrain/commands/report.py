"""Run `uptrain report`: write the report of runs as an HTML page and a PNG."""

from pathlib import Path

import click

from model.common.console import echo

FILE = click.Path(path_type=Path)


@click.command("report")
@click.argument("runs", type=FILE, nargs=-1, required=True, metavar="RUN…")
@click.option(
    "--out",
    type=FILE,
    metavar="FILE.html",
    help="Path of the page; the picture is written beside it.  [default: RUN/report.html]",
)
def command(runs: tuple[Path, ...], out: Path | None) -> None:
    """Write a page and a picture of what RUN did.

    Losses, recovered fraction, learning rate, speed, events. Several runs are compared in the same panels; then --out
    is needed. A report may be written during the run. It replaces the one before.
    """
    from uptrain.report.report import write_report

    page, picture = write_report(runs, out)
    echo(f"Wrote {page} and {picture}.")
