"""Convert rows of Q and K from Meta's rotary order to Hugging Face's.

Meta's code and llama.cpp rotate adjacent rows of a head as a pair: [d/2, 2]. Hugging Face pairs row i of the first
half with row i of the second: [2, d/2]. One permutation of each head's rows converts between them (transformers,
`convert_llama_weights_to_hf.py`, `permute`). It commutes with every operation on whole heads.
"""

from collections.abc import Callable

from model.checkpoint.tensor import Array


def half_split_rows(stored_rows: Callable[[int, int], Array], head_dim: int, start: int, stop: int) -> Array:
    """Return rows `start:stop` in Hugging Face's order. `stored_rows(start, stop)` returns rows in Meta's order."""
    first, last = start // head_dim, -(-stop // head_dim)  # the heads that contain these rows
    stored = stored_rows(first * head_dim, last * head_dim)
    heads = stored.reshape(last - first, head_dim // 2, 2, *stored.shape[1:]).swapaxes(1, 2)
    return heads.reshape(stored.shape)[start - first * head_dim : stop - first * head_dim]
