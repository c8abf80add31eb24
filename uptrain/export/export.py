"""Export a training checkpoint as a standard Hugging Face folder, one tensor at a time."""

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint import Array, Checkpoint, Span, TensorInfo
from model.checkpoint.formats.dcp.reader import DistributedFolder
from model.checkpoint.hf_folder import INDEX, list_files, read_config
from model.checkpoint.hub import name_of
from model.checkpoint.latent_norm import WithLatentNorm, read_latent_norm, without_latent_norm
from model.checkpoint.safetensors_writer import DEFAULT_SHARD_SIZE, ShardFile, divide, index_bytes, name_shards
from model.checkpoint.tensor import numpy_dtype
from model.common.console import Advance
from model.common.errors import InputError
from model.common.typed_json import json_bytes
from model.decoder.config import is_native
from model.decoder.loading import check_shapes
from model.decoder.transformers_model import HF_PREFIX
from model.families import our_code
from model.files.names import CHECKPOINTS, CONVERSION_RECORD, METRICS, MODEL_CARD, UPTRAINING_RECORD
from model.files.staging import new_folder
from model.files.write import copy_file, sync_tree, write_file
from model.language_model import InsideWrapper, WithLanguageModel, open_language_model, text_config_key
from uptrain.checkpoints.files import TENSORS, find_damage, input_error_if_removed, list_checkpoints, read_state
from uptrain.export.model_card import model_card
from uptrain.models.load import build_meta_from_config
from uptrain.models.stored_names import stored_names
from uptrain.models.trainable_parts import common_dtype
from uptrain.runs.fingerprints import check_same_frozen
from uptrain.runs.make_folder import refuse_existing
from uptrain.runs.run_folder import MODEL, RUN_STATE, Run, model_folder, read_run_state
from uptrain.runs.settings import Settings
from uptrain.training.loss_module import STUDENT
from uptrain.training.metrics_log import read_metrics

DTYPES = {"bfloat16": "BF16", "float32": "F32"}
_COPY_BYTES = 64 << 20
"""Bytes of a tensor that are in memory at once."""


def export(run_folder: Path, checkpoint: Path, out: Path, dtype: str, advance: Advance) -> dict[str, Any]:
    """Write the model of a run's checkpoint to the folder `out`, atomically; return the content of `uptraining.json`.

    Config, tokenizer and other files are copies of the initial model's, except for the dtype in config.json, the
    README.md, and the modelling code of Groupwise, which is today's. `advance` is called with the number of further
    bytes read, which sum to `stored_size`. Raises InputError if `out` exists, RUN/model is a link out of the run, or
    MODEL's weights are replaced while they are read.
    """
    refuse_existing(out, "choose another OUT")
    run, model = Run.read(run_folder), model_folder(run_folder)
    record = make_record(run, run_folder, checkpoint)
    with _open_weights(run, run_folder, checkpoint) as weights, new_folder(out) as folder:
        _write_weights(weights, folder, dtype, advance)
        if run.settings.trainable != "all" and not _is_unchanged(weights):
            raise InputError(f"{run.settings.model} changed while it was read; export again once nothing writes to it.")
        _write_files(model, folder, record, dtype)
        _check_fit(folder, run_folder)
    return record


def _is_unchanged(weights: Checkpoint) -> bool:
    """Return whether the files of the initial model are those that were opened; one that is missing is not."""
    try:
        return weights.is_unchanged()
    except FileNotFoundError:
        return False


def _check_fit(folder: Path, run_folder: Path) -> None:
    """Raise InputError if config.json does not describe the tensors of an exported folder."""
    try:
        with open_language_model(folder) as checkpoint:
            if is_native(checkpoint.config):
                check_shapes(checkpoint)
            else:
                build_meta_from_config(folder)
    except InputError as error:
        config = run_folder / MODEL / "config.json"
        raise InputError(f"{config} does not describe the checkpoint's model: {error}") from error


def find_checkpoint(run_folder: Path, step: int | None) -> Path:
    """Return the checkpoint of `step`, or the newest, after verifying its files and the frozen tensors in the model's.

    Raises InputError if the folder is no run, the checkpoint is missing or damaged, the model has changed, or the run
    was halted after its newest checkpoint, which then may hold what the halt calls broken, and no step is given.
    """
    run = Run.read(run_folder)
    checkpoints = list_checkpoints(run_folder / CHECKPOINTS)
    halt = find_halt(run_folder)
    if halt is not None and step is None and max(checkpoints, default=-1) != halt["step"]:
        raise InputError(f"{run_folder} was halted after step {halt['step']}: {halt['reason']}")
    if step is not None and step not in checkpoints:
        steps = ", ".join(map(str, checkpoints)) or "none"
        raise InputError(f"{run_folder} has no checkpoint of step {step}; it has those of: {steps}.")
    if not checkpoints:
        resume = f"`uptrain resume {shlex.quote(str(run_folder))}`"
        raise InputError(f"{run_folder} has no checkpoint; {resume} trains on.")
    checkpoint = checkpoints[max(checkpoints) if step is None else step]
    with input_error_if_removed(checkpoint):
        if problem := find_damage(checkpoint):
            others = ", ".join(str(other) for other, path in checkpoints.items() if path != checkpoint)
            advice = f" (there are: {others})" if others else ""
            raise InputError(f"{problem}; choose another checkpoint with --step{advice}.")
    check_same_frozen(run.settings, run.fingerprints)
    return checkpoint


def find_halt(run_folder: Path) -> dict[str, Any] | None:
    """Return the content of run_state.json if the run was halted; None otherwise, or if the file is damaged."""
    try:
        state = read_run_state(run_folder / RUN_STATE)
    except InputError:
        return None
    return state if state.get("status") == "halted" else None


def default_dtype(settings: Settings, run_folder: Path) -> str:
    """Return the dtype of the weights that a run began with, as `--dtype` names it.

    It is that of config.json if MODEL, which a run that trains all of it no longer needs, is gone. A run with `--init`
    has bfloat16. So has one of a float16 MODEL: trained weights may be too large for float16.
    """
    if not settings.model:
        return "bfloat16"
    try:
        with open_language_model(Path(settings.model)) as checkpoint:
            stored = common_dtype(checkpoint.tensors.values())
    except InputError:
        config = read_config(run_folder / MODEL)[1]
        stored = "F32" if "float32" in (config.get("dtype"), config.get("torch_dtype")) else "BF16"
    return "float32" if stored == "F32" else "bfloat16"


def stored_size(run_folder: Path, checkpoint: Path) -> int:
    """Return how many bytes `export` reads."""
    with _open_weights(Run.read(run_folder), run_folder, checkpoint) as weights:
        return sum(tensor.nbytes for tensor in weights.tensors.values())


def exported_size(run_folder: Path, checkpoint: Path, dtype: str) -> int:
    """Return how many bytes of weights `export` writes."""
    with _open_weights(Run.read(run_folder), run_folder, checkpoint) as weights:
        return sum(tensor.nbytes for tensor in _in_dtype(weights, dtype).values())


def _open_weights(run: Run, folder: Path, checkpoint: Path) -> Checkpoint:
    """Open the weights of a checkpoint, together with those that are not trained from the initial model."""
    prefixes = (f"model.{STUDENT}{HF_PREFIX}", f"model.{STUDENT}")
    trained: Checkpoint = DistributedFolder(checkpoint / TENSORS, prefixes, folder / MODEL)
    weights = trained
    if run.settings.trainable != "all":
        model = Path(run.settings.model)
        initial = open_language_model(model)
        weights = _Completed(trained, without_latent_norm(initial), stored_names(model))
        if isinstance(initial, InsideWrapper):
            return WithLanguageModel(weights, initial)
    norm = read_latent_norm(read_config(folder / MODEL)[1])
    return weights if norm is None else WithLatentNorm(weights, norm)


def _outside(source: Checkpoint) -> frozenset[str]:
    """Return the names of the tensors that keep their bytes, because they are not the language model's."""
    return source.outside if isinstance(source, WithLanguageModel) else frozenset()


def _in_dtype(source: Checkpoint, dtype: str) -> dict[str, TensorInfo]:
    """Return the tensors to write: those of the language model in a dtype, and all others as they are."""
    outside = _outside(source)
    return {
        name: tensor if name in outside else replace(tensor, dtype=DTYPES[dtype])
        for name, tensor in source.tensors.items()
    }


class _Completed(Checkpoint):
    """The trained tensors of a training checkpoint, and the other tensors of the initial model, by its names.

    Adapters are added to the tensors that they belong to, in float64.
    """

    def __init__(self, trained: Checkpoint, initial: Checkpoint, names: dict[str, tuple[str, ...]]) -> None:
        self.path, self.format, self.shards = trained.path, trained.format, trained.shards
        self.weight_files, self.opened = initial.weight_files, initial.opened  # those that may change
        self._open = (trained, initial)
        self._places = {
            stored: (trained, name) if name in trained.tensors else (initial, stored)
            for name, all_stored in names.items()
            for stored in all_stored
        }
        self.tensors = {
            stored: replace(source.tensors[name], name=stored) for stored, (source, name) in self._places.items()
        }
        modules = {stored[0]: name.removesuffix("weight") for name, stored in names.items() if len(stored) == 1}
        self._adapters = {
            name: module for name, module in modules.items() if f"{module}lora_A.weight" in trained.tensors
        }
        for name in self._adapters:
            self.tensors[name] = replace(self.tensors[name], dtype="F64")

    def rows(self, name: str, start: int, stop: int) -> Array:
        source, own_name = self._places[name]
        rows = source.rows(own_name, start, stop)
        if name not in self._adapters:
            return rows
        trained, module = self._open[0], self._adapters[name]
        rank = trained.tensors[f"{module}lora_A.weight"].shape[0]
        a_RI = trained.rows(f"{module}lora_A.weight", 0, rank)
        b_OR = trained.rows(f"{module}lora_B.weight", start, stop)
        merged: Array = rows.astype(np.float64) + b_OR.astype(np.float64) @ a_RI.astype(np.float64)
        return merged

    def span(self, name: str) -> Span | None:
        source, own_name = self._places[name]
        if name in self._adapters:
            return None
        return source.span(own_name)

    def close(self) -> None:
        for checkpoint in self._open:
            checkpoint.close()


def make_record(run: Run, run_folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Return the record of a model's training. It holds no paths, so that equal runs have equal records."""
    state = read_state(checkpoint)
    settings = asdict(run.settings)
    settings |= {name: name_of(Path(settings[name])) for name in ("model", "teacher", "teacher_logits")}
    evaluations = [r for r in read_metrics(run_folder / METRICS) if "evaluation" in r and r["step"] <= state["step"]]
    return {
        "schema": 1,
        "step": state["step"],
        "tokens": state["tokens"],
        "skipped_steps": state["skipped"],
        "budget": asdict(run.budget),
        "settings": {k: v for k, v in settings.items() if k not in ("data", "eval_data", "track")},
        "data_sha256": run.cache_sha256,
        "evaluations": [{"step": r["step"], **r["evaluation"]} for r in evaluations],
        "versions": run.versions,
    }


def _write_weights(source: Checkpoint, folder: Path, dtype: str, advance: Advance) -> None:
    tensors, outside = _in_dtype(source, dtype), _outside(source)
    groups = divide(tensors.values(), DEFAULT_SHARD_SIZE)
    shards = name_shards(groups, {})
    for shard, group in zip(shards, groups, strict=True):
        file = ShardFile(folder / shard.name, group, shard.metadata)
        try:
            for tensor in group:
                for start, stop in tensor.row_blocks(_COPY_BYTES):
                    rows = source.rows(tensor.name, start, stop)
                    converted = rows.astype(numpy_dtype(tensor.dtype), copy=False)
                    if tensor.name not in outside and not np.isfinite(converted).all():
                        raise InputError(
                            f"{source.path.parent} holds values in {tensor.name} that are NaN or infinite in {dtype}; "
                            "choose an earlier checkpoint with --step."
                        )
                    file.write_rows(tensor.name, start, converted)
                    advance(rows.nbytes)
            file.finish()
        finally:
            file.close()
    index = index_bytes(shards, tensors)
    if index is not None:
        write_file(folder / INDEX, index)


def _write_files(source: Path, folder: Path, record: dict[str, Any], dtype: str) -> None:
    side_files, _ = list_files(source)
    code = our_code(read_config(source)[1])
    files: dict[str, Path | bytes] = {**side_files, **code, "config.json": config_bytes(source, dtype)}
    files[UPTRAINING_RECORD] = json_bytes(record)
    files[MODEL_CARD] = model_card(source, record)
    if (source / CONVERSION_RECORD).is_file():
        files[CONVERSION_RECORD] = source / CONVERSION_RECORD
    for name, content in files.items():
        copy_file(content, folder / name)
    sync_tree(folder, synced=".safetensors")


def config_bytes(folder: Path, dtype: str) -> bytes:
    """Return config.json unchanged, or with another dtype if it names a different one, or none.

    A wrapper's config names that of its language model too.
    """
    text, config = read_config(folder)
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    changed = config | dict.fromkeys(keys, dtype)
    inner = text_config_key(config)
    if inner is not None:
        named = [key for key in ("dtype", "torch_dtype") if key in config[inner]]
        changed[inner] = config[inner] | dict.fromkeys(named, dtype)
    return text if changed == config else json_bytes(changed)
