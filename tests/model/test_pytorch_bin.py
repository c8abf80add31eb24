"""pytorch_model.bin read as the safetensors folder that the same model makes."""

import json

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch_files import assert_same_conversion, bits, save_bins, write_bin
from transformers import AutoConfig

from model.checkpoint import open_checkpoint
from model.checkpoint.tied import TIED_BY_DEFAULT
from model.families import FAMILIES
from model.families.family import Family


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_converts_as_safetensors_do(convert, tmp_path, dtype, n_shards):
    model = tiny.build(attention_bias=True)
    folder = tiny.save(model, tmp_path / "folder", dtype)
    other = write_bin(tmp_path / "bin", model, dtype, n_shards)
    for groups in (8, 2, 1):
        assert_same_conversion(convert, folder, other, tmp_path, groups)
    assert len(list((tmp_path / "b2").glob("*.safetensors"))) == n_shards
    ours, theirs = tiny.snapshot(tmp_path / "a2"), tiny.snapshot(tmp_path / "b2")
    assert ours["config.json"] == theirs["config.json"]
    for name in tiny.SIDE_FILES.keys() - {"README.md"}:
        assert theirs[name] == ours[name]


@pytest.mark.parametrize("n_shards", [1, 2])
def test_a_tied_lm_head_is_written_once(convert, tmp_path, n_shards):
    model = tiny.build(tie_word_embeddings=True)
    folder = tiny.save(model, tmp_path / "folder", "bfloat16")
    other = write_bin(tmp_path / "bin", model, "bfloat16", n_shards)
    assert "lm_head.weight" not in tiny.tensors(folder)
    assert_same_conversion(convert, folder, other, tmp_path, 2)


@pytest.mark.parametrize("how", ["shared", "equal", "different"])
@pytest.mark.parametrize("tied", [True, False, ...])
def test_an_lm_head_goes_only_where_the_config_ties_it_and_it_is_the_embedding(convert, tmp_path, tied, how):
    folder = write_bin(tmp_path / "bin", tiny.build(tie_word_embeddings=True))
    tiny.edit_config(folder, tie_word_embeddings=tied)
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    if how != "shared":
        tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += how == "different"
        save_bins(folder, tensors)
    convert("mha-to-mqa", "--method", "mean", folder, tmp_path / "out").succeeded()
    out = tiny.tensors(tmp_path / "out")
    assert ("lm_head.weight" in out) != (tied is True and how != "different")
    assert torch.equal(out.get("lm_head.weight", tensors["lm_head.weight"]), tensors["lm_head.weight"])
    assert torch.equal(out["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])


def test_which_classes_tie_by_default():
    own = {"gpt_neox_gqa": False, "t5_gqa": True}  # defined by code that an output brings along
    families = [name for name, family in FAMILIES.items() if isinstance(family, Family)]
    defaults = {name: own[name] if name in own else AutoConfig.for_model(name).tie_word_embeddings for name in families}
    assert defaults == {name: name in TIED_BY_DEFAULT for name in families}


def test_a_shard_with_nothing_but_the_tied_lm_head_disappears(convert, tmp_path):
    folder = write_bin(tmp_path / "bin", tiny.build(tie_word_embeddings=True))
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    (folder / "pytorch_model.bin").unlink()
    torch.save({"lm_head.weight": tensors.pop("lm_head.weight")}, folder / "b.bin")
    torch.save(tensors, folder / "a.bin")
    weight_map = {**dict.fromkeys(tensors, "a.bin"), "lm_head.weight": "b.bin"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert("mha-to-mqa", "--method", "mean", folder, tmp_path / "out").succeeded()
    assert [f.name for f in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


def test_views_of_one_storage(convert, tmp_path):
    """Slices, transposed and overlapping views, parameters, scalars, empty tensors: each is written as what it is."""
    model = tiny.build()
    folder = tiny.save(model, tmp_path / "folder")
    other = write_bin(tmp_path / "bin", model)
    tensors = tiny.tensors(folder)
    layer = "model.layers.0.self_attn."
    fused = torch.cat([tensors[f"{layer}{part}_proj.weight"] for part in "qkv"])
    for i, part in enumerate("qkv"):
        tensors[f"{layer}{part}_proj.weight"] = fused[32 * i : 32 * (i + 1)]
    for name in ("mlp.down_proj", "self_attn.o_proj", "self_attn.v_proj"):
        w = tensors[f"model.layers.1.{name}.weight"]
        tensors[f"model.layers.1.{name}.weight"] = torch.nn.Parameter(w.T.contiguous().T)
        assert not tensors[f"model.layers.1.{name}.weight"].is_contiguous()
    more = {
        "scalar": torch.tensor(-1e9),
        "empty": torch.empty(0, 3),
        "mask": torch.ones(3, 3, dtype=torch.bool).tril(),
        "positions": torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        "overlap": fused.view(-1)[5:11],
        "every_other": fused[::2, 1::2],
        "expanded": torch.arange(3.0).expand(4, 3),
    }
    save_bins(other, {**tensors, **more})
    save_file(
        {n: t.detach().contiguous().clone() for n, t in {**tensors, **more}.items()}, folder / "model.safetensors"
    )
    for groups in (8, 2):
        assert_same_conversion(convert, folder, other, tmp_path, groups)
    with open_checkpoint(other) as checkpoint:
        for name in more.keys() - {"scalar", "empty"}:
            part = checkpoint.rows(name, 1, 3)
            assert np.array_equal(part.view(np.uint8 if name == "mask" else part.dtype), more[name][1:3].numpy()), name


@st.composite
def views(draw):
    """Draw tensors that are views of a few storages, in any order and overlapping."""
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool])
    storages = [torch.arange(draw(st.integers(1, 40))).to(draw(dtypes)) for _ in range(draw(st.integers(1, 3)))]
    tensors = {}
    for i in range(draw(st.integers(1, 6))):
        storage = draw(st.sampled_from(storages))
        start = draw(st.integers(0, len(storage) - 1))
        view = storage[start : draw(st.integers(start, len(storage)))]
        n_columns = draw(st.integers(1, 4))
        view = view[: len(view) // n_columns * n_columns].view(-1, n_columns)
        how = draw(st.sampled_from(["as it is", "transposed", "every other", "expanded", "flat"]))
        view = {
            "as it is": view, "transposed": view.T, "every other": view[::2, ::2], "flat": view.flatten(),
            "expanded": view[:, None].expand(-1, 3, -1),
        }[how]  # fmt: skip
        tensors[f"t{i}"] = view
    return tensors


@settings(max_examples=60)
@given(tensors=views(), n_shards=st.integers(1, 3))
def test_any_views_of_shared_storages(tmp_path_factory, tensors, n_shards):
    folder = tmp_path_factory.mktemp("views")
    (folder / "config.json").write_text("{}")
    save_bins(folder, tensors, min(n_shards, len(tensors)))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert checkpoint.tensors[name].shape == tensor.shape
            for rows in (slice(None), slice(1, 3)):
                start, stop, _ = rows.indices(len(tensor))
                values = checkpoint.rows(name, start, max(start, stop))
                assert np.ascontiguousarray(values).tobytes() == bits(tensor[rows]), name
            span = checkpoint.span(name)
            if span is not None:
                assert span.path.read_bytes()[span.offset : span.offset + span.length] == bits(tensor), name


def test_inspect_and_the_record_name_the_files(convert, tmp_path):
    folder = write_bin(tmp_path / "bin", tiny.build(), n_shards=2)
    (folder / "training_args.bin").write_bytes(b"\x80\x02 of no concern")
    summary = json.loads(convert("inspect", folder, "--json").out)
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    assert (summary["format"], summary["files"], summary["skipped_files"]) == ("bin", files, ["training_args.bin"])
    convert("mha-to-mqa", "--method", "mean", folder, tmp_path / "out")
    record = json.loads((tmp_path / "out/groupwise.json").read_text())
    assert [file["name"] for file in record["source"]["files"]] == files


def test_safetensors_are_preferred(convert, tmp_path):
    folder = write_bin(tmp_path / "both", tiny.build(seed=1))
    tiny.save(tiny.build(), tmp_path / "both")
    summary = json.loads(convert("inspect", folder, "--json").out)
    assert (summary["format"], summary["skipped_files"]) == ("safetensors", ["pytorch_model.bin"])
    assert "pytorch_model.bin" in convert("inspect", folder).out


def test_a_negated_view_is_refused(convert, tmp_path):
    """The file holds the numbers, and the sign beside them."""
    folder = write_bin(tmp_path / "bin", tiny.build(), "float32", 1)
    path = next(folder.glob("*.bin"))
    tensors = torch.load(path, weights_only=True)
    name = "model.norm.weight"
    tensors[name] = torch._neg_view(tensors[name])
    torch.save(tensors, path)
    convert("to-hf", folder, tmp_path / "out").refused(f"holds {name} as a negated view")
