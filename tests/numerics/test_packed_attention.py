"""What goes to CUDA's kernel for packed texts, against the same attention by other ways, without CUDA.

The kernel is replaced by its contract in a few lines of float32, which refuses what the kernel refuses.
"""

from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.nn.attention.varlen
from hypothesis import given, settings
from hypothesis import strategies as st

import model.decoder.attention
import model.decoder.llama
from model import load_model
from model.decoder.attention import attend, has_flash_attention, has_packed_attention
from model.decoder.masks import document_mask

HALF = (torch.float16, torch.bfloat16)


def kernel(q_NHD, k_NKD, v_NKD, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa):
    """The contract of torch.nn.attention.varlen.varlen_attn, for the window sizes (n, 0): n tokens back, -1 for all."""
    assert enable_gqa == (q_NHD.shape[1] != k_NKD.shape[1])
    assert cu_seq_q is cu_seq_k
    assert cu_seq_q.dtype == torch.int32
    lengths = cu_seq_q.diff().tolist()
    assert cu_seq_q[0] == 0
    assert sum(lengths) == len(q_NHD) == len(k_NKD)
    assert 0 < max(lengths) <= max_q == max_k
    back, ahead = window_size
    assert ahead == 0
    out = []
    for q_THD, k_TKD, v_TKD in zip(*(x.split(lengths) for x in (q_NHD, k_NKD, v_NKD)), strict=True):
        k_THD, v_THD = (x.float().repeat_interleave(q_THD.shape[1] // x.shape[1], dim=1) for x in (k_TKD, v_TKD))
        scores_HTT = torch.einsum("thd,shd->hts", q_THD.float(), k_THD) * q_THD.shape[2] ** -0.5
        index_T = torch.arange(len(q_THD))
        distance_TT = index_T[:, None] - index_T
        seen_TT = (distance_TT >= 0) & ((distance_TT <= back) | (back < 0))
        out.append(torch.einsum("hts,shd->thd", scores_HTT.masked_fill(~seen_TT, -torch.inf).softmax(2), v_THD))
    return torch.cat(out).to(q_NHD.dtype)


def strict_kernel(q_NHD, k_NKD, v_NKD, *more, **options):
    assert q_NHD.dtype == k_NKD.dtype == v_NKD.dtype
    assert q_NHD.dtype in HALF
    return kernel(q_NHD, k_NKD, v_NKD, *more, **options)


@given(st.data())
@settings(max_examples=60)
def test_packed_is_the_masked_attention(data):
    """Any documents, groups and window."""
    batch, n_tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    groups, heads_per_group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    window = data.draw(st.none() | st.integers(1, 13))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    documents_BT = torch.randint(0, 2, (batch, n_tokens), generator=generator).cumsum(1)
    q_BTHD = torch.randn(batch, n_tokens, groups * heads_per_group, 8, generator=generator)
    k_BTKD, v_BTKD = torch.randn(2, batch, n_tokens, groups, 8, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
        packed = attend(q_BTHD, k_BTKD, v_BTKD, document_mask(documents_BT, window, packed=True))
    dense = attend(q_BTHD, k_BTKD, v_BTKD, document_mask(documents_BT, window, dense=True))
    torch.testing.assert_close(packed, dense, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("mistral", {"sliding_window": 5})])
def test_training_in_bfloat16_gives_the_kernel_what_it_takes(tmp_path, monkeypatch, family, changes):
    """Float32 masters under autocast: the angles of the rotary embedding are float32, the heads must not become so."""
    hf_model = tiny.build(family, hidden_size=64, num_key_value_heads=2, **changes)
    ours = load_model(tiny.save(hf_model, tmp_path / "model"), torch.float32)
    ids_BT = torch.randint(0, 67, (2, 12), generator=torch.Generator().manual_seed(0))
    documents_BT = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    losses = []
    for packed in (False, True):
        monkeypatch.setattr(model.decoder.llama, "has_packed_attention", lambda x, head_dim, packed=packed: packed)
        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", strict_kernel)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = ours(ids_BT, ids_BT, documents_BT)
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "expected"),
    [
        (torch.bfloat16, 64, (9, 0), True),
        (torch.float16, 256, (8, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
        (torch.bfloat16, 60, (9, 0), False),
        (torch.bfloat16, 264, (9, 0), False),
    ],
)
def test_where_there_is_flash_attention(monkeypatch, dtype, head_dim, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x = SimpleNamespace(dtype=dtype, device=torch.device("cuda"))
    assert has_flash_attention(x, head_dim) == has_packed_attention(x, head_dim) == expected
    x.device = torch.device("cpu")
    assert not has_flash_attention(x, head_dim)


def test_older_torch_has_none_for_grouped_heads(monkeypatch):
    monkeypatch.setattr(model.decoder.attention, "has_flash_attention", lambda x, head_dim: True)
    assert has_packed_attention(torch.zeros(1), 64)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", lambda query, key, value, window_size: None)
    assert not has_packed_attention(torch.zeros(1), 64)
