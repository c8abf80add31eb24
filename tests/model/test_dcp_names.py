"""Checkpoints of torchtitan and OLMo-core read as the Hugging Face folder of the same model."""

import json
import shutil

import frameworks
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_files import assert_same_conversion, bits, cast, write_dcp
from transformers import AutoModelForCausalLM

from model.checkpoint import open_checkpoint

OLMO2 = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "rms_norm_eps": 1e-6}


def titan(tmp_path, model, dtype="float32", config=True, **how):
    folder = tiny.save(model, tmp_path / "folder", dtype)
    tensors = frameworks.titan_tensors(model, dtype, how.pop("new", False), how.pop("fused", False))
    path = frameworks.save_titan(tmp_path / "outputs/checkpoint/step-7", tensors, **how)
    for name in ("config.json", "tokenizer.json") if config else ():
        shutil.copy(folder / name, path)
    return folder, path


def olmo(tmp_path, model, dtype="float32", run=...):
    folder = tiny.save(model, tmp_path / "folder", dtype)
    run = frameworks.olmo_run(model) if run is ... else run
    return folder, frameworks.save_olmo(tmp_path / "step7", frameworks.olmo_tensors(model, dtype), run)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "how",
    [{}, {"nested": True}, {"new": True}, {"new": True, "fused": True}],
    ids=["separate", "early", "renamed", "fused"],
)
def test_torchtitan_converts_as_the_hugging_face_folder_does(convert, tmp_path, dtype, how):
    folder, path = titan(tmp_path, tiny.build(num_key_value_heads=8), dtype, **how)
    for groups in (8, 2, 1):
        assert_same_conversion(convert, folder, path, tmp_path, groups)
    summary = json.loads(convert("inspect", path, "--json").out)
    assert (summary["format"], summary["side_files"], summary["skipped_files"]) == ("dcp", ["tokenizer.json"], [])


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("shape", [{"num_key_value_heads": 2}, {"head_dim": 6}, {"num_attention_heads": 4}])
def test_torchtitan_s_rows_in_any_run(tmp_path, shape, fused):
    model = tiny.build(**{"num_key_value_heads": 4, **shape})
    with open_checkpoint(titan(tmp_path, model, new=fused, fused=fused)[1]) as checkpoint:
        assert checkpoint.tensors.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            for start, stop in ((0, len(tensor)), (0, 1), (3, 7), (len(tensor) - 1, len(tensor))):
                assert np.array_equal(checkpoint.rows(name, start, stop), tensor.numpy()[start:stop]), name
        permuted = {name for name in checkpoint.tensors if checkpoint.span(name) is None}
        rewritten = "qkv" if fused else "qk"
        assert permuted == {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in rewritten}


@settings(max_examples=40)
@given(data=st.data(), kind=st.sampled_from(["Hugging Face", "torchtitan", "renamed", "fused", "OLMo-core"]))
def test_any_model_in_any_pieces(tmp_path_factory, data, kind):
    """Head counts, dtypes, prefixes, and the number and direction of the pieces that processes wrote."""
    n_kv_heads = data.draw(st.integers(1, 4))
    n_heads = n_kv_heads * data.draw(st.integers(1, 3))
    shape = {"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "num_hidden_layers": 1}
    shape |= {
        "hidden_size": 2 * n_heads * data.draw(st.integers(1, 3)),
        "intermediate_size": data.draw(st.integers(1, 9)),
    }
    dtype = data.draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    model = tiny.build("olmo2" if kind == "OLMo-core" else "llama", **shape)
    if kind == "OLMo-core":
        tensors = frameworks.olmo_tensors(model, dtype)
    elif kind == "Hugging Face":
        tensors = cast(model, dtype)
    else:
        tensors = frameworks.titan_tensors(model, dtype, new=kind != "torchtitan", fused=kind == "fused")
    prefix = data.draw(st.sampled_from(["", "model.", "app.model."]))
    path = tmp_path_factory.mktemp("d") / "dcp"
    write_dcp(
        path, {prefix + n: t for n, t in tensors.items()}, data.draw(st.integers(1, 5)), data.draw(st.integers(0, 1))
    )
    (path / "config.json").write_text(json.dumps(model.config.to_dict()))
    with open_checkpoint(path) as checkpoint:
        original = cast(model, dtype)
        assert checkpoint.tensors.keys() == original.keys()
        for name, tensor in original.items():
            start = data.draw(st.integers(0, len(tensor) - 1))
            for rows in (slice(None), slice(start, data.draw(st.integers(start + 1, len(tensor))))):
                values = checkpoint.rows(name, *rows.indices(len(tensor))[:2])
                assert (values.shape, np.ascontiguousarray(values).tobytes()) == (
                    tensor[rows].shape,
                    bits(tensor[rows]),
                )


@pytest.mark.parametrize("kept", ["both", "embedding only"])
def test_torchtitan_with_tied_embeddings(convert, tmp_path, kept):
    model = tiny.build(tie_word_embeddings=True)
    folder, path = titan(tmp_path, model)
    if kept == "embedding only":
        tensors = frameworks.titan_tensors(model)
        del tensors["output.weight"]
        frameworks.save_titan(path, tensors)
        shutil.copy(folder / "config.json", path)
    assert_same_conversion(convert, folder, path, tmp_path, 2)
    assert "lm_head.weight" not in tiny.tensors(tmp_path / "b2")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", ["OLMo-core's", "Hugging Face's"])
def test_olmo_core_converts_as_the_hugging_face_folder_does(convert, tmp_path, dtype, config):
    folder, path = olmo(tmp_path, tiny.build("olmo2", **OLMO2), dtype)
    if config == "Hugging Face's":
        shutil.copy(folder / "config.json", path)
    for groups in (8, 2, 1):
        assert_same_conversion(convert, folder, path, tmp_path, groups)
    notes = json.loads(convert("inspect", path, "--json").out)["notes"]
    assert len(notes) == (2 if config == "OLMo-core's" else 0)
    assert not any(str(tmp_path) in note for note in notes), "the model card would name a path"
    assert not notes or ("max_position_embeddings = 64" in notes[0] and "allenai/dolma2-tokenizer" in notes[1])
    assert {p.suffix for p in (tmp_path / "b2").iterdir()} == {".json", ".safetensors", ".md"}
    assert not (tmp_path / "b2/.metadata.json").exists()


def test_an_olmo_3_needs_its_hugging_face_config(convert, tmp_path):
    folder, path = olmo(tmp_path, tiny.build("olmo3", **OLMO2), run=None)
    shutil.copy(folder / "config.json", path.parent)
    for groups in (8, 2):
        assert_same_conversion(convert, folder, path, tmp_path, groups)


@pytest.mark.parametrize("how", ["as it was", "sequence_mixer", "max_sequence_length", "grouped"])
def test_olmo_core_s_config_means_the_same_model(convert, tmp_path, how):
    model = tiny.build("olmo2", **OLMO2, **({"num_key_value_heads": 4} if how == "grouped" else {}))
    run = frameworks.olmo_run(model)
    block = run["model"]["block"]
    if how == "sequence_mixer":
        block["sequence_mixer"] = block.pop("attention")
    elif how == "max_sequence_length":
        run["train_module"]["max_sequence_length"] = run["dataset"].pop("sequence_length")
    elif how == "grouped":
        block["attention"]["n_kv_heads"] = 4
    _, path = olmo(tmp_path, model, run=run)
    convert("to-hf", path, tmp_path / "out").succeeded()
    opened, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (opened.config.bos_token_id, opened.config.eos_token_id, opened.config.pad_token_id) == (None, 2, 3)
    assert opened.config.dtype == torch.float32
    ids = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("name", "normalized"), ("block.name", "default"), ("block.attention.bias", True),
        ("block.attention.bias", ...),
        ("block.attention.clip_qkv", 8.0), ("block.attention.sliding_window", {"pattern": [4, -1]}),
        ("block.attention.rope", ...), ("block.attention.rope.name", "complex"),
        ("block.attention.rope.scaling", {"factor": 8}), ("block.attention.qk_norm", ...),
        ("block.attention.use_head_qk_norm", True), ("block.attention.head_dim", 8), ("block.attention.n_heads", "8"),
        ("block.attention.rope.theta", True), ("block.layer_norm.name", "default"), ("block.layer_norm.eps", 1e-5),
        ("block.layer_norm.eps", []), ("block.feed_forward.bias", True), ("block.feed_forward", []),
        ("block.feed_forward_moe", {"num_experts": 4}), ("lm_head.layer_norm.bias", True), ("embed_scale", 2.0),
        ("block_overrides", {"0": {}}), ("n_layers", 0), ("d_model", None),
    ],
)  # fmt: skip
def test_olmo_core_s_config_that_may_mean_another_model(convert, tmp_path, place, value):
    model = tiny.build("olmo2", **OLMO2)
    run = frameworks.olmo_run(model)
    *above, key = place.split(".")
    part = run["model"]
    for name in above:
        part = part[name]
    if value is ...:
        del part[key]
    else:
        part[key] = value
    folder, path = olmo(tmp_path, model, run=run)
    convert("inspect", path).refused(str(tmp_path / "step7/config.json"), "OLMo-core's", key, "put the Hugging Face")
    shutil.copy(folder / "config.json", path)
    convert("inspect", path).succeeded()


def test_olmo_core_s_config_without_the_length(convert, tmp_path):
    model = tiny.build("olmo2", **OLMO2)
    run = frameworks.olmo_run(model)
    del run["dataset"]["sequence_length"]
    convert("inspect", olmo(tmp_path, model, run=run)[1]).refused("max_sequence_length", "put the Hugging Face")


def test_without_config(convert, tmp_path):
    _, path = titan(tmp_path, tiny.build(), config=False)
    words = ("is torchtitan's", "needs the model's config.json (Hugging Face's, of model_type llama)", "copy it")
    convert("inspect", path).refused(str(path), *words)
    _, path = olmo(tmp_path, tiny.build("olmo2"), run=None)
    convert("inspect", path).refused("is OLMo-core's", "of model_type olmo2 or olmo3", "copy it")
    (path / "config.json").write_text(json.dumps(frameworks.olmo_run(tiny.build("olmo2", **OLMO2))))
    convert("inspect", path).succeeded()


def test_config_of_another_framework_is_not_used(convert, tmp_path):
    _, path = titan(tmp_path, tiny.build(), config=False)
    (path / "config.json").write_text(json.dumps(frameworks.olmo_run(tiny.build("olmo2", **OLMO2))))
    convert("inspect", path).refused("is torchtitan's", "it is neither there nor in")


def test_the_folder_above_points_to_the_tensors(convert, tmp_path):
    _, path = olmo(tmp_path, tiny.build("olmo2", **OLMO2))
    convert("inspect", path.parent).refused("itself holds no weights", f"name the folder of its tensors: {path}")


LAYER = "layers.1.attention"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{LAYER}.wk.weight"), ("lacks the tensor for model.layers.1.self_attn.k_proj.weight",)),
        (lambda t: t.pop("output.weight"), ("lacks the tensor for lm_head.weight",)),
        (lambda t: t.pop("norm.weight"), ("lacks the tensor for model.norm.weight",)),
        (lambda t: t.update({f"{LAYER}.wv.weight": torch.ones(32, 31)}), (LAYER, "(32, 31)", "implies (32, 32)")),
        (lambda t: t.update({"tok_embeddings.weight": torch.ones(66, 32)}), ("(66, 32)", "implies (67, 32)")),
        (lambda t: t.update({f"{LAYER}.wq.bias": torch.ones(32)}), (f"{LAYER}.wq.bias", "does not have", "refused")),
        (lambda t: t.update({f"{LAYER}.q_norm.weight": torch.ones(4)}), (f"{LAYER}.q_norm.weight", "refused")),
        (lambda t: t.update({"layers.2.ffn_norm.weight": torch.ones(32)}), ("layers.2.ffn_norm.weight", "refused")),
        (lambda t: t.update({"layers.00.ffn_norm.weight": torch.ones(32)}), ("layers.00.ffn_norm", "refused")),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(67, 32)}),
            ("two names of the same tensor", "output", "lm_head"),
        ),
        (
            lambda t: t.update({f"{LAYER}.qkv_linear.wqkv.weight": torch.ones(96, 32)}),
            (f"{LAYER}.wq.weight and {LAYER}.qkv_linear.wqkv.weight", "two names of the same tensor"),
        ),
        (
            lambda t: t.update({f"{LAYER}.qkv_linear.wqkv.weight": torch.ones(95, 32)}),
            ("qkv_linear.wqkv.weight", "(95, 32)", "implies (96, 32)"),
        ),
        (lambda t: t.pop("tok_embeddings.weight"), ("found 0", "torchtitan", "OLMo-core")),
        (lambda t: t.update({"model.embed_tokens.weight": torch.ones(67, 32)}), ("found 2",)),
    ],
)
def test_tensors_that_are_not_the_model_s(convert, tmp_path, change, words):
    model = tiny.build()
    folder, path = titan(tmp_path, model)
    tensors = frameworks.titan_tensors(model)
    change(tensors)
    frameworks.save_titan(path, tensors)
    shutil.copy(folder / "config.json", path)
    convert("mha-to-mqa", "--method", "mean", path, tmp_path / "out").refused(str(path), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, ("torchtitan's names", "model_type llama", "says 'mistral'")),
        ({"model_type": ...}, ("torchtitan's names", "says None")),
        ({"attention_bias": True}, ("attention_bias = True", "no biases")),
        ({"num_hidden_layers": 3}, ("lacks the tensor for model.layers.2",)),
        ({"num_hidden_layers": 1}, ("layers.1.", "refused")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers = 1000000000", "at most")),
        ({"num_key_value_heads": 4}, ("attention.wk.weight", "implies (16, 32)")),
        ({"intermediate_size": None}, ("intermediate_size = None", "positive whole number")),
        ({"head_dim": 5}, ("K/V heads of 5",)),
        ({"num_key_value_heads": 3}, ("8 query and 3 K/V heads",)),
        ({"num_attention_heads": True}, ("num_attention_heads = True",)),
    ],
)
def test_config_of_another_model(convert, tmp_path, changes, words):
    _, path = titan(tmp_path, tiny.build())
    tiny.edit_config(path, **changes)
    convert("mha-to-mqa", "--method", "mean", path, tmp_path / "out").refused(*words)


def test_olmo_core_s_norms_of_each_head_are_no_olmo_2_s(convert, tmp_path):
    model = tiny.build("olmo2", **OLMO2)
    tensors = frameworks.olmo_tensors(model)
    tensors["blocks.0.attention.k_norm.weight"] = torch.ones(4)
    path = frameworks.save_olmo(tmp_path / "step7", tensors, frameworks.olmo_run(model))
    convert("inspect", path).refused("blocks.0.attention.k_norm.weight", "(4,)", "implies (32,)")


def test_checkpoint_of_a_run_that_trains_some_tensors(convert, tmp_path):
    """Its other tensors are in the model that the run began with."""
    model = tiny.build()
    folder = tiny.save(model, tmp_path / "folder")
    tensors = {f"model.student.{name}": t for name, t in model.state_dict().items() if "attn" in name}
    write_dcp(tmp_path / "tensors", tensors)
    shutil.copy(folder / "config.json", tmp_path / "tensors")
    convert("to-hf", tmp_path / "tensors", tmp_path / "out").refused("a run of `uptrain`", "uptrain export RUN OUT")
