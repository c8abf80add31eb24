"""Read windows of the token cache as batches. Reading mapped memory takes microseconds, so there are no workers.

Letters: B windows, T = seq_len tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model.decoder.losses import IGNORED
from uptrain.data.token_cache import Cache, Integers


@dataclass(frozen=True)
class Batch:
    """Batch of rows of packed documents."""

    ids_BT: Tensor
    labels_BT: Tensor
    """The ids, with −100 for tokens without a loss: the first of each document, and padding."""
    documents_BT: Tensor
    """Index of each token's document within its row; −1 for padding."""

    @classmethod
    def read(cls, cache: Cache, windows: Integers, device: torch.device | str) -> "Batch":
        """Read windows. Pad a short last window with a separate document without targets."""
        shape = (len(windows), cache.seq_len)
        ids_BT, labels_BT = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
        documents_BT = torch.full(shape, -1)
        for row, window in enumerate(windows):
            ids, documents = (torch.from_numpy(x) for x in cache.window(int(window)))
            ids_BT[row, : len(ids)] = ids
            documents_BT[row, : len(ids)] = documents
            labels_BT[row, : len(ids)] = ids.masked_fill(documents != documents.roll(1), IGNORED)
        return cls(*(x.to(device, non_blocking=True) for x in (ids_BT, labels_BT, documents_BT)))

    @classmethod
    def ignored(cls, seq_len: int, device: torch.device | str) -> "Batch":
        """Return one row without targets, for a process that has no window left."""
        zeros = torch.zeros((1, seq_len), dtype=torch.long, device=device)
        return cls(zeros, torch.full_like(zeros, IGNORED), zeros)


def micro_batches(cache: Cache, windows: Integers, size: int, device: torch.device | str) -> Iterator[Batch]:
    """Yield the windows in batches of at most `size`."""
    for start in range(0, len(windows), size):
        yield Batch.read(cache, windows[start : start + size], device)
