"""Observe the queries, keys and values that attention receives in transformers' classes.

Most classes call the attention function that their config names. Ours, registered with transformers, sees what they
pass. The classes in `_FROM_INPUTS` compute attention themselves. Their modules run as they are, and a function for each
class repeats its steps up to the products of queries and keys.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OBSERVED = "groupwise_observed"
"""Our attention function's name in transformers."""


class ObservedCall(NamedTuple):
    """What an attention module received. Letters: B batch, H heads, T tokens, D head dimension."""

    q: Tensor
    """[B, H, T, D], after rotation."""
    k: Tensor
    """[B, K/V heads, T, D], after rotation."""
    v: Tensor
    """[B, K/V heads, T, D]."""
    mask: Tensor
    """[B, 1 or H, T, T], added to the logits."""
    softmax: Callable[[Tensor, Tensor], Tensor]
    """`softmax(products, mask)`: the weights of the products of queries and keys, as the class computes them."""


Observer = Callable[[ObservedCall], None]


def attention_function(model_type: str) -> str | None:
    """Register our attention function with transformers, and return its name.

    For the classes that compute attention themselves (`_FROM_INPUTS`), return None, the default of the class.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(OBSERVED, _observed_attention)
    AttentionMaskInterface.register(OBSERVED, eager_mask)
    return None if model_type in _FROM_INPUTS else OBSERVED


@contextmanager
def observe_attention(model_type: str, attention: Any, observer: Observer) -> Iterator[None]:
    """Call `observer` whenever this attention module of a model runs."""
    if model_type not in _FROM_INPUTS:
        attention.observer = observer
        try:
            yield
        finally:
            del attention.observer
        return

    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observer(_FROM_INPUTS[model_type](module, *args, **kwargs))

    hook = attention.register_forward_pre_hook(observe, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def attention_weights(call: ObservedCall, q_HSD: Tensor, k_KTD: Tensor, at_S: Tensor) -> Tensor:
    """Return the weights, [H, S, T], that an observed attention gives to rotated queries at the positions `at_S`."""
    logits_KNT = q_HSD.reshape(len(k_KTD), -1, q_HSD.shape[2]) @ k_KTD.mT
    logits_1HST = logits_KNT.view(1, *q_HSD.shape[:2], k_KTD.shape[1])
    return call.softmax(logits_1HST, call.mask[:1, :, at_S])[0]


def _observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' eager functions do.

    That includes caps on logits (`softcap`), sinks (`s_aux`) and T5's biases, which are added to the mask.
    """
    if attention_mask is None:  # nothing is hidden
        attention_mask = query.new_zeros(1, 1, query.shape[2], key.shape[2])
    if position_bias is not None:
        attention_mask = attention_mask + position_bias
    heads_per_group = query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    softmax = partial(_softmax, scale=scale, softcap=softcap, s_aux=s_aux)
    observer = getattr(module, "observer", None)
    if observer is not None:
        observer(ObservedCall(query, key, value, attention_mask, softmax))
    key, value = (x.repeat_interleave(heads_per_group, dim=1) for x in (key, value))
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scale)
    else:
        out = softmax(query @ key.mT, attention_mask) @ value
    return out.transpose(1, 2).contiguous(), None


def _softmax(
    products: Tensor, mask: Tensor, scale: float, softcap: float | None = None, s_aux: Tensor | None = None
) -> Tensor:
    logits = products * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + mask
    if s_aux is None:
        return logits.softmax(dim=-1)
    sinks = s_aux.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def _falcon(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **others: Any,
) -> ObservedCall:
    """Falcon. Its mask holds ALiBi already. (Its eager code then adds ALiBi again; the default, SDPA, does not.)"""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    q, k, v = (heads.transpose(1, 2) for heads in module._split_heads(module.query_key_value(hidden_states)))
    if alibi is None:
        assert position_embeddings is not None
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)  # type: ignore[no-untyped-call]
    mask = attention_mask
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    return ObservedCall(q, k, v, mask, partial(_softmax, scale=module.head_dim**-0.5))


def _mpt(
    module: Any, hidden_states: Tensor, position_bias: Tensor, attention_mask: Tensor, **others: Any
) -> ObservedCall:
    """MPT. `position_bias` [heads, 1, contexts' maximum] is ALiBi, and `attention_mask` is true where it hides."""
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = (heads.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for heads in qkv.chunk(3, dim=2))
    bias = position_bias[None, :, :, -hidden_states.shape[1] :]
    mask = bias.masked_fill(attention_mask, torch.finfo(q.dtype).min)
    return ObservedCall(q, k, v, mask, partial(_softmax, scale=module.softmax_scale))


_FROM_INPUTS: Mapping[str, Callable[..., ObservedCall]] = {"falcon": _falcon, "mpt": _mpt}
