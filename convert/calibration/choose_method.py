"""Choose the recipe for `--method auto`: merge by each candidate on one part of the text, and score it on the rest."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from convert.calibration.layer_stream import Layer, Progress, iter_layers, last_states
from convert.calibration.native_layers import NativeLayer
from convert.calibration.refit_output import is_held_out
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
from model.decoder.devices import faster_products, naming_lack_of_memory
from model.decoder.llama import RMSNorm
from model.decoder.loading import load_head, load_last_norm
from model.decoder.losses import chunked_cross_entropy

TOKENS = 16_384
"""Tokens of the calibration text that candidates are tried on; the whole text where it is shorter."""
MIN_WINDOWS = 5
"""Minimum windows: one scores; of the rest one is held out."""
_BATCH = 4


@dataclass(frozen=True)
class AutoResult:
    """The recipe with the lowest loss, and the held-out loss of each candidate in nats per token."""

    recipe: Recipe
    losses: dict[str, float]


def candidates(recipe: Recipe, can_group: bool) -> dict[str, Recipe]:
    """Return the recipes that `auto` tries, by name.

    `can_group` says that grouping matters, as it does only with several groups of several heads.
    """
    recipes = {
        method: replace(recipe, method=method, refit=recipe.refit or method == "fit") for method in LAYER_METHODS
    }
    if can_group and recipe.grouping != "similar":
        recipes["fit, similar heads grouped"] = replace(recipes["fit"], grouping="similar")
    return recipes


def choose(
    checkpoint: Checkpoint, n_kv_heads: int, tried: dict[str, Recipe], staging: Staging, progress: Progress
) -> AutoResult:  # fmt: skip
    """Return the recipe with the lowest loss. All recipes share one calibration text.

    `progress` counts tokens, `work` of them in all. A killed run resumes: the staging area stores the losses measured
    and the layers merged so far.
    """
    fitting, scoring = divided(_shared_text(tried))
    for name, recipe in tried.items():
        if name in staging.finished:
            progress(work(checkpoint, {name: recipe}))
            continue
        scratch = staging.scratch / name
        merges = make_plan(checkpoint, n_kv_heads, replace(recipe, text=fitting), None).layers
        calibrate_layers(checkpoint, merges, fitting, scratch / "merged", progress)
        staging.record(name, score(checkpoint, merges, scratch / "merged", scoring, scratch, progress))
        shutil.rmtree(scratch)
    losses = {name: staging.finished[name] for name in tried}
    return AutoResult(tried[min(losses, key=losses.__getitem__)], losses)


def check_can_score(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the checkpoint has no output head."""
    load_head(checkpoint, read_llama_config(checkpoint.config))


def work(checkpoint: Checkpoint, tried: dict[str, Recipe]) -> int:
    """Return the tokens × layers that `choose` runs."""
    n_layers = read_llama_config(checkpoint.config).n_layers
    return len(tried) * n_layers * sum(part.n_tokens for part in divided(_shared_text(tried)))


def _shared_text(tried: dict[str, Recipe]) -> CalibrationText:
    text = next(iter(tried.values())).text
    assert text is not None
    return text


def part_tried(text: CalibrationText) -> CalibrationText:
    """Return the windows that candidates are tried on. Raises CheckpointError if there are fewer than MIN_WINDOWS."""
    if text.n_windows < MIN_WINDOWS:
        raise CheckpointError(
            f"--method auto needs {MIN_WINDOWS} windows of {text.window} tokens to compare by; "
            f"give --calibration-tokens {MIN_WINDOWS * text.window} or more."
        )
    n_windows = min(text.n_windows, max(MIN_WINDOWS, TOKENS // text.window))
    return replace(text, n_windows=n_windows, ids_NT=None if text.ids_NT is None else text.ids_NT[:n_windows])


def divided(text: CalibrationText) -> tuple[CalibrationText, CalibrationText]:
    """Return the windows to merge by, and the held-out windows to score on."""
    ids_NT = part_tried(text).ids_NT
    assert ids_NT is not None
    held_N = np.array([is_held_out(window) for window in range(len(ids_NT))])
    parts = (ids_NT[~held_N], ids_NT[held_N])
    fitting, scoring = (replace(text, n_windows=len(part), ids_NT=part) for part in parts)
    return fitting, scoring


@torch.inference_mode()
def score(
    checkpoint: Checkpoint,
    merges: list[LayerMerge],
    merged: Path,
    text: CalibrationText,
    scratch: Path,
    progress: Progress,
) -> float:
    """Return the loss of the model with its merged layers on a text, in nats per token."""
    device = merges[0].recipe.device
    with naming_lack_of_memory(device), faster_products(device):
        for layer in iter_layers(checkpoint, text, scratch, progress, device):
            _load_merged(layer, checkpoint, merges[layer.index], merged)
            layer.run(lambda heads: None)
    config = read_llama_config(checkpoint.config)
    norm, head_VM = load_last_norm(checkpoint, config).to(device), load_head(checkpoint, config).float().to(device)
    return _loss(np.load(last_states(scratch), mmap_mode="r", allow_pickle=False), norm, head_VM, text)


def _load_merged(layer: Layer, checkpoint: Checkpoint, merge: LayerMerge, merged: Path) -> None:
    """Replace the weights of a layer's attention by the merged ones."""
    assert isinstance(layer.module, NativeLayer)
    tensors = load_layer(checkpoint, merge, merged).tensors
    for name, values in tensors.items():
        *_, part, leaf = name.split(".")
        parameter = nn.Parameter(layer.on_device(values.astype(np.float32)))
        setattr(layer.module.block.self_attn.get_submodule(part), leaf, parameter)


def _loss(states_NTM: np.ndarray, norm: RMSNorm, head_VM: torch.Tensor, text: CalibrationText) -> float:
    assert text.ids_NT is not None
    total = n = 0.0
    for start in range(0, len(states_NTM), _BATCH):
        rows = slice(start, start + _BATCH)
        hidden_BTM = norm(torch.from_numpy(states_NTM[rows].copy()).to(head_VM.device))
        targets_BT = torch.from_numpy(text.ids_NT[rows]).to(head_VM.device)[:, 1:]
        loss, count = chunked_cross_entropy(hidden_BTM[:, :-1].flatten(0, 1), head_VM, targets_BT.flatten())
        total, n = total + float(loss), n + int(count)
    return total / n
