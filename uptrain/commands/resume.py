"""Run `uptrain resume`: resume a run."""

from pathlib import Path

import click

from model.common.command_options import PathType
from uptrain.commands.options import max_minutes_option, micro_batch_option
from uptrain.commands.run import command as run_command
from uptrain.distributed.signals import stop_request
from uptrain.runs.run_folder import Run


class WithSettingsOfTheRun(click.Command):
    """A command that says of an option of `uptrain run` why it does not take it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not any(error.option_name in parameter.opts for parameter in run_command.params):
                raise
            raise click.UsageError(
                f"{error.option_name} cannot change: a run keeps the settings with which it began. `uptrain extend` "
                "trains it for longer; for other settings, start a new run.",
                ctx,
            ) from error


@click.command("resume", cls=WithSettingsOfTheRun)
@click.argument("run", type=PathType())
@micro_batch_option("Windows that a process computes at a time from now on. Fewer take less memory.")
@click.option(
    "--activation-checkpointing", is_flag=True, help="Use less memory from now on, and a quarter to a half more time."
)
@max_minutes_option("Save and stop again after M minutes.")
def command(run: Path, micro_batch: int | None, activation_checkpointing: bool, max_minutes: float | None) -> None:
    """Resume RUN, and train it to its end.

    Training continues from the newest checkpoint whose checksums match. The settings are those with which the run
    began. The number of processes may differ. Options that save memory change losses by rounding only.
    """
    stop_request.install()
    Run.read(run)  # refused before torch is imported, which takes seconds
    from uptrain.runs.launch import launch_resumed

    launch_resumed(run, micro_batch, activation_checkpointing, max_minutes)
