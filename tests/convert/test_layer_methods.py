"""`--method aligned` and `pca`, file to file."""

import json

import pytest
import tiny
import torch
from damage import record_sha256, rewrite
from equivalent_heads import equivalent_mha, for_stock_class, logits, share_heads
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from model.checkpoint import open_checkpoint
from model.families import NATIVE_FAMILIES
from model.geometry import read_geometry

METHODS = ("aligned", "pca")
BY_WEIGHTS = ("--calibration", "none")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("llama", {"attention_bias": True}), ("mistral", {}), ("qwen2", {})]
)
def test_heads_equal_but_for_their_coordinates_merge_without_loss(convert, tmp_path, family, changes, groups, method):
    size = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.3}
    source = tiny.save(tiny.build(family, num_key_value_heads=groups, **size, **changes), tmp_path / "source")
    many = equivalent_mha(source, tmp_path / "many", groups)
    expected = logits(source)
    assert (logits(many) - expected).abs().max() < 1e-4
    convert("mha-to-gqa", "--method", "mean", many, tmp_path / "mean", "--groups", groups).succeeded()
    assert (logits(tmp_path / "mean") - expected).abs().max() > 0.1
    convert(
        "mha-to-gqa", many, tmp_path / "out", "--groups", groups, "--method", method, *BY_WEIGHTS, "--json"
    ).succeeded()
    assert (logits(tmp_path / "out") - expected).abs().max() < 1e-4 * expected.abs().max()
    report = json.loads(convert("verify", many, tmp_path / "out", "--json").out)
    assert (report["ok"], report["differences"]) == (True, [])


@pytest.mark.parametrize(
    ("family", "engines"),
    [("phi", "vLLM, llama.cpp and SGLang"), ("olmo", "vLLM and SGLang"), ("olmoe", "llama.cpp and SGLang")],
)
def test_a_note_on_engines_without_grouped_heads(convert, tmp_path, family, engines):
    source, out = tiny.save(tiny.build(family), tmp_path / "source"), tmp_path / "out"
    note = (
        f"the classes of {family} in {engines} have a K/V head for each query head, and cannot load merged heads (read "
        "in their source, not tried). vLLM and SGLang can use transformers' class: --model-impl transformers."
    )
    assert note in json.loads(convert("inspect", source, "--json").out)["notes"]
    notes = json.loads(convert("mha-to-gqa", source, out, "--groups", 2, "--method", "mean", "--json").out)["notes"]
    assert [note in each for each in notes] == [True]
    assert note in (out / "README.md").read_text()
    assert not json.loads(convert("to-hf", source, tmp_path / "same", "--json").out)["notes"]


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_and_what_is_not(convert, tmp_path, method):
    source = tiny.save(tiny.build("qwen2"), tmp_path / "source", "bfloat16", max_shard_size="20KB")
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", method, *BY_WEIGHTS)
    assert result.code == 0 and "cosine" not in result.out and "uptrain evaluate" in result.out
    before, after = tiny.tensors(source), tiny.tensors(tmp_path / "out")
    assert {(n, t.dtype) for n, t in before.items()} == {(n, t.dtype) for n, t in after.items()}
    for name, tensor in before.items():
        attention = "self_attn" in name
        assert after[name].shape == tensor.shape or tiny.is_kv(name)
        assert attention or torch.equal(after[name], tensor), name
    report = json.loads((tmp_path / "out/groupwise.json").read_text())["merge_report"]
    assert [(entry["tensor"].rpartition("attn.")[2], entry["heads"]) for entry in report] == [
        ("k_proj.weight", "k"), ("v_proj.weight", "v"),
    ] * tiny.N_LAYERS  # fmt: skip
    card = (tmp_path / "out/README.md").read_text()
    assert "queries and output projections changed" in card
    assert f"- --method {method} uses the weights alone" in card
    one, many = (tmp_path / name for name in ("one", "many"))
    for out, workers in ((one, 1), (many, 4)):
        convert(
            "mha-to-gqa", source, out, "--groups", 2, "--method", method, *BY_WEIGHTS, "--workers", workers
        ).succeeded()
    assert tiny.snapshot(one) == tiny.snapshot(many) == tiny.snapshot(tmp_path / "out")


@pytest.mark.parametrize("method", METHODS)
def test_verify_sees_a_changed_query(convert, tmp_path, method):
    source = tiny.save(tiny.build(), tmp_path / "source")
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", method, *BY_WEIGHTS).succeeded()
    rewrite(tmp_path / "out", lambda tensors: tensors["model.layers.1.self_attn.q_proj.weight"][3, 4].add_(0.01))
    result = convert("verify", source, tmp_path / "out")
    assert (result.code, "q_proj.weight differs from the one recomputed" in result.err) == (3, True)
    assert "q_proj.weight has SHA-256" in result.err


@pytest.mark.parametrize("method", METHODS)
def test_verify_forgives_rounding_and_nothing_more(convert, tmp_path, method):
    """Another processor's rounding: 0.0005 of the root mean square of a tensor passes, 0.002 is a difference."""
    source, out = tiny.save(tiny.build(), tmp_path / "source"), tmp_path / "out"
    convert("mha-to-gqa", source, out, "--groups", 2, "--method", method, *BY_WEIGHTS).succeeded()
    name = "model.layers.1.self_attn.q_proj.weight"
    original = tiny.tensors(out)[name]
    typical = float(original.square().mean().sqrt())
    for share, code in ((0.0005, 0), (0.002, 3)):
        changed = original.clone()
        changed[3, 4] += share * typical
        rewrite(out, lambda tensors, changed=changed: tensors.update({name: changed}))
        record_sha256(out)
        result = convert("verify", source, out, "--json")
        assert result.code == code, (share, result.err)
        report = json.loads(result.out)
        assert (list(report["rounded"]), len(report["differences"])) == (([name], 0) if code == 0 else ([], 1))


OTHERS = tuple(family for family in tiny.FITTED if family not in NATIVE_FAMILIES)


def equivalent(folder, family):
    """Write a model with two K/V heads, and the same with eight in other coordinates; return both folders."""
    changes = {} if family in tiny.ALWAYS_MHA else {"num_key_value_heads": 2}
    if family not in tiny.IMPLIED_HEAD_DIM:
        changes["head_dim"] = 16
    model = tiny.build(family, vocab_size=300, hidden_size=128, initializer_range=0.15, **changes)
    tiny.equal_in_pairs(model, 16)
    source = make_tokenizer(tiny.save(model, folder / "source"), 300)
    if family in tiny.ALWAYS_MHA:
        share_heads(source, tiny.few(family))
    return source, equivalent_mha(source, folder / "many", tiny.few(family))


@pytest.mark.parametrize("family", tiny.kinds_first(OTHERS))
def test_other_families_merge_without_loss_too(convert, tmp_path, family):
    """By the weights alone, and calibrated through the model's own class in transformers."""
    source, many = equivalent(tmp_path, family)
    expected = logits(source)

    def error(out):
        opened = logits(for_stock_class(out), trust_remote_code=family == "gpt_neox")
        return float((opened - expected).abs().max())

    limit = 1e-4 * float(expected.abs().max())
    assert error(many) < limit
    for method, options in (
        ("mean", ()), ("pca", BY_WEIGHTS), ("aligned", BY_WEIGHTS), ("fit", ("--refit", "--calibration-tokens", 1024)),
    ):  # fmt: skip
        out = tmp_path / method
        convert("mha-to-gqa", many, out, "--groups", tiny.few(family), "--method", method, *options).succeeded()
        lost = error(out)
        assert lost > 50 * limit if method == "mean" else lost < 2 * limit, method
    convert("verify", many, tmp_path / "fit").succeeded()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("said", [{"no_rope_layers": [1, 0]}, {"no_rope_layers": None, "no_rope_layer_interval": 2}])
def test_layers_without_rotary_embedding(convert, tmp_path, method, said):
    """Their keys may be rotated in any way, and so merge without loss from any coordinates."""
    size = {"hidden_size": 64, "initializer_range": 0.3, "no_rope_layers": [1, 0]}
    source = tiny.save(tiny.build("smollm3", num_key_value_heads=2, **size), tmp_path / "source")
    many = equivalent_mha(source, tmp_path / "many", 2, unrotated=(1,))
    expected = logits(source)
    assert (logits(many) - expected).abs().max() < 1e-4 * expected.abs().max()
    tiny.edit_config(many, **said)
    convert("mha-to-gqa", many, tmp_path / "out", "--groups", 2, "--method", method, *BY_WEIGHTS).succeeded()
    assert (logits(tmp_path / "out") - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_repeated_heads_with_norms_merge_without_loss(convert, tmp_path, method, kind):
    """EXAONE 4 normalises queries and keys in all layers, and rotates them in those with a window only."""
    size = {"hidden_size": 64, "initializer_range": 0.3, "layer_types": [kind] * 2, "sliding_window": 64}
    source = tiny.save(tiny.build("exaone4", num_key_value_heads=2, **size), tmp_path / "source")
    expected = logits(source)
    convert("repeat-kv", source, tmp_path / "many", "--groups", 8).succeeded()
    convert(
        "mha-to-gqa", tmp_path / "many", tmp_path / "out", "--groups", 2, "--method", method, *BY_WEIGHTS
    ).succeeded()
    assert (logits(tmp_path / "out") - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("groups", [1, 2])
def test_query_heads_of_one_norm_keep_their_lengths(convert, tmp_path, method, groups):
    """OLMo 2 normalises all heads together, so a query head that is longer than others has larger logits."""
    model = tiny.build("olmo2", num_key_value_heads=groups, hidden_size=64, initializer_range=0.3)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.q_proj.weight
            weight.view(8, -1, 64).mul_(torch.linspace(0.25, 2, 8)[:, None, None])
    source = tiny.save(model, tmp_path / "source")
    convert("repeat-kv", source, tmp_path / "many", "--groups", 8).succeeded()
    command = ("mha-to-gqa", tmp_path / "many", tmp_path / "out", "--groups", groups, "--method", method, *BY_WEIGHTS)
    convert(*command).succeeded()
    expected = logits(source)
    assert (logits(tmp_path / "out") - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("said", [[1], [1, 2], "all"])
def test_which_layers_rotate_is_checked(convert, tmp_path, said):
    source = tiny.save(tiny.build("smollm3"), tmp_path / "source")
    tiny.edit_config(source, no_rope_layers=said)
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "pca", *BY_WEIGHTS).refused(
        "it must give for each of 2 layers"
    )


def test_a_partial_rotation_is_read_from_the_config(convert, tmp_path):
    source = tiny.save(tiny.build("phi", hidden_size=64, partial_rotary_factor=0.25), tmp_path / "source")
    tiny.edit_config(source, partial_rotary_factor=1.5, rope_parameters=None)
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "pca", *BY_WEIGHTS).refused(
        "partial_rotary_factor = 1.5; it must be between 0 and 1"
    )


@pytest.mark.parametrize(
    ("settings", "fraction"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}, 0.25),
        ({"partial_rotary_factor": 0.25}, 0.25),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}}, 1.0),
        # transformers takes rope_scaling in place of rope_parameters.
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.25,
          "rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0}}, 0.25),
    ],
)  # fmt: skip
def test_the_partial_rotation_is_that_of_the_class(tmp_path, settings, fraction):
    source = tiny.save(tiny.build("phi", hidden_size=64), tmp_path / "source")
    tiny.edit_config(source, **{"rope_parameters": ..., "partial_rotary_factor": ..., **settings})
    with open_checkpoint(source) as checkpoint:
        pairs = read_geometry(checkpoint).n_rotary_pairs
    hf_model = AutoModelForCausalLM.from_pretrained(source)
    assert set(pairs) == {len(hf_model.model.rotary_emb.inv_freq)} == {int(8 * fraction / 2)}


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2", "hunyuan_v1_dense"])
def test_norms_of_queries_and_keys_are_merged_too(convert, tmp_path, family):
    size = {} if family in tiny.FLAT_NORMS else {"head_dim": 16}
    model = tiny.build(family, vocab_size=300, hidden_size=128, initializer_range=0.15, **size)
    source = make_tokenizer(tiny.save(model, tmp_path / "source"), 300)
    out = tmp_path / "out"
    convert("mha-to-gqa", source, out, "--groups", 2, "--calibration-tokens", 1024).succeeded()
    convert("verify", source, out).succeeded()
    before, after = tiny.tensors(source), tiny.tensors(out)
    norms = [name for name in before if "self_attn" in name and "norm" in name]
    assert len(norms) == 2 * tiny.N_LAYERS
    for name in norms:
        flat_keys = family in tiny.FLAT_NORMS and "k_norm" in name
        assert after[name].shape == ((2 * 16,) if flat_keys else before[name].shape)
        assert flat_keys or not torch.equal(after[name], before[name])


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_a_missing_norm_is_named(convert, tmp_path, name):
    source = tiny.save(tiny.build("qwen3"), tmp_path / "source")
    tensors = tiny.tensors(source)
    for layer in range(tiny.N_LAYERS):
        del tensors[f"model.layers.{layer}.self_attn.{name}.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "pca", *BY_WEIGHTS).refused(
        f"lacks the tensor model.layers.0.self_attn.{name}.weight"
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [("phi", {"qk_layernorm": True}), ("stablelm", {"qk_layernorm": True}), ("cohere", {"use_qk_norm": True})],
)
def test_norms_that_subtract_the_mean_are_refused(convert, tmp_path, family, changes):
    source = tiny.save(tiny.build(family, hidden_size=64, **changes), tmp_path / "source")
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "pca", *BY_WEIGHTS).refused(
        "normalises queries or keys afterwards, and subtracts their mean; choose mean, first, random."
    )
    assert not (tmp_path / "out").exists()
    convert("inspect", source, "--heads").refused(
        "--heads maps heads as --method pca does", "subtracts their mean; leave --heads out."
    )
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2).refused(
        "the default merge is not possible", "subtracts their mean. --method mean is the paper's merge"
    )


def test_norms_of_mpt(convert, tmp_path):
    source = tiny.save(tiny.build("mpt"), tmp_path / "source")
    layers = [f"transformer.blocks.{layer}.attn" for layer in range(tiny.N_LAYERS)]
    norms = {f"{layer}.{name}.weight": torch.ones(tiny.HIDDEN) for layer in layers for name in ("q_ln", "k_ln")}
    save_file({**tiny.tensors(source), **norms}, source / "model.safetensors", metadata={"format": "pt"})
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2).refused(
        "transformer.blocks.0.attn.k_ln.weight normalises queries or keys afterwards", "--method mean"
    )


@pytest.mark.parametrize("method", METHODS)
def test_not_finite(convert, tmp_path, method):
    source = tiny.save(tiny.build(), tmp_path / "source")
    tensors = tiny.tensors(source)
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", method, *BY_WEIGHTS).refused(
        "model.layers.0.self_attn.o_proj.weight holds NaN or infinite values"
    )


@pytest.mark.parametrize("family", ["olmo", "mpt"])
def test_clipping_is_not_seen_in_weights(convert, tmp_path, family):
    folder = tiny.save(tiny.build(family), tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    if family == "mpt":
        config["attn_config"]["clip_qkv"] = 0.3
    else:
        config["clip_qkv"] = 0.3
    (folder / "config.json").write_text(json.dumps(config))
    result = convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--method", "pca", *BY_WEIGHTS)
    result.refused("clip_qkv = 0.3", "--method mean")
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()


def test_a_clip_of_0_is_none_for_mpt(convert, tmp_path):
    source = tiny.save(tiny.build("mpt"), tmp_path / "source")
    attention = json.loads((source / "config.json").read_text())["attn_config"]
    outputs = []
    for clip in (None, 0.0):
        tiny.edit_config(source, attn_config={**attention, "clip_qkv": clip})
        out = tmp_path / f"out-{clip}"
        convert("mha-to-gqa", source, out, "--groups", 2, "--method", "pca", *BY_WEIGHTS).succeeded()
        outputs.append((out / "model.safetensors").read_bytes())
    assert outputs[0] == outputs[1]
