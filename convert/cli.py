"""The command line of `convert`: parse, call, print. What a command needs is imported when it runs.

Exit codes: 0 success; 1 reading or writing failed midway (the same command continues); 2 the input is not acceptable;
3 `verify` found a difference; 4 it found none, but could not compare everything.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from convert.methods import AUTO, LAYER_METHODS, METHODS, REPEAT
from convert.recipe import GROUPINGS, RENORMS
from model import terminal
from model.printable import printable

if TYPE_CHECKING:
    from convert.head_report import HeadReport
    from convert.plan import Plan
    from convert.verify import Findings
    from model.checkpoint import Checkpoint

DIFFERENT, NOT_ALL_CHECKED = 3, 4
WORKERS = 4
WORTH_SAYING = 60
"""Seconds from which on people are told beforehand."""

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="groupwise", prog_name="convert")
def cli() -> None:
    """Merge the K/V heads of a multi-head-attention checkpoint into fewer: grouped-query attention.

    SOURCE is a Hugging Face folder (safetensors or .bin), a folder with Meta's consolidated.*.pth, a
    torch.distributed.checkpoint, a .gguf file, or the name of a model in the Hugging Face cache (org/name). OUT becomes
    an ordinary Hugging Face folder. Merging costs quality: `uptrain evaluate` says how much, `uptrain run` restores it.
    """


def _writing_options(command: Command) -> Command:
    for option in reversed(
        (
            click.option("--max-shard-size", metavar="SIZE",
                         help="Divide the output anew, e.g. 5GB.  [default: the source's own shards]"),
            click.option("--workers", type=click.IntRange(min=1), default=WORKERS, show_default=True,
                         help="Threads that copy, merge and checksum; they wait for the disk more than they compute."),
            click.option("--dry-run", is_flag=True, help="Print what would be done, and write nothing."),
            click.option("--overwrite", is_flag=True, help="Replace OUT if it is a checkpoint folder."),
            click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, without progress bar."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


def _conversion_options(command: Command) -> Command:
    for option in reversed(
        (
            click.option("--method", type=click.Choice((*METHODS, *LAYER_METHODS, AUTO)),
                         help="How heads are merged: their mean (the paper's method), the first, or random ones. With "
                         "queries and output projections changed to fit: the mean of aligned heads, or shared "
                         "principal components (pca), both for 17 families; or these fitted to what attention computes "
                         "(fit: llama, mistral, qwen2). auto tries these three on some of the text, fit with --refit, "
                         "and with similar heads grouped too.  "
                         "[default: fit with --refit; where the model does not allow it, mean]"),
            click.option("--renorm", type=click.Choice(RENORMS),
                         help="Give merged heads back their length (norm), or queries the spread of their logits "
                         "(spread).  [default: spread for aligned, pca and fit, else none]"),
            click.option("--group-heads", "grouping", type=click.Choice(GROUPINGS), default=GROUPINGS[0],
                         show_default=True,
                         help="Which heads share a group: neighbours, or for aligned, pca and fit those that are most "
                         "alike; queries move with them."),
            click.option("--refit", is_flag=True,
                         help="Fit output projections to what the layers gave before, where that holds on text that "
                         "was held out.  [default: only where no --method is given]"),
            click.option("--refine", type=click.IntRange(min=0), default=0, show_default=True, metavar="TOKENS",
                         help="Then train each merged layer's attention on so many tokens of the calibration text, to "
                         "give what the layer gave before; held-out text decides what is kept."),
            click.option("--calibration", metavar="TEXT",
                         help="Text to run the model on, for aligned, pca and fit: shipped (a text of many kinds, part "
                         "of Groupwise), self (the model writes it, which needs the whole model in memory), a .txt or "
                         ".jsonl file (also .gz, .xz), a folder of them, or hub:NAME[:[CONFIG:]SPLIT]; self+shipped, "
                         "self+TEXT, … take windows of each by turns. none merges by the weights alone.  "
                         "[default: shipped]"),
            click.option("--calibration-tokens", type=click.IntRange(min=1), metavar="N",
                         help="How much of it.  [default: 65536]"),
            click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
                         help="Seed of --method random and --calibration self."),
            _writing_options,
        )
    ):  # fmt: skip
        command = option(command)
    return command


@cli.command("mha-to-gqa")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--groups", type=int, required=True, metavar="G",
    help="K/V heads to keep: 8 makes GQA-8. Not the number of heads in a group.",
)  # fmt: skip
@_conversion_options
def mha_to_gqa(source: Path, out: Path, groups: int, **options: Any) -> None:
    """Merge the K/V heads of SOURCE into G groups.

    OUT becomes the merged model. G must divide the number of K/V heads SOURCE has; `convert inspect SOURCE` lists the
    possible values. A killed run leaves no OUT; the same command continues it.
    """
    _convert(source, out, groups, **options)


@cli.command("mha-to-mqa")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@_conversion_options
def mha_to_mqa(source: Path, out: Path, **options: Any) -> None:
    """Merge all K/V heads of SOURCE into one.

    That is multi-query attention, the same as `mha-to-gqa --groups 1`.
    """
    _convert(source, out, 1, **options)


@cli.command("to-hf")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@_writing_options
def to_hf(source: Path, out: Path, **options: Any) -> None:
    """Write SOURCE as a Hugging Face folder with safetensors, its heads as they are.

    For checkpoints in another format: Meta's, .bin, .gguf, torch.distributed.checkpoint.
    """
    _convert(source, out, None, method=METHODS[0], **options)


@cli.command("repeat-kv")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--kv-heads", type=int, required=True, metavar="N", help="K/V heads to have, each of SOURCE's repeated.")
@_writing_options
def repeat_kv(source: Path, out: Path, kv_heads: int, **options: Any) -> None:
    """Repeat the K/V heads of SOURCE, so that there are N.

    For engines that cannot divide a few K/V heads among more devices. OUT computes what SOURCE does, with a larger KV
    cache. N must be a multiple of SOURCE's number that divides the query heads; `convert inspect SOURCE` lists them.
    """
    _convert(source, out, kv_heads, method=REPEAT, **options)


def _convert(
    source: Path,
    out: Path,
    n_kv_heads: int | None,
    *,
    max_shard_size: str | None,
    workers: int,
    dry_run: bool,
    overwrite: bool,
    as_json: bool,
    **wished: Any,
) -> None:
    from convert import conversion, show
    from convert.plan import make_plan
    from convert.wishes import Wishes, decide
    from model.checkpoint import open_checkpoint
    from model.checkpoint.folder import CALIBRATION_TOKENS
    from model.checkpoint.writer import parse_size

    size = parse_size(max_shard_size) if max_shard_size is not None else None
    with open_checkpoint(source) as checkpoint:
        conversion.check_target(checkpoint, out, overwrite)
        recipe, remarks = decide(checkpoint, n_kv_heads, Wishes(**wished))
        plan = asked = make_plan(checkpoint, n_kv_heads, recipe, size)
        found = _estimate(plan, quiet=dry_run or as_json)
        if dry_run:
            conversion.check(checkpoint, plan, out, overwrite)
        elif recipe.method == AUTO:
            choice = conversion.choose_recipe(checkpoint, plan, out, overwrite, quiet=as_json)
            plan, found = make_plan(checkpoint, n_kv_heads, choice.recipe, size), {**found, "auto": choice.losses}
        summary = {"source": str(source), "out": str(out), **plan.summary(workers)}
        summary |= {"notes": (*remarks, *plan.notes), "left_out": checkpoint.left_out, **found}
        if dry_run:
            (terminal.print_json if as_json else show.plan)(summary)
            return
        record = conversion.run(checkpoint, plan, out, overwrite, workers, as_json, asked)
    if as_json:
        terminal.print_json({**summary, "merge_report": record["merge_report"]})
    else:
        if recipe.method != REPEAT:
            show.merges(record["merge_report"])
        show.plan(summary)
        terminal.echo(f"\nWrote {out}. Check it with: convert verify {source} {out}")
        if plan.recipe.sample and plan.recipe.sample.private:
            terminal.echo(
                f"{CALIBRATION_TOKENS} holds the tokens of {plan.recipe.sample.label}, for verify. If that text is "
                "private, remove this file before you publish the folder."
            )


def _estimate(plan: "Plan", quiet: bool) -> dict[str, Any]:
    """Return how long calibrating will take, and say so beforehand where it is long."""
    if plan.recipe.sample is None:
        return {}
    from convert.estimate import calibration_seconds

    seconds = round(calibration_seconds(plan))
    if not quiet and seconds > WORTH_SAYING:
        terminal.echo(
            f"Calibrating takes about {terminal.duration(seconds)} here; "
            "--method mean takes hardly longer than copying, and begins worse.",
            err=True,
        )
    return {"calibration_seconds": seconds, "scratch_bytes": plan.scratch_bytes}


@cli.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--heads", is_flag=True,
              help="Also show how alike the K/V heads of each layer are, and what merging them would lose. "
              "Reads all attention weights.")  # fmt: skip
@click.option("--figure", type=click.Path(path_type=Path), metavar="FILE.png",
              help="Draw what --heads finds.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, without progress bar.")
def inspect(source: Path, heads: bool, figure: Path | None, as_json: bool) -> None:
    """Show the geometry of SOURCE, and what --groups can be.

    For each number of groups: the size, the KV cache, and the tensor-parallel sizes it allows.
    """
    from convert import show
    from convert.inspection import inspect
    from model.checkpoint import open_checkpoint

    if figure is not None and not heads:
        raise click.UsageError("--figure draws what --heads finds; give --heads too.")
    with open_checkpoint(source) as checkpoint:
        found = inspect(checkpoint)
        report = _look_at_heads(checkpoint, figure, as_json) if heads else None
    if as_json:
        terminal.print_json(found if report is None else {**found, "heads": report.record})
        return
    show.inspection(found)
    if report is not None:
        from convert import show_heads

        show_heads.heads(report)
    if figure is not None:
        terminal.echo(f"\nWrote {figure}.")


def _look_at_heads(checkpoint: "Checkpoint", figure: Path | None, quiet: bool) -> "HeadReport":
    from convert import figure_file
    from convert.head_report import head_layers, report_heads

    if figure is not None:
        figure_file.check(figure)
    merges = head_layers(checkpoint)
    with terminal.progress_bar("Comparing heads", len(merges), quiet, unit="layers") as progress:
        report = report_heads(checkpoint, merges, progress)
    if figure is not None:
        from convert.head_figure import draw_png
        from model.files import replace_file

        replace_file(figure, draw_png(report, printable(checkpoint.path.resolve().name)))
    return report


@cli.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, without progress bar.")
def verify(source: Path, out: Path, as_json: bool) -> None:
    """Check OUT against SOURCE.

    Every merged tensor is recomputed, and every other byte, key and file compared. Exit code 0 if all agree, 3 if
    anything differs, 4 if something could not be compared, as where OUT has lost the tokens it was calibrated on.
    """
    from convert.verify import verify
    from model.checkpoint import open_checkpoint

    with open_checkpoint(source) as checkpoint:
        total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        with terminal.progress_bar("Verifying", total, quiet=as_json) as progress:
            findings = verify(checkpoint, out, progress, WORKERS, as_json)
    if as_json:
        terminal.print_json({"ok": findings.ok, **vars(findings)})
        sys.exit(_exit_code(findings))
    for remark in findings.unchecked:
        terminal.echo_line(f"NOT CHECKED: {remark}")
    if findings.ok:
        apart = findings.rounded
        rounded = f", {len(apart)} of them but for rounding (at most {max(apart.values()):.2g} of 1)" if apart else ""
        terminal.echo(
            f"OK: {findings.n_regrouped} tensors with K/V heads recomputed, {findings.n_copied} other tensors, the "
            f"config and {findings.n_files} other files compared; all agree{rounded}."
        )
    for difference in findings.differences:
        terminal.echo_line(f"DIFFERENT: {difference}")
    sys.exit(_exit_code(findings))


def _exit_code(findings: "Findings") -> int:
    return DIFFERENT if findings.differences else NOT_ALL_CHECKED if findings.unchecked else 0


def main() -> None:
    """Run the command line. SIGTERM ends it as Ctrl-C does, so that temporary files are removed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    terminal.run(cli)
