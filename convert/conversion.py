"""Run a conversion: check the target, calibrate, write, publish."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from convert.calibration_text.read import pack
from convert.output.groupwise_json import build_record, earlier_conversion
from convert.output.model_card import model_card
from convert.output.side_files import copied_files
from convert.output.write_shards import total_bytes, write_shards
from convert.planning.latent_plan import LatentPlan
from convert.planning.make_plan import make_plan
from convert.planning.plan import Plan, fingerprint
from model.checkpoint import Checkpoint
from model.checkpoint.hf_folder import (
    INDEX,
    MODEL_FILES,
    OWN_FILES,
    SKIPPED_FOLDERS,
    WEIGHTS,
    is_uptrain_output,
    json_text,
)
from model.checkpoint.hub import origin_of
from model.checkpoint.safetensors_writer import index_text
from model.common import console
from model.common.errors import CheckpointError, InputError, RunError, prefix_path
from model.common.file_names import CALIBRATION_TOKENS, CONVERSION_RECORD, MODEL_CARD
from model.common.files import check_name, copy_file, lies_in, sync_tree, tree_bytes
from model.common.staging import AREAS, Staging, check_out, check_room

POSITIONS = "positions of the rotated key"
"""The journal's name for the chosen positions."""
SPARE_BYTES = 16 << 20
"""Reserved disk space for files that are not counted: config, journal, folders."""


def staging_for(checkpoint: Checkpoint, out: Path, overwrite: bool) -> Staging:
    """Return the staging area for OUT. Raises CheckpointError if a conversion must not or cannot write there."""
    source = checkpoint.path.resolve()
    check_name(Path(source.name), "SOURCE")
    check_out(out)
    out = out.resolve()
    if out.is_mount():
        raise CheckpointError(f"OUT ({out}) is a mount point, which cannot be replaced; name a folder inside it.")
    if lies_in(out, source):
        raise CheckpointError(f"OUT ({out}) is SOURCE or lies inside it; choose a folder elsewhere.")
    inputs = [source, checkpoint.config_folder.resolve(), *(path.resolve() for path in checkpoint.weight_files)]
    if any(lies_in(path, folder) for path in inputs for folder in (out, Staging(out).root)):
        raise CheckpointError(f"OUT ({out}) holds files of SOURCE, which replacing it would destroy; choose another.")
    if out.exists() and not overwrite:
        raise CheckpointError(f"OUT ({out}) exists; choose another name, or add --overwrite to replace it.")
    if out.exists() and not _is_replaceable(out):
        other = _other_files(out) if out.is_dir() else []
        named = f"; here: {other[0]}" if other else ""
        raise CheckpointError(
            f"OUT ({out}) is not a checkpoint folder, or holds more (such as .git or a training run{named}), "
            "so --overwrite will not replace it."
        )
    folder = _nearest_folder(out)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} cannot be written to; choose another OUT.")
    earlier_conversion(checkpoint)  # its record goes into that of this conversion
    return Staging(out, _is_replaceable if overwrite else None)


def _nearest_folder(out: Path) -> Path:
    """Return the nearest parent of OUT that exists."""
    return next(parent for parent in out.parents if parent.exists())


def _is_replaceable(out: Path) -> bool:
    """Return whether OUT is an empty folder, or a checkpoint that holds no other work."""
    if not out.is_dir():
        return False
    if not any(out.iterdir()):
        return True
    is_checkpoint = (out / "config.json").is_file() and any(out.glob("*.safetensors"))
    return is_checkpoint and not _holds_other_work(out)


def _holds_other_work(folder: Path) -> bool:
    """Return whether a folder holds what no conversion writes: version control, training runs, staging areas."""
    return (
        any(fnmatch(path.name, pattern) for path in folder.iterdir() for pattern in SKIPPED_FOLDERS)
        or any(folder.rglob("run.json"))  # of `uptrain run`, with its checkpoints
        or any(folder.rglob(AREAS))
        or any(path.is_dir() and is_uptrain_output(path) for path in folder.rglob("*"))
        or bool(_other_files(folder))
    )


def _other_files(folder: Path) -> list[str]:
    """Return weights in subfolders and, without a groupwise.json, files that belong to no model.

    A conversion copies whatever lies beside the source's weights, so its own output may hold any file.
    """
    is_output = (folder / CONVERSION_RECORD).is_file()
    patterns = (*WEIGHTS, "*.index.json", *MODEL_FILES, "*.json", ".gitattributes", "*.jinja")
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and (
            (path.parent != folder and any(fnmatch(path.name, pattern) for pattern in WEIGHTS))
            or (not is_output and not any(fnmatch(path.name, pattern) for pattern in patterns))
        )
    ]


def check_disk_space(plan: Plan, checkpoint: Checkpoint, staging: Staging) -> None:
    """Raise CheckpointError if the bytes still to be written do not fit on the disk."""
    present = tree_bytes(staging.root)
    sizes = (c.stat().st_size if isinstance(c, Path) else len(c) for c in checkpoint.side_files.values())
    needed = plan.output_bytes + plan.scratch_bytes + sum(sizes) + SPARE_BYTES - present
    check_room(staging.out, needed)


def run(checkpoint: Checkpoint, plan: Plan, staging: Staging, workers: int, quiet: bool) -> tuple[Plan, dict[str, Any]]:
    """Convert `checkpoint` into the folder of `staging`, atomically; return the final plan, and `groupwise.json`.

    A killed run resumes. Raises CheckpointError for an error that the user can correct, after removing the staging
    area. Raises OSError if reading or writing fails midway; the staging area stays for the next run.
    """
    check_disk_space(plan, checkpoint, staging)
    _check_side_files(checkpoint, plan)  # raises what is wrong with them before hours of calibration
    with _resumable(staging, fingerprint(checkpoint, plan)), prefix_path(checkpoint.config_folder):
        _check_unchanged(checkpoint)
        plan = _with_generated_text(checkpoint, plan, staging, quiet)
        plan = _with_positions(checkpoint, plan, staging, quiet)
        notes = plan.calibrate(checkpoint, staging.scratch, quiet)
        plan = replace(plan, notes=(*plan.notes, *notes))
        with console.progress_bar("Converting", total_bytes(checkpoint, plan), quiet) as progress:
            write_shards(checkpoint, plan, staging, workers, progress)
        _check_unchanged(checkpoint)
        record = _write_side_files(checkpoint, plan, staging)
        staging.publish()
    return plan, record


def _check_unchanged(checkpoint: Checkpoint) -> None:
    if not checkpoint.is_unchanged():
        raise CheckpointError(f"{checkpoint.path} changed while it was read; convert again once nothing writes to it.")


@contextmanager
def _resumable(staging: Staging, fingerprint_sha256: str) -> Iterator[None]:
    """Open a staging area, with its finished parts from an earlier run. Remove it if the input is the error."""
    advice = f"finished work is kept in {staging.root}, and the same command continues from there"
    with staging:
        try:
            staging.open(fingerprint_sha256)
            yield
        except (OSError, RunError) as error:
            kind = OSError if isinstance(error, OSError) else RunError
            raise kind(f"{error}; {advice}.") from error
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(advice) from error
        except InputError:
            staging.discard()
            raise


def _with_generated_text(checkpoint: Checkpoint, plan: Plan, staging: Staging, quiet: bool) -> Plan:
    """Return the plan with all windows of its calibration text. The model writes its own windows, if any."""
    text = plan.recipe.text
    if text is None or text.ids_NT is not None or not plan.conversions:
        return plan
    from convert.calibration.generated_text import TextGeneration  # imported here, because it needs torch

    generated = TextGeneration.of(checkpoint, text, plan.recipe.seed, plan.recipe.device)
    with console.progress_bar("Writing text", generated.n_tokens, quiet, unit="tokens") as progress:
        generated_NT = generated.write(staging.scratch / "generated-text", progress)
    recipe = replace(plan.recipe, text=text.with_generated(generated_NT))
    return make_plan(checkpoint, plan.n_kv_heads, recipe, plan.max_shard_size)


def _with_positions(checkpoint: Checkpoint, plan: Plan, staging: Staging, quiet: bool) -> Plan:
    """Return a plan of latent attention with the frequencies of its rotated key, which are chosen on a text."""
    if not isinstance(plan, LatentPlan) or plan.recipe.positions is not None:
        return plan
    from convert.calibration.latent_survey import choose_positions, survey_text  # imported here: it needs torch

    if POSITIONS not in staging.finished:
        assert plan.recipe.text is not None
        text, folder = survey_text(plan.recipe.text), staging.scratch / "survey"
        shutil.rmtree(folder, ignore_errors=True)  # of a killed run
        total = len(plan.conversions) * text.n_tokens
        with console.progress_bar("Choosing frequencies", total, quiet, unit="tokens x layers") as progress:
            positions = choose_positions(checkpoint, plan.conversions, text, folder, progress)
        shutil.rmtree(folder)
        staging.record(POSITIONS, positions)
    recipe = replace(plan.recipe, positions=tuple(staging.finished[POSITIONS]))
    return make_plan(checkpoint, plan.n_kv_heads, recipe, plan.max_shard_size)


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
    index, text = index_text(plan.shards, plan.tensors), plan.recipe.text
    files: dict[str, Path | bytes] = {
        **copied_files(checkpoint, plan),
        "config.json": plan.config_json,
        **({} if index is None else {INDEX: index}),
        **({} if text is None else {CALIBRATION_TOKENS: pack(text)}),
        CONVERSION_RECORD: json_text(record),
        MODEL_CARD: model_card(checkpoint, plan, origin_of(checkpoint.path)),
    }
    for name, content in files.items():
        copy_file(content, folder / name)
    staging.keep_only([*files, *(shard.name for shard in plan.shards)])  # an earlier run may have left other files
    sync_tree(folder, synced=".safetensors")
    return record
