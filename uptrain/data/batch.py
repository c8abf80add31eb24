"""Read windows of the token cache as batches, one ahead of the computation.

Reading mapped memory takes microseconds, so a thread suffices, without worker processes. Copies to a GPU start from
pinned memory and do not block.

Letters: B windows, T = seq_len tokens, K the top k of a teacher, L = K + 1.
"""

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from model.decoder.losses import IGNORED
from uptrain.data.order import windows_of_step
from uptrain.data.teacher_logits import TeacherLogits
from uptrain.data.token_cache import Integers, TokenCache

T = TypeVar("T")


@dataclass(frozen=True)
class TopK:
    """A teacher's logits of a batch. Each row's last token predicts nothing, so T is seq_len − 1 here."""

    values_BTL: Tensor
    """Log-probabilities of the top k, then the log of the mass of the rest, float32."""
    ids_BTK: Tensor

    @classmethod
    def read(cls, logits: TeacherLogits, windows: Integers, device: torch.device | str) -> "TopK":
        values, ids = logits.read(windows)
        return cls(_copy(torch.from_numpy(values), device), _copy(torch.from_numpy(ids), device))

    @classmethod
    def without_targets(cls, seq_len: int, device: torch.device | str, n_rows: int, k: int) -> "TopK":
        """Return values for rows without targets."""
        values = torch.zeros((n_rows, seq_len - 1, k + 1), device=device)
        return cls(values, torch.zeros((n_rows, seq_len - 1, k), dtype=torch.long, device=device))

    def as_inputs(self) -> tuple[Tensor, Tensor]:
        """Return the tensors as a module's arguments. FSDP2 rounds floats to bfloat16, so values go as integers."""
        return self.values_BTL.view(torch.int32), self.ids_BTK

    @classmethod
    def from_inputs(cls, bits_BTL: Tensor, ids_BTK: Tensor) -> "TopK":
        return cls(bits_BTL.view(torch.float32), ids_BTK)


@dataclass(frozen=True)
class Batch:
    """Batch of rows of packed documents."""

    ids_BT: Tensor
    labels_BT: Tensor
    """The ids, with −100 for tokens without a loss: the first of each document, and padding."""
    documents_BT: Tensor
    """Index of each token's document within its row; −1 for padding."""
    top: TopK | None = None

    @classmethod
    def read(cls, cache: TokenCache, windows: Integers, device: torch.device | str) -> "Batch":
        """Read windows. Pad a short last window with a separate document without targets."""
        shape = (len(windows), cache.seq_len)
        ids_BT, labels_BT = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED)
        documents_BT = torch.full(shape, -1)
        for row, window in enumerate(windows):
            ids, documents = (torch.from_numpy(x) for x in cache.window(int(window)))
            ids_BT[row, : len(ids)] = ids
            documents_BT[row, : len(ids)] = documents
            labels_BT[row, 1 : len(ids)] = ids[1:].masked_fill(documents[1:] != documents[:-1], IGNORED)
        return cls(_copy(ids_BT, device), _copy(labels_BT, device), _copy(documents_BT, device))

    @property
    def targets_N(self) -> Tensor:
        """The label that each token predicts, of each row's tokens except the last; −100 for none."""
        return self.labels_BT[:, 1:].flatten()

    @property
    def has_target_N(self) -> Tensor:
        return self.targets_N != IGNORED

    def without_padding(self) -> "Batch":
        """Return the batch without the tokens after its longest row. Attention over them would take long."""
        n_tokens = int((self.documents_BT >= 0).any(dim=0).sum())
        return replace(
            self,
            ids_BT=self.ids_BT[:, :n_tokens],
            labels_BT=self.labels_BT[:, :n_tokens],
            documents_BT=self.documents_BT[:, :n_tokens],
        )

    @classmethod
    def without_targets(cls, seq_len: int, device: torch.device | str, n_rows: int = 1, top_k: int = 0) -> "Batch":
        """Return rows without targets, each token with the top k of a teacher's logits if k is not 0."""
        zeros = torch.zeros((n_rows, seq_len), dtype=torch.long, device=device)
        top = TopK.without_targets(seq_len, device, n_rows, top_k) if top_k else None
        return cls(zeros, torch.full_like(zeros, IGNORED), zeros, top)


def _copy(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor of the host to a device, without waiting if that is a GPU of CUDA.

    Apple's MPS would read the tensor later, when its memory may be free again (pytorch/pytorch#189690).
    """
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def micro_batches(
    cache: TokenCache, windows: Integers, size: int, device: torch.device | str, logits: TeacherLogits | None = None
) -> Iterator[Batch]:
    """Yield the windows in batches of at most `size`, with a teacher's logits if they are given."""
    for start in range(0, len(windows), size):
        chosen = windows[start : start + size]
        batch = Batch.read(cache, chosen, device)
        yield replace(batch, top=TopK.read(logits, chosen, device)) if logits else batch


def batches_of_steps(
    steps: Iterable[int],
    global_batch: int,
    seed: int,
    own_windows: slice,
    cache: TokenCache,
    size: int,
    device: torch.device | str,
    logits: TeacherLogits | None,
) -> Iterator[Batch]:
    """Yield the micro-batches of steps, of this process's slice of each step's windows."""
    for step in steps:
        windows = windows_of_step(step, cache.n_windows, global_batch, seed)
        yield from micro_batches(cache, windows[own_windows], size, device, logits)


def one_ahead(items: Iterator[T]) -> Generator[T]:
    """Yield the items of an iterator that advances in another thread: it prepares an item while the last one is used.

    An error of the iterator is raised where its item is due.
    """
    with ThreadPoolExecutor(1) as thread:
        last = object()
        due = thread.submit(next, items, last)
        while (item := due.result()) is not last:
            due = thread.submit(next, items, last)
            yield item  # type: ignore[misc]
