"""`convert mha-to-gqa`: merge the K/V heads into G groups."""

from pathlib import Path
from typing import Any

import click

from convert.commands.options import GroupsType, OutputOptions, merge_options, output_options
from model.common.command_options import PathType, pop_fields


@click.command("mha-to-gqa")
@click.argument("source", type=PathType())
@click.argument("out", type=PathType())
@click.option(
    "--groups", type=GroupsType(), required=True, metavar="G",
    help="K/V heads in OUT: 8 makes GQA-8. Not the number of heads in a group.",
)  # fmt: skip
@merge_options
@output_options
def command(source: Path, out: Path, groups: int, **options: Any) -> None:
    """Merge the K/V heads of SOURCE into G groups.

    G must divide the number of K/V heads in SOURCE; `convert inspect SOURCE` lists the possible values. If the command
    is killed, OUT is not written; run the same command again to continue.
    """
    from convert.commands.run_conversion import convert_heads
    from convert.planning.resolve_merge import MergeOptions

    convert_heads(source, out, groups, pop_fields(MergeOptions, options), pop_fields(OutputOptions, options))
