"""Define the options that several commands share."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from model.common.checks import MAX_SIZE
from model.common.command_options import Command, CountType, FiniteFloat, PathType, ShareType, WholeNumber, add_options
from model.common.errors import InputError
from model.common.launcher_variables import world_size
from uptrain.models.trainable_choices import DEFAULT_LORA_RANK, TRAINABLE
from uptrain.runs.settings import OPTIMIZERS
from uptrain.training.learning_rate import SCHEDULES

if TYPE_CHECKING:
    from uptrain.machine_shards import MachineShard


def check_one_process(command: str, advice: str = "start it without a launcher") -> None:
    """Raise InputError if a launcher has started several processes of a command that is for one."""
    if world_size() > 1:
        raise InputError(f"`uptrain {command}` is for one process; {advice}.")


def _find_in_cache(path: Path) -> Path | None:
    """Return the folder of a model that is named as in the Hugging Face cache; None for any other path."""
    try:
        if path.exists() or path.is_symlink():
            return None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check its permissions.") from error
    from model.checkpoint.hub import find_in_cache  # imports numpy, which the command line does not need to start

    return find_in_cache(path)


class ModelFolder(PathType):
    """A folder, or the name of a model in the Hugging Face cache, whose folder there is the value."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Path:
        if not self.file_okay and Path(str(value)).is_file():
            raise InputError(f"{value} is a file; give its folder: {Path(str(value)).parent}")
        given = Path(str(super().convert(value, parameter, context)))
        path = _find_in_cache(given) or given
        if not path.exists() and not path.is_symlink():
            raise InputError(
                f"{path}: no such file or folder; give a model's folder, or its name in the Hugging Face cache "
                "(org/name)."
            )
        return path


trainable_option = click.option(
    "--trainable",
    type=click.Choice(TRAINABLE),
    help="Parameters to train. attention: attention and the norm before it. kv: key and value projections. lora: "
    "adapters of all linear layers, which `export` merges. The other parameters stay in MODEL's dtype.  [default: "
    "attention if Groupwise merged MODEL's heads or converted them to MLA, or if MODEL also reads images or sound; "
    "else all]",
)


def micro_batch_option(help: str) -> Callable[[Command], Command]:
    """Return the option `--micro-batch`, the number of windows that a process computes at a time."""
    return click.option("--micro-batch", type=WholeNumber(min=1), metavar="N", help=help)


def count_option(name: str, help: str) -> Callable[[Command], Command]:
    """Return an option whose value is a count such as 50B."""
    return click.option(name, type=CountType(), metavar="N", help=help)


def shard_option(help: str) -> Callable[[Command], Command]:
    """Return the option `--shard`, whose value is `machine_shard`. `help` says which work is divided."""
    return click.option(
        "--shard",
        "machine_shard",
        metavar="I/N",
        callback=lambda context, parameter, text: None if text is None else _parse_machine_shard(text),
        help=f"{help} Afterwards, the same command without --shard joins the shards.",
    )


def _parse_machine_shard(text: str) -> "MachineShard":
    """Return the machine shard I/N. Raises click.BadParameter for another form."""
    from uptrain.machine_shards import MachineShard

    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise click.BadParameter(f"{text!r} is not I/N with I from 1 to N, such as 1/4.", param_hint="--shard")
    return MachineShard(int(match[1]), int(match[2]))


def shard_is_done(shard: str, contents: str) -> str:
    """Return what to print after one shard of a work that `--shard` divides; `shard` is I/N."""
    return (
        f"Shard {shard} is done: {contents}. When all {shard.partition('/')[2]} shards are done, run the command "
        "without --shard to join them."
    )


def max_minutes_option(help: str) -> Callable[[Command], Command]:
    """Return the option `--max-minutes`, after which a run saves and stops."""
    return click.option("--max-minutes", type=FiniteFloat(min=0), metavar="M", help=help)


seq_len_option = click.option(
    "--seq-len",
    type=WholeNumber(2, MAX_SIZE),
    metavar="N",
    help="Tokens in a window.  [default: as in the cache, or the model's context, at most 4096]",
)
optimizer_option = click.option(
    "--optimizer",
    type=click.Choice(OPTIMIZERS),
    default=OPTIMIZERS[0],
    show_default=True,
    help="adafactor is the GQA paper's. adamw8bit has smaller states, and needs torchao.",
)
lora_rank_option = click.option(
    "--lora-rank", type=WholeNumber(min=1), metavar="R", help=f"Rank of the adapters.  [default: {DEFAULT_LORA_RANK}]"
)


def budget_options(command: Command) -> Command:
    """Add the options of the budget: the length of the training and its original."""
    return add_options(
        command,
        click.option("--alpha", type=ShareType(), metavar="SHARE",
                     help="Length of the training as a share of the original pre-training. The GQA paper uses 0.05."),
        count_option("--tokens", "Length of the training in tokens, e.g. 50B."),
        count_option("--steps", "Length of the training in optimizer steps."),
        click.option("--original", metavar="NAME",
                     help="Name of the original in the table of known pre-trainings.  [default: found by shape and "
                     "source]"),
        count_option("--original-tokens", "Tokens of the original pre-training, e.g. 2T.  [default: from the table]"),
        count_option("--global-batch-tokens",
                     "Tokens of one optimizer step, over all processes.  [default: that of the original pre-training]"),
    )  # fmt: skip


def schedule_options(command: Command) -> Command:
    """Add the learning rate and its schedule."""
    return add_options(
        command,
        click.option("--lr", type=FiniteFloat(), metavar="LR",
                     help="Peak learning rate.  [default: a share of the original pre-training's, see "
                     "docs/training.md]"),
        click.option("--schedule", type=click.Choice(SCHEDULES), default=SCHEDULES[0], show_default=True,
                     help="wsd: constant, then falls to 0 over the last fifth. cosine: falls to a tenth. "
                     "constant: does not fall. inverse-sqrt: the GQA paper's."),
        click.option("--warmup-steps", type=WholeNumber(min=0), metavar="N",
                     help="Steps of linear warm-up.  [default: 5 % of the steps; at least 100, or a quarter if that "
                     "is fewer]"),
    )  # fmt: skip
