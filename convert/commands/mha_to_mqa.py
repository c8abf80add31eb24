"""`convert mha-to-mqa`: merge all K/V heads into one."""

from pathlib import Path
from typing import Any

import click

from convert.commands.options import OutputOptions, merge_options, output_options
from model.common.command_options import PathType, pop_fields


@click.command("mha-to-mqa")
@click.argument("source", type=PathType())
@click.argument("out", type=PathType())
@merge_options
@output_options
def command(source: Path, out: Path, **options: Any) -> None:
    """Merge all K/V heads of SOURCE into one.

    The result is multi-query attention, as with `mha-to-gqa --groups 1`.
    """
    from convert.commands.run_conversion import convert_heads
    from convert.planning.resolve_merge import MergeOptions

    convert_heads(source, out, 1, pop_fields(MergeOptions, options), pop_fields(OutputOptions, options))
