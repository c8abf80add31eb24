"""Extend a run: make a longer one that resumes at the last checkpoint whose learning rates both share."""

from dataclasses import replace
from pathlib import Path

from model.checkpoint.formats.dcp.metadata import METADATA, read_metadata
from model.checkpoint.hf_folder import read_config
from model.common.errors import InputError
from model.files.names import CHECKPOINTS, METRICS
from model.files.paths import check_name, refuse_inside
from model.files.write import copy_file
from uptrain.budget.budget import BudgetOptions, check_repetition, steps_of
from uptrain.checkpoints.files import (
    MANIFEST,
    TENSORS,
    find_damage,
    folder_name,
    input_error_if_removed,
    list_checkpoints,
    read_manifest,
)
from uptrain.data.token_cache import TokenCache
from uptrain.runs.checks import epochs_of
from uptrain.runs.fingerprints import check_same, check_same_data
from uptrain.runs.make_folder import make_folder, refuse_existing
from uptrain.runs.resolve_settings import find_data
from uptrain.runs.run_folder import Run, model_folder
from uptrain.training.learning_rate import EXTENDABLE, decay_start
from uptrain.training.metrics_log import read_metrics, write_metrics


def extended_steps(run: Run, wanted: BudgetOptions) -> int:
    """Return the number of steps of the longer run; α refers to the same original."""
    planned = run.budget
    if wanted.alpha is not None and planned.original_tokens is None:
        raise InputError("how many tokens the original was pre-trained on is not known; give --tokens or --steps.")
    total = steps_of(wanted, planned.original_tokens, planned.global_batch_tokens)
    if total <= run.settings.steps:
        raise InputError(f"the run has {run.settings.steps} steps already; {total} would not extend it.")
    return total


def extend(folder: Path, out: Path, steps: int, wanted: BudgetOptions) -> None:
    """Make the folder of a longer run, with the checkpoint that it resumes at and the metrics up to there.

    `wanted`: what `steps` was computed from. Raises InputError if data, teacher or frozen tensors are not those that
    the run began with, if the data would be read too often, or if RUN/model is a link out of the run;
    CheckpointError if it has no valid config.json.
    """
    run, model = Run.read(folder), model_folder(folder)
    check_name(folder.resolve(), "RUN")
    refuse_existing(out)
    refuse_inside(out, folder, *(Path(model) for model in (run.settings.model, run.settings.teacher) if model))
    branch = branch_step(folder, run)
    source = folder / CHECKPOINTS / folder_name(branch)
    with input_error_if_removed(source):
        if problem := find_damage(source):
            raise InputError(f"the checkpoint to continue from is damaged: {problem}.")
        if not (source / TENSORS / METADATA).is_file():
            raise InputError(f"the checkpoint to continue from is damaged: it has no {TENSORS}/{METADATA}.")
        read_metadata(source / TENSORS / METADATA)
    longer = find_data(replace(run.settings, steps=steps), folder)
    first_decay = decay_start(longer.lr_schedule)
    assert first_decay is None or first_decay >= branch
    check_same_data(run, longer.data)
    check_same(longer, run.fingerprints, with_model=False)
    epochs = epochs_of(longer, TokenCache.open(Path(longer.data)))
    check_repetition(wanted, steps, epochs, "an extended run keeps its data, so extend it by less")
    parent = {"run": str(folder.resolve()), "step": branch}
    tokens = steps * run.budget.global_batch_tokens
    alpha = tokens / run.budget.original_tokens if run.budget.original_tokens else None
    budget = replace(run.budget, steps=steps, tokens=tokens, alpha=alpha)

    def fill(unfinished: Path) -> None:
        for name in (MANIFEST, *read_manifest(source)):
            copy_file(source / name, unfinished / CHECKPOINTS / source.name / name)
        records = [record for record in read_metrics(folder / METRICS) if record["step"] <= branch]
        write_metrics(unfinished / METRICS, records)

    read_config(model)  # before anything is written
    with input_error_if_removed(source):
        make_folder(longer, budget, run.fingerprints, model, out, parent, fill)


def branch_step(folder: Path, run: Run) -> int:
    """Return the step to extend a run from: its last checkpoint that the longer run would share."""
    schedule = run.settings.lr_schedule
    if schedule.kind not in EXTENDABLE:
        raise InputError(
            f"{folder} has a {schedule.kind} schedule, whose every step depends on its length; it cannot be extended. "
            "Start a new run, with --schedule wsd to extend it later."
        )
    decay = decay_start(schedule)
    usable = [step for step in list_checkpoints(folder / CHECKPOINTS) if decay is None or step <= decay]
    if not usable:
        raise InputError(f"{folder} has no checkpoint from before its learning rate decays; `uptrain resume` it first.")
    return max(usable)
