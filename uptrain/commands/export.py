"""Run `uptrain export`: write a run's model as a Hugging Face folder."""

from pathlib import Path

import click

from model.common import console
from model.common.command_options import PathType, json_option
from uptrain.distributed.signals import interruptible
from uptrain.runs.folder import Run

FOLDER = PathType()


@click.command("export")
@click.argument("run", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option(
    "--step", type=click.IntRange(min=0), metavar="N", help="Step of the checkpoint to write.  [default: the newest]"
)
@click.option(
    "--dtype",
    type=click.Choice(("bfloat16", "float32")),
    default="bfloat16",
    show_default=True,
    help="Dtype of the weights.",
)
@json_option("Print the record of the training as JSON.")
def command(run: Path, out: Path, step: int | None, dtype: str, as_json: bool) -> None:
    """Write the model that RUN has trained as a Hugging Face folder.

    OUT holds the weights, the config, tokenizer and other files of the model that the run began with, and a model
    card. `uptraining.json` records the training.
    """
    from uptrain.runs.make_folder import refuse_existing

    Run.read(run)  # refused, as an OUT that exists, before torch is imported, which takes seconds
    refuse_existing(out, "choose another OUT")
    from uptrain.export.export import export, find_checkpoint, stored_size

    checkpoint = find_checkpoint(run, step)
    progress_bar = console.progress_bar("Exporting", stored_size(run, checkpoint), quiet=as_json)
    with interruptible(), progress_bar as progress:  # a signal removes what is unfinished
        record = export(run, checkpoint, out, dtype, progress)
    if as_json:
        console.print_json(record)
    else:
        console.echo(f"Wrote {out}: the model after step {record['step']:,}, in {dtype}.")
