"""Run `uptrain evaluate`: measure a model on held-out data."""

from typing import Any

import click

from model.common import console
from model.common.command_options import SingleOption, device_option, json_option
from uptrain.commands.options import ModelFolder, micro_batch_option, seq_len_option
from uptrain.distributed.signals import interruptible
from uptrain.runs.settings import PRECISIONS
from uptrain.training.loss_values import format_above_teacher, format_loss


@click.command("evaluate")
@click.argument("model", type=ModelFolder())
@click.option(
    "--data",
    cls=SingleOption,
    required=True,
    metavar="CACHE|PATH",
    help="Held-out text: a token cache, or texts as for `uptrain prepare`.",
)
@seq_len_option
@click.option("--teacher", type=ModelFolder(), metavar="FOLDER", help="The parent, to compare with.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Precision of the computation.  [default: bf16 on a GPU that has it (Ampere or newer), else fp32]",
)
@micro_batch_option(
    "Windows to compute at a time.  [default: as many as make 8192 tokens, or fewer for large vocabularies]"
)
@device_option("evaluate on")
@json_option()
def command(as_json: bool, **options: Any) -> None:
    """Measure MODEL's loss and perplexity on held-out text.

    Every predicted token counts once, whatever the batches. With --teacher, also measure the teacher's loss, the KL
    divergence from the teacher, and how often both choose the same token. The number after ± is a standard error.
    """
    from accelerate import PartialState

    from uptrain.evaluate_folder import EvaluateOptions, evaluate_folder

    given = EvaluateOptions(**options)
    with interruptible():  # so that temporary files are removed
        result = evaluate_folder(given, quiet=as_json)
    if not PartialState().is_main_process:
        return
    if as_json:
        console.print_json({"model": str(given.model), "data": given.data, **result})
        return
    rows = [
        ("targets", f"{result['targets']:,}, in windows of {result['seq_len']:,} tokens"),
        ("loss", format_loss(result["loss"], " nats per token", result["loss_error"])),
        ("perplexity", f"{result['perplexity']:.4g}"),
    ]
    if "kl" in result:
        above = format_above_teacher(result["loss"], result["teacher_loss"], result["above_teacher_error"])
        rows.append(("teacher's loss", format_loss(result["teacher_loss"])))
        rows.append(("above the teacher's", above))
        rows.append(("KL from the teacher", format_loss(result["kl"], error=result["kl_error"])))
        rows.append(("agreement", f"{result['agreement']:.1%}"))
    console.print_key_values(str(given.model), rows)
