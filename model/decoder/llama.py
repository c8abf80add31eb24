"""Define the Llama decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

Modules have Hugging Face's names, so that the state dict has the tensor names of a checkpoint. Letters of tensor names:
B batch, T tokens, M hidden_size, H query heads, K K/V heads, D head_dim, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.decoder.attention import Mask, attend, has_packed_attention
from model.decoder.config import LlamaConfig
from model.decoder.kv_cache import KVCache, LayerCache
from model.decoder.latent_attention import LatentAttention
from model.decoder.linear import PrepackedLinear, can_prepack, matmul_dtype, prepack_linears
from model.decoder.losses import chunked_cross_entropy, next_token_targets
from model.decoder.masks import document_lengths, document_mask, document_positions, text_mask
from model.decoder.rope import rotate, rotations

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the new tokens, [B, T, 1, D] each."""


class RMSNorm(nn.Module):
    """Divide by the root mean square, in float32, then scale (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x in the dtype of the next matrix products, so that it is cast only once."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(matmul_dtype(x))


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=config.o_bias)

    def forward(self, x_BTM: Tensor, rotation: Rotation, mask: Mask, cache: LayerCache | None, start: int) -> Tensor:
        heads = (*x_BTM.shape[:2], -1, self.head_dim)
        q_BTHD = rotate(self.q_proj(x_BTM).view(heads), *rotation)
        k_BTKD = rotate(self.k_proj(x_BTM).view(heads), *rotation)
        v_BTKD = self.v_proj(x_BTM).view(heads)
        if cache is not None:
            k_BTKD, v_BTKD = cache.store(start, k_BTKD, v_BTKD, whole=mask.n_keys is not None)
        out_BTHD = attend(q_BTHD, k_BTKD, v_BTKD, mask)
        out_BTM: Tensor = self.o_proj(out_BTHD.flatten(2))
        return out_BTM


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        wide, narrow = config.intermediate_size, config.hidden_size
        self.gate_proj = nn.Linear(narrow, wide, bias=config.mlp_bias)
        self.up_proj = nn.Linear(narrow, wide, bias=config.mlp_bias)
        self.down_proj = nn.Linear(wide, narrow, bias=config.mlp_bias)

    def forward(self, x_BTM: Tensor) -> Tensor:
        out_BTM: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTM)) * self.up_proj(x_BTM))
        return out_BTM


class Block(nn.Module):
    """One layer: attention, then the MLP, each with a norm before it and a residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config) if config.latent is None else LatentAttention(config, config.latent)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_BTM: Tensor, rotation: Rotation, mask: Mask, cache: LayerCache | None = None, start: int = 0
    ) -> Tensor:
        x_BTM = x_BTM + self.self_attn(self.input_layernorm(x_BTM), rotation, mask, cache, start)
        out_BTM: Tensor = x_BTM + self.mlp(self.post_attention_layernorm(x_BTM))
        return out_BTM


class Decoder(nn.Module):
    """The decoder without the LM head: embedding, layers and last norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids_BT: Tensor, documents_BT: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Return the hidden states [B, T, M]. With a KV cache, the ids continue its texts, and are stored in it."""
        if cache is not None:
            cache.make_room(ids_BT.shape[1])
        start = cache.length if cache else 0
        x_BTM = self.embed_tokens(ids_BT)
        rotation = self._rotation(ids_BT, documents_BT, cache, x_BTM.dtype)
        masks = {window: self._mask(x_BTM, documents_BT, cache, window) for window in set(self.config.windows)}
        for index, layer in enumerate(self.layers):
            layer_cache = cache.layers[index] if cache else None
            x_BTM = layer(x_BTM, rotation, masks[self.config.windows[index]], layer_cache, start)
        if cache is not None:
            cache.length += ids_BT.shape[1]
        hidden_BTM: Tensor = self.norm(x_BTM)
        return hidden_BTM

    def _rotation(
        self, ids_BT: Tensor, documents_BT: Tensor | None, cache: KVCache | None, dtype: torch.dtype
    ) -> Rotation:
        rope = self.config.rope
        if documents_BT is not None:
            lengths_BT = document_lengths(documents_BT) if rope.needs_lengths else None
            return rotations(rope, document_positions(documents_BT), lengths_BT, dtype)
        old = cache.length if cache else 0
        positions_BT = torch.arange(old, old + ids_BT.shape[1], device=ids_BT.device)[None]
        if cache is not None and cache.padding_B is not None:
            positions_BT = (positions_BT - cache.padding_B[:, None]).clamp(min=0)
        # The last token's position gives the length of a row's text, because padding is on the left.
        return rotations(rope, positions_BT, positions_BT[:, -1:] + 1 if rope.needs_lengths else None, dtype)

    def _mask(self, x_BTM: Tensor, documents_BT: Tensor | None, cache: KVCache | None, window: int | None) -> Mask:
        if documents_BT is not None:
            packed = has_packed_attention(x_BTM, self.config.head_dim)
            return document_mask(documents_BT, window, packed)
        old, padding_B = (cache.length, cache.padding_B) if cache else (0, None)
        return text_mask(x_BTM.shape[0], old, x_BTM.shape[1], window, padding_B, x_BTM.device)


class LlamaForCausalLM(nn.Module):
    """The decoder and the LM head, which predicts the next token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.stop_ids: tuple[int, ...] = ()
        """The end-of-text tokens at which `generate` stops; `load_model` reads them from the checkpoint."""
        self.model = Decoder(config)
        self.lm_head: nn.Linear | PrepackedLinear | None = None
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def lm_head_weight(self) -> Tensor:
        """The LM head's matrix, [V, M]; the embedding's if they are tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden(self, ids_BT: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Return the hidden states before the LM head, [B, T, M]."""
        hidden_BTM: Tensor = self.model(ids_BT, documents_BT)
        return hidden_BTM

    def logits(self, hidden_BTM: Tensor) -> Tensor:
        """Return the LM head's logits of hidden states, float32, [B, T, V]."""
        if isinstance(self.lm_head, PrepackedLinear):
            prepacked_BTV: Tensor = self.lm_head(hidden_BTM)
            return prepacked_BTV.float()
        # A frozen LM head may have a narrower dtype than the hidden states.
        return F.linear(hidden_BTM, self.lm_head_weight.to(hidden_BTM.dtype)).float()

    def prepack(self) -> None:
        """Make decoding faster, if the model is on a CPU that has oneDNN; otherwise, do nothing.

        The model then has logits only: no losses or gradients, and it cannot be saved, moved or copied. If the LM head
        is tied to the embedding, its weights take memory of their own.
        """
        if isinstance(self.lm_head, PrepackedLinear) or not can_prepack(self.lm_head_weight):
            return
        self.requires_grad_(False)
        lm_head_VM = self.lm_head_weight
        prepack_linears(self.model, skip="kv_b_proj")  # decoding needs this matrix itself
        self.lm_head = PrepackedLinear(lm_head_VM, None)

    def forward(
        self,
        ids_BT: Tensor,
        labels_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return float32 logits [B, T, V]; with labels, the sum of their losses (nats, float32) and their number.

        Labels are the ids themselves; they are shifted here, and −100 is ignored. `documents_BT` numbers the documents
        of packed rows: tokens attend to, and predict, only tokens of their own document, and positions restart at 0.
        """
        _check_ids(ids_BT, self.config.vocab_size)
        hidden_BTM = self.model(ids_BT, documents_BT, cache)
        if labels_BT is None:
            return self.logits(hidden_BTM)
        if isinstance(self.lm_head, PrepackedLinear):
            raise ValueError("a prepacked model computes no losses; load it again, and leave out prepack().")
        targets_BT = next_token_targets(labels_BT, documents_BT)
        return chunked_cross_entropy(hidden_BTM[:, :-1].flatten(0, 1), self.lm_head_weight, targets_BT.flatten())


def _check_ids(ids_BT: Tensor, vocab_size: int) -> None:
    """Raise ValueError for ids outside the vocabulary. (On CUDA an assertion of the embedding catches them.)"""
    if ids_BT.is_cuda or ids_BT.numel() == 0:
        return
    low, high = (int(x) for x in ids_BT.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"token id {wrong} is outside the vocabulary, which has {vocab_size} tokens (0 to {vocab_size - 1})."
        )
