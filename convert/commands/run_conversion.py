"""Convert for all commands that write a checkpoint: resolve the options, plan, convert, and print the result."""

import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from convert import conversion
from convert.calibration_text.choices import NONE
from convert.calibration_text.text import user_texts
from convert.commands import tables
from convert.commands.options import OutputOptions
from convert.merging.methods import HEAD_METHODS
from convert.output.groupwise_json import LAYER_ERRORS
from convert.output.target import staging_for
from convert.planning.calibration_options import warn_of_unused_seed
from convert.planning.latent_plan import LatentPlan, make_latent_plan
from convert.planning.merge_plan import MergePlan, make_merge_plan
from convert.planning.plan import Plan
from convert.planning.resolve_latent import LatentOptions, resolve_latent
from convert.planning.resolve_merge import MergeOptions, resolve_merge
from model.checkpoint import Checkpoint, open_checkpoint
from model.common import console
from model.common.errors import CheckpointError
from model.completeness import has_lm_head
from model.files.names import CALIBRATION_TOKENS
from model.files.paths import lies_in
from model.geometry import Geometry
from model.language_model import has_language_model

SLOW_SECONDS = 60
"""A message announces a calibration that is estimated to take longer."""


def convert_heads(source: Path, out: Path, n_kv_heads: int | None, merge: MergeOptions, output: OutputOptions) -> None:
    """Convert SOURCE to `n_kv_heads` K/V heads, and print the result. None keeps their number."""

    def plan_of(checkpoint: Checkpoint, shard_size: int | None) -> Plan:
        recipe = resolve_merge(checkpoint, n_kv_heads, merge)
        warn_of_unused_seed(merge, recipe)
        return make_merge_plan(checkpoint, n_kv_heads, recipe, shard_size)

    _convert(source, out, plan_of, output, merge.calibration)


def convert_to_latent(source: Path, out: Path, options: LatentOptions, output: OutputOptions) -> None:
    """Convert SOURCE to latent attention, and print the result."""

    def plan_of(checkpoint: Checkpoint, shard_size: int | None) -> Plan:
        if find_spec("torch") is None:
            raise CheckpointError(
                f"mha-to-mla needs torch, transformers, accelerate and tokenizers; {console.INSTALL_EXTRA}."
            )
        recipe = resolve_latent(checkpoint, options)
        warn_of_unused_seed(options, recipe)
        return make_latent_plan(checkpoint, recipe, shard_size)

    _convert(source, out, plan_of, output, options.calibration)


def _convert(
    source: Path,
    out: Path,
    plan_of: Callable[[Checkpoint, int | None], Plan],
    output: OutputOptions,
    calibration: str | None,
) -> None:
    _refuse_to_replace_text(calibration, out)
    with open_checkpoint(source) as checkpoint:
        if not source.exists() and out.resolve() == source.resolve():
            raise CheckpointError(
                f"OUT ({out}) is the name of SOURCE in the Hugging Face cache, which would then be read from OUT; "
                "choose another name."
            )
        staging = staging_for(checkpoint, out, output.overwrite)
        plan = plan_of(checkpoint, output.max_shard_size)
        if output.dry_run:
            conversion.check(plan, checkpoint, staging)
        estimate = _estimate(checkpoint, plan, quiet=output.dry_run or output.as_json)
        about = {"source": str(source), "out": str(out)}
        extras = {"skipped_files": checkpoint.skipped_files, **estimate}
        if output.dry_run:
            summary = about | plan.summary(output.workers) | extras
            (console.print_json if output.as_json else tables.print_plan)(summary)
            return
        announced = plan.notes if plan.recipe.text is not None and not output.as_json else ()
        for note in announced:  # calibrating may take hours
            console.echo(f"Note: {note}", err=True)
        plan, record = conversion.run(checkpoint, plan, staging, output.workers, output.as_json)
    summary = about | plan.summary(output.workers) | extras
    if output.as_json:
        kept = ("merge_report", LAYER_ERRORS)
        console.print_json({**summary, **{key: record[key] for key in kept if key in record}})
        return
    summary["notes"] = [note for note in plan.notes if note not in announced]
    _print_result(checkpoint, out, plan, summary, record)


def _refuse_to_replace_text(calibration: str | None, out: Path) -> None:
    """Raise CheckpointError if OUT holds the calibration text, which replacing it would delete."""
    for part in user_texts(calibration or NONE):
        if Path(part).exists() and lies_in(Path(part), out):
            raise CheckpointError(f"OUT ({out}) holds the calibration text {part}, which replacing it would delete.")


def _print_result(
    checkpoint: Checkpoint, out: Path, plan: Plan, summary: dict[str, Any], record: dict[str, Any]
) -> None:
    if not plan.computed:
        console.echo("The number of K/V heads is unchanged.")
    elif plan.recipe.method in HEAD_METHODS:  # the other methods fit heads, so that cosines and norms say little
        tables.print_merge_report(record["merge_report"])
    tables.print_plan(summary, done=True, layer_errors=record.get(LAYER_ERRORS, []))
    source, written = shlex.quote(summary["source"]), shlex.quote(str(out))
    console.echo(f"\nWrote {out}.")
    text = plan.recipe.text
    if text and user_texts(text.name):
        console.echo(
            f"{CALIBRATION_TOKENS} holds the tokens of {text.label}, for verify. If {user_texts(text.name)[0]} is "
            "private, remove this file before you publish the folder."
        )
    if plan.is_exact:
        pass
    elif obstacle := _find_obstacle(checkpoint, plan.geometry):
        console.echo(f"It has {obstacle}, so uptrain does not measure or train it.")
    else:
        _print_next_steps(checkpoint, plan, source, written)
    long = ", which takes as long as the conversion" if text else ""
    console.echo(f"Check the files{long}:\n  convert verify {source} {written}")


def _print_next_steps(checkpoint: Checkpoint, plan: Plan, source: str, written: str) -> None:
    """Print the commands that measure and train the output. `source`, `written`: paths as a shell takes them."""
    is_folder = (checkpoint.path / "config.json").is_file()
    teacher = source if is_folder else "PARENT"
    console.echo("Measure its quality, and train it:")
    if not is_folder:
        console.echo(f"  convert to-hf {source} PARENT")
    console.echo(f"  uptrain evaluate {written} --teacher {teacher} --data HELD-OUT")
    console.echo(f"  uptrain run {written} --teacher {teacher} --data DATA --alpha A --out RUN")
    rate = "2e-5" if isinstance(plan, LatentPlan) else "5e-5"  # as `uptrain run` advises
    console.echo(
        "  (If `uptrain plan` does not know the model, replace --alpha A by\n"
        f"   --tokens 50M --global-batch-tokens 131072 --lr {rate})"
    )


def _find_obstacle(checkpoint: Checkpoint, geometry: Geometry) -> str | None:
    """Return what a model has, or lacks, that keeps `uptrain evaluate` from it; None if it can be evaluated."""
    obstacles = {
        "a language model that cannot be used alone": not has_language_model(checkpoint.config),
        "an encoder": geometry.family.is_encoder_decoder,
        "ALiBi biases": geometry.alibi,
        "no language-model head": not has_lm_head(checkpoint),
    }
    return next((obstacle for obstacle, found in obstacles.items() if found), None)


def _estimate(checkpoint: Checkpoint, plan: Plan, quiet: bool) -> dict[str, Any]:
    """Return the device, time and disk space of a calibration; announce a slow one."""
    if plan.recipe.text is None:
        return {}
    from convert.estimates.latent import latent_seconds
    from convert.estimates.merge import merge_seconds

    if isinstance(plan, LatentPlan):
        seconds, faster = latent_seconds(checkpoint, plan), "--refine 0 takes less"
    else:
        assert isinstance(plan, MergePlan)
        seconds, faster = merge_seconds(checkpoint, plan), "--method mean takes little longer than copying"
    seconds = round(seconds)
    if not quiet and seconds > SLOW_SECONDS:
        console.echo(
            f"Calibrating takes about {console.format_duration(seconds)} on {plan.recipe.device}; {faster}, but starts "
            "with a higher loss.",
            err=True,
        )
    return {"device": plan.recipe.device, "estimated_calibration_seconds": seconds, "scratch_bytes": plan.scratch_bytes}
