"""Run a conversion: check the disk space, calibrate, write, publish."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from convert.calibration_text.read import stored_tokens
from convert.output.groupwise_json import build_record
from convert.output.model_card import model_card
from convert.output.side_files import copied_files
from convert.output.write_shards import total_bytes, write_shards
from convert.planning.latent_plan import LatentPlan
from convert.planning.make_plan import make_plan
from convert.planning.plan import Plan, inputs_of
from model.checkpoint import Checkpoint
from model.checkpoint.hf_folder import INDEX, OWN_FILES
from model.checkpoint.hub import origin_of
from model.checkpoint.safetensors_writer import index_bytes
from model.common import console
from model.common.errors import CheckpointError, InputError, RunError, prefix_path
from model.common.typed_json import json_bytes
from model.files.names import CALIBRATION_TOKENS, CONVERSION_RECORD, MODEL_CARD
from model.files.staging import Staging, check_room
from model.files.write import copy_file, sync_tree, tree_bytes

PAIR_INDICES = "pair indices of the rotated key"
"""The journal's name for the pair indices of the rotated key's channels."""
FINISHED_FILES = ("*.npz", "*.ids")
"""Patterns of finished pieces in the scratch folder: layers, and windows that the model wrote."""
SPARE_BYTES = 16 << 20
"""Reserved disk space for files that are not counted: config, journal, folders."""


def check(plan: Plan, checkpoint: Checkpoint, staging: Staging) -> None:
    """Raise CheckpointError if `run` would refuse the disk or the finished work of another command."""
    check_disk_space(plan, checkpoint, staging)
    staging.check_inputs(inputs_of(checkpoint, plan), FINISHED_FILES)


def check_disk_space(plan: Plan, checkpoint: Checkpoint, staging: Staging) -> None:
    """Raise CheckpointError if the bytes still to be written do not fit on the disk."""
    present = tree_bytes(staging.root)
    sizes = (c.stat().st_size if isinstance(c, Path) else len(c) for c in checkpoint.side_files.values())
    needed = plan.output_bytes + plan.scratch_bytes + sum(sizes) + SPARE_BYTES - present
    check_room(staging.out, needed)


def run(checkpoint: Checkpoint, plan: Plan, staging: Staging, workers: int, quiet: bool) -> tuple[Plan, dict[str, Any]]:
    """Convert `checkpoint` into the folder of `staging`, atomically; return the final plan, and `groupwise.json`.

    A killed run resumes. Raises CheckpointError for an error that the user can correct, after removing the staging
    area. Raises OSError if reading or writing fails midway; the staging area stays for the next run if a piece is
    finished.
    """
    check_disk_space(plan, checkpoint, staging)
    if plan.recipe.text is not None and plan.conversions:
        # An interrupt during an import removes nothing (`model.common.interrupts`), so torch is imported before there
        # is a staging area.
        import_module("convert.calibration.calibrate")
    _check_side_files(checkpoint, plan)  # raises what is wrong with them before hours of calibration
    with _resumable(staging, inputs_of(checkpoint, plan)), prefix_path(checkpoint.config_folder):
        _check_unchanged(checkpoint)
        plan = _with_generated_text(checkpoint, plan, staging, quiet)
        plan = _with_pair_indices(checkpoint, plan, staging, quiet)
        notes = _calibrate(checkpoint, plan, staging, quiet)
        with console.progress_bar("Converting", total_bytes(checkpoint, plan), quiet) as progress:
            write_shards(checkpoint, plan, staging, workers, progress)
        _check_unchanged(checkpoint)
        record = _write_side_files(checkpoint, plan, staging)  # without `notes`, which verifying may not find again
        staging.publish()
    return replace(plan, notes=(*plan.notes, *notes)), record


def _check_unchanged(checkpoint: Checkpoint) -> None:
    if not checkpoint.is_unchanged():
        raise CheckpointError(f"{checkpoint.path} changed while it was read; convert again once nothing writes to it.")


@contextmanager
def _resumable(staging: Staging, inputs: Mapping[str, object]) -> Iterator[None]:
    """Open a staging area, with its finished parts from an earlier run.

    Remove it if the input is the error, or if nothing is finished when another error or an interrupt ends the run.
    """

    def advice() -> str:
        if not staging.holds_finished_work:
            with suppress(OSError, CheckpointError, RunError):
                staging.discard()
            return "nothing is finished yet, and the same command starts again"
        return f"finished work is kept in {staging.root}, and the same command continues from there"

    with staging:
        staging.open(inputs, FINISHED_FILES)
        try:
            yield
        except (OSError, RunError) as error:
            kind = OSError if isinstance(error, OSError) else RunError
            raise kind(f"{str(error).rstrip('.')}; {advice()}.") from error
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(advice()) from error
        except InputError:
            with suppress(RunError):  # the area is another's now
                staging.discard()
            raise


def _with_generated_text(checkpoint: Checkpoint, plan: Plan, staging: Staging, quiet: bool) -> Plan:
    """Return the plan with all windows of its calibration text. The model generates its own windows, if any."""
    text = plan.recipe.text
    if text is None or text.ids_NT is not None or not plan.conversions:
        return plan
    from convert.calibration.generated_text import TextGeneration  # imported here, because it needs torch

    generated = TextGeneration.of(checkpoint, text, plan.recipe.seed, plan.recipe.device)
    with console.progress_bar("Generating text", generated.n_tokens, quiet, unit="tokens") as progress:
        generated_NT = generated.generate(staging.scratch / "generated-text", progress)
    recipe = replace(plan.recipe, text=text.with_generated(generated_NT))
    return make_plan(checkpoint, plan.n_kv_heads, recipe, plan.max_shard_size)


def _with_pair_indices(checkpoint: Checkpoint, plan: Plan, staging: Staging, quiet: bool) -> Plan:
    """Return a plan of latent attention with the frequencies of its rotated key, which are chosen on a text."""
    if not isinstance(plan, LatentPlan) or plan.recipe.pair_indices is not None:
        return plan
    from convert.calibration.latent_survey import choose_pair_indices, survey_text  # imported here: it needs torch

    if PAIR_INDICES not in staging.finished:
        assert plan.recipe.text is not None
        text, folder = survey_text(plan.recipe.text), staging.scratch / "survey"
        shutil.rmtree(folder, ignore_errors=True)  # of a killed run
        total = len(plan.conversions) * text.n_tokens
        with console.progress_bar("Choosing frequencies", total, quiet, unit="tokens x layers") as progress:
            pair_indices = choose_pair_indices(checkpoint, plan.conversions, text, folder, progress)
        shutil.rmtree(folder)
        staging.record(PAIR_INDICES, pair_indices)
    recipe = plan.recipe.with_pair_indices(plan.conversions[0].source_rope, tuple(staging.finished[PAIR_INDICES]))
    return make_plan(checkpoint, plan.n_kv_heads, recipe, plan.max_shard_size)


def _calibrate(checkpoint: Checkpoint, plan: Plan, staging: Staging, quiet: bool) -> tuple[str, ...]:
    """Write the layers that a text converts into the scratch folder. Return notes on the result."""
    if plan.recipe.text is None or not plan.conversions:
        return ()
    from convert.calibration.calibrate import calibrate  # imported here, because it needs torch

    return calibrate(checkpoint, plan.conversions, staging.scratch, quiet)


def _check_side_files(checkpoint: Checkpoint, plan: Plan) -> None:
    """Raise CheckpointError for files of the source that cannot be copied, or lie where another file is written."""
    copied = copied_files(checkpoint, plan)
    model_card(checkpoint, plan, origin_of(checkpoint.path))
    written = {*copied, *OWN_FILES, INDEX, MODEL_CARD, *(shard.name for shard in plan.shards)}
    for name in copied:
        for folder in PurePosixPath(name).parents:
            if str(folder) in written:
                raise CheckpointError(
                    f"{checkpoint.config_folder / folder} is a folder, but OUT has a file of that name; rename it or "
                    "move it away."
                )


def _write_side_files(checkpoint: Checkpoint, plan: Plan, staging: Staging) -> dict[str, Any]:
    """Write every file except the weights; return the content of `groupwise.json`."""
    folder = staging.folder
    record = build_record(checkpoint, plan, staging)
    index, text = index_bytes(plan.shards, plan.tensors), plan.recipe.text
    files: dict[str, Path | bytes] = {
        **copied_files(checkpoint, plan),
        "config.json": plan.config_json,
        **({} if index is None else {INDEX: index}),
        **({} if text is None else {CALIBRATION_TOKENS: stored_tokens(text)}),
        CONVERSION_RECORD: json_bytes(record),
        MODEL_CARD: model_card(checkpoint, plan, origin_of(checkpoint.path)),
    }
    for name, content in files.items():
        copy_file(content, folder / name)
    staging.keep_only([*files, *(shard.name for shard in plan.shards)])  # an earlier run may have left other files
    sync_tree(folder, synced=".safetensors")
    return record
