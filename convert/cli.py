"""Define the command line of `convert`, with one file per command in `convert/commands/`.

Exit codes: 0 success; 1 reading or writing failed midway (the same command continues); 2 the input is not acceptable;
3 `verify` found a difference; 4 it found none, but could not compare everything.
"""

import signal
from importlib import import_module

import click

from convert.commands import COMMANDS
from model.common import console, interrupts


@click.group(
    cls=console.OrderedGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="groupwise", prog_name="convert")
def cli() -> None:
    """Convert a checkpoint with multi-head or grouped-query attention to fewer K/V heads, or to latent attention.

    SOURCE is a Hugging Face folder (safetensors or .bin), a folder with Meta's consolidated.*.pth, a
    torch.distributed.checkpoint, a .gguf file, or the name of a model in the Hugging Face cache (org/name). OUT is an
    ordinary Hugging Face folder. Merging raises the loss: `uptrain evaluate` measures it, and `uptrain run` lowers it
    again.
    """


for _name in COMMANDS:
    cli.add_command(import_module(f"convert.commands.{_name}").command)


def main() -> None:
    """Run the command line. SIGTERM and SIGHUP have the effect of Ctrl-C, so that temporary files are removed."""
    interrupts.install(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    console.run(cli)
