"""`convert mha-to-mla`: replace the K/V heads by one latent vector and one rotated key for all heads."""

from pathlib import Path
from typing import Any

import click

from convert.commands.options import OutputOptions, latent_options, output_options
from model.common.command_options import PathType, pop_fields


@click.command("mha-to-mla")
@click.argument("source", type=PathType())
@click.argument("out", type=PathType())
@latent_options
@output_options
def command(source: Path, out: Path, **options: Any) -> None:
    """Replace the K/V heads of SOURCE by latent attention (MLA).

    OUT is a checkpoint of DeepSeek-V3's class with dense layers. Its KV cache holds LATENT + ROPE elements for each
    token and layer, whatever the number of heads. SOURCE is a Llama or Mistral, with MHA or GQA. If the command is
    killed, OUT is not written; run the same command again to continue.
    """
    from convert.commands.run_conversion import convert_to_latent
    from convert.planning.resolve_latent import LatentOptions

    convert_to_latent(source, out, pop_fields(LatentOptions, options), pop_fields(OutputOptions, options))
