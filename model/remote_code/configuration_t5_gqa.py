"""T5 with grouped-query attention in its decoder: the config.

`T5Config` of transformers with one more field. Written by Groupwise; the model is in `modeling_t5_gqa.py`.
"""

from transformers import T5Config


class T5GQAConfig(T5Config):
    """`T5Config` and `num_key_value_heads`: the K/V heads of the decoder's self-attention and of its cross-attention.

    It must divide `num_heads` (absent: it equals it). The encoder keeps `num_heads` K/V heads.
    """

    model_type = "t5_gqa"

    def __init__(self, num_key_value_heads=None, **kwargs):
        # What AutoTokenizer takes if tokenizer_config.json names no class; it does not know this model type.
        kwargs.setdefault("tokenizer_class", "T5Tokenizer")
        super().__init__(**kwargs)
        n_kv_heads = self.num_heads if num_key_value_heads is None else num_key_value_heads
        if type(n_kv_heads) is not int or n_kv_heads < 1 or self.num_heads % n_kv_heads:
            raise ValueError(
                f"num_key_value_heads is {n_kv_heads!r}; it must be a whole number that divides num_heads, "
                f"which is {self.num_heads}."
            )
        self.num_key_value_heads = n_kv_heads
