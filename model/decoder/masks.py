"""Build attention masks: causal, per document in packed rows, with windows, padding and a KV cache.

Letters: B batch, T new tokens, S all tokens (those in the KV cache and the new ones).
"""

import torch
from torch import Tensor

from model.decoder.attention import Mask, Segments


def document_positions(documents_BT: Tensor) -> Tensor:
    """Return each token's position in its document, [B, T]. A document is a run of equal numbers in a row."""
    index_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    starts_BT = torch.where(_begins(documents_BT), index_T, 0)
    return index_T - starts_BT.cummax(dim=1).values


def document_lengths(documents_BT: Tensor) -> Tensor:
    """Return for each token the number of tokens in its document, [B, T]."""
    runs_BT = _runs(documents_BT)
    counts_BT = torch.zeros_like(runs_BT).scatter_add_(1, runs_BT, torch.ones_like(runs_BT))
    return counts_BT.gather(1, runs_BT)


def _runs(documents_BT: Tensor) -> Tensor:
    """Return each token's document, numbered 0, 1, … within its row, [B, T]. Numbers in `documents_BT` may repeat."""
    return _begins(documents_BT).cumsum(dim=1) - 1


def _begins(documents_BT: Tensor) -> Tensor:
    """Return a mask that is True at the first token of every document, [B, T]."""
    changes = documents_BT[:, 1:] != documents_BT[:, :-1]
    return torch.cat((torch.ones_like(documents_BT[:, :1], dtype=torch.bool), changes), dim=1)


def document_mask(documents_BT: Tensor, window: int | None, packed: bool = False, dense: bool = False) -> Mask:
    """Return the mask of packed rows in its cheapest form. `packed`: packed attention is available.

    `dense` forces the T x T mask, which windows without packed attention need too.
    """
    if window is not None and documents_BT.shape[1] <= window:  # it hides nothing
        window = None
    begins_BT = _begins(documents_BT)
    if packed:
        starts = begins_BT.flatten().nonzero().flatten().to(torch.int32)
        end = starts.new_full((1,), begins_BT.numel())  # written by the device, so nothing waits
        return Mask(boundaries=torch.cat((starts, end)), window=window)
    if dense or window is not None:
        positions_BT, runs_BT = document_positions(documents_BT), _runs(documents_BT)
        same_B1TT = (runs_BT[:, :, None] == runs_BT[:, None, :])[:, None]
        return Mask(allowed_B1TS=same_B1TT & _band(positions_BT, positions_BT, window))
    if not begins_BT[:, 1:].any():
        return Mask()  # each row is one document; one causal mask for all rows is faster
    n_tokens = documents_BT.shape[1]
    segments = []
    for row, begins_T in enumerate(begins_BT):
        starts = begins_T.nonzero().flatten().tolist()
        segments += [(row, a, b) for a, b in zip(starts, [*starts[1:], n_tokens], strict=True)]
    return Mask(segments=Segments(tuple(segments)))


def text_mask(
    batch: int, old: int, new: int, window: int | None, padding_B: Tensor | None, device: torch.device
) -> Mask:
    """Return the mask of `new` tokens after `old` ones in a KV cache. The first `padding_B` of each row are padding."""
    total = old + new
    n_keys = total if new == 1 and device.type == "cpu" else None
    unbounded = window is None or total <= window
    if padding_B is None and unbounded and (old == 0 or new == 1):
        return Mask(n_keys=n_keys)
    keys_S = torch.arange(total, device=device)
    queries_T = keys_S[old:]
    allowed_B1TS = _band(queries_T[None], keys_S[None], window)
    if padding_B is not None:
        allowed_B1TS = allowed_B1TS & (keys_S >= padding_B[:, None])[:, None, None]
        # Padding attends to itself, so that its softmax is not empty. No other token attends to it.
        allowed_B1TS = allowed_B1TS | (queries_T[:, None] == keys_S)
    return Mask(allowed_B1TS=allowed_B1TS.expand(batch, 1, new, total), n_keys=n_keys)


def _band(queries_BT: Tensor, keys_BS: Tensor, window: int | None) -> Tensor:
    """Return [B, 1, T, S]: True if a key is not after the query, and within its window."""
    distance_B1TS = (queries_BT[:, :, None] - keys_BS[:, None, :])[:, None]
    allowed_B1TS = distance_B1TS >= 0
    return allowed_B1TS if window is None else allowed_B1TS & (distance_B1TS < window)
