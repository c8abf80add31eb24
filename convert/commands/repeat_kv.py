"""`convert repeat-kv`: repeat each K/V head, for a larger number of K/V heads."""

from pathlib import Path
from typing import Any

import click

from convert.commands.options import GroupsType, OutputOptions, output_options
from model.common.command_options import PathType, RenamedOption, pop_fields


@click.command("repeat-kv")
@click.argument("source", type=PathType())
@click.argument("out", type=PathType())
@click.option("--groups", "--kv-heads", cls=RenamedOption, type=GroupsType(), required=True, metavar="G",
              help="K/V heads in OUT; each of SOURCE's is repeated.")  # fmt: skip
@output_options
def command(source: Path, out: Path, groups: int, **options: Any) -> None:
    """Repeat the K/V heads of SOURCE, to G heads in OUT.

    This is for engines that divide K/V heads among more devices than there are heads. OUT computes what SOURCE does,
    with a larger KV cache. G must be a multiple of the number of K/V heads in SOURCE, and divide the number of query
    heads; `convert inspect SOURCE` lists the possible values.
    """
    from convert.commands.run_conversion import convert_heads
    from convert.merging.methods import REPEAT
    from convert.planning.resolve_merge import MergeOptions

    convert_heads(source, out, groups, MergeOptions(method=REPEAT), pop_fields(OutputOptions, options))
