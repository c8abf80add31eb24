"""Windows as tensors: what is a target, and what only fills up."""

import caches
import numpy as np
import torch

from model.decoder.losses import IGNORED
from uptrain.data.batch import Batch, micro_batches
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
    batch = Batch.ignored(4, "cpu")
    assert torch.equal(batch.labels_BT, torch.full((1, 4), IGNORED))
