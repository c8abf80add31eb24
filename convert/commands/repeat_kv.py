"""`convert repeat-kv`: repeat each K/V head, for a larger number of K/V heads."""

from pathlib import Path
from typing import Any

import click

from convert.commands.options import OutputOptions, output_options
from convert.planning.options import MergeOptions
from model.common.command_options import RenamedOption, pop_fields


@click.command("repeat-kv")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--groups", "--kv-heads", cls=RenamedOption, type=int, required=True, metavar="G",
              help="K/V heads to have, each of SOURCE's repeated.")  # fmt: skip
@output_options
def command(source: Path, out: Path, groups: int, **options: Any) -> None:
    """Repeat the K/V heads of SOURCE to make G.

    For engines that cannot divide few K/V heads among more devices. OUT gives the same results as SOURCE, with a larger
    KV cache. G must be a multiple of SOURCE's number that divides the query heads; `convert inspect SOURCE` lists them.
    """
    from convert.commands.convert import convert
    from convert.merging.methods import REPEAT

    convert(source, out, groups, MergeOptions(method=REPEAT), pop_fields(OutputOptions, options))
