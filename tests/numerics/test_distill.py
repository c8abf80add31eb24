"""The chunked KL divergence against the plain formula in float64."""

import pytest
import tiny
import torch

from model import load_model
from model.decoder import losses
from scripts.bench import loss as bench
from uptrain.data.batch import Batch
from uptrain.training.losses import LOSSES, distill, find_loss

N, V, M, TEACHER_M = 50, 67, 16, 24


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = ((N, M), (V, M), (N, TEACHER_M), (V, TEACHER_M))
    student, weight, teacher, teacher_weight = (torch.randn(shape).to(dtype) for shape in shapes)
    return student.requires_grad_(), weight.requires_grad_(), teacher, teacher_weight, torch.rand(N) < 0.7


def plain_kl(student, weight, teacher, teacher_weight, counts):
    p = (student @ weight.T).log_softmax(1)
    q = (teacher @ teacher_weight.T).log_softmax(1)
    return torch.nn.functional.kl_div(p, q, reduction="none", log_target=True)[counts].sum()


@pytest.mark.parametrize("chunk", [1, 7, 50, 64])
def test_value_and_gradients(monkeypatch, chunk):
    for module in (losses, bench):
        monkeypatch.setattr(module, "chunk_size", lambda *sizes: chunk)
    ours, exact = inputs(), inputs(torch.float64)
    loss = bench.chunked_kl(*ours)
    wanted = plain_kl(*exact)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-6)
    (loss * 0.3).backward()
    (wanted * 0.3).backward()
    for actual, reference in zip(ours[:2], exact[:2], strict=True):
        assert (actual.grad - reference.grad).norm() <= 1e-5 * reference.grad.norm()


def test_of_a_model_with_itself_is_zero_with_zero_gradient():
    student, weight, _, _, counts = inputs()
    loss = bench.chunked_kl(student, weight, student.detach(), weight.detach(), counts)
    loss.backward()
    assert loss.abs() <= 1e-5
    assert student.grad.abs().max() <= 1e-6


def test_frozen_head_gets_no_gradient():
    student, weight, teacher, teacher_weight, counts = inputs()
    weight.requires_grad_(False)
    bench.chunked_kl(student, weight, teacher, teacher_weight, counts).backward()
    assert weight.grad is None
    assert student.grad is not None


def test_half_precision_accumulates_in_float32():
    """Many chunks of bf16 products: the weight's gradient is no worse than one big bf16 product."""
    student, weight, teacher, teacher_weight, counts = inputs()
    exact = inputs(torch.float64)
    plain_kl(*exact).backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = bench.chunked_kl(student, weight, teacher, teacher_weight, counts)
    loss.backward()
    assert (weight.grad - exact[1].grad).norm() <= 0.02 * exact[1].grad.norm()


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_the_projects_models(tmp_path, monkeypatch, name, chunk):
    """In chunks, against the formula for all logits in float64, with gradients by autograd."""
    for module in (losses, distill):
        monkeypatch.setattr(module, "chunk_size", lambda *sizes: chunk)
    folders = [tiny.save(tiny.build("llama", seed, initializer_range=0.2), tmp_path / str(seed)) for seed in (0, 1)]
    student, teacher = (load_model(folder, torch.float32) for folder in folders)
    ids = torch.randint(0, 64, (2, 12))
    batch = Batch(ids, ids.clone(), torch.zeros_like(ids))
    batch.labels_BT[0, 5:] = losses.IGNORED
    counts, labels = batch.has_target_N, batch.targets_N[batch.has_target_N]
    log_q, log_p = (model(ids)[:, :-1].flatten(0, 1)[counts].double().log_softmax(1) for model in (student, teacher))
    next_token = torch.nn.functional.nll_loss(log_q, labels, reduction="sum")
    kl = (log_p.exp() * (log_p - log_q)).sum()
    wanted = {"next-token": next_token, "distill": kl, "mix": (next_token + kl) / 2}[name]
    expected = torch.autograd.grad(wanted, list(student.parameters()))
    loss = find_loss(name)(student, teacher, batch)
    assert loss.item() == pytest.approx(wanted.item(), rel=2e-6)
    for actual, reference in zip(torch.autograd.grad(loss, list(student.parameters())), expected, strict=True):
        assert (actual - reference).norm() <= 1e-5 * reference.norm()
