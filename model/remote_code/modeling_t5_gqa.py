"""T5 with grouped-query attention in its decoder.

The model is transformers' own T5 but for the decoder's self-attention and cross-attention: consecutive query heads form
`num_key_value_heads` groups, and a group shares one key and one value head (Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245). The cache holds only those. The encoder stays as it is: it reads all tokens at once,
and has no cache to save. Names of tensors are the stock ones; of their shapes, only those of the decoder's `k` and `v`
differ, which have num_key_value_heads * d_kv rows. Query head h reads K/V head h // (heads per group), and keeps its
own relative position bias.
"""

import inspect

import torch
from torch import nn
from transformers import EncoderDecoderCache, T5ForConditionalGeneration, T5Model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention

from .configuration_t5_gqa import T5GQAConfig

# transformers 4 hands attention weights on only if asked to, transformers 5 always.
WEIGHTS_ON_REQUEST = "output_attentions" in inspect.signature(T5Attention.forward).parameters


def eager_attention(module, query, key, value, mask, dropout, scaling, position_bias, layer_head_mask=None, **kwargs):
    """Repeat each K/V head for the query heads that read it, and attend step by step."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None:
        scores = scores + mask[..., : key.shape[2]]
    weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
    weights = nn.functional.dropout(weights, dropout)
    if layer_head_mask is not None:
        weights = weights * layer_head_mask
    return (weights @ value).transpose(1, 2), weights


class T5GQAAttention(T5Attention):
    """The stock attention of a decoder, with fewer K/V heads."""

    def __init__(self, config, layer_idx, has_relative_attention_bias, is_causal):
        super().__init__(config, has_relative_attention_bias=has_relative_attention_bias, layer_idx=layer_idx)
        self.config = config
        self.is_causal = is_causal
        # transformers' name for the number of query heads in a group; its attention functions read it.
        self.num_key_value_groups = config.num_heads // config.num_key_value_heads
        self.k = nn.Linear(config.d_model, config.num_key_value_heads * config.d_kv, bias=False)
        self.v = nn.Linear(config.d_model, config.num_key_value_heads * config.d_kv, bias=False)

    def forward(
        self,
        hidden_states,
        mask=None,
        key_value_states=None,
        position_bias=None,
        past_key_values=None,  # before transformers 5.24
        cache_position=None,  # transformers 4 only
        cache=None,
        **kwargs,
    ):
        """Attend to `hidden_states` themselves, or to the encoder's, which are `key_value_states`."""
        crossing = key_value_states is not None
        n_tokens, n_before = hidden_states.shape[1], 0
        both = own = past_key_values if cache is None else cache
        if isinstance(both, EncoderDecoderCache):
            own = both.cross_attention_cache if crossing else both.self_attention_cache
        if own is not None and not crossing:
            n_before = own.get_seq_length(self.layer_idx)
        positions = torch.arange(n_tokens, device=hidden_states.device) + n_before

        query = self._heads(self.q(hidden_states))
        if crossing and own is not None and both.is_updated.get(self.layer_idx):
            key, value = own.layers[self.layer_idx].keys, own.layers[self.layer_idx].values
        else:
            states = key_value_states if crossing else hidden_states
            key, value = self._heads(self.k(states)), self._heads(self.v(states))
            if own is not None:
                where = {"cache_position": None if crossing else cache_position}
                key, value = own.update(key, value, self.layer_idx, where)
                if crossing:
                    both.is_updated[self.layer_idx] = True
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self._relative_bias(positions, key.shape[2])  # the other layers are handed this one's

        kind = self.config._attn_implementation
        attend = eager_attention if kind == "eager" else ALL_ATTENTION_FUNCTIONS[kind]
        dropout = self.dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, mask, dropout=dropout, scaling=1.0, position_bias=position_bias, **kwargs
        )
        output = self.o(output.reshape(*hidden_states.shape[:-1], -1))
        if WEIGHTS_ON_REQUEST and not kwargs.get("output_attentions"):
            return output, position_bias
        return output, position_bias, weights

    def _heads(self, rows):
        return rows.unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)

    def _relative_bias(self, positions, n_keys):
        buckets = self._relative_position_bucket(
            torch.arange(n_keys, device=positions.device) - positions[:, None],
            bidirectional=False,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
        )
        return self.relative_attention_bias(buckets).permute(2, 0, 1)[None]  # [1, heads, tokens, keys]


def _group_heads(decoder):
    """Put grouped attention in the place of every layer's own; its weights are drawn as the stock model draws them."""
    for i, block in enumerate(decoder.block):
        block.layer[0].SelfAttention = T5GQAAttention(decoder.config, i, i == 0, is_causal=True)
        block.layer[1].EncDecAttention = T5GQAAttention(decoder.config, i, False, is_causal=False)
    decoder.post_init()


class T5GQAModel(T5Model):
    """`T5Model` with grouped-query attention in its decoder."""

    config_class = T5GQAConfig

    def __init__(self, config):
        super().__init__(config)
        _group_heads(self.decoder)


class T5GQAForConditionalGeneration(T5ForConditionalGeneration):
    """`T5ForConditionalGeneration` with grouped-query attention in its decoder."""

    config_class = T5GQAConfig

    def __init__(self, config):
        super().__init__(config)
        _group_heads(self.decoder)
