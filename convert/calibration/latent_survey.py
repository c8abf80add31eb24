"""Choose the frequencies of the shared rotated key for a whole model, by a first pass over part of the text.

All layers share them, since `config.json` has one rotary embedding. Letters: H query heads, K key/value heads, P
RoPE pairs, S queries of a window, C keys drawn for each, N pairs of these, F candidates of frequencies.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from convert.calibration.float32_weights import latent_weights
from convert.calibration.input_moments import InputSums
from convert.calibration.latent_queries import solve_queries
from convert.calibration.layer_output import output_power, squared_error
from convert.calibration_text.read import MIN_WINDOWS
from convert.calibration_text.text import CalibrationText
from convert.latent.closed_form import pair_powers, solve
from convert.latent.frequencies import spacings, stock_pair_indices
from convert.latent.latent_conversion import LatentConversion
from convert.layer_tensors.head_matrices import Real
from convert.layers.layer_stream import CalibrationLayer, iter_layers
from model.checkpoint import Checkpoint
from model.common.console import Advance
from model.decoder.devices import computing_on

SURVEY_TOKENS = 8192
"""Maximum tokens of the text that are surveyed."""


def survey_text(text: CalibrationText) -> CalibrationText:
    """Return the first windows of a text."""
    assert text.ids_NT is not None
    n = min(text.n_windows, max(MIN_WINDOWS, SURVEY_TOKENS // text.window_tokens))
    return replace(text, n_windows=n, ids_NT=text.ids_NT[:n])


@torch.no_grad()
def choose_pair_indices(
    checkpoint: Checkpoint, conversions: Sequence[LatentConversion], text: CalibrationText, folder: Path,
    advance: Advance,
) -> tuple[float, ...]:  # fmt: skip
    """Return the pair indices of the rotated key's channels. `advance` counts tokens, layer by layer."""
    recipe = conversions[0].recipe
    n_channels, n_rotary_pairs = recipe.qk_rope_head_dim // 2, conversions[0].source_rope.n_rotary_pairs
    candidates = [stock_pair_indices(spacing, n_channels) for spacing in spacings(n_rotary_pairs, n_channels)]
    errors_F, benefits_PK = np.zeros(len(candidates)), np.zeros((n_rotary_pairs, conversions[0].sizes.n_kv_heads))
    folder.mkdir(parents=True)
    with computing_on(recipe.device):
        for layer in iter_layers(checkpoint, text, folder, advance, recipe.device):
            conversion = conversions[layer.index]
            sums = InputSums(layer, conversion.sizes.hidden_size)
            layer.run(sums.add)
            if recipe.frequencies == "longrope":
                benefits_PK += _benefits(checkpoint, conversion, sums)
            else:
                errors_F += _errors(checkpoint, conversion, layer, sums, candidates)
    if recipe.frequencies == "longrope":
        return _most_useful(benefits_PK, n_channels)
    return candidates[int(errors_F.argmin())]


def _benefits(checkpoint: Checkpoint, conversion: LatentConversion, sums: InputSums) -> Real:
    """Return what each principal component of each RoPE pair would add to the logits if it was rotated, [P, K].

    That is its power, as a share of that of all, times the share that an unrotated key could not express: one minus the
    squared mean of exp(i f Δ) over the distances Δ that heads attend to.
    """
    powers_PK = pair_powers(conversion.read(checkpoint), sums.moments())
    distances = [drawn.key_positions_HSC - drawn.query_positions_S[None, :, None] for drawn in sums.drawn_keys]
    distances_HN = np.concatenate([each_HSC.flatten(1).numpy() for each_HSC in distances], axis=1)
    means_PH = [np.exp(1j * frequency * distances_HN).mean(axis=1) for frequency in conversion.source_rope.frequencies]
    rotating_P = (1 - np.abs(means_PH) ** 2).mean(axis=1)
    benefits: Real = powers_PK / (powers_PK.sum() or 1.0) * rotating_P[:, None]
    return benefits


def _most_useful(benefits_PK: Real, n_channels: int) -> tuple[float, ...]:
    """Return the RoPE pairs of the components with the largest benefits, each as often as it occurs, in order."""
    order = np.argsort(-benefits_PK, axis=None, kind="stable")[:n_channels]
    return tuple(sorted(float(index // benefits_PK.shape[1]) for index in order))


def _errors(
    checkpoint: Checkpoint, conversion: LatentConversion, layer: CalibrationLayer, sums: InputSums,
    candidates: Sequence[tuple[float, ...]],
) -> Real:  # fmt: skip
    """Return the squared output error of the layer on validation windows for each candidate, as shares of its power."""
    before, moments = conversion.read(checkpoint), sums.moments()
    windows = layer.windows.validation_windows
    power = output_power(layer, windows) or 1.0
    errors = []
    for pair_indices in candidates:
        target = conversion.target_at(pair_indices)
        latent = solve_queries(layer, before, solve(before, moments, target), target, sums.training_keys())
        errors.append(squared_error(layer, latent_weights(latent, target.frequencies_C), windows) / power)
    return np.array(errors)
