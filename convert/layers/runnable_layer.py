"""Define one interface for running a model layer by layer, whatever code runs it.

`native_layers.py` runs the project's own decoder, `transformers_model_layers.py` a model's class in transformers,
`t5_layers.py` that of T5. Methods and moments do not know which one runs. Letters: B windows in a batch, T tokens, M
hidden size, H query heads, K key/value heads, D head_dim, R rotated dimensions, S sampled queries, C = heads · D, X
inputs (the hidden size, and a constant 1 where there are biases).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from model.checkpoint import Checkpoint
from model.common.errors import CheckpointError
from model.decoder.rope import rotate_first


@dataclass(frozen=True)
class HeadStates:
    """A batch of a layer's heads, before and after rotation, in the half-split order of HeadMatrices."""

    q_BTHD: Tensor
    rotated_q_BTHD: Tensor
    rotated_k_BTKD: Tensor
    v_BTKD: Tensor
    key_scales_BTK: Tensor | None = None
    """The keys' factors by norms of each head, relative to a norm of all heads together; None without them."""


HeadObserver = Callable[[HeadStates], None]


@dataclass(frozen=True)
class HeadWeights:
    """A layer's `HeadMatrices` as float32 tensors, its heads in the same half-split order."""

    q_CX: Tensor
    k_CX: Tensor
    v_CX: Tensor
    o_MC: Tensor
    q_norm_HD: Tensor | None = None
    k_norm_KD: Tensor | None = None
    """The weights of norms, for each head, or one row for all heads; None without them."""

    def to(self, device: torch.device) -> "HeadWeights":
        """Return the weights on a device."""
        return HeadWeights(*(matrix.to(device) for matrix in self))

    def with_matrices(self, *matrices: Tensor) -> "HeadWeights":
        """Return the weights with other matrices, in the order of iteration."""
        return HeadWeights(*matrices)

    def __iter__(self) -> Iterator[Tensor]:
        matrices = (self.q_CX, self.k_CX, self.v_CX, self.o_MC, self.q_norm_HD, self.k_norm_KD)
        return (matrix for matrix in matrices if matrix is not None)


class RunnableLayer(ABC):
    """One layer in memory, in float32. All its tensors, inputs and outputs are on one device."""

    index: int
    device: torch.device
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotation: tuple[Tensor, Tensor] | None
    """Cosines and sines [T, R] of the first R dimensions of a head, dimension i with i + R/2; None for no rotation."""
    attention_scaling: float = 1.0
    """RoPE's factor of rotated dimensions, which is not in `rotation`."""
    output_bias: Tensor | None
    """The bias of the output projection, [M]."""
    clip: float | None = None
    """The largest absolute value of queries, keys and values before rotation (`clip_qkv`); None for no limit."""

    @abstractmethod
    def inputs(self, states_BTM: Tensor) -> Tensor:
        """Return the inputs of the layer's attention, [B, T, M], for the layer's input states."""

    @abstractmethod
    def run(self, states_BTM: Tensor, observer: HeadObserver) -> tuple[Tensor, Tensor]:
        """Return the attention's output, with its bias, and the layer's output states, both [B, T, M].

        `observer` is called with the heads. Raises CheckpointError for NaN and infinity.
        """

    @abstractmethod
    def attention_weights(self, q_HSD: Tensor, k_KTD: Tensor, at_S: Tensor) -> Tensor:
        """Return the attention weights, [H, S, T], of rotated queries at the positions `at_S`. Call after `run`."""

    @abstractmethod
    def heads_out(self, weights: HeadWeights, x_BTM: Tensor) -> Tensor:
        """Return the heads' outputs before the output projection, [B, T, H·D], with other weights.

        `weights` may have fewer K/V heads than the layer. Gradients flow to them. `clip` does not apply.
        """

    def unclipped_heads(self, weights: HeadWeights | None, x_BTM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values before rotation and before `clip`, [B, T, heads, D].

        `weights`: as in `heads_out`; None for the layer's own. Layers with a clip have this method.
        """
        raise NotImplementedError

    def unrotated(self, heads_BTHD: Tensor) -> Tensor:
        """Return rotated queries or keys as they were before rotation."""
        if self.rotation is None:
            return heads_BTHD
        cos_TR, sin_TR = self.rotation
        unrotated_BTHD = rotate_first(heads_BTHD, cos_TR[:, None], -sin_TR[:, None])
        return self.scale_rotated(unrotated_BTHD, 1 / self.attention_scaling)

    def scale_rotated(self, heads_BTHD: Tensor, factor: float) -> Tensor:
        """Multiply the rotated dimensions of heads."""
        if self.rotation is None or factor == 1:
            return heads_BTHD
        n_rotated = self.rotation[0].shape[1]
        return torch.cat([heads_BTHD[..., :n_rotated] * factor, heads_BTHD[..., n_rotated:]], dim=-1)

    def check_finite(self, *tensors: Tensor) -> None:
        """Raise CheckpointError if a tensor holds NaN or infinity."""
        extremes = [extreme for tensor in tensors for extreme in tensor.aminmax()]  # faster than all, and NaN stays
        if not torch.stack(extremes).isfinite().all():  # one wait for a GPU
            raise CheckpointError(
                f"layer {self.index} produces NaN or infinite values on the text; the checkpoint is damaged."
            )


class ModelLayers(ABC):
    """A model whose layers are loaded one at a time, for texts in windows of one length."""

    checkpoint: Checkpoint
    device: torch.device
    """The device of the layers, one at a time."""
    n_layers: int
    embedding_name: str
    """The embedding's tensor in the checkpoint."""

    @property
    def n_embeddings(self) -> int:
        """Number of rows of the embedding. Raises CheckpointError if the checkpoint lacks it."""
        if self.embedding_name not in self.checkpoint.tensors:
            raise CheckpointError(f"{self.checkpoint.path} lacks the tensor {self.embedding_name}.")
        return self.checkpoint.tensors[self.embedding_name].shape[0]

    @abstractmethod
    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return the input states of the first layer, [B, T, M], in float32, on any device."""

    @abstractmethod
    def check(self) -> None:
        """Raise CheckpointError if the first layer shows that the model cannot be run layer by layer."""

    @abstractmethod
    def load(self, index: int) -> RunnableLayer:
        """Return one layer. The layer before it is not needed any more."""
