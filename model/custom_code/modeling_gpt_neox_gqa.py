"""GPT-NeoX (Pythia) with grouped-query attention.

The model is transformers' own GPT-NeoX but for its attention: consecutive query heads form `num_key_value_heads` groups,
and a group shares one key and one value head (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245). The cache holds
only those. Names of tensors are the stock ones; of their shapes, only that of `query_key_value` differs. Its rows are,
group after group,

    [ the group's query heads | its key head | its value head ]      each head of head_size rows

in all (num_attention_heads + 2 * num_key_value_heads) * head_size. With as many K/V heads as query heads a group is one
query head, and this is exactly the stock layout. Query head h reads K/V head h // (heads per group).
"""

from torch import nn
from transformers import GPTNeoXForCausalLM, GPTNeoXModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox as stock

from .configuration_gpt_neox_gqa import GPTNeoXGQAConfig


def eager_attention(module, query, key, value, attention_mask, **kwargs):
    """Repeat each K/V head for the query heads that read it, and attend as the stock model does."""
    key, value = (heads.repeat_interleave(module.num_key_value_groups, dim=1) for heads in (key, value))
    return stock.eager_attention_forward(module, query, key, value, attention_mask, **kwargs)


class GPTNeoXGQAAttention(stock.GPTNeoXAttention):
    """The stock attention, with fewer K/V heads."""

    def __init__(self, config, layer_idx=None):
        super().__init__(config, layer_idx)
        # transformers' name for the number of query heads in a group; its attention functions read it.
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        rows = (config.num_attention_heads + 2 * config.num_key_value_heads) * self.head_size
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=config.attention_bias)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        layer_past=None,
        position_embeddings=None,
        cache_position=None,  # transformers 4 only
        **kwargs,
    ):
        shape = hidden_states.shape[:-1]
        # [batch, tokens, groups, heads, head_size], where heads are a group's query heads, its key and its value
        heads = self.query_key_value(hidden_states).view(*shape, -1, self.num_key_value_groups + 2, self.head_size)
        query = heads[..., :-2, :].flatten(2, 3).transpose(1, 2)
        key = heads[..., -2, :].transpose(1, 2)
        value = heads[..., -1, :].transpose(1, 2)

        query, key = stock.apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx, {"cache_position": cache_position})

        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention)
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        return self.dense(output.reshape(*shape, -1)), weights


def _group_heads(body):
    """Put grouped attention in the place of every layer's own; its weights are drawn as the stock model draws them."""
    for i, layer in enumerate(body.layers):
        layer.attention = GPTNeoXGQAAttention(body.config, i)
    body.post_init()


class GPTNeoXGQAModel(GPTNeoXModel):
    """`GPTNeoXModel` with grouped-query attention."""

    config_class = GPTNeoXGQAConfig

    def __init__(self, config):
        super().__init__(config)
        _group_heads(self)


class GPTNeoXGQAForCausalLM(GPTNeoXForCausalLM):
    """`GPTNeoXForCausalLM` with grouped-query attention."""

    config_class = GPTNeoXGQAConfig

    def __init__(self, config):
        super().__init__(config)
        _group_heads(self.gpt_neox)
