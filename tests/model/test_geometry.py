"""The geometry, derived from shapes and checked against the config. (What is refused: tests/faults.)"""

import json
import re

import pytest
import tiny
from families_without_gqa import t5
from safetensors.torch import save_file

from convert.merging.merge_recipe import MergeRecipe
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import open_checkpoint
from model.common.errors import CheckpointError
from model.geometry import read_geometry
from model.language_model import ties_lm_head


def geometry_of(folder):
    with open_checkpoint(folder) as checkpoint:
        return read_geometry(checkpoint)


@pytest.mark.parametrize("n_kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("head_dim", [None, 6])
def test_geometry(tmp_path, n_kv_heads, head_dim):
    model = tiny.build(num_key_value_heads=n_kv_heads, **({"head_dim": head_dim} if head_dim else {}))
    geometry = geometry_of(tiny.save(model, tmp_path / "m"))
    assert (geometry.n_layers, geometry.n_heads, geometry.n_kv_heads) == (2, 8, n_kv_heads)
    assert (geometry.head_dim, geometry.hidden_size) == (head_dim or 4, 32)
    assert geometry.heads_per_group == 8 // n_kv_heads
    assert geometry.legal_n_kv_heads == tuple(n for n in (1, 2, 4, 8) if n <= n_kv_heads)
    assert geometry.kv_cache_bytes_per_token(2) == 2 * 2 * 2 * (head_dim or 4) * 2


def test_kv_heads_are_all_and_only_k_and_v(tmp_path):
    model = tiny.build("qwen2")
    geometry = geometry_of(tiny.save(model, tmp_path / "m"))
    names = [name for heads in geometry.attention.heads(8) for name in heads.tensor_names]
    assert set(names) == {name for name in model.state_dict() if tiny.is_kv(name)}
    assert len(names) == 8


@pytest.mark.parametrize(
    ("family", "value", "n_kv_heads"),
    [("llama", ..., 8), ("llama", None, 8), ("mistral", ..., 8), ("qwen2", None, 8)],
)
def test_absent_and_null_as_the_class_takes_them(tmp_path, family, value, n_kv_heads):
    folder = tiny.save(tiny.build(family), tmp_path / "m")
    tiny.edit_config(folder, num_key_value_heads=value)
    assert geometry_of(folder).n_kv_heads == n_kv_heads


def test_a_base_model_without_lm_head_and_prefix(tmp_path):
    model = tiny.build()
    folder = tiny.save(model, tmp_path / "m")
    save_file(model.model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    assert geometry_of(folder).attention.heads(8)[0].tensor_names == ("layers.0.self_attn.k_proj.weight",)


@pytest.mark.parametrize("buffers", [("inv_freq",), ("inv_freq", "cos_cached", "sin_cached")])
def test_rotary_buffers_of_old_checkpoints_are_known(tmp_path, buffers):
    import torch

    folder = tiny.save(tiny.build(), tmp_path / "m")
    extra = {f"model.layers.{i}.self_attn.rotary_emb.{name}": torch.ones(2) for i in (0, 1) for name in buffers}
    save_file({**tiny.tensors(folder), **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    assert len(geometry_of(folder).attention.heads(8)) == 4


def test_config_is_edited_in_place(tmp_path):
    folder = tiny.save(tiny.build(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps({"b": 1e-05, **config, "a": [1.0, None], "ü": "✓"}, ensure_ascii=False).encode()
    (folder / "config.json").write_bytes(text)
    with open_checkpoint(folder) as checkpoint:
        edited = make_merge_plan(checkpoint, 2, MergeRecipe("mean"), None).config_json
        added = {"rope_theta": 10000.0}  # as transformers 4 has what `rope_parameters` says
        assert json.loads(edited) == {**json.loads(text), "num_key_value_heads": 2, **added}
        assert list(json.loads(edited)) == [*json.loads(text), *added]
        assert "ü" in edited.decode() and "1e-05" in edited.decode()
        assert make_merge_plan(checkpoint, 8, MergeRecipe("mean"), None).config_json == text


@pytest.mark.parametrize(
    ("rope", "added"),
    [
        ({"rope_type": "default", "rope_theta": 54321.0}, {"rope_theta": 54321.0}),
        ({"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5},
         {"rope_theta": 7.0, "partial_rotary_factor": 0.5}),
        ({"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
         {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ({"full_attention": {"rope_type": "default", "rope_theta": 7.0}}, {}),
    ],
)  # fmt: skip
def test_version_4s_spelling_of_rope_is_added(tmp_path, rope, added):
    folder = tiny.save(tiny.build(), tmp_path / "m")
    tiny.edit_config(folder, rope_parameters=rope, rope_theta=...)
    config = json.loads((folder / "config.json").read_text())
    with open_checkpoint(folder) as checkpoint:
        plan = make_merge_plan(checkpoint, 2, MergeRecipe("mean"), None)
        assert json.loads(plan.config_json) == {**config, "num_key_value_heads": 2, **added}
        assert len(plan.notes) == (not added)
    tiny.edit_config(folder, rope_theta=3.0, partial_rotary_factor=0.1, rope_scaling={"rope_type": "yarn"})
    config = json.loads((folder / "config.json").read_text())
    with open_checkpoint(folder) as checkpoint:
        edited = json.loads(make_merge_plan(checkpoint, 2, MergeRecipe("mean"), None).config_json)
    assert edited == {**config, "num_key_value_heads": 2}, "what the source says stays"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox", "falcon", "phi", "mixtral"])
def test_a_layer_without_one_of_its_tensors_is_refused(tmp_path, family):
    """Its class would fill it with random numbers."""
    folder = tiny.save(tiny.build(family), tmp_path / "m")
    whole = tiny.tensors(folder)
    prefix = geometry_of(folder).attention.layer_prefixes[-1]
    layer = [name for name in whole if name.startswith(prefix)]
    assert len(layer) > 5
    for missing in layer:
        save_file({n: t for n, t in whole.items() if n != missing}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"lacks the tensor|incomplete|one of K and V"):
            geometry_of(folder)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {}), ("qwen3", {}), ("olmo2", {}),
        ("cohere", {"use_qk_norm": True}), ("phi", {"qk_layernorm": True}), ("stablelm", {"qk_layernorm": True}),
        ("llava", {}), ("llava_onevision", {}),
    ],
)  # fmt: skip
def test_a_tensor_that_is_missing_in_every_layer_is_refused(tmp_path, family, changes):
    folder = tiny.save(tiny.build(family, **changes), tmp_path / "m")
    whole = tiny.tensors(folder)
    first, *_ = geometry_of(folder).attention.layer_prefixes
    native = family in ("llama", "qwen2", "llava", "llava_onevision")
    wanted = r"" if native else r"self_attn\.[qk]_(norm|layernorm)\."
    parts = [name.removeprefix(first) for name in whole if name.startswith(first) and re.search(wanted, name)]
    assert len(parts) >= 2
    for missing in parts:
        left = {name: tensor for name, tensor in whole.items() if not name.endswith(missing)}
        save_file(left, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"lacks the tensor|incomplete|one of K and V|is missing"):
            geometry_of(folder)


def test_layers_may_differ_in_kind(tmp_path):
    """A dense layer among those with experts has an MLP in their place."""
    folder = tiny.save(tiny.build("qwen2_moe", mlp_only_layers=[1]), tmp_path / "m")
    assert {"model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.gate.weight"} <= tiny.tensors(folder).keys()
    assert geometry_of(folder).n_layers == 2


def test_a_wrapper_without_its_lm_head_is_refused(tmp_path):
    folder = tiny.save(tiny.build("llava"), tmp_path / "m")
    whole = tiny.tensors(folder)
    assert geometry_of(folder).n_layers == 2
    save_file({n: t for n, t in whole.items() if not n.endswith("lm_head.weight")}, folder / "model.safetensors")
    assert len(tiny.tensors(folder)) == len(whole) - 1
    tiny.edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks the tensor lm_head\.weight\."):
        geometry_of(folder)
    tiny.edit_config(folder, tie_word_embeddings=True)
    assert geometry_of(folder).n_layers == 2


def test_a_wrapper_around_a_class_that_ties_needs_no_lm_head(tmp_path):
    """Its config may leave out that default: LLaVA around Gemma, saved by transformers 4."""
    folder = tiny.save(tiny.build("llava"), tmp_path / "m")
    save_file({n: t for n, t in tiny.tensors(folder).items() if "lm_head" not in n}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in config["text_config"].items() if key != "tie_word_embeddings"}
    tiny.edit_config(folder, tie_word_embeddings=False, text_config={**text, "model_type": "gemma"})
    assert geometry_of(folder).n_layers == 2
    inner = {**text, "model_type": "gemma"}
    outer = {"tie_word_embeddings": False}
    assert [ties_lm_head(outer, inner, has_lm_head) for has_lm_head in (False, True)] == [True, False]
    assert ties_lm_head(outer, {**text, "model_type": "llama"}, has_lm_head=False) is False


@pytest.mark.parametrize(
    "missing", ["shared.weight", "encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"]
)
def test_a_t5_without_its_embedding_or_a_final_norm_is_refused(tmp_path, missing):
    folder = tiny.save(t5(), tmp_path / "m")
    tensors = tiny.tensors(folder)
    assert geometry_of(folder).n_layers == 2
    save_file({n: t for n, t in tensors.items() if n != missing}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"lacks the tensor {re.escape(missing)}\."):
        geometry_of(folder)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox", "falcon", "phi", "olmo2", "cohere"])
def test_a_model_without_embedding_norm_or_lm_head_is_refused(tmp_path, family):
    folder = tiny.save(tiny.build(family, tie_word_embeddings=False), tmp_path / "m")
    whole = tiny.tensors(folder)
    assert geometry_of(folder).n_layers == 2
    outside = [name for name in whole if not re.search(r"\.\d\.", name) and name.endswith("weight")]
    assert len(outside) == 3, outside
    for missing in outside:
        save_file({n: t for n, t in whole.items() if n != missing}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"lacks the tensor {re.escape(missing)}\."):
            geometry_of(folder)
