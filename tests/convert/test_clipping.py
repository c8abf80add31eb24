"""Merges of models that clip queries, keys and values (`clip_qkv`): the clip must not cut more than in the source."""

import json

import numpy as np
import pytest
import tiny
import torch
from equivalent_heads import equivalent_mha, for_stock_class, logits, share_heads
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from convert.layer_tensors.head_matrices import HeadMatrices, NormWeights
from convert.merging.clipping import HeadMaxima, scale_into_clip

FAMILIES = ("mpt", "olmo", "olmoe")
FIT = ("--groups", 2, "--calibration-tokens", 1024)


def make_source(family, tmp_path):
    """Write a model whose K/V heads are equal in groups, up to maps, and whose values nearly lie on a line.

    The first component of such a value is four times as large as its numbers.
    """
    model = tiny.build(family, vocab_size=300, hidden_size=128, initializer_range=0.2)
    start, folder = tiny.save(tiny.equal_in_pairs(model, 16), tmp_path / "start"), tmp_path / "source"
    if family == "mpt":
        share_heads(start, 2)
    else:
        tensors, n = tiny.tensors(start), 2
        for name in filter(tiny.is_kv, tensors):
            tensors[name] = tensors[name].unflatten(0, (tiny.N_HEADS, -1))[:: tiny.N_HEADS // n].flatten(0, 1)
        for name in tensors:
            if "k_norm" in name:
                tensors[name] = tensors[name][: n * 16].clone()
        save_file({n: t.contiguous() for n, t in tensors.items()}, start / "model.safetensors", {"format": "pt"})
    equivalent_mha(start, folder, 2)
    tensors = tiny.tensors(folder)
    for name in [name for name in tensors if "v_proj" in name or "Wqkv" in name]:
        values = tensors[name][-128:].view(2, 4, 16, 128)[:, :1]
        values = values.mean(2, keepdim=True) * 4 + 0.1 * values
        tensors[name] = torch.cat([tensors[name][:-128], values.repeat(1, 4, 1, 1).flatten(0, 2)])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return make_tokenizer(folder, 300)


def clip(folder, value):
    config = json.loads((folder / "config.json").read_text())
    attention = config.get("attn_config")
    changes = {"clip_qkv": value} if attention is None else {"attn_config": {**attention, "clip_qkv": value}}
    tiny.edit_config(folder, **changes)
    return folder


def largest(folder):
    """Return the largest query, key or value of any token, before a clip."""
    model = AutoModelForCausalLM.from_pretrained(clip(folder, None), attn_implementation="eager").eval()
    found = []
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm", "v_proj", "Wqkv")) or (
            name.endswith(("q_proj", "k_proj")) and model.config.model_type == "olmo"
        ):
            module.register_forward_hook(lambda module, args, out: found.append(out.abs().max()))
    with torch.inference_mode():
        model(torch.randint(300, (32, 64), generator=torch.Generator().manual_seed(0)))
    return float(max(found))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [(), ("--method", "pca")])
def test_a_merge_is_as_exact_with_a_clip_that_cuts_nothing_of_the_source(convert, tmp_path, family, method):
    folder = make_source(family, tmp_path)
    # MPT's keys are merged in coordinates in which one product of key and query is most of the logit.
    clip(folder, (2 if family == "mpt" else 1.2) * largest(folder))
    shown = convert("mha-to-gqa", folder, tmp_path / "out", *FIT, *method).succeeded()
    assert "clip_qkv" not in shown.out
    expected, got = logits(folder), logits(for_stock_class(tmp_path / "out"))
    assert float((got - expected).norm() / expected.norm()) < 1e-4
    convert("verify", folder, tmp_path / "out").succeeded()


def test_what_the_clip_cuts_of_a_merge_is_counted(convert, tmp_path):
    folder = make_source("olmo", tmp_path)
    clip(folder, 0.9 * largest(folder))
    shown = convert("mha-to-gqa", folder, tmp_path / "out", *FIT, "--json").succeeded()
    *_, note = json.loads(shown.out)["notes"]
    n_values = 2 * 1024 * (8 + 2 + 2) * 16
    assert note.startswith("clip_qkv = ")
    assert note.endswith(f" of {n_values:,} values of the merged layers on the calibration text.")
    convert("verify", folder, tmp_path / "out").succeeded()


def test_a_clip_that_takes_effect_in_a_later_layer_is_refused(convert, tmp_path):
    folder = make_source("olmo", tmp_path)
    clip(folder, 1.2 * largest(folder))
    tensors = tiny.tensors(folder)
    tensors["model.layers.1.self_attn.q_proj.weight"] *= 10
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = convert("mha-to-gqa", folder, tmp_path / "out", *FIT)
    note, error = result.err.splitlines()
    assert (result.code, note.startswith("Note: ")) == (2, True)
    for words in ("layer 1: clip_qkv = ", "on the calibration text", "use --method mean"):
        assert words in error
    assert not (tmp_path / "out").exists()


def test_the_first_layer_is_tried_on_its_own_inputs(convert, tmp_path):
    """The weights of MPT's norm make them smaller than random numbers of size 1."""
    folder = make_source("mpt", tmp_path)
    tensors = tiny.tensors(folder)
    for name in [name for name in tensors if "norm_1" in name]:
        tensors[name] /= 20
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    clip(folder, 1.2 * largest(folder))
    convert("mha-to-gqa", folder, tmp_path / "out", *FIT).succeeded()


@pytest.mark.parametrize("normed", [False, True])
def test_factors_cancel_and_bring_heads_below_their_limits(normed):
    rng = np.random.default_rng(0)
    x_X = rng.normal(size=8)
    q_HDX, k_GDX, v_GDX, o_HMD = (
        rng.normal(size=(n, *rest)) for n, *rest in ((4, 6, 8), (2, 6, 8), (2, 6, 8), (4, 8, 6))
    )
    k_GDX[0, 1] *= 60 / abs(k_GDX[0, 1] @ x_X)  # dimensions 1 and 3 are a pair; 4 and 5 are not rotated
    q_HDX[3, 5] *= 90 / abs(q_HDX[3, 5] @ x_X)
    v_GDX[1] *= 20
    norms = NormWeights(rng.normal(size=(4, 6)), rng.normal(size=(2, 6)), 1.0, 1.0, False) if normed else None
    attention = HeadMatrices(q_HDX, k_GDX, v_GDX, o_HMD, 2, norms)

    def largest_of(attention):
        return HeadMaxima(*(abs(heads @ x_X) for heads in (attention.q_HDX, attention.k_KDX, attention.v_KDX)))

    source = HeadMaxima(np.full((4, 6), 40.0), np.full((4, 6), 40.0), np.full((4, 6), 5.0))
    scaled = scale_into_clip(attention, largest_of(attention), source, 30.0)
    after = largest_of(scaled)
    assert after.q_HD.max() <= 30 and after.k_KD.max() <= 30 and after.v_KD.max() <= 5
    factors_GD = (scaled.k_KDX / attention.k_KDX)[:, :, 0]
    assert np.array_equal(factors_GD[:, 0:2], factors_GD[:, 2:4])
    changed = [(g, d) for g in range(2) for d in range(6) if factors_GD[g, d] != 1]
    assert changed == [(0, 1), (0, 3), (1, 5)]
    logits = [np.einsum("hdx,hdy->hdxy", a.q_HDX, np.repeat(a.k_KDX, 2, axis=0)) for a in (attention, scaled)]
    assert np.array_equal(*logits)
    outputs = [np.einsum("hmd,hdx->hmdx", a.o_HMD, np.repeat(a.v_KDX, 2, axis=0)) for a in (attention, scaled)]
    assert np.array_equal(*outputs)
    for ours, before in zip(scaled.projections, attention.projections, strict=True):
        assert not normed or np.allclose(ours, before, rtol=1e-14)
