"""What calibrating sees of a layer, held against transformers' own attention, in float64 and one query at a time."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from equivalent_heads import equivalent_mha, logits
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from convert.calibration import head_moments
from convert.calibration.merge_layers import calibrate_merges
from convert.calibration_text.read import read_calibration_text
from convert.layer_tensors.head_matrices import Real
from convert.layer_tensors.layer_file import load_layer
from convert.layers import layer_stream
from convert.layers.native_layers import NativeLayer
from convert.merging.merge_recipe import MergeRecipe
from convert.merging.moments import Moments
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import open_checkpoint
from model.common.errors import CheckpointError

WINDOW, N_WINDOWS, GROUPS = 32, 4, 2
FAMILIES = [
    ("llama", {}), ("llama", {"attention_bias": True}), ("qwen2", {}), ("mistral", {"sliding_window": 9}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
]  # fmt: skip


@pytest.fixture
def watched(monkeypatch):
    """Look at every query, and at very many keys for each; keep the moments."""
    seen: list[list[Moments]] = []
    monkeypatch.setattr(head_moments, "VALUE_QUERIES", 10**6)
    monkeypatch.setattr(head_moments, "KEY_QUERIES", 10**6)
    monkeypatch.setattr(head_moments, "KEYS_PER_GROUP_QUERY", 4000)
    moments = head_moments.HeadSums.moments

    def keep(sums, *rest):
        seen.append(moments(sums, *rest))
        return seen[-1]

    monkeypatch.setattr(head_moments.HeadSums, "moments", keep)
    return seen


def source_folder(folder, family="llama", **changes):
    tiny.save(tiny.build(family, vocab_size=300, max_position_embeddings=WINDOW, **changes), folder)
    return make_tokenizer(folder, 300)


def text(folder):
    path = folder / "text.txt"
    path.write_text("The folder is the interface, and heads are merged into groups. Ein Dokument endet. " * 40)
    return str(path)


def heads_of(model, ids_NT):
    """Return for each layer attention's probabilities, and queries, keys and values before rotation, in float64."""
    projections = []

    def keep(module, arguments, keywords):
        x = keywords["hidden_states"]
        shape = (*x.shape[:2], -1, module.head_dim)
        projections.append([p(x).view(shape) for p in (module.q_proj, module.k_proj, module.v_proj)])

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        out = model(torch.from_numpy(ids_NT), output_attentions=True)
    return [(a.numpy(), *(h.numpy() for h in heads)) for a, heads in zip(out.attentions, projections, strict=True)]


def rotate(x_TD: Real, positions_T: Real, theta: float, factor: float) -> Real:
    """Rotate by position, by the textbook: dimension i with i + D/2, as one complex number."""
    half = x_TD.shape[1] // 2
    angles = positions_T[:, None] / factor * theta ** (-np.arange(half) / half)
    z = (x_TD[:, :half] + 1j * x_TD[:, half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], axis=1)


def expected(a_NHTT, k_NTKD, v_NTKD, group: int, factor: float) -> tuple[Real, Real]:
    """Return the keys' and the values' moments of a group, query by query as they are defined."""
    n_heads, n_keys = a_NHTT.shape[1], k_NTKD.shape[2]
    keys = range(group * n_keys // GROUPS, (group + 1) * n_keys // GROUPS)
    heads = range(group * n_heads // GROUPS, (group + 1) * n_heads // GROUPS)
    k_moments, v_moments, n = 0.0, 0.0, 0
    for window in range(len(a_NHTT)):
        for m in range(a_NHTT.shape[2]):
            from_query = np.arange(a_NHTT.shape[2]) - m
            met = np.concatenate([rotate(k_NTKD[window, :, k], from_query, 10000.0, factor) for k in keys], axis=1)
            values = np.concatenate([v_NTKD[window, :, k] for k in keys], axis=1)
            for h in heads:
                a_T = a_NHTT[window, h, m]
                apart = met - a_T @ met
                k_moments = k_moments + apart.T @ (a_T[:, None] * apart)
                v_moments = v_moments + np.outer(a_T @ values, a_T @ values)
                n += 1
    return k_moments / n, v_moments / n


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_moments_are_those_of_their_definition(tmp_path, watched, family, changes):
    folder = source_folder(tmp_path / "source", family, **changes)
    with open_checkpoint(folder) as checkpoint:
        sample = read_calibration_text(checkpoint, text(tmp_path), WINDOW * N_WINDOWS)
        plan = make_merge_plan(checkpoint, GROUPS, MergeRecipe("fit", text=sample), None)
        calibrate_merges(checkpoint, plan.conversions, tmp_path / "scratch", lambda n: None)
        for layer in plan.conversions:
            assert load_layer(layer, tmp_path / "scratch").tensors.keys() >= set(layer.weights)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    factor = changes.get("rope_parameters", {}).get("factor", 1.0)
    for known, (a_NHTT, q_NTHD, k_NTKD, v_NTKD) in zip(watched, heads_of(model, sample.ids_NT), strict=True):
        for group, moments in enumerate(known):
            keys, values = expected(a_NHTT, k_NTKD, v_NTKD, group, factor)
            heads = slice(group * len(q_NTHD[0, 0]) // GROUPS, (group + 1) * len(q_NTHD[0, 0]) // GROUPS)
            queries = np.einsum("nthd,nthe->hde", q_NTHD[:, :, heads], q_NTHD[:, :, heads]) / sample.n_tokens
            assert np.abs(moments.keys_FF - keys).max() < 5e-3 * np.abs(keys).max()  # what is drawn varies
            for ours, theirs in ((moments.values_FF, values), (moments.queries_HDD, queries)):
                assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("sink", [0.0, 0.2, 1.0])
def test_keys_of_all_groups_are_drawn_as_those_of_each(sink):
    """To the bit. `sink`: what an attention sink takes of every query."""
    n_heads, size, n_keys, n_queries = 8, 4, 40, 5
    cpu, windows = torch.device("cpu"), SimpleNamespace(n_windows=4, window_tokens=n_keys)
    runnable = SimpleNamespace(device=cpu, n_heads=n_heads, n_kv_heads=n_heads, head_dim=size, rotation=None)
    sums = head_moments.HeadSums(SimpleNamespace(index=3, runnable=runnable, windows=windows), GROUPS)
    generator = torch.Generator().manual_seed(0)
    weights_HST = torch.rand(n_heads, n_queries, n_keys, generator=generator).softmax(-1) * (1 - sink)
    k_KTD = torch.randn(n_heads, n_keys, size, generator=generator)
    at_S = torch.randperm(n_keys, generator=generator)[:n_queries]
    sums._add_keys(weights_HST, k_KTD, at_S)
    draws, per_group = torch.Generator().manual_seed(3), n_heads // GROUPS
    for group in range(GROUPS):
        heads = slice(group * per_group, (group + 1) * per_group)
        shares = head_moments._among_keys(weights_HST[heads].flatten(0, 1), at_S.repeat(per_group))
        assert (shares.sum(dim=1) - 1).abs().max() < 1e-6
        drawn = torch.multinomial(shares, head_moments.KEYS_PER_GROUP_QUERY, replacement=True, generator=draws)
        keys = k_KTD[heads].transpose(0, 1).flatten(1)
        apart = (keys[drawn] - (shares @ keys)[:, None]).flatten(0, 1)
        assert torch.equal(sums._keys_GFF[group], (apart.T @ apart).double() / len(apart))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_value_must_be_finite(value):
    module, tensors = NativeLayer.__new__(NativeLayer), [torch.randn(2, 3, n) for n in (4, 5)]
    module.index = 7
    module.check_finite(*tensors)
    for tensor in tensors:
        tensor[1, 2, 0], kept = value, tensor[1, 2, 0].clone()
        with pytest.raises(CheckpointError, match="layer 7 produces NaN or infinite values"):
            module.check_finite(*tensors)
        tensor[1, 2, 0] = kept


def test_states_are_the_models(tmp_path, watched):
    """What the pass hands from layer to layer is what the model hands on."""
    folder, kept = source_folder(tmp_path / "source"), {}
    states = layer_stream._states
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with open_checkpoint(folder) as checkpoint:
        sample = read_calibration_text(checkpoint, text(tmp_path), WINDOW * N_WINDOWS)
        plan = make_merge_plan(checkpoint, GROUPS, MergeRecipe("pca", text=sample), None)

        def progress(n):
            for index in range(len(plan.conversions) + 1):
                path = states(tmp_path / "scratch", index)
                if path.exists():
                    kept[index] = np.load(path)

        calibrate_merges(checkpoint, plan.conversions, tmp_path / "scratch", progress)
    with torch.inference_mode():
        hidden = model(torch.from_numpy(sample.ids_NT), output_hidden_states=True).hidden_states
    assert set(kept) >= set(range(len(plan.conversions)))
    for index in range(len(plan.conversions)):
        assert np.abs(kept[index] - hidden[index].numpy()).max() < 1e-5


@pytest.mark.parametrize("refine", [0, 64])
def test_calibration_stopped_anywhere_resumes_to_the_same_result(tmp_path, refine):
    class Stop(Exception):
        pass

    folder = source_folder(tmp_path / "source", num_hidden_layers=3)
    with open_checkpoint(folder) as checkpoint:
        sample = read_calibration_text(checkpoint, text(tmp_path), WINDOW * N_WINDOWS)
        plan = make_merge_plan(checkpoint, GROUPS, MergeRecipe("fit", refit=True, refine=refine, text=sample), None)

        def run(place, stop_at):
            counts = []

            def progress(n):
                if len(counts) == stop_at:
                    raise Stop
                counts.append(n)

            calibrate_merges(checkpoint, plan.conversions, tmp_path / place, progress)
            assert sum(counts) == len(plan.conversions) * (sample.n_tokens + refine)
            return [load_layer(layer, tmp_path / place).tensors for layer in plan.conversions]

        whole = run("whole", -1)
        for stop_at in range(4):
            with pytest.raises(Stop):
                run(f"stopped-{stop_at}", stop_at)
            again = run(f"stopped-{stop_at}", -1)
            for one, other in zip(whole, again, strict=True):
                assert all(np.array_equal(one[name], other[name]) for name in one)
        assert not list((tmp_path / "whole").glob("states-*"))


def test_lossless_with_a_text_too(convert, tmp_path):
    """Heads that are equal merge without loss whatever the text says of them."""
    model = tiny.build(num_key_value_heads=2, vocab_size=300, hidden_size=64, initializer_range=0.2)
    source = tiny.save(model, tmp_path / "source")
    make_tokenizer(source, 300)
    many = equivalent_mha(source, tmp_path / "many", 2)
    for file in source.glob("tokenizer*"):
        (many / file.name).write_bytes(file.read_bytes())
    expected = logits(source)
    for method in ("aligned", "pca", "fit"):
        out = tmp_path / method
        options = ("--method", method, "--calibration-tokens", 2048)
        convert("mha-to-gqa", many, out, "--groups", 2, *options).succeeded()
        assert (logits(out) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert math.isclose(float(expected.std()), float(logits(out).std()), rel_tol=1e-3)
