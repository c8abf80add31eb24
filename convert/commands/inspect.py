"""`convert inspect`: show a checkpoint's geometry, and the possible numbers of groups."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from model.common import console
from model.common.command_options import PathType, json_option
from model.common.errors import InputError
from model.common.printable import printable

if TYPE_CHECKING:
    from convert.inspection.heads import HeadReport
    from model.checkpoint import Checkpoint


@click.command("inspect")
@click.argument("source", type=PathType())
@click.option("--heads", is_flag=True,
              help="Also show how similar the K/V heads of each layer are, and what merging them would lose. Reads "
              "all attention weights.")  # fmt: skip
@click.option("--figure", type=PathType(), metavar="FILE.png",
              help="Draw the result of --heads. The file must not exist.")  # fmt: skip
@json_option()
def command(source: Path, heads: bool, figure: Path | None, as_json: bool) -> None:
    """Show the geometry of SOURCE and the possible --groups.

    For each number of groups, show the size of the weights and of the KV cache, and the possible tensor-parallel
    sizes.
    """
    from convert.inspection.summary import inspect
    from convert.inspection.table import print_heads, print_inspection
    from model.checkpoint import open_checkpoint

    if figure is not None and not heads:
        raise click.UsageError("--figure draws the result of --heads; give --heads too.")
    with open_checkpoint(source) as checkpoint:
        summary = inspect(checkpoint)
        report = _compare_heads(checkpoint, figure, as_json) if heads else None
    if as_json:
        console.print_json(summary if report is None else {**summary, "heads": report.record})
        return
    print_inspection(summary)
    if report is not None:
        print_heads(report)
    if figure is not None:
        console.echo(f"\nWrote {figure}.")


def _compare_heads(checkpoint: "Checkpoint", figure: Path | None, quiet: bool) -> "HeadReport":
    from convert.inspection.heads import head_layers, report_heads

    if figure is not None:
        _check_figure(figure)
    merges = head_layers(checkpoint)
    with console.progress_bar("Comparing heads", len(merges), quiet, unit="layers") as progress:
        report = report_heads(checkpoint, merges, progress)
    if figure is not None:
        from convert.inspection.figure import draw_png
        from model.files.write import replace_file

        replace_file(figure, draw_png(report, printable(checkpoint.path.resolve().name)))
    return report


def _check_figure(path: Path) -> None:
    """Raise InputError if no figure can be drawn and written to `path`."""
    if find_spec("matplotlib") is None:
        raise InputError("--figure needs matplotlib: pip install matplotlib; or leave --figure out.")
    if path.suffix.lower() != ".png":
        raise InputError(f"--figure {path}: the name must end in .png.")
    if os.path.lexists(path):
        raise InputError(f"--figure {path} exists; choose another name, or remove it.")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} for {path.name}; create it first.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"the folder {path.parent} is not writable, so {path.name} cannot be created there.")
