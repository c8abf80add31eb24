"""`convert to-hf`: write a checkpoint as a Hugging Face folder without merging heads."""

from pathlib import Path
from typing import Any

import click

from convert.commands.options import OutputOptions, output_options
from model.common.command_options import PathType, pop_fields


@click.command("to-hf")
@click.argument("source", type=PathType())
@click.argument("out", type=PathType())
@output_options
def command(source: Path, out: Path, **options: Any) -> None:
    """Write SOURCE as a Hugging Face folder, without merging heads.

    OUT holds safetensors. This is for checkpoints in another format: Meta's, .bin, .gguf, torch.distributed.checkpoint.
    """
    from convert.commands.run_conversion import convert_heads
    from convert.planning.resolve_merge import MergeOptions

    convert_heads(source, out, None, MergeOptions(), pop_fields(OutputOptions, options))
