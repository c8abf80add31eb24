"""Define the command line of `uptrain`, with one file per command in `uptrain/commands/`.

Exit codes:
0    success, also of a run that saved and stopped after a signal or `--max-minutes` (see `status` in `run_state.json`)
1    failure during the run, or halt after non-finite gradients (`uptrain resume RUN` continues at the last checkpoint);
     interruption of a command without steps, such as `prepare`, or of any command while it starts
2    invalid input
130  stopped by a second signal, without saving
"""

import importlib
import signal

import click

from model.common import console, interrupts
from uptrain.commands import COMMANDS


@click.group(
    cls=console.OrderedGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(package_name="groupwise", prog_name="uptrain")
def cli() -> None:
    """Uptrain a converted checkpoint: continue its pre-training for a small share α of the original tokens.

    CACHE is a token cache that `uptrain prepare` writes. RUN is the folder of a run. Models are Hugging
    Face folders, or the names of models in the Hugging Face cache (org/name).
    """


for _name in COMMANDS:
    cli.add_command(importlib.import_module(f"uptrain.commands.{_name}").command)


def main() -> None:
    """Run the command line. Commands that save or clean up first install handlers of their own."""
    interrupts.install(signal.SIGINT)
    console.run(cli, launched=True)
