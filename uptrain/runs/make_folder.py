"""Make the folder of a new run, atomically. Needs no torch."""

import os
import shlex
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from model.checkpoint.hf_folder import list_files
from model.common.errors import InputError
from model.common.typed_json import json_bytes
from model.files.names import CONVERSION_RECORD, MODEL_CARD, RUN_JSON
from model.files.staging import check_out, new_folder
from model.files.write import copy_file, sync_tree, write_file
from uptrain.budget.budget import Budget
from uptrain.data.token_cache import TokenCache
from uptrain.runs.run_folder import MODEL, RUN_STATE, Run, read_run_state
from uptrain.runs.settings import Settings


def make_folder(
    settings: Settings,
    budget: Budget,
    fingerprints: dict[str, str],
    config_folder: Path,
    out: Path,
    parent: dict[str, Any] | None = None,
    fill: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write a run's folder atomically; `fill` may add files before it is published."""
    refuse_existing(out)
    side_files, _ = list_files(config_folder)
    files = {**side_files, "config.json": config_folder / "config.json"}
    record = config_folder / CONVERSION_RECORD
    if not settings.model:  # random weights: what the folder says of its own does not apply
        files.pop(MODEL_CARD, None)
    elif record.is_file():
        files[record.name] = record
    run = Run(
        settings=settings,
        budget=budget,
        cache_sha256=TokenCache.open(Path(settings.data)).manifest.sha256,
        identities=fingerprints,
        versions={name: version(name) for name in ("groupwise", "torch", "accelerate", "transformers")},
        parent=parent,
    )
    with new_folder(out.resolve()) as folder:
        for name, content in files.items():
            copy_file(content, folder / MODEL / name)
        fill(folder)
        write_file(folder / RUN_JSON, json_bytes(asdict(run)))
        sync_tree(folder)


def refuse_existing(out: Path, advice: str = "choose another --out") -> None:
    """Raise InputError if `out` exists or cannot be created."""
    check_out(out)
    if out.exists():
        raise InputError(f"{out} exists already; {_continuing(out) if (out / RUN_JSON).exists() else advice}.")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder} cannot be written to; {advice}.")


def _continuing(run: Path) -> str:
    """Return how to go on with an existing run."""
    quoted = shlex.quote(str(run))
    if read_run_state(run / RUN_STATE).get("status") != "finished":
        return f"`uptrain resume {quoted}` continues it"
    return (
        f"the run is finished: `uptrain export {quoted} FOLDER` writes its model, and `uptrain extend {quoted} --out "
        "RUN2 --steps N` trains it for longer"
    )
