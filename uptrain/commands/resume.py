"""Run `uptrain resume`: resume a run."""

from pathlib import Path

import click

from uptrain.commands.options import max_minutes_option
from uptrain.runs.signals import stop_request


@click.command("resume")
@click.argument("run", type=click.Path(path_type=Path))
@max_minutes_option("Then save and stop again.")
def command(run: Path, max_minutes: float | None) -> None:
    """Resume RUN, and train it to its end.

    It resumes from the newest checkpoint whose files are as they were written. Everything else is as it was when the
    run began; the number of processes may differ.
    """
    stop_request.install()
    from uptrain.runs.launch import launch_resumed

    launch_resumed(run, max_minutes)
