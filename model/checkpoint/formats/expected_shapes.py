"""List the tensor shapes of a decoder without biases, for formats that are checked for completeness."""

from collections.abc import Mapping

Shape = tuple[int, ...]


def expected_shapes(
    n_layers: int, vocab_size: int, hidden_size: int, n_mlp: int, n_q: int, n_kv: int, norms: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Return the shape of every tensor, in Hugging Face's order.

    `n_q` and `n_kv`: rows of all query heads and of all K (or V) heads. `norms`: the norms inside a layer.
    """
    layer = {
        "self_attn.q_proj": (n_q, hidden_size), "self_attn.k_proj": (n_kv, hidden_size),
        "self_attn.v_proj": (n_kv, hidden_size), "self_attn.o_proj": (hidden_size, n_q),
        "mlp.gate_proj": (n_mlp, hidden_size), "mlp.up_proj": (n_mlp, hidden_size),
        "mlp.down_proj": (hidden_size, n_mlp), **norms,
    }  # fmt: skip
    return {
        "model.embed_tokens.weight": (vocab_size, hidden_size),
        **{f"model.layers.{i}.{part}.weight": shape for i in range(n_layers) for part, shape in layer.items()},
        "model.norm.weight": (hidden_size,),
        "lm_head.weight": (vocab_size, hidden_size),
    }
