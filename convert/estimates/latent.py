"""Estimate how long a calibration of latent attention takes, from the times of the first layer on a few windows."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from convert.calibration.convert_layers import MAX_COMPARISON_TOKENS
from convert.calibration.float32_weights import latent_weights
from convert.calibration.input_moments import InputSums
from convert.calibration.latent_fit import KEY_WEIGHTS
from convert.calibration.latent_queries import solve_queries
from convert.calibration.latent_survey import SURVEY_TOKENS
from convert.calibration.refine import EVALUATIONS
from convert.calibration_text.choices import VALIDATION_EVERY
from convert.estimates.timing import (
    FORWARDS_PER_TRAINED_TOKEN,
    fastest_seconds,
    generation_seconds,
    matmul_flops_per_second,
)
from convert.latent.frequencies import SPACING_SHARES, even_pair_indices
from convert.latent.matrices import LatentMatrices
from convert.layers.layer_stream import CalibrationLayer, CalibrationWindows, open_layers
from convert.planning.latent_plan import LatentPlan
from model.checkpoint import Checkpoint
from model.decoder.devices import computing_on

_DECOMPOSITIONS = 40
"""FLOPs of a closed form, in cubes of the hidden size: measured 30 to 60 for 256 to 2048, with several weights."""


@dataclass(frozen=True)
class _Measured:
    """Seconds of the first layer."""

    load: float
    run: float
    """Per token, with its moments."""
    output: float
    """Per token, of the latent attention."""
    queries: float
    """Per window, to solve for them."""
    solving: float
    """A closed form."""


def latent_seconds(checkpoint: Checkpoint, plan: LatentPlan) -> float:
    """Return an estimate in seconds, correct within a factor of two."""
    text, recipe = plan.recipe.text, plan.recipe
    if text is None:
        return 0.0
    with computing_on(recipe.device), torch.inference_mode():
        layer = _measure(checkpoint, plan)
        generation = generation_seconds(plan, text.window_tokens * layer.run)
    validation = text.n_tokens / VALIDATION_EVERY
    outputs = 2 * len(KEY_WEIGHTS) * min(validation, MAX_COMPARISON_TOKENS) + text.n_tokens
    if recipe.refine:
        outputs += text.n_tokens  # to refit again
        outputs += (EVALUATIONS + 1) * validation + FORWARDS_PER_TRAINED_TOKEN * recipe.refine
    surveyed = min(text.n_tokens, SURVEY_TOKENS) if recipe.pair_indices is None else 0
    tried = len(SPACING_SHARES) if surveyed and recipe.frequencies == "stock" else 0
    closed = len(KEY_WEIGHTS) * (layer.solving + text.n_windows * layer.queries)
    closed += tried * (layer.solving + surveyed / text.window_tokens * layer.queries)
    seconds = 2 * layer.load + (text.n_tokens + surveyed) * layer.run + outputs * layer.output + closed
    return len(plan.conversions) * seconds + generation


def _measure(checkpoint: Checkpoint, plan: LatentPlan) -> _Measured:
    """Run the first layer, and a latent attention of zeros, on random states."""
    text, conversion = plan.recipe.text, plan.conversions[0]
    assert text is not None
    sizes, layers = conversion.sizes, open_layers(checkpoint, text.window_tokens, plan.recipe.device)
    started = time.perf_counter()
    runnable = layers.load(0)
    load = time.perf_counter() - started
    states_1TM = np.random.default_rng(0).standard_normal((1, text.window_tokens, sizes.hidden_size)).astype(np.float32)
    states_NTM = np.broadcast_to(states_1TM, (text.n_windows, *states_1TM.shape[1:]))
    layer = CalibrationLayer(CalibrationWindows(text), runnable, states_NTM, Path(), lambda n: None)
    batch = next(layer.windows.batches())

    def run() -> InputSums:
        sums = InputSums(layer, sizes.hidden_size)
        runnable.run(layer.on_device(layer.states_NTM[batch]), sums.add)
        return sums

    drawn_keys = [(0, run().drawn_keys[0])]
    before = conversion.read(checkpoint)
    latent = LatentMatrices(
        q_HNX=np.zeros((sizes.n_heads, sizes.qk_nope_head_dim, sizes.hidden_size)),
        q_HRX=np.zeros((sizes.n_heads, sizes.qk_rope_head_dim, sizes.hidden_size)),
        latent_LX=np.zeros((sizes.latent_dim, sizes.hidden_size)),
        key_RX=np.zeros((sizes.qk_rope_head_dim, sizes.hidden_size)),
        k_HNL=np.zeros((sizes.n_heads, sizes.qk_nope_head_dim, sizes.latent_dim)),
        v_HDL=np.zeros((sizes.n_heads, sizes.head_dim, sizes.latent_dim)),
        o_HMD=before.o_HMD,
    )
    target = conversion.target_at(even_pair_indices(conversion.source_rope.n_rotary_pairs, sizes.qk_rope_head_dim // 2))
    weights, x_BTM = latent_weights(latent, target.frequencies_C).to(runnable.device), layer.inputs(batch)
    n_tokens, device = len(batch) * text.window_tokens, plan.recipe.device
    return _Measured(
        load=load,
        run=fastest_seconds(run, device) / n_tokens,
        output=fastest_seconds(lambda: weights.heads_out(x_BTM) @ weights.o_MC.T, device) / n_tokens,
        queries=fastest_seconds(lambda: solve_queries(layer, before, latent, target, drawn_keys), device),
        solving=_DECOMPOSITIONS * sizes.hidden_size**3 / matmul_flops_per_second(),
    )
