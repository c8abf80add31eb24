"""Run `uptrain run`: train a model."""

import tomllib
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from model.common.checks import short_repr
from model.common.command_options import (
    FiniteFloat,
    GroupedCommand,
    PathType,
    RenamedOption,
    SingleOption,
    WholeNumber,
    pop_fields,
)
from uptrain.budget.budget import BudgetOptions
from uptrain.checkpoints.files import DEFAULT_KEEP_LAST
from uptrain.commands.options import (
    ModelFolder,
    budget_options,
    lora_rank_option,
    max_minutes_option,
    micro_batch_option,
    optimizer_option,
    schedule_options,
    seq_len_option,
    trainable_option,
)
from uptrain.distributed.signals import stop_request
from uptrain.runs.settings import PRECISIONS, TRACKERS, RunOptions
from uptrain.training.losses import LOSSES

HEADINGS = {
    "What to train, on what": ("init", "data", "seq-len", "out", "config"),
    "How long (give one of --alpha, --tokens and --steps)": (
        "alpha", "tokens", "steps", "original", "original-tokens", "global-batch-tokens", "max-minutes",
    ),
    "Teacher and loss": ("teacher", "teacher-logits", "loss"),
    "Parameters and optimizer": (
        "trainable", "lora-rank", "optimizer", "lr", "schedule", "warmup-steps", "weight-decay", "spike-sigma", "seed",
    ),
    "Memory and speed": ("micro-batch", "activation-checkpointing", "precision", "compile"),
    "Evaluating, saving and logging": ("eval-data", "eval-every", "save-every", "keep-last", "track"),
}  # fmt: skip
"""The options in the help."""


def _read_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Take the options that are not on the command line from a TOML file with the same names."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path} cannot be read: {error}", context, parameter) from error
    parameters = {o.lstrip("-"): p for p in context.command.params for o in p.opts if p is not parameter}
    context.default_map = {}
    for name, value in values.items():
        option = parameters.get(name.replace("_", "-"))
        if option is None or option.name is None:
            raise click.BadParameter(f"{path} sets {name!r}, which is no option of this command.", context, parameter)
        if option.name in context.default_map:
            raise click.BadParameter(f"{path} sets --{name.replace('_', '-')} twice.", context, parameter)
        try:
            context.default_map[option.name] = _as_argument(option, value)
        except ValueError as error:
            message = f"{path} sets {name} = {short_repr(value)}, which must be {error}."
            raise click.BadParameter(message, context, parameter) from error
    return path


def _drop_overridden_lengths(options: dict[str, Any]) -> None:
    """Drop the length that --config gives if the command line gives one, since a run takes one of the three."""
    source = click.get_current_context().get_parameter_source
    given = {name: source(name) for name in ("alpha", "tokens", "steps") if options[name] is not None}
    if ParameterSource.COMMANDLINE in given.values():
        options.update({name: None for name in given if given[name] is ParameterSource.DEFAULT_MAP})


def _as_argument(option: click.Parameter, value: Any) -> bool | str | list[str]:
    """Return a value of the TOML file in the form of the command line. Raises ValueError with the expected type.

    Numbers become text, so that one parser handles both sources.
    """
    if getattr(option, "is_flag", False):
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return value
    if getattr(option, "multiple", False):
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in values):
            raise ValueError("text, or a list of texts")
        return [_check_no_nul(item) for item in values]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("text or a number")
    return _check_no_nul(str(value))


def _check_no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("text without the character NUL")
    return text


@click.command("run", cls=GroupedCommand, headings=HEADINGS)
@click.argument("model", type=ModelFolder(), required=False)
@click.option(
    "--config",
    type=PathType(),
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    metavar="TOML",
    help="TOML file with options of this command, by name. Options on the command line override it.",
)
@click.option(
    "--init",
    type=ModelFolder(),
    metavar="FOLDER",
    help="Instead of MODEL: train the model that FOLDER/config.json describes, from random weights.",
)
@click.option(
    "--data",
    multiple=True,
    required=True,
    metavar="CACHE|PATH[=WEIGHT]",
    help="What to train on: a token cache, or texts as for `uptrain prepare`, which are first tokenised into "
    "RUN.data. Repeat the option for several sources of texts.",
)
@seq_len_option
@click.option("--out", type=PathType(), required=True, metavar="RUN", help="The run's folder, which must not exist.")
@budget_options
@schedule_options
@click.option("--teacher", type=ModelFolder(), metavar="FOLDER", help="The parent, to distil from and to compare with.")
@click.option(
    "--teacher-logits",
    type=PathType(),
    metavar="LOGITS",
    help="Instead of --teacher: the logits that `uptrain teach` wrote for --data.",
)
@click.option(
    "--loss",
    type=click.Choice(tuple(LOSSES)),
    help="What to minimise. next-token: the cross-entropy. distill: the divergence from the teacher. mix: the mean "
    "of both.  [default: distill with a teacher, else next-token]",
)
@trainable_option
@lora_rank_option
@optimizer_option
@click.option(
    "--weight-decay",
    type=FiniteFloat(min=0),
    default=0.0,
    show_default=True,
    metavar="W",
    help="Weight decay of matrices. 0.1 is usual when training from random weights.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Precision of the computation. Trained parameters are always float32.  [default: bf16 on a GPU that has "
    "it (Ampere or newer), else fp32]",
)
@micro_batch_option(
    "Windows that a process computes at a time.  [default: as many as make 8192 tokens, at most its part of a step, or "
    "fewer that fit the device]"
)
@click.option(
    "--seed",
    type=WholeNumber(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the order of the data, and of the weights of --init.",
)
@click.option(
    "--save-every",
    "--save-every-steps",
    cls=RenamedOption,
    type=WholeNumber(min=1),
    metavar="N",
    help="Steps between checkpoints. A run also saves an hour after the last one.  [default: a tenth of the run]",
)
@click.option(
    "--keep-last",
    type=WholeNumber(min=1),
    default=DEFAULT_KEEP_LAST,
    show_default=True,
    metavar="N",
    help="Keep the last N checkpoints of all, and the last N of --save-every. The one before the decay, from which "
    "`extend` continues, is also kept.",
)
@click.option("--eval-data", cls=SingleOption, metavar="CACHE|PATH", help="Held-out text, to evaluate on.")
@click.option(
    "--eval-every",
    type=WholeNumber(min=1),
    metavar="N",
    help="Steps between evaluations.  [default: a tenth of the run]",
)
@click.option(
    "--spike-sigma",
    type=FiniteFloat(min=0, min_open=True),
    metavar="σ",
    help="Leave out updates whose gradient norm is more than σ standard deviations above the mean of the last 128.",
)
@click.option("--compile", is_flag=True, help="Compile the student's layers: slower to start, then faster.")
@click.option("--activation-checkpointing", is_flag=True, help="Use less memory, and a quarter to a half more time.")
@click.option("--track", type=click.Choice(TRACKERS), multiple=True, help="Also log to this tracker.")
@max_minutes_option("Save and stop after M minutes; `uptrain resume` continues.")
def command(**options: Any) -> None:
    """Train MODEL on --data, and write the new folder RUN.

    MODEL is a converted checkpoint, or any other that `uptrain` trains.

    The loss is next-token prediction, or with --teacher the divergence from the parent's distribution. Give one of
    --alpha, --tokens and --steps. For several GPUs, use scripts/uptrain_multi_gpu.sh. Ctrl-C saves and stops;
    `uptrain resume RUN` continues where it stopped.
    """
    stop_request.install()
    _drop_overridden_lengths(options)
    given = RunOptions(pop_fields(BudgetOptions, options), **options)
    from uptrain.runs.make_folder import refuse_existing

    refuse_existing(given.out)  # before torch is imported, which takes seconds
    from uptrain.runs.launch import launch_new

    launch_new(given)
