"""Compute multi-head latent attention without a norm of the latent (DeepSeek-V2, section 2.1).

The KV cache holds the latent and the rotated key of each token. A prompt is computed with full keys and values. A
single new token is computed on the latents themselves: the projections to keys and values are absorbed into its queries
and into what attention mixes (DeepSeek-V2, appendix C). Parameters have the names and the order of rows of
transformers' DeepseekV3Attention.

Letters: B batch, T query tokens, S key tokens, H query heads, N unrotated dimensions of a query head, R rotated ones, Q
= N + R, L dimensions of the latent, Z = L + R, D dimensions of a value head, U = N + D, M hidden_size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.decoder.attention import Mask, attend, exclude
from model.decoder.config import LatentShape, LlamaConfig
from model.decoder.kv_cache import LayerCache
from model.decoder.rope import rotate


class LatentAttention(nn.Module):
    """Latent attention with the interface of `model.decoder.llama.Attention`."""

    def __init__(self, config: LlamaConfig, shape: LatentShape) -> None:
        super().__init__()
        self.shape, self.n_heads = shape, config.n_heads
        hidden, heads = config.hidden_size, config.n_heads
        self.q_proj = nn.Linear(hidden, heads * shape.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, shape.latent_dim + shape.qk_rope_head_dim, bias=False)
        self.kv_b_proj = nn.Linear(shape.latent_dim, heads * (shape.qk_nope_head_dim + shape.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * shape.v_head_dim, hidden, bias=False)

    def forward(
        self, x_BTM: Tensor, rotation: tuple[Tensor, Tensor], mask: Mask, cache: LayerCache | None, start: int
    ) -> Tensor:
        shape = self.shape
        q_BTHQ = self.q_proj(x_BTM).view(*x_BTM.shape[:2], self.n_heads, shape.qk_head_dim)
        q_nope_BTHN, q_rope_BTHR = torch.split(q_BTHQ, [shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=-1)
        cached_BTZ = self.kv_a_proj_with_mqa(x_BTM)
        latent_BTL, key_BTR = torch.split(cached_BTZ, [shape.latent_dim, shape.qk_rope_head_dim], dim=-1)
        latent_BT1L = (latent_BTL * shape.gain)[:, :, None]
        q_rope_BTHR, key_BT1R = (rotate(_half_split(each), *rotation) for each in (q_rope_BTHR, key_BTR[:, :, None]))
        if cache is not None:
            key_BT1R, latent_BT1L = cache.store(start, key_BT1R, latent_BT1L, whole=mask.n_keys is not None)
        out = self._absorbed if cache is not None and x_BTM.shape[1] == 1 else self._expanded
        out_BTM: Tensor = self.o_proj(out(q_nope_BTHN, q_rope_BTHR, key_BT1R, latent_BT1L, mask).flatten(2))
        return out_BTM

    def _expanded(
        self, q_nope_BTHN: Tensor, q_rope_BTHR: Tensor, key_BS1R: Tensor, latent_BS1L: Tensor, mask: Mask
    ) -> Tensor:
        """Attend with full keys and values, [B, T, H, D]."""
        shape = self.shape
        heads_BSHU = self.kv_b_proj(latent_BS1L[:, :, 0]).view(*latent_BS1L.shape[:2], self.n_heads, -1)
        k_nope_BSHN, v_BSHD = torch.split(heads_BSHU, [shape.qk_nope_head_dim, shape.v_head_dim], dim=-1)
        q_BTHQ = torch.cat([q_nope_BTHN, q_rope_BTHR], dim=-1)
        k_BSHQ = torch.cat([k_nope_BSHN, key_BS1R.expand(-1, -1, self.n_heads, -1)], dim=-1)
        wider = max(0, shape.qk_head_dim - shape.v_head_dim)  # torch's fast kernels need heads of one size
        return attend(q_BTHQ, k_BSHQ, F.pad(v_BSHD, (0, wider)), mask)[..., : shape.v_head_dim]

    def _absorbed(
        self, q_nope_B1HN: Tensor, q_rope_B1HR: Tensor, key_BS1R: Tensor, latent_BS1L: Tensor, mask: Mask
    ) -> Tensor:
        """Attend with one token on the latents, [B, 1, H, D]."""
        shape = self.shape
        up_HUL = self.kv_b_proj.weight.view(self.n_heads, shape.qk_nope_head_dim + shape.v_head_dim, shape.latent_dim)
        k_HNL, v_HDL = torch.split(up_HUL, [shape.qk_nope_head_dim, shape.v_head_dim], dim=1)
        key_BSR, latent_BSL = key_BS1R[:, :, 0], latent_BS1L[:, :, 0]
        q_BHL = torch.einsum("bhn,hnl->bhl", q_nope_B1HN[:, 0], k_HNL)
        scores_BHS = q_BHL @ latent_BSL.mT + q_rope_B1HR[:, 0] @ key_BSR.mT
        scores_BHS = scores_BHS * shape.qk_head_dim**-0.5
        exclude(scores_BHS, None if mask.allowed_B1TS is None else mask.allowed_B1TS[:, :, 0], mask.n_keys)
        weights_BHS = scores_BHS.softmax(dim=-1, dtype=torch.float32).to(latent_BSL.dtype)
        return torch.einsum("bhl,hdl->bhd", weights_BHS @ latent_BSL, v_HDL)[:, None]


def _half_split(heads_BTHR: Tensor) -> Tensor:
    """Return rotated dimensions 2i and 2i + 1 as i and i + R/2."""
    return torch.cat([heads_BTHR[..., 0::2], heads_BTHR[..., 1::2]], dim=-1)
