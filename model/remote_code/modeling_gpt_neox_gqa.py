"""GPT-NeoX (Pythia) with grouped-query attention.

The model is transformers' own GPT-NeoX but for its attention: consecutive query heads form `num_key_value_heads`
groups, and a group shares one key and one value head (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245). The cache
holds only those. Names of tensors are the stock ones; of their shapes, only that of `query_key_value` differs. Its rows
are, group after group,

    [ the group's query heads | its key head | its value head ]      each head of head_size rows

in all (num_attention_heads + 2 * num_key_value_heads) * head_size. With as many K/V heads as query heads a group is one
query head, and this is exactly the stock layout. Query head h reads K/V head h // (heads per group).
"""

from dataclasses import fields
from typing import ClassVar

from torch import nn
from transformers import GenerationMixin, GPTNeoXModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_neox import modeling_gpt_neox as stock
from transformers.utils import can_return_tuple

from .configuration_gpt_neox_gqa import GPTNeoXGQAConfig

# The name of the cache among arguments and outputs, which transformers 5.24 changed.
CACHE = "cache" if "cache" in (field.name for field in fields(CausalLMOutputWithPast)) else "past_key_values"


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
        cache=None,  # what newer versions may call `layer_past`, as they do elsewhere
        **kwargs,
    ):
        shape = hidden_states.shape[:-1]
        # [batch, tokens, groups, heads, head_size], where heads are a group's query heads, its key and its value
        heads = self.query_key_value(hidden_states).view(*shape, -1, self.num_key_value_groups + 2, self.head_size)
        query = heads[..., :-2, :].flatten(2, 3).transpose(1, 2)
        key = heads[..., -2, :].transpose(1, 2)
        value = heads[..., -1, :].transpose(1, 2)

        query, key = stock.apply_rotary_pos_emb(query, key, *position_embeddings)
        cache = layer_past if cache is None else cache
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, {"cache_position": cache_position})

        kind = self.config._attn_implementation
        attend = eager_attention if kind == "eager" else ALL_ATTENTION_FUNCTIONS[kind]
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        return self.dense(output.reshape(*shape, -1)), weights


class GPTNeoXGQAModel(GPTNeoXModel):
    """`GPTNeoXModel` with grouped-query attention."""

    config_class = GPTNeoXGQAConfig

    def __init__(self, config):
        super().__init__(config)
        for i, layer in enumerate(self.layers):
            layer.attention = GPTNeoXGQAAttention(config, i)
        self.post_init()


class GPTNeoXGQAForCausalLM(stock.GPTNeoXPreTrainedModel, GenerationMixin):
    """The model and its head, as in `GPTNeoXForCausalLM`.

    The head is called `embed_out` as in the files of every GPT-NeoX; transformers 5 renames it in its own class alone.
    """

    config_class = GPTNeoXGQAConfig
    _tied_weights_keys: ClassVar = {"embed_out.weight": "gpt_neox.embed_in.weight"}  # if the config says so

    def __init__(self, config):
        super().__init__(config)
        self.gpt_neox = GPTNeoXGQAModel(config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.embed_out

    def set_output_embeddings(self, new_embeddings):
        self.embed_out = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        cache=None,
        **kwargs,
    ):
        """Return logits of all tokens, or of the last `logits_to_keep`; with `labels`, the loss too."""
        body = self.gpt_neox(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE: past_key_values if cache is None else cache},
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.embed_out(body.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=body.hidden_states,
            attentions=body.attentions,
            **{CACHE: getattr(body, CACHE)},
        )
