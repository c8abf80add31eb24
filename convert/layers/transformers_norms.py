"""Norms of queries and keys in a class of transformers. The letters are those of `runnable_layer`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from convert.layer_tensors.head_matrices import pair_means
from convert.layers.runnable_layer import HeadWeights
from model.attention_layout import Kind
from model.families.family import HeadNorms


class TransformersNorms:
    """The RMS norms of queries and keys of one attention module.

    Weights have the class's order of dimensions, and one row for each head, or one row for all heads.
    """

    def __init__(self, attention: Any, norms: HeadNorms, order_D: Tensor, n_rotary_pairs: int) -> None:
        self._norms, self._back, self.after_rotation = norms, torch.argsort(order_D), norms.after_rotation
        self.weights: dict[Kind, Tensor] = {}
        self._factors: dict[Kind, Tensor | None] = {"q": None, "k": None}
        """The factors of observed heads, in half-split order."""
        self._epsilons: dict[Kind, float] = {}
        kinds: tuple[tuple[Kind, str], ...] = (("q", norms.query), ("k", norms.key))
        for kind, name in kinds:
            norm = attention.get_submodule(name)
            self._epsilons[kind] = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
            if norms.layout == "none":
                self.weights[kind] = torch.ones(1, len(order_D), device=order_D.device)
                continue
            weights_HD = norm.weight.view(-1, len(order_D)) + norms.offset
            self.weights[kind] = weights_HD
            if norms.after_rotation:
                ordered_HD = weights_HD[:, order_D].cpu().double().numpy()
                # The weight 0 gives heads of zeros, which say nothing of the projection.
                factors_HD = pair_means(ordered_HD, n_rotary_pairs) / np.where(ordered_HD == 0, np.inf, ordered_HD)
                self._factors[kind] = torch.from_numpy(factors_HD).float().to(order_D.device)

    def apply(self, kind: Kind, heads_BTHD: Tensor) -> Tensor:
        """Return projected heads as the norm makes them, without rotation."""
        dims = (3,) if self._norms.per_head else (2, 3)
        mean_square = heads_BTHD.square().mean(dim=dims, keepdim=True)
        return heads_BTHD * torch.rsqrt(mean_square + self._epsilons[kind]) * self.weights[kind]

    def key_scales(self, k_BTKD: Tensor) -> Tensor | None:
        """Return the norm's factors of projected keys, relative to a norm of all heads together, [B, T, K].

        None for a norm of all heads together.
        """
        if not self._norms.per_head:
            return None
        square_BTK = k_BTKD.square().mean(dim=3) + self._epsilons["k"]
        return torch.sqrt(square_BTK.mean(dim=2, keepdim=True) / square_BTK)

    def with_pair_means(self, kind: Kind, heads_BTHD: Tensor) -> Tensor:
        """Return observed heads, in half-split order, with weights that are equal for both dimensions of a pair.

        A norm after rotation with other weights gives heads that no rotation leads back. Where weights are equal
        already, heads stay.
        """
        factors_HD = self._factors[kind]
        return heads_BTHD if factors_HD is None else heads_BTHD * factors_HD

    def parameters(self, weights: HeadWeights, n_kv_heads: int) -> dict[str, Tensor]:
        """Return the class's parameters for these norm weights. Those of shared keys are repeated to `n_kv_heads`."""
        if weights.q_norm_HD is None or weights.k_norm_KD is None:
            return {}
        k_norm_KD = weights.k_norm_KD
        if len(k_norm_KD) > 1 or not self._norms.per_head:
            k_norm_KD = k_norm_KD.repeat_interleave(n_kv_heads // len(k_norm_KD), dim=0)
        return {
            f"{name}.weight": norm_HD[:, self._back].flatten() - self._norms.offset
            for name, norm_HD in ((self._norms.query, weights.q_norm_HD), (self._norms.key, k_norm_KD))
        }
