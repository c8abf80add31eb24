r"""Compute attention over grouped heads: MHA, GQA and MQA are one computation.

    MHA, n_kv_heads = n_heads       GQA, two groups          MQA, one group
      q0  q1  q2  q3                 q0  q1  q2  q3           q0  q1  q2  q3
      |   |   |   |                    \ /     \ /               \  \ /  /
      k0  k1  k2  k3                   k0      k1                   k0

Query head h reads K/V head h // heads_per_group. Letters: B batch, T query tokens, S key tokens (with a KV cache more
than T), H query heads, K K/V heads, J query heads in a group, D head_dim.
"""

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.decoder.linear import matmul_dtype


@dataclass
class Segments:
    """The documents of packed rows. torch.compile does not look into an instance, which differs in each batch.

    It would compile a layer again for each number of documents in a tuple, or in a frozen dataclass.
    """

    documents: tuple[tuple[int, int, int], ...]
    """(row, start, stop) of each."""


@dataclass(frozen=True)
class Mask:
    """The keys that each query attends to. With nothing set: causal (one new token with a KV cache: all keys)."""

    segments: Segments | None = None
    """The documents, if rows hold several documents that must not attend to each other."""
    boundaries: Tensor | None = None
    """The same for packed attention: the starts of all documents in the flattened batch, and its length (int32)."""
    allowed_B1TS: Tensor | None = None
    """True where a query attends to a key. For masks without a cheaper form: padding, windows, several new tokens with
    a KV cache."""
    n_keys: int | None = None
    """Number of keys, for one query token on the CPU. The keys passed may be longer: the rest is unused room of the KV
    cache. torch would copy a slice of it before each bfloat16 product, 15 times slower."""
    window: int | None = None
    """With `boundaries`: number of tokens that a query attends to, itself included."""


def attend(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Mask) -> Tensor:
    """Return softmax(q kᵀ / √D) v for every head, [B, T, H, D]."""
    if mask.boundaries is not None:
        return _variable_length(q_BTHD, k_BSKD, v_BSKD, mask.boundaries, mask.window)
    if mask.segments is not None:
        return by_segment(q_BTHD, k_BSKD, v_BSKD, mask.segments)
    if q_BTHD.shape[1] == 1:
        return _one_token(q_BTHD, k_BSKD, v_BSKD, mask)
    return _all_tokens(q_BTHD, k_BSKD, v_BSKD, mask.allowed_B1TS)


def has_packed_attention(x: Tensor, head_dim: int) -> bool:
    """Return whether heads computed from x can use flash attention on packed documents."""
    return has_flash_attention(x, head_dim) and torch_has_packed_attention()


def torch_has_packed_attention() -> bool:
    """Return whether torch is recent enough for flash attention on packed documents with grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"enable_gqa", "window_size"} <= inspect.signature(varlen_attn).parameters.keys()


def has_flash_attention(x: Tensor, head_dim: int) -> bool:
    """Return whether heads computed from x can use flash attention."""
    return flash_attention_on(x.device, matmul_dtype(x), head_dim)


def flash_attention_on(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether heads of this dtype can use flash attention on a device.

    It needs CUDA, half precision, an Ampere GPU or newer, and a fitting head_dim.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return is_flash_head_dim(head_dim) and gpu_has_flash_attention(device)


def is_flash_head_dim(head_dim: int) -> bool:
    """Return whether flash attention takes heads of this size. It would pad those that are no multiple of 8."""
    return head_dim % 8 == 0 and head_dim <= 256


def gpu_has_flash_attention(device: torch.device | None = None) -> bool:
    """Return whether a CUDA device, the current one by default, is an Ampere GPU or newer."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _all_tokens(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, allowed_B1TS: Tensor | None) -> Tensor:
    q_BHTD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q_BTHD, k_BSKD, v_BSKD))
    heads_per_group = q_BHTD.shape[1] // k_BKSD.shape[1]
    # Without flash, or with a mask, `enable_gqa` selects the kernel with S² memory (pytorch issues 139586, 181528).
    grouped = heads_per_group > 1 and allowed_B1TS is None and has_flash_attention(q_BHTD, q_BHTD.shape[3])
    if heads_per_group > 1 and not grouped:
        k_BKSD, v_BKSD = (x.repeat_interleave(heads_per_group, dim=1) for x in (k_BKSD, v_BKSD))
    out_BHTD = F.scaled_dot_product_attention(
        q_BHTD, k_BKSD, v_BKSD, attn_mask=allowed_B1TS, is_causal=allowed_B1TS is None, enable_gqa=grouped
    )
    return out_BHTD.transpose(1, 2)


def _one_token(q_B1HD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask: Mask) -> Tensor:
    """Attend with one query token. The heads of a group take the token axis, so each K/V head is read once."""
    batch, _, n_heads, head_dim = q_B1HD.shape
    out_BKJD: Tensor
    q_BKJD = q_B1HD.view(batch, k_BSKD.shape[2], -1, head_dim)
    k_BKSD, v_BKSD = k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2)
    if q_B1HD.is_cpu:  # torch's kernel copies all keys to scale them
        scores_BKJS = (q_BKJD * head_dim**-0.5) @ k_BKSD.mT
        exclude(scores_BKJS, mask.allowed_B1TS, mask.n_keys)
        out_BKJD = scores_BKJS.softmax(dim=-1, dtype=torch.float32).to(v_BKSD.dtype) @ v_BKSD
    else:
        out_BKJD = F.scaled_dot_product_attention(q_BKJD, k_BKSD, v_BKSD, attn_mask=mask.allowed_B1TS)
    return out_BKJD.reshape(batch, 1, n_heads, head_dim)


def exclude(scores: Tensor, allowed: Tensor | None, n_keys: int | None) -> None:
    """Set scores [..., R] to -inf where a query does not attend to the key: where `allowed` [..., S] says so, and
    in unused room of the KV cache, from key `n_keys` on. R is at least S.
    """
    if n_keys is not None:
        scores[..., n_keys:] = float("-inf")
    if allowed is not None:
        scores[..., : allowed.shape[-1]].masked_fill_(~allowed, float("-inf"))


def by_segment(q_BTHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, segments: Segments) -> Tensor:
    """Attend document by document: exact, with Σ length² work instead of T²."""
    slices = [(slice(row, row + 1), slice(start, stop)) for row, start, stop in segments.documents]
    out = [_all_tokens(q_BTHD[part], k_BSKD[part], v_BSKD[part], None)[0] for part in slices]
    return torch.cat(out).view(q_BTHD.shape)


def exclude_segments_from_compilation() -> None:
    """Make torch.compile skip `by_segment`, which it would recompile for the document lengths of each batch.

    This is no decorator, since that would import the compiler with the model. A second call changes nothing.
    """
    global by_segment
    if not getattr(by_segment, "_torchdynamo_disable", False):
        by_segment = torch.compiler.disable(by_segment)  # type: ignore[no-untyped-call]


def _variable_length(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, boundaries: Tensor, window: int | None
) -> Tensor:  # fmt: skip
    """Attend document by document in one kernel (variable-length flash attention)."""
    from torch.nn.attention.varlen import varlen_attn

    longest = q_BTHD.shape[1]
    out = varlen_attn(
        q_BTHD.flatten(0, 1),
        k_BTKD.flatten(0, 1),
        v_BTKD.flatten(0, 1),
        cu_seq_q=boundaries,
        cu_seq_k=boundaries,
        max_q=longest,
        max_k=longest,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q_BTHD.shape[2] != k_BTKD.shape[2],
    )
    assert isinstance(out, Tensor)
    return out.view(q_BTHD.shape)
