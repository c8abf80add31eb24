"""The chunked cross-entropy against the plain one."""

import pytest
import torch
import torch.nn.functional as F

from model.decoder import losses
from model.decoder.losses import IGNORED, chunked_cross_entropy


def case(n=50, size=24, vocab=101, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, size, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, size, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocab, (n,), generator=generator)
    labels[::7] = IGNORED
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [1, 7, 50, 64])
@pytest.mark.parametrize("scale", [1.0, -0.25])
def test_value_and_gradients(monkeypatch, chunk, scale):
    monkeypatch.setattr(losses, "chunk_size", lambda *sizes: chunk)
    hidden, weight, labels = case()
    expected = F.cross_entropy((hidden @ weight.T).double(), labels, reduction="sum", ignore_index=IGNORED)
    expected_grads = torch.autograd.grad(expected * scale, (hidden, weight))
    loss, n_valid = chunked_cross_entropy(hidden, weight, labels)
    assert n_valid == (labels != IGNORED).sum()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    for ours, theirs in zip(torch.autograd.grad(loss * scale, (hidden, weight)), expected_grads, strict=True):
        assert (ours - theirs).norm() / theirs.norm() <= 1e-5


def test_all_ignored_is_zero():
    hidden, weight, labels = case()
    loss, n_valid = chunked_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED))
    loss.backward()
    assert loss == n_valid == 0
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_frozen_parts_get_no_gradient():
    hidden, weight, labels = case()
    chunked_cross_entropy(hidden.detach(), weight, labels)[0].backward()
    only_weight = weight.grad
    weight.grad = None
    chunked_cross_entropy(hidden, weight.detach(), labels)[0].backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert only_weight is not None
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, labels)[0].requires_grad


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32():
    hidden, weight, labels = case(n=400, size=64, vocab=997)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = chunked_cross_entropy(hidden, weight, labels)
        logits = hidden @ weight.T
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORED)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_the_scale_of_a_gradient_in_half_precision_is_not_rounded():
    """It is the number of processes over that of targets, and gradients must not depend on the processes."""
    hidden, weight, labels = case(n=2100)
    half = hidden.detach().bfloat16().requires_grad_()
    scale = torch.tensor(3 / 4099)
    assert scale.bfloat16() != scale
    whole, scaled = (
        torch.autograd.grad(chunked_cross_entropy(half, weight, labels)[0] * factor, half)[0]
        for factor in (torch.tensor(1.0), scale)
    )
    assert torch.equal(scaled, (whole.float() * scale).bfloat16())


@pytest.mark.parametrize("trial", [0, *(pytest.param(trial, marks=pytest.mark.slow) for trial in (1, 2))])
def test_the_full_logits_never_exist(trial):
    """Peak memory at vocabulary 32 000, by torch's own account of allocations."""
    from torch.profiler import ProfilerActivity, profile

    def peak(run):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        level = highest = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                level += event.nbytes()
                highest = max(highest, level)
        return highest

    generator = torch.Generator().manual_seed(trial)
    hidden = torch.randn(2048, 64, generator=generator, requires_grad=True)
    weight = torch.randn(32000, 64, generator=generator, requires_grad=True)
    labels = torch.randint(0, 32000, (2048,), generator=generator)
    plain = peak(lambda: F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum").backward())
    hidden.grad = weight.grad = None
    chunked = peak(lambda: chunked_cross_entropy(hidden, weight, labels)[0].backward())
    assert chunked <= 0.7 * plain
