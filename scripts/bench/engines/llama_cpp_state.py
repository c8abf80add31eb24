"""The state of a sequence in llama.cpp's KV cache, as the library saves and restores it."""

import numpy as np

DATA = np.dtype("u1")


def repeated(state: np.ndarray, n_cells: int, wanted: int) -> np.ndarray:
    """Repeat the rows of a sequence's saved state of `n_cells` tokens, for one of `wanted` tokens.

    A state holds: magic, sequence, streams, tokens (4 bytes each); position, 1 and sequence of each token; whether V is
    transposed, the number of layers; for each layer's K, then for each layer's V: the type, the size of a row (8
    bytes), and a row for each token. The other streams are empty: a zero for each.
    """
    head, cell = 16, 12
    assert np.frombuffer(state[12:head], "<u4")[0] == n_cells
    at = head + cell * n_cells
    transposed, n_layers = np.frombuffer(state[at : at + 8], "<u4")
    assert not transposed
    cells = np.zeros((wanted, 3), "<u4")
    cells[:, 0], cells[:, 1] = np.arange(wanted), 1
    parts = [state[:12], np.array([wanted], "<u4").view(DATA), cells.reshape(-1).view(DATA), state[at : at + 8]]
    at += 8
    for _ in range(2 * int(n_layers)):
        size = n_cells * int(np.frombuffer(state[at + 4 : at + 12], "<u8")[0])
        rows = state[at + 12 : at + 12 + size]
        parts += [state[at : at + 12], *[rows] * (wanted // n_cells), rows[: size * (wanted % n_cells) // n_cells]]
        at += 12 + size
    assert not state[at:].any()
    return np.concatenate([*parts, state[at:]])
