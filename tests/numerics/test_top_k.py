"""The loss from a teacher's top k is the divergence with the rest lumped, and with all tokens the live teacher's."""

import pytest
import tiny
import torch
import torch.nn.functional as F

from model.decoder.losses import IGNORED
from uptrain.data.batch import Batch, TopK
from uptrain.models.load import load_student
from uptrain.teach import top_k_of
from uptrain.training.losses import find_loss

VOCAB = 67


@pytest.fixture(params=["llama", "phi"])
def pair(request, tmp_path):
    """Return a function that loads the student, and the teacher: by our code, and by transformers'."""
    for name, heads in (("model", 2), ("parent", 8)):
        torch.manual_seed(heads)
        model = tiny.build(request.param, num_key_value_heads=heads)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.5)  # so that the distributions are far from uniform
        tiny.save(model, tmp_path / name)
    return lambda: load_student(tmp_path / "model"), load_student(tmp_path / "parent").requires_grad_(False)


def make_batch():
    ids = torch.randint(0, VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
    documents = (torch.arange(12) > 6).long().expand(3, -1)
    labels = ids.clone()
    labels[:, [0, 7]] = IGNORED
    labels[2, 9:] = IGNORED
    return Batch(ids, labels, documents)


def with_top(batch, teacher, k):
    logits = teacher(batch.ids_BT, None, batch.documents_BT)[:, :-1].flatten(0, 1)
    values, ids = top_k_of(logits, k)
    return Batch(batch.ids_BT, batch.labels_BT, batch.documents_BT, TopK(values.view(3, 11, -1), ids.view(3, 11, -1)))


def loss_and_gradients(load, teacher, batch, name):
    student = load().train()
    loss = find_loss(name)(student, teacher, batch)
    (loss / 3).backward()
    return loss.item(), {n: p.grad for n, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["distill", "mix"])
def test_all_tokens_are_the_live_teacher(pair, name):
    load, teacher = pair
    batch = make_batch()
    n = int((batch.labels_BT[:, 1:] != IGNORED).sum())
    live, gradients = loss_and_gradients(load, teacher, batch, name)
    stored, of_stored = loss_and_gradients(load, None, with_top(batch, teacher, VOCAB), name)
    assert live / n > 0.1
    assert abs(live - stored) / n <= 1e-6
    assert gradients.keys() == of_stored.keys()
    for key, gradient in gradients.items():
        assert (gradient - of_stored[key]).norm() <= 2e-6 * gradient.norm() + 1e-9, key


@pytest.mark.parametrize("k", [1, 5, VOCAB - 1])
def test_the_rest_is_one_category(pair, k):
    """Against the formula in float64, with gradients by autograd."""
    load, teacher = pair
    batch = make_batch()
    counts = (batch.labels_BT[:, 1:] != IGNORED).flatten()

    def lumped(student):
        log_p, log_q = (
            model(batch.ids_BT, None, batch.documents_BT)[:, :-1].flatten(0, 1)[counts].double().log_softmax(dim=1)
            for model in (teacher, student)
        )
        ids = log_p.topk(k, dim=1).indices
        rest = torch.ones_like(log_p, dtype=torch.bool).scatter(1, ids, False)

        def categories(log):
            others = log.masked_fill(~rest, -torch.inf).logsumexp(dim=1, keepdim=True)
            return torch.cat((log.gather(1, ids), others), dim=1)

        return F.kl_div(categories(log_q), categories(log_p), reduction="sum", log_target=True)

    student = load().train()
    expected = lumped(student)
    (expected / 3).backward()
    loss, gradients = loss_and_gradients(load, None, with_top(batch, teacher, k), "distill")
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in student.named_parameters():
        if parameter.grad is not None:
            assert (gradients[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-9, name


def test_more_tokens_come_nearer_from_below(pair):
    load, teacher = pair
    batch = make_batch()
    live, _ = loss_and_gradients(load, teacher, batch, "distill")
    losses = [loss_and_gradients(load, None, with_top(batch, teacher, k), "distill")[0] for k in (1, 4, 16, 64)]
    assert losses == sorted(losses)
    assert losses[-1] < live


def test_a_small_rest_keeps_its_digits():
    logits = torch.tensor([[30.0, 0.0, 1.0, -1.0]])
    values, ids = top_k_of(logits, 1)
    expected = torch.logsumexp(logits[0, 1:].double(), 0) - torch.logsumexp(logits[0].double(), 0)
    assert ids.item() == 0
    assert values[0, 1].item() == pytest.approx(expected.item(), rel=1e-6)
