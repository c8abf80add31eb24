"""`uptrain export`: a run's model as a Hugging Face folder."""

from pathlib import Path

import click

from model import terminal

FOLDER = click.Path(path_type=Path)


@click.command("export")
@click.argument("run", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Which checkpoint.  [default: the newest]")
@click.option("--dtype", type=click.Choice(("bfloat16", "float32")), default="bfloat16", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the record of the training as JSON.")
def command(run: Path, out: Path, step: int | None, dtype: str, as_json: bool) -> None:
    """Write the model that RUN has trained to OUT, an ordinary Hugging Face folder."""
    from uptrain.export import export, find_checkpoint

    size = sum(f.stat().st_size for f in find_checkpoint(run, step).rglob("*.distcp")) / 3
    with terminal.progress_bar("Exporting", size * (0.5 if dtype == "bfloat16" else 1), quiet=as_json) as progress:
        record = export(run, out, step, dtype, progress)
    if as_json:
        terminal.print_json(record)
    else:
        click.echo(f"Wrote {out}: the model after step {record['step']:,}, in {dtype}.")
