"""What calibration sees of every family's layers, against a plain forward pass of the whole model in transformers."""

import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from equivalent_heads import INTERLEAVED, SHARES
from rounding import assert_close
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from convert.calibration.float32_weights import head_weights
from convert.calibration.merge_layers import calibrate_merges
from convert.calibration_text.read import read_calibration_text
from convert.layer_tensors.layer_file import load_layer
from convert.layers import layer_stream, transformers_model_layers
from convert.layers.transformers_model_layers import TransformersModelLayers
from convert.merging.layer_merge import read_attention
from convert.merging.merge_recipe import MergeRecipe
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import open_checkpoint
from model.common.errors import CheckpointError
from model.decoder import observed_attention
from model.decoder.rope import rotate_first
from model.families import FAMILIES

CHANGES = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "mistral": {"sliding_window": 5},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 3.0},
    "cohere2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 5},
    "smollm3": {"no_rope_layers": [1, 0]},
}
LENGTH = 16
IDS = torch.randint(0, 60, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def build(family, folder, **changes):
    size = {} if family in tiny.IMPLIED_HEAD_DIM else {"head_dim": 16}
    model = tiny.build(family, hidden_size=128, initializer_range=0.2, **size, **CHANGES.get(family, {}), **changes)
    if family in ("hunyuan_v1_dense", "hunyuan_v1_moe"):
        tiny.equal_in_pairs(model, 16)  # what is seen of norms after rotation is exact only then
    return model, tiny.save(model, folder)


@pytest.mark.parametrize("family", ["llava", "idefics2"])
def test_a_language_model_inside_whose_config_names_no_type(tmp_path, family):
    """The outer class has a default for it."""
    folder = tiny.save(tiny.build(family), tmp_path / "source")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    del text["model_type"]
    tiny.edit_config(folder, text_config=text)
    with open_checkpoint(folder) as checkpoint:
        layer_stream.open_checked(checkpoint, "cpu")


class Plain:
    """A plain forward pass: per layer its output, and what its attention's parts gave and returned."""

    def __init__(self, model, family):
        self.outputs, self.given, self.attended, self.norms = [], [], [], []
        layers = getattr(model.base_model, FAMILIES[family].names.layers)
        for layer in layers:
            attention = layer.get_submodule(FAMILIES[family].names.attention[0])
            layer.register_forward_hook(
                lambda module, args, out: self.outputs.append(out[0] if isinstance(out, tuple) else out)
            )
            names = [FAMILIES[family].names.fused] if FAMILIES[family].names.fused else ["q_proj", "k_proj", "v_proj"]
            parts, norms = {}, FAMILIES[family].head_norms
            normed = norms is not None and norms.kind == "rms"
            self.norms.append([attention.get_submodule(n) for n in (norms.query, norms.key)] if normed else [])
            self.given.append(parts)
            for name in names:
                hook = lambda module, args, out, name=name, parts=parts: parts.__setitem__(name, out)  # noqa: E731
                attention.get_submodule(name).register_forward_hook(hook)
            output = attention.get_submodule(FAMILIES[family].names.output)
            output.register_forward_hook(lambda module, args, out: self.attended.append(out))
        with torch.no_grad():
            self.weights = attention_weights(model, family)

    def heads(self, index, head_dim):
        """Return queries, keys and values before rotation, [B, T, heads, D]."""
        parts = self.given[index]
        if "query_key_value" in parts:
            whole = parts["query_key_value"].unflatten(2, (tiny.N_HEADS, 3, head_dim))
            return [whole[:, :, :, i] for i in range(3)]
        with torch.no_grad():
            for name, norm in zip(("q_proj", "k_proj"), self.norms[index], strict=False):
                shape = parts[name].shape
                flat = getattr(norm, "weight", None) is not None and len(norm.weight) == shape[2]
                parts[name] = norm(parts[name] if flat else parts[name].unflatten(2, (-1, head_dim))).view(shape)
        whole = torch.cat([parts[name] for name in parts], dim=2)
        return whole.unflatten(2, (3, -1, head_dim)).unbind(2)  # as many of each kind: the models are MHA


def attention_weights(model, family):
    """Run the model and return its attention weights by layer.

    Falcon's class returns none of its default attention: asked for them, it computes another (ALiBi twice). So those
    that it computes are derived from its calls of torch.
    """
    if family != "falcon":
        return model(IDS, use_cache=False, output_attentions=True).attentions
    weights, attend = [], F.scaled_dot_product_attention

    def watched(q, k, v, attn_mask, **others):
        hidden = attn_mask if attn_mask.dtype != torch.bool else torch.where(attn_mask, 0.0, -torch.inf)
        weights.append((q @ k.mT / q.shape[-1] ** 0.5 + hidden).softmax(-1))
        return attend(q, k, v, attn_mask=attn_mask, **others)

    with mock.patch.object(F, "scaled_dot_product_attention", watched):
        model(IDS, use_cache=False)
    return weights


def half_split(heads, family, n_rotated):
    if family not in INTERLEAVED:
        return heads
    rotated = [*range(0, n_rotated, 2), *range(1, n_rotated, 2)]
    return heads[..., [*rotated, *range(n_rotated, heads.shape[-1])]]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in tiny.FITTED),
        ("falcon", {"alibi": False}),
        ("llama", {"hidden_act": "relu"}),
        # Norms of queries and keys take their class's epsilon.
        *((family, {"rms_norm_eps": 0.1}) for family in ("gemma3_text", "nanochat", "olmo2", "qwen3")),
    ],
)
def test_what_is_seen_is_what_the_whole_model_computes(tmp_path, family, changes):
    model, folder = build(family, tmp_path / "source", **changes)
    plain = Plain(model, family)
    with open_checkpoint(folder) as checkpoint, torch.no_grad():
        layers = TransformersModelLayers(checkpoint, LENGTH)
        plan = make_merge_plan(checkpoint, tiny.few(family), MergeRecipe("pca"), None)
        states_BTM = layers.embed(IDS)
        for index in range(layers.n_layers):
            layer, seen = layers.load(index), []
            x_BTM = layer.inputs(states_BTM)
            attended_BTM, states_BTM = layer.run(states_BTM, seen.append)
            assert_close(states_BTM, plain.outputs[index])
            assert_close(attended_BTM, plain.attended[index])
            n_rotated = 2 * plan.conversions[index].n_rotary_pairs
            assert n_rotated == (0 if layer.rotation is None else layer.rotation[0].shape[1])
            q, k, v = plain.heads(index, layer.head_dim)
            seen_k = seen[0].rotated_k_BTKD
            # gpt-oss uses YaRN, which makes queries and keys longer as it rotates them.
            assert (layer.attention_scaling > 1.2) == (family == "gpt_oss")
            if layer.rotation is not None:
                cos_TR, sin_TR = (x / layer.attention_scaling for x in layer.rotation)
                seen_k = rotate_first(seen_k, cos_TR[:, None], -sin_TR[:, None])
            assert_close(seen[0].q_BTHD, half_split(q, family, n_rotated))
            assert_close(seen_k, half_split(k, family, n_rotated))
            assert_close(seen[0].v_BTKD, v)
            q_HTD, k_KTD = (x[0].transpose(0, 1) for x in (seen[0].rotated_q_BTHD, seen[0].rotated_k_BTKD))
            weights_HST = layer.attention_weights(q_HTD, k_KTD, torch.arange(LENGTH))
            assert_close(weights_HST, plain.weights[index][0])
            weights = head_weights(read_attention(checkpoint, plan.conversions[index]))
            bias_M = 0 if layer.output_bias is None else layer.output_bias
            assert_close(layer.heads_out(weights, x_BTM) @ weights.o_MC.T + bias_M, attended_BTM)


def test_shares_of_rotated_dimensions_are_the_classes(tmp_path):
    for family in tiny.FITTED:
        with open_checkpoint(build(family, tmp_path / family)[1]) as checkpoint:
            plan = make_merge_plan(checkpoint, tiny.few(family), MergeRecipe("pca"), None)
            share = 2 * plan.conversions[0].n_rotary_pairs / plan.geometry.head_dim
            assert share == SHARES.get(family, 1.0), family


def merged(tmp_path, monkeypatch, use_class):
    if use_class:
        monkeypatch.setattr(layer_stream, "open_layers", TransformersModelLayers)
    folder, place = tmp_path / "source", tmp_path / f"merged-{use_class}"
    with open_checkpoint(folder) as checkpoint:
        text = read_calibration_text(checkpoint, "shipped", 1024)
        recipe = MergeRecipe("fit", refit=True, refine=256, text=text)
        plan = make_merge_plan(checkpoint, 2, recipe, None)
        calibrate_merges(checkpoint, plan.conversions, place, lambda n: None)
        return [load_layer(layer, place).tensors for layer in plan.conversions]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_own_decoder_and_the_class_merge_alike(tmp_path, monkeypatch, family):
    """Not byte for byte: our kernel is told that attention is causal, theirs gets a mask."""
    model = tiny.build(family, vocab_size=300, hidden_size=64, initializer_range=0.2)
    make_tokenizer(tiny.save(model, tmp_path / "source"), 300)
    own, theirs = (merged(tmp_path, monkeypatch, use_class) for use_class in (False, True))
    for mine, other in zip(own, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            assert np.linalg.norm(mine[name] - other[name]) <= 1e-3 * np.linalg.norm(other[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "relu"},
        {
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 2.0,
                "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            }
        },
    ],
    ids=["relu", "longrope"],
)  # fmt: skip
def test_a_llama_that_the_native_decoder_does_not_run_is_fitted_in_its_class(convert, tmp_path, changes):
    """`self` also has the class write the text."""
    source = tiny.save(tiny.build(vocab_size=300, hidden_size=64, **changes), tmp_path / "source")
    make_tokenizer(source, 300)
    for text in ("shipped", "self"):
        out = tmp_path / text
        convert(
            "mha-to-gqa", source, out, "--groups", 2, "--calibration-tokens", 1024, "--calibration", text
        ).succeeded()
        assert json.loads((out / "groupwise.json").read_text())["method"] == "fit"
        convert("verify", source, out).succeeded()


def test_fit_knows_that_longrope_lengthens_rotated_dimensions(convert, tmp_path):
    """A model whose projections lengthen them in RoPE's place computes the same, before and after the merge."""
    scaling = {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 6,
        "long_factor": [1.0] * 6, "original_max_position_embeddings": 128,
    }  # fmt: skip
    sizes = {"vocab_size": 300, "hidden_size": 128, "max_position_embeddings": 4096, "initializer_range": 0.2}
    by_rope = tiny.build("phi3", **sizes, rope_parameters=scaling, original_max_position_embeddings=128)
    plain = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    by_weights = tiny.build("phi3", **sizes, rope_parameters=plain)
    by_weights.load_state_dict(by_rope.state_dict())
    length = by_rope.model.rotary_emb.attention_scaling
    assert length > 1.3
    for layer in by_weights.model.layers:
        heads = layer.self_attn.qkv_proj.weight.data.view(-1, 16, 128)
        heads[: 2 * tiny.N_HEADS, :12] *= length  # of queries and keys
    ids = torch.randint(300, (4, 64), generator=torch.Generator().manual_seed(0))
    logits = []
    for name, model in (("rope", by_rope), ("weights", by_weights)):
        folder = make_tokenizer(tiny.save(model, tmp_path / name), 300)
        out = tmp_path / f"{name}-out"
        options = ("--groups", 2, "--method", "fit", "--calibration-tokens", 4096)
        convert("mha-to-gqa", folder, out, *options).succeeded()
        merged = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
        with torch.inference_mode():
            logits.append((model(ids, use_cache=False).logits, merged(ids, use_cache=False).logits))
    (before, after), (same_before, same_after) = logits
    assert (before - same_before).norm() < 1e-5 * before.norm()
    assert (after - same_after).norm() < 0.01 * (after - before).norm()


def test_keys_of_which_float32_cannot_hold_the_squares_are_refused(convert, tmp_path):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)
    tensors = tiny.tensors(folder)
    for name in tensors:
        if "k_proj" in name:
            tensors[name] *= 1e20
        if "q_proj" in name:
            tensors[name] *= 1e-20
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    options = ("--groups", 2, "--method", "fit", "--calibration-tokens", 1024)
    convert("mha-to-gqa", folder, tmp_path / "out", *options).refused(
        "keys or values of layer 0 are so large that their squares are infinite; use --method mean"
    )


def test_a_class_that_rotates_otherwise_is_refused(tmp_path, monkeypatch):
    _, folder = build("glm", tmp_path / "source")
    with open_checkpoint(folder) as checkpoint:
        geometry = transformers_model_layers.read_geometry(checkpoint)
        family = geometry.family
        halves = replace(family, positions=replace(family.positions, rotary_pairing="half"))
        wrong = replace(geometry.attention, family=halves)
        monkeypatch.setattr(
            transformers_model_layers, "read_geometry", lambda checkpoint: replace(geometry, attention=wrong)
        )
        with pytest.raises(CheckpointError, match="rotates queries and keys differently"):
            TransformersModelLayers(checkpoint, LENGTH).check()


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model.layers.1.mlp.up_proj.weight", lambda t: t * float("nan"), "layer 1 produces NaN or infinite values"),
        ("model.layers.1.mlp.up_proj.weight", lambda t: None, "lacks the tensor model.layers.1.mlp.up_proj.weight."),
        ("model.layers.1.mlp.up_proj.weight", lambda t: t[:-1].clone(), "model.layers.1.mlp.up_proj.weight"),
        ("model.layers.1.mlp.left.weight", lambda t: torch.ones(2, 2), "model.layers.1.mlp.left.weight"),
        ("model.embed_tokens.weight", lambda t: None, "lacks the tensor model.embed_tokens.weight."),
        ("model.embed_tokens.weight", lambda t: t[:100].clone(), "set vocab_size to 100"),
    ],
)
def test_damaged_models_are_refused_in_one_line(convert, tmp_path, name, change, words):
    source, out = tmp_path / "source", tmp_path / "out"
    make_tokenizer(tiny.save(tiny.build("gemma", vocab_size=300, tie_word_embeddings=True), source), 300)
    tensors = tiny.tensors(source)
    tensors[name] = change(tensors.get(name))
    save_file({n: t for n, t in tensors.items() if t is not None}, source / "model.safetensors", {"format": "pt"})
    convert("mha-to-gqa", source, out, "--groups", 2, "--calibration-tokens", 1024).refused(words)
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))


def test_buffers_of_old_checkpoints_are_ignored(convert, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    make_tokenizer(tiny.save(tiny.build("gpt_neox", vocab_size=300, hidden_size=64), source), 300)
    tensors = tiny.tensors(source)
    for layer in range(tiny.N_LAYERS):
        place = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{place}.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
        tensors[f"{place}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{place}.rotary_emb.inv_freq"] = torch.ones(1)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    convert("mha-to-gqa", source, out, "--groups", 2, "--calibration-tokens", 1024).succeeded()
    assert '"method": "fit"' in (out / "groupwise.json").read_text()


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("olmo", {"clip_qkv": 0.05}, "layer 0: clip_qkv = 0.05 clips"),
        ("gemma", {"is_causal": False}, "has no causal mask"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "has no causal mask"),
        ("mpt", {"attn_config": {"alibi": True, "clip_qkv": 0.05}}, "layer 0: clip_qkv = 0.05 clips"),
        ("mpt", {"attn_config": {"alibi": False}}, "of model_type 'mpt' without attn_config.alibi = true"),
        ("mpt", {"attn_config": {"alibi": True, "alibi_bias_max": 16}}, "attn_config.alibi_bias_max = 16, which"),
        (
            "mpt",
            {"attn_config": {"alibi": True, "attn_logit_softcapping": 30.0}},
            "attn_logit_softcapping = 30.0, which",
        ),
        ("mpt", {"attn_config": {"alibi": True, "qk_gn": True}}, "attn_config.qk_gn = True, which"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type = 'rmsnorm', which transformers' class of mpt ignores"),
        ("phi3", {"partial_rotary_factor": 0.45}, "has an odd number of them"),
    ],
)
def test_heads_that_cannot_be_mapped_are_refused(convert, tmp_path, family, changes, words):
    source = tmp_path / "source"
    make_tokenizer(tiny.save(tiny.build(family, vocab_size=300, hidden_size=128, initializer_range=0.2), source), 300)
    tiny.edit_config(source, **changes, **({"rope_parameters": None} if family == "phi3" else {}))
    options = ("--groups", 2, "--calibration-tokens", 1024)
    for given in (options, (*options, "--dry-run")):
        convert("mha-to-gqa", source, tmp_path / "out", *given).refused(words, "--method mean")


def test_a_class_that_attends_otherwise_is_refused(tmp_path, monkeypatch):
    def without_alibi(module, hidden_states, position_bias, **others):
        return observed_attention._mpt(module, hidden_states, 0 * position_bias, **others)

    _, folder = build("mpt", tmp_path / "source")
    monkeypatch.setattr(observed_attention, "_FROM_INPUTS", {"mpt": without_alibi})
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match="computes attention differently"):
        TransformersModelLayers(checkpoint, LENGTH).check()


def test_windows_are_no_longer_than_mpts_context(convert, tmp_path):
    source = make_tokenizer(tiny.save(tiny.build("mpt", vocab_size=300, max_seq_len=32), tmp_path / "source"), 300)
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024).succeeded()
    calibration = json.loads((tmp_path / "out/groupwise.json").read_text())["calibration"]
    assert (calibration["windows"], calibration["window"]) == (32, 32)


def test_mpts_bias_of_a_long_context_is_not_made(tmp_path):
    """Its class makes ALiBi's bias for the whole context, of which the end alone is used."""
    _, folder = build("mpt", tmp_path / "source")
    results = []
    for context in (LENGTH, 2_000_000_000):
        tiny.edit_config(folder, max_seq_len=context)
        with open_checkpoint(folder) as checkpoint, torch.no_grad():
            layers = TransformersModelLayers(checkpoint, LENGTH)
            results.append(layers.load(0).run(layers.embed(IDS), lambda heads: None)[1])
    assert torch.equal(*results)


@pytest.mark.parametrize("family", tiny.FITTED)
def test_a_padding_token_changes_nothing(tmp_path, family):
    """Real models have one, whose row the embedding of a short text may not have."""
    _, folder = build(family, tmp_path / "source")
    seen = []
    for pad_token_id in (None, 60):
        tiny.edit_config(folder, pad_token_id=pad_token_id)
        with open_checkpoint(folder) as checkpoint, torch.no_grad():
            layers = TransformersModelLayers(checkpoint, LENGTH)
            layers.check()
            seen.append(layers.embed(IDS))
    assert torch.equal(*seen)


def test_windows_are_no_longer_than_a_wrapped_models_context(convert, tmp_path):
    source = make_tokenizer(tiny.save(tiny.build("llava", vocab_size=300), tmp_path / "source"), 300)
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024).succeeded()
    calibration = json.loads((tmp_path / "out/groupwise.json").read_text())["calibration"]
    assert (calibration["windows"], calibration["window"]) == (16, 64)


@pytest.mark.parametrize("family", ["gemma3", "janus"])
def test_a_wrapper_that_ties_the_lm_head_alone_generates_by_a_stored_one(tmp_path, family):
    """Version 5 of transformers saves such configs of models with an LM head of their own, and then uses it."""
    folder = tiny.save(tiny.build(family), tmp_path / family)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    tiny.edit_config(folder, tie_word_embeddings=True, text_config={**text, "tie_word_embeddings": False})
    tensors = tiny.tensors(folder)
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    lm_head = "language_model.lm_head.weight" if embedding.startswith("language_model.") else "lm_head.weight"
    outputs = []
    for added in ({}, {lm_head: tensors[embedding].flip(0)}):
        save_file({**tensors, **added}, folder / "model.safetensors", metadata={"format": "pt"})
        whole = tiny.model_class(family).from_pretrained(folder, dtype=torch.float32)
        with open_checkpoint(folder) as checkpoint, torch.no_grad():
            outputs.append(TransformersModelLayers(checkpoint, LENGTH).load_whole()(IDS).logits)
            torch.testing.assert_close(outputs[-1], whole(input_ids=IDS).logits, rtol=0, atol=1e-6)
    assert not torch.equal(*outputs)
