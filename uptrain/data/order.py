"""Compute the windows of a step: a pure function of the seed and the step, independent of the world size.

Every epoch visits each window once, in its own random order. The order is not stored: a keyed permutation (a Feistel
network with cycle walking; Black and Rogaway 2002) computes any position directly. Step 500 000 costs as much as
step 0, and resuming needs no stored permutation. `Generator.permutation`, kept for each epoch, would be shorter, but
25 million windows (100 billion tokens of 4096 each) take 200 MB of it in every process, and its values may change with
NumPy's version: NumPy guarantees the stream of a `SeedSequence`, but not that of a `Generator`.
"""

import numpy as np
import numpy.typing as npt

from uptrain.data.token_cache import Integers

_ROUNDS = 6
Words = npt.NDArray[np.uint64]


def windows_of_step(step: int, n_windows: int, global_batch: int, seed: int) -> Integers:
    """Return the windows of one step, [global_batch]. A step may span two or more epochs."""
    positions = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    epochs = positions // n_windows
    windows = np.empty_like(positions)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        windows[in_epoch] = permute(positions[in_epoch] % n_windows, n_windows, seed, int(epoch))
    return windows


def permute(indices: Integers, n: int, seed: int, epoch: int) -> Integers:
    """Return the images of `indices` under a permutation of 0 … n − 1 keyed by seed and epoch."""
    half_bits = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    keys = np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64).astype(np.uint64)
    out = _feistel(indices.astype(np.uint64), half_bits, keys)
    while (outside := out >= n).any():
        out[outside] = _feistel(out[outside], half_bits, keys)
    return out.astype(np.int64)


def _feistel(x: Words, half_bits: np.uint64, keys: Words) -> Words:
    """Permute integers of 2 · half_bits bits."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = x >> half_bits, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    mixed: Words = (left << half_bits) | right
    return mixed


def _mix(x: Words) -> Words:
    """Mix the bits of each word (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
