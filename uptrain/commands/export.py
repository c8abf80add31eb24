"""Run `uptrain export`: write a run's model as a Hugging Face folder."""

import shlex
from pathlib import Path

import click

from model.common import console
from model.common.command_options import PathType, WholeNumber, json_option
from model.files.names import CHECKPOINTS, METRICS
from model.files.paths import refuse_inside
from model.files.staging import check_room
from uptrain.checkpoints.files import input_error_if_removed
from uptrain.commands.options import check_one_process
from uptrain.distributed.signals import interruptible
from uptrain.runs.run_folder import MODEL, Run
from uptrain.runs.settings import Settings
from uptrain.training.learning_rate import decay_start
from uptrain.training.loss_rise import rise_warning
from uptrain.training.metrics_log import read_metrics


@click.command("export")
@click.argument("run", type=PathType())
@click.argument("out", type=PathType())
@click.option(
    "--step", type=WholeNumber(min=0), metavar="N", help="Step of the checkpoint to write.  [default: the newest]"
)
@click.option(
    "--dtype",
    type=click.Choice(("bfloat16", "float32")),
    help="Dtype of the weights, trained or not; vision towers and the like keep theirs.  "
    "[default: MODEL's; bfloat16 for float16, and for a run with --init]",
)
@json_option("Print the record of the training as JSON.")
def command(run: Path, out: Path, step: int | None, dtype: str | None, as_json: bool) -> None:
    """Write the model that RUN has trained as a Hugging Face folder.

    OUT holds the weights, the config, tokenizer and other files of the model that the run began with, and a model
    card. `uptraining.json` records the training.
    """
    check_one_process("export")
    from uptrain.runs.make_folder import refuse_existing

    content = Run.read(run)  # refused, as an OUT that exists, before torch is imported, which takes seconds
    settings = content.settings
    refuse_existing(out, "choose another OUT")
    models = [Path(model) for model in (settings.model, settings.teacher) if model]
    refuse_inside(out, *models, run / MODEL, run / CHECKPOINTS, advice="choose another OUT")
    from uptrain.export.export import default_dtype, export, exported_size, find_checkpoint, find_halt, stored_size

    checkpoint = find_checkpoint(run, step)
    if halt := find_halt(run):
        console.warn(f"{run} was halted after step {halt['step']}: {halt['reason']}")
    dtype = dtype or default_dtype(settings, run)
    with input_error_if_removed(checkpoint):
        check_room(out, exported_size(run, checkpoint, dtype))
        progress_bar = console.progress_bar("Exporting", stored_size(run, checkpoint), quiet=as_json)
        with interruptible(), progress_bar as progress:  # a signal removes what is unfinished
            record = export(run, checkpoint, out, dtype, progress)
    records = [each for each in read_metrics(run / METRICS) if each["step"] <= record["step"]]
    if warning := rise_warning(records, settings.lr, bool(settings.teacher_logits)):
        console.warn(warning)
    if as_json:
        console.print_json(record)
    else:
        after = f"{record['step']:,}{_unfinished(settings, record['step'])}"
        console.echo(f"Wrote {out}: the model after step {after}, in {dtype}.")
        teacher = f" --teacher {shlex.quote(settings.teacher)}" if settings.teacher else ""
        windows = f" --seq-len {content.budget.global_batch_tokens // settings.global_batch}"  # as in the run
        console.echo(f"Next: uptrain evaluate {shlex.quote(str(out))} --data HELD-OUT{teacher}{windows}")


def _unfinished(settings: Settings, step: int) -> str:
    """Return words on a checkpoint from before the end of its run; "" for the last one."""
    if step == settings.steps:
        return ""
    decay = decay_start(settings.lr_schedule)
    why = ": its learning rate has not decayed" if decay is not None and step <= decay else ""
    return f" of {settings.steps:,} (not finished{why})"
