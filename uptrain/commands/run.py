"""`uptrain run`: train."""

import tomllib
from pathlib import Path
from typing import Any

import click

from uptrain.commands.options import budget_options, request_from, schedule_options
from uptrain.signals import stop_request

FOLDER = click.Path(path_type=Path)


def _read_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Take options that were not given from a TOML file with the same names."""
    if path is None:
        return None
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}", context, parameter) from error
    known = {o.lstrip("-") for p in context.command.params for o in p.opts} - {"config"}
    unknown = [name for name in found if name.replace("_", "-") not in known]
    if unknown:
        raise click.BadParameter(f"{path} sets {unknown[0]!r}, which is no option of this command.", context, parameter)
    names = {o.lstrip("-"): p.name for p in context.command.params for o in p.opts}
    context.default_map = {names[name.replace("_", "-")]: value for name, value in found.items()}
    return path


@click.command("run")
@click.argument("model", type=FOLDER, required=False)
@click.option(
    "--config",
    type=FOLDER,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    metavar="TOML",
    help="A TOML file with options of this command by their names; those on the command line win.",
)
@click.option(
    "--init",
    type=FOLDER,
    metavar="FOLDER",
    help="Instead of MODEL: train from nothing what FOLDER/config.json describes.",
)
@click.option("--data", type=FOLDER, required=True, metavar="CACHE", help="What to train on.")
@click.option("--out", type=FOLDER, required=True, metavar="RUN", help="The run's folder, which must not exist.")
@budget_options
@schedule_options
@click.option("--teacher", type=FOLDER, metavar="FOLDER", help="The MHA parent, to distil from and to compare with.")
@click.option(
    "--loss",
    type=click.Choice(("next-token", "distill", "mix")),
    help="What to minimise.  [default: distill with a teacher, else next-token]",
)
@click.option(
    "--trainable",
    type=click.Choice(("all", "attention", "kv")),
    default="all",
    show_default=True,
    help="Which parameters to train.",
)
@click.option(
    "--optimizer",
    type=click.Choice(("adamw", "adafactor")),
    default="adamw",
    show_default=True,
    help="adafactor is the GQA paper's.",
)
@click.option(
    "--weight-decay",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="For matrices; 0.1 is usual when training from nothing.",
)
@click.option(
    "--precision",
    type=click.Choice(("bf16", "fp32")),
    help="Of the computation; parameters are float32 always.  [default: bf16 on a GPU, fp32 on a CPU]",
)
@click.option(
    "--micro-batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Windows that a process takes at a time.  [default: as many as make 8192 tokens]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the order of the data.")
@click.option("--save-every-steps", type=click.IntRange(min=1), metavar="N", help="[default: a tenth of the run]")
@click.option(
    "--keep-last",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Checkpoints to keep, beside the one before the decay, from which `extend` goes on.",
)
@click.option("--eval-data", type=FOLDER, metavar="CACHE", help="Held-out windows.")
@click.option("--eval-every", type=click.IntRange(min=1), metavar="N", help="[default: a tenth of the run]")
@click.option(
    "--spike-sigma",
    type=click.FloatRange(min=0, min_open=True),
    metavar="σ",
    help="Leave out updates whose gradient norm is this many standard deviations above the last 128.",
)
@click.option("--compile", is_flag=True, help="Compile the layers (torch.compile): slower to start, then faster.")
@click.option("--activation-checkpointing", is_flag=True, help="Less memory, a third more time.")
@click.option("--track", type=click.Choice(("tensorboard", "wandb")), multiple=True, help="Also log there.")
@click.option("--max-minutes", type=click.FloatRange(min=0), metavar="M", help="Then save and stop; resume goes on.")
def command(**options: Any) -> None:
    """Train MODEL on CACHE into the new folder RUN, by default all parameters on next-token prediction.

    Give one of --alpha, --tokens and --steps. Start it as it is, or with `accelerate launch -m uptrain run …` over many
    GPUs. Ctrl-C saves and stops; `uptrain resume RUN` goes on exactly where it stopped.
    """
    stop_request.install()
    from uptrain.launch import launch_new

    launch_new(request_from(options), **options)
