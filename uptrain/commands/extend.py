"""Run `uptrain extend`: make a longer run from an existing one."""

from pathlib import Path

import click

from model.common.command_options import PathType, ShareType
from model.common.launcher_variables import is_main_process
from uptrain.commands.options import count_option, max_minutes_option
from uptrain.commands.resume import WithSettingsOfTheRun
from uptrain.distributed.signals import stop_request
from uptrain.runs.run_folder import Run


@click.command("extend", cls=WithSettingsOfTheRun)
@click.argument("run", type=PathType())
@click.option("--out", type=PathType(), required=True, metavar="RUN2", help="The folder of the longer run.")
@click.option(
    "--alpha",
    type=ShareType(),
    metavar="SHARE",
    help="New total, with what RUN has trained, as a share of the original pre-training.",
)
@count_option("--tokens", "New total in tokens.")
@count_option("--steps", "New total in optimizer steps.")
@max_minutes_option("Save and stop after M minutes; `uptrain resume` continues.")
def command(
    run: Path, out: Path, alpha: float | None, tokens: int | None, steps: int | None, max_minutes: float | None
) -> None:
    """Train RUN for longer, in a new folder. Give one of --alpha, --tokens and --steps.

    Training continues from the checkpoint before the decay of the learning rate. The result is that of a run planned
    this long from the start, with RUN's warm-up.
    """
    stop_request.install()
    from uptrain.runs.make_folder import refuse_existing

    Run.read(run)  # refused, as an OUT that exists, before torch is imported, which takes seconds
    if is_main_process():  # it may have made OUT before another process gets here
        refuse_existing(out)
    from uptrain.runs.launch import launch_extended

    launch_extended(run, out, alpha, tokens, steps, max_minutes)
