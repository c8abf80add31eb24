"""GPT-NeoX (Pythia) with grouped-query attention: the config.

`GPTNeoXConfig` of transformers with one more field. Written by Groupwise; the model is in `modeling_gpt_neox_gqa.py`.
"""

from transformers import GPTNeoXConfig


class GPTNeoXGQAConfig(GPTNeoXConfig):
    """`GPTNeoXConfig` and `num_key_value_heads`, which must divide `num_attention_heads` (absent: it equals it)."""

    model_type = "gpt_neox_gqa"

    def __init__(self, num_key_value_heads=None, **kwargs):
        # What AutoTokenizer takes if tokenizer_config.json names no class; it does not know this model type.
        kwargs.setdefault("tokenizer_class", "GPTNeoXTokenizer")
        super().__init__(**kwargs)
        n_heads = self.num_attention_heads
        n_kv_heads = n_heads if num_key_value_heads is None else num_key_value_heads
        if type(n_kv_heads) is not int or n_kv_heads < 1 or n_heads % n_kv_heads:
            raise ValueError(
                f"num_key_value_heads is {n_kv_heads!r}; it must be a whole number that divides num_attention_heads, "
                f"which is {n_heads}."
            )
        self.num_key_value_heads = n_kv_heads
