"""`--method auto`: try some ways to merge on a part of the calibration text; take what predicts the rest best."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from convert.calibration.layer_stream import Layer, Progress, iter_layers, last_states
from convert.calibration.solve import calibrate_layers
from convert.calibration.text import CalibrationText
from convert.merging.layer import LayerMerge, load_layer
from convert.merging.methods import LAYER_METHODS
from convert.planning.plan import make_plan
from convert.planning.recipe import Recipe
from model.checkpoint import Checkpoint
from model.common.errors import CheckpointError
from model.common.staging import Staging
from model.decoder.config import read_llama_config
from model.decoder.llama import RMSNorm
from model.decoder.loading import load_head, load_last_norm
from model.decoder.losses import chunked_cross_entropy

TOKENS = 16_384
"""Of the calibration text, or all where it is shorter."""
HELD_OUT = 4
"""The share that scores: one of so many windows."""
MIN_WINDOWS = 5
"""Windows: one that scores, and of those to merge by, one on which solutions are compared."""
_BATCH = 4


@dataclass(frozen=True)
class AutoResult:
    """The best way to merge, and the loss that each had on held-out windows, in nats per token."""

    recipe: Recipe
    losses: dict[str, float]


def candidates(recipe: Recipe, can_group: bool) -> dict[str, Recipe]:
    """Return what `auto` tries, by name. Which heads share a group matters where there are several and not all."""
    found = {method: replace(recipe, method=method, refit=recipe.refit or method == "fit") for method in LAYER_METHODS}
    if can_group and recipe.grouping != "similar":
        found["fit, similar heads grouped"] = replace(found["fit"], grouping="similar")
    return found


def choose(
    checkpoint: Checkpoint, n_kv_heads: int, tried: dict[str, Recipe], staging: Staging, progress: Progress
) -> AutoResult:  # fmt: skip
    """Return the best of some recipes that share a calibration text. Progress counts tokens, `work` of them.

    What was killed goes on where it was: the staging area keeps the losses found, and the layers merged.
    """
    fitting, scoring = divided(_sample(tried))
    for name, recipe in tried.items():
        if name in staging.finished:
            progress(work(checkpoint, {name: recipe}))
            continue
        scratch = staging.scratch / name
        merges = make_plan(checkpoint, n_kv_heads, replace(recipe, sample=fitting), None).layers
        calibrate_layers(checkpoint, merges, fitting, scratch / "merged", progress)
        staging.record(name, score(checkpoint, merges, scratch / "merged", scoring, scratch, progress))
        shutil.rmtree(scratch)
    losses = {name: staging.finished[name] for name in tried}
    return AutoResult(tried[min(losses, key=losses.__getitem__)], losses)


def check_can_score(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where the checkpoint has no head."""
    load_head(checkpoint, read_llama_config(checkpoint.config))


def work(checkpoint: Checkpoint, tried: dict[str, Recipe]) -> int:
    """Return how many tokens pass through layers in all."""
    n_layers = read_llama_config(checkpoint.config).n_layers
    return len(tried) * n_layers * sum(part.n_tokens for part in divided(_sample(tried)))


def _sample(tried: dict[str, Recipe]) -> CalibrationText:
    sample = next(iter(tried.values())).sample
    assert sample is not None
    return sample


def part_tried(sample: CalibrationText) -> CalibrationText:
    """Return the windows that candidates are tried on. Raises CheckpointError where there are too few."""
    if sample.n_windows < MIN_WINDOWS:
        raise CheckpointError(
            f"--method auto needs {MIN_WINDOWS} windows of {sample.window} tokens to compare by; "
            f"give --calibration-tokens {MIN_WINDOWS * sample.window} or more."
        )
    n_windows = min(sample.n_windows, max(MIN_WINDOWS, TOKENS // sample.window))
    return replace(sample, n_windows=n_windows, ids_NT=None if sample.ids_NT is None else sample.ids_NT[:n_windows])


def divided(sample: CalibrationText) -> tuple[CalibrationText, CalibrationText]:
    """Return the windows to merge by, and those to score on."""
    ids_NT = part_tried(sample).ids_NT
    assert ids_NT is not None
    held_N = np.arange(len(ids_NT)) % HELD_OUT == HELD_OUT - 1
    parts = (ids_NT[~held_N], ids_NT[held_N])
    first, second = (replace(sample, n_windows=len(part), ids_NT=part) for part in parts)
    return first, second


@torch.inference_mode()
def score(
    checkpoint: Checkpoint,
    merges: list[LayerMerge],
    merged: Path,
    sample: CalibrationText,
    scratch: Path,
    progress: Progress,
) -> float:
    """Return the loss of the model with its merged layers, in nats per token."""
    for layer in iter_layers(checkpoint, sample, scratch, progress):
        _put(layer, checkpoint, merges[layer.index], merged)
        layer.attend(lambda heads: None)
    config = read_llama_config(checkpoint.config)
    norm, head_VM = load_last_norm(checkpoint, config), load_head(checkpoint, config).float()
    return _loss(np.load(last_states(checkpoint, scratch), mmap_mode="r", allow_pickle=False), norm, head_VM, sample)


def _put(layer: Layer, checkpoint: Checkpoint, merge: LayerMerge, merged: Path) -> None:
    """Give a block its merged weights."""
    tensors = load_layer(checkpoint, merge, merged).tensors
    for name, values in tensors.items():
        *_, part, leaf = name.split(".")
        parameter = nn.Parameter(torch.from_numpy(values.astype(np.float32)))
        setattr(layer.block.self_attn.get_submodule(part), leaf, parameter)


def _loss(states_NTM: np.ndarray, norm: RMSNorm, head_VM: torch.Tensor, sample: CalibrationText) -> float:
    assert sample.ids_NT is not None
    total = n = 0.0
    for start in range(0, len(states_NTM), _BATCH):
        rows = slice(start, start + _BATCH)
        hidden_BTM = norm(torch.from_numpy(states_NTM[rows].copy()))
        targets_BT = torch.from_numpy(sample.ids_NT[rows])[:, 1:]
        loss, count = chunked_cross_entropy(hidden_BTM[:, :-1].flatten(0, 1), head_VM, targets_BT.flatten())
        total, n = total + float(loss), n + int(count)
    return total / n
