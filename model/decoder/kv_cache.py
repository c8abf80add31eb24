"""Store keys and values in a preallocated KV cache, with only `n_kv_heads` heads: the purpose of GQA.

Letters: B batch, S tokens, G K/V heads, D head_dim.
"""

import torch
from torch import Tensor

from model.decoder.config import LlamaConfig


class LayerCache:
    """One layer's keys and values, [B, G, capacity, D] each; with latent attention the rotated key and the latent."""

    def __init__(
        self, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.k_BGSD, self.v_BGSD = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)

    def store(self, start: int, k_BTGD: Tensor, v_BTGD: Tensor) -> tuple[Tensor, Tensor]:
        """Write new tokens at position `start`, and return the keys and values of all tokens so far, [B, S, G, D]."""
        stop = start + k_BTGD.shape[1]
        self.k_BGSD[:, :, start:stop] = k_BTGD.transpose(1, 2)
        self.v_BGSD[:, :, start:stop] = v_BTGD.transpose(1, 2)
        return self.k_BGSD[:, :, :stop].transpose(1, 2), self.v_BGSD[:, :, :stop].transpose(1, 2)


class KVCache:
    """The keys and values of all layers, for `batch` texts of up to `capacity` tokens each.

    Keys are stored rotated, as attention reads them.
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
        shapes = (batch, k_heads, capacity, k_size), (batch, v_heads, capacity, v_size)
        self.layers = [LayerCache(shapes, dtype, device) for _ in range(config.n_layers)]
        self.capacity = capacity
        self.padding_B = padding_B
        """Number of padding tokens at the beginning of each row; None without padding."""
        self.length = 0
        """Tokens stored so far, padding included."""

    @property
    def nbytes(self) -> int:
        return sum(layer.k_BGSD.nbytes + layer.v_BGSD.nbytes for layer in self.layers)

    def check_room(self, new: int) -> None:
        """Raise ValueError if `new` more tokens exceed the capacity."""
        if self.length + new > self.capacity:
            raise ValueError(
                f"the text grows to {self.length + new} tokens, but the cache holds {self.capacity}; make it larger."
            )
