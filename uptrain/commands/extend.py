"""Run `uptrain extend`: make a longer run from an existing one."""

from pathlib import Path

import click

from model.common.checks import FiniteFloat
from uptrain.commands.options import count_option, max_minutes_option
from uptrain.runs.signals import stop_request


@click.command("extend")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="RUN2", help="The longer run's folder.")
@click.option(
    "--alpha", type=FiniteFloat(), metavar="SHARE", help="The share of the original pre-training it shall reach."
)
@count_option("--tokens", "The tokens it shall reach.")
@count_option("--steps", "The steps it shall reach.")
@max_minutes_option("Then save and stop; `uptrain resume` continues.")
def command(
    run: Path, out: Path, alpha: float | None, tokens: int | None, steps: int | None, max_minutes: float | None
) -> None:
    """Train RUN for longer, in a new folder.

    The result is that of a run planned so from the beginning: it continues from the checkpoint before the learning
    rate's decay. The warm-up stays as long as it was.
    """
    stop_request.install()
    from uptrain.runs.launch import launch_extended

    launch_extended(run, out, alpha, tokens, steps, max_minutes)
