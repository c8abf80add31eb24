"""`scripts/study/behaviour.py`: losses by position and by kind of token, against sums made by hand."""

import pytest
import tiny
import torch
from torch.nn import functional

from model.decoder.loading import load_model
from scripts.study import behaviour


class Ago:
    """A model that expects the token that came so many places before the next one."""

    class config:
        vocab_size = 9

    def __init__(self, places):
        self.places = places

    def hidden(self, ids_BT):
        return functional.one_hot(ids_BT.roll(self.places - 1, dims=1), 9)

    def logits(self, hidden_NM):
        return 50.0 * hidden_NM


def test_losses_are_those_of_the_model(tmp_path):
    model = load_model(tiny.save(tiny.build("llama"), tmp_path / "model"), torch.float32)
    ids_NT = torch.randint(60, (5, 12), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        losses_NT = behaviour.token_losses(model, ids_NT)
        total, n = model(ids_NT, labels_BT=ids_NT)
    assert losses_NT.shape == (5, 11)
    assert float(losses_NT.mean()) == pytest.approx(float(total) / int(n), rel=1e-6)


def test_by_position():
    losses_NT = torch.arange(31.0).repeat(2, 1)
    assert behaviour.bounds(32) == [16, 32]
    assert behaviour.by_position(losses_NT) == [sum(range(15)) / 15, sum(range(15, 31)) / 16]


def test_by_kind():
    """Token 1 occurs twice, 2 and 3 twice, 7 once; the pair 2, 3 comes again in the first window only."""
    ids_NT = torch.tensor([[2, 3, 1, 2, 3], [3, 2, 7, 1, 1]])
    losses_NT = torch.tensor([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 128.0]])
    assert behaviour.by_kind(losses_NT, ids_NT) == {
        "seen before": 8.0,
        "not seen before": pytest.approx((255 - 8) / 7),
        "once": 32.0,
        "2 to 9 times": pytest.approx((255 - 32) / 7),
    }
    frequent = behaviour.by_kind(torch.ones(1, 199), torch.tensor([[1] * 150 + [2] * 50]))
    assert [*frequent] == ["seen before", "not seen before", "10 to 99 times", "100 times or more"]


def test_copying():
    assert behaviour.copying(Ago(behaviour.COPIED_TOKENS))["copied"] < 1e-6
    assert behaviour.copying(Ago(behaviour.COPIED_TOKENS - 1))["copied"] > 10
