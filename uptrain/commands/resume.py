"""Run `uptrain resume`: resume a run."""

from pathlib import Path

import click

from model.common.command_options import PathType
from uptrain.commands.options import max_minutes_option
from uptrain.distributed.signals import stop_request


@click.command("resume")
@click.argument("run", type=PathType())
@max_minutes_option("Save and stop again after M minutes.")
def command(run: Path, max_minutes: float | None) -> None:
    """Resume RUN, and train it to its end.

    Training continues from the newest checkpoint whose checksums match. The settings are those with which the run
    began. The number of processes may differ.
    """
    stop_request.install()
    from uptrain.runs.launch import launch_resumed

    launch_resumed(run, max_minutes)
