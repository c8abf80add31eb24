"""The refit of an output projection, against numpy's own least squares."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from convert.calibration import refit_output as refitting
from convert.calibration.refit_output import RIDGE_PENALTIES, refit_output
from convert.calibration_text.choices import VALIDATION_EVERY
from convert.layer_tensors.head_matrices import HeadMatrices

N_HEADS, HEAD_DIM, HIDDEN, WINDOW, N_WINDOWS = 4, 6, 20, 50, 12
CPU = torch.device("cpu")


def layer(rng) -> HeadMatrices:
    heads = rng.normal(size=(N_HEADS, HEAD_DIM, HIDDEN))
    return HeadMatrices(heads, heads[:1], heads[:1], rng.normal(size=(N_HEADS, HIDDEN, HEAD_DIM)), HEAD_DIM // 2)


def projection(attention: HeadMatrices) -> np.ndarray:
    return np.concatenate(list(attention.o_HMD), axis=1)


def windows(rng, target):
    for index in range(N_WINDOWS):
        heads = rng.normal(size=(WINDOW, N_HEADS * HEAD_DIM))
        yield index, heads, target(index, heads)


def answers(rows):
    return iter([(torch.from_numpy(h).float(), torch.from_numpy(t).float()) for _, h, t in rows])


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_refit_finds_the_true_projection(noise):
    rng = np.random.default_rng(0)
    merged, truth = layer(rng), rng.normal(size=(HIDDEN, N_HEADS * HEAD_DIM))
    samples = list(windows(rng, lambda i, h: h @ truth.T + noise * rng.normal(size=(WINDOW, HIDDEN))))
    fitted = projection(refit_output(merged, answers(samples), CPU))
    fit = [pair for pair in samples if pair[0] % VALIDATION_EVERY != VALIDATION_EVERY - 1]
    x, y = (np.concatenate([pair[i] for pair in fit]) for i in (1, 2))
    old = projection(merged)
    expected = []
    for penalty in RIDGE_PENALTIES:
        power = x.T @ x
        power += penalty * np.diag(power).mean() * np.eye(len(power))
        expected.append(old + np.linalg.solve(power, x.T @ (y - x @ old.T)).T)
    assert min(np.abs(fitted - one).max() for one in expected) < 1e-4
    assert np.abs(fitted - truth).max() < 0.1 * np.abs(old - truth).max()


def test_refit_without_held_out_gain_is_dropped():
    """What is learnt on the other windows is the opposite of what holds on these."""
    rng = np.random.default_rng(1)
    merged = layer(rng)
    old, other = projection(merged), rng.normal(size=(HIDDEN, N_HEADS * HEAD_DIM))

    def target(index, heads):
        return heads @ (old - other if index % VALIDATION_EVERY == VALIDATION_EVERY - 1 else old + other).T

    assert refit_output(merged, answers(windows(rng, target)), CPU) is merged


def test_refit_changes_only_the_output_projection():
    rng = np.random.default_rng(2)
    merged = layer(rng)
    fitted = refit_output(merged, answers(windows(rng, lambda i, h: h[:, :HIDDEN] * 2)), CPU)
    assert fitted is not merged
    assert not np.array_equal(fitted.o_HMD, merged.o_HMD)
    others = {field.name for field in fields(merged)} - {"o_HMD"}
    assert all(getattr(fitted, name) is getattr(merged, name) for name in others)


@pytest.mark.parametrize(("block", "n_computed"), [(1024, 24 * 24), (8, 8 * (24 + 16 + 8)), (9, 9 * (24 + 15) + 6 * 6)])
def test_sums_by_blocks_are_those_of_their_definition(monkeypatch, block, n_computed):
    """Only the upper block triangle of the features' products is computed."""
    monkeypatch.setattr(refitting, "BLOCK", block)
    rng = np.random.default_rng(3)
    o, other = rng.normal(size=(2, N_HEADS * HEAD_DIM, HIDDEN))
    samples = list(windows(rng, lambda i, h: h @ other + 0.1 * rng.normal(size=(WINDOW, HIDDEN))))
    sums = refitting._Sums(torch.from_numpy(o))
    for heads, target in answers(samples):
        sums.add(heads, target)
    x, y = (np.concatenate([pair[i] for pair in samples]) for i in (1, 2))
    power, cross = x.T @ x, x.T @ y
    assert np.abs(sums.power().numpy() - power).max() < 1e-6 * np.abs(power).max()
    assert np.abs(sums.cross_CM.numpy() - cross).max() < 1e-6 * np.abs(cross).max()
    for projected in (o, other):
        error = ((x @ projected - y) ** 2).sum() - (y**2).sum()
        assert sums.error(torch.from_numpy(projected)) == pytest.approx(error, rel=1e-6)
    assert sum(triangle.numel() for triangle in sums._triangle) == n_computed
    mean_power = np.diag(power).mean()
    solutions = list(refitting._solutions(torch.from_numpy(o), sums))
    for penalty, solution in zip(RIDGE_PENALTIES, solutions, strict=True):
        ridged = power + penalty * mean_power * np.eye(len(power))
        expected = o + np.linalg.solve(ridged, cross - power @ o)
        assert np.abs(solution.numpy() - expected).max() < 1e-5 * np.abs(expected).max()
