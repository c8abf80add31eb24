"""Windows as tensors: what is a target, what only fills up, and that each is read before it is needed."""

import threading

import caches
import numpy as np
import pytest
import torch

from model.decoder.losses import IGNORED
from uptrain.data.batch import Batch, _copy, micro_batches, one_ahead
from uptrain.data.token_cache import TokenCache


def test_targets_are_all_but_the_first_of_each_document(tmp_path):
    shards = [[[1, 2, 3], [4], [5, 6, 7, 8, 9]], [[10, 11]]]  # the last document goes into a short last window
    cache = TokenCache.open(caches.write_cache(tmp_path / "cache", shards, 5))
    batch = Batch.read(cache, np.arange(cache.n_windows), "cpu")
    assert batch.ids_BT.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 0, 0, 0, 0]]
    _ = IGNORED
    assert batch.labels_BT[:, 1:].tolist() == [[2, 3, _, _], [7, 8, 9, _], [_, _, _, _]]
    assert cache.n_targets(np.arange(cache.n_windows)) == (batch.labels_BT[:, 1:] != IGNORED).sum()
    assert batch.documents_BT.tolist() == [[0, 0, 0, 1, 2], [0, 0, 0, 0, 1], [0, -1, -1, -1, -1]]


def test_micro_batches_are_the_windows_in_turn(tmp_path):
    cache = TokenCache.open(caches.write_cache(tmp_path / "cache", [[[*range(20)]]], 2))
    first_ids = [batch.ids_BT[:, 0].tolist() for batch in micro_batches(cache, np.array([9, 3, 0, 1, 5]), 2, "cpu")]
    assert first_ids == [[18, 6], [0, 2], [10]]


def test_a_row_that_counts_for_nothing():
    batch = Batch.without_targets(4, "cpu")
    assert torch.equal(batch.labels_BT, torch.full((1, 4), IGNORED))


def test_an_item_is_prepared_while_the_last_is_used():
    prepared = [threading.Event() for _ in range(4)]

    def items():
        for number, event in enumerate(prepared):
            event.set()
            yield number

    for number, item in enumerate(one_ahead(items())):
        assert item == number
        if number + 1 < len(prepared):
            assert prepared[number + 1].wait(10)
        assert not any(event.is_set() for event in prepared[number + 2 :])


def test_an_error_comes_when_its_item_is_due():
    def items():
        yield 1
        yield 2
        raise ValueError("damaged")

    ahead = one_ahead(items())
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(ValueError, match="damaged"):
        next(ahead)


@pytest.mark.parametrize(("device", "is_cuda"), [("cuda:1", True), ("mps", False), ("cpu", False)])
def test_only_copies_to_cuda_start_from_pinned_memory_and_do_not_block(monkeypatch, device, is_cuda):
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pin") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *where, **how: calls.append((*where, how)) or tensor)
    _copy(torch.zeros(2), torch.device(device))
    assert calls == [*["pin"] * is_cuda, (torch.device(device), {"non_blocking": True} if is_cuda else {})]
