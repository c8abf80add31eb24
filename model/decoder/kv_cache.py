"""Store keys and values in a KV cache with only `n_kv_heads` heads: the purpose of GQA.

Letters: B batch, T new tokens, S tokens so far, K K/V heads, D head_dim; R room, tokens that fit into the memory
allocated so far.
"""

import torch
from torch import Tensor

from model.decoder.config import LlamaConfig

_MIN_ROOM, _GROWTH = 256, 1.125
"""Tokens that fit at first, and the factor by which the room grows. Growing copies the cache, and the CPU's attention
reads all of the room: 1.125 makes both cheap."""


class LayerCache:
    """One layer's keys and values, [B, K, R, D] each; with latent attention the rotated key and the latent."""

    def __init__(
        self, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.k_BKRD, self.v_BKRD = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

    def grow(self, room: int) -> None:
        """Make room for so many tokens. New room is zero: a weight of zero does not remove a NaN."""
        self.k_BKRD, self.v_BKRD = (_grown(old_BKRD, room) for old_BKRD in (self.k_BKRD, self.v_BKRD))

    def store(self, start: int, k_BTKD: Tensor, v_BTKD: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
        """Write new tokens at position `start`, and return the keys and values of all tokens so far, [B, S, K, D].

        `whole`: return the room behind them too, [B, R, K, D].
        """
        stop = start + k_BTKD.shape[1]
        self.k_BKRD[:, :, start:stop] = k_BTKD.transpose(1, 2)
        self.v_BKRD[:, :, start:stop] = v_BTKD.transpose(1, 2)
        end = None if whole else stop
        return self.k_BKRD[:, :, :end].transpose(1, 2), self.v_BKRD[:, :, :end].transpose(1, 2)


class KVCache:
    """The keys and values of all layers, for `batch` texts of up to `capacity` tokens each.

    Keys are stored rotated, as attention reads them. Memory is allocated for 256 tokens at first, and then for an
    eighth more than there are.
    """

    def __init__(
        self,
        config: LlamaConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        padding_B: Tensor | None = None,
    ) -> None:
        (k_heads, k_size), (v_heads, v_size) = config.cached_shapes
        self._room = min(capacity, _MIN_ROOM)
        shapes = (batch, k_heads, self._room, k_size), (batch, v_heads, self._room, v_size)
        self.layers = [LayerCache(shapes, dtype, device) for _ in range(config.n_layers)]
        self.capacity = capacity
        self.padding_B = padding_B
        """Number of padding tokens at the beginning of each row; None without padding."""
        self.length = 0
        """Tokens stored so far, padding included."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(layer.k_BKRD.nbytes + layer.v_BKRD.nbytes for layer in self.layers)

    def make_room(self, new: int) -> None:
        """Allocate memory for `new` more tokens. Raises ValueError if they exceed the capacity."""
        needed = self.length + new
        if needed > self.capacity:
            raise ValueError(f"the text grows to {needed} tokens, but the cache holds {self.capacity}; make it larger.")
        if needed > self._room:
            self._room = min(self.capacity, int(needed * _GROWTH))
            for layer in self.layers:
                layer.grow(self._room)


def _grown(old_BKRD: Tensor, room: int) -> Tensor:
    batch, heads, before, size = old_BKRD.shape
    # A cache that grows in inference mode can be used outside of it too.
    with torch.inference_mode(False), torch.no_grad():
        new_BKRD = old_BKRD.new_zeros(batch, heads, room, size)
        new_BKRD[:, :, :before] = old_BKRD
    return new_BKRD
