"""Every bad input gets one clear line, exit code 2, and leaves nothing behind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path):
    """Whatever a test does, no OUT and no staging folder may exist after it."""
    yield
    left = {p.name for p in tmp_path.iterdir()}
    assert not {name for name in left if name == "out" or name.endswith(".groupwise")}, left


@pytest.fixture
def refuse(convert, source, tmp_path):
    """Convert and check the refusal: one line with all `words`."""

    def run(*words, groups=2, options=(), path=None, out=None):
        result = convert(
            "mha-to-gqa", "--method", "mean", path or source, out or tmp_path / "out", "--groups", groups, *options
        )
        result.refused(*words)

    return run


def rewrite(folder, change):
    """Apply `change` to the dict of tensors of a folder, and save them as one file."""
    tensors = tiny.tensors(folder)
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# The number of groups


@pytest.mark.parametrize("groups", [3, 5, 16, 0, -2])
def test_groups_that_do_not_divide(refuse, groups):
    refuse(f"--groups {groups} is not possible", "8 K/V heads", "choose one of 1, 2, 4, 8", groups=groups)


def test_groups_that_are_no_number(convert, source, tmp_path):
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", "many").refused("--groups", "many")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out").refused("Missing option '--groups'")


def test_unknown_method(convert, source, tmp_path):
    convert("mha-to-mqa", source, tmp_path / "out", "--method", "median").refused("median", "mean", "first", "random")


# SOURCE as a whole


def test_missing_source(refuse, tmp_path):
    refuse("nowhere", "no such file", path=tmp_path / "nowhere")


def test_source_is_a_file_of_another_kind(refuse, source):
    refuse("unknown kind", ".gguf", path=source / "config.json")


def test_damaged_record_of_an_earlier_conversion(refuse, source):
    (source / "groupwise.json").write_text("[" * 100_000)
    refuse("groupwise.json", "damaged", options=("--dry-run",))


def test_dangling_source(refuse, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    refuse("dangling symlink", path=tmp_path / "link")


def test_no_config(refuse, source):
    (source / "config.json").unlink()
    refuse("no config.json")
    (source / "model.gguf").write_text("")
    refuse("no config.json", "model.gguf")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("\xff", "valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": "\\ud800"}', "not valid JSON"),
        ("", "not valid JSON"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "not valid JSON"),
        ("\xff\xfe{\x00}\x00", "not valid JSON in UTF-8"),
    ],
)
def test_damaged_config(refuse, source, text, word):
    (source / "config.json").write_text(text, encoding="latin-1")
    refuse("config.json", word)


def test_no_weights(refuse, source):
    for file in [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]:
        file.unlink()
    refuse("holds no weights")
    (source / "tf_model.h5").write_text("")
    refuse("only tf_model.h5", "safetensors first")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("alone", [False, True])
def test_adapter_folder(refuse, source, name, alone):
    if alone:
        for file in source.glob("model*"):
            file.unlink()
    (source / name).write_text("{}")
    refuse("adapter", name, "merge it into its base model")


@pytest.mark.parametrize("name", ["NOTICE", "model-00001-of-00002.safetensors", "config.json"])
def test_dangling_symlink_inside(refuse, source, name):
    names = {p.name for p in source.iterdir()}
    name = next((n for n in names if n.startswith("model-00001")), name) if name.startswith("model") else name
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(source / "gone")
    refuse(name if name != "config.json" else "no config.json")


def test_symlink_cycle(refuse, source):
    (source / "loop").symlink_to(source)
    refuse("cannot contain itself")


def test_both_a_single_file_and_an_index(refuse, source):
    save_file(tiny.tensors(source), source / "model.safetensors")
    refuse("holds both", "remove the outdated one")


# Permissions bind root only when it gives up its right to ignore them.
NO_OVERRIDE = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


def run_without_override(*arguments):
    prefix = NO_OVERRIDE if Path("/proc/self").stat().st_uid == 0 else []
    if prefix and (not shutil.which("setpriv") or subprocess.run([*prefix, "true"], check=False).returncode):
        pytest.skip("running as root, and setpriv cannot drop its override of permissions here")
    command = [*prefix, sys.executable, "-m", "convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["config.json", "LICENSE", "model-00001"])
def test_unreadable_source(source, tmp_path, name):
    path = next(source.glob(f"{name}*"))
    path.chmod(0)
    result = run_without_override("mha-to-mqa", "--method", "mean", source, tmp_path / "out")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert path.name in result.stderr
    assert "permissions" in result.stderr


def test_read_only_target(source, tmp_path):
    parent = tmp_path / "locked"
    parent.mkdir(mode=0o555)
    result = run_without_override("mha-to-mqa", "--method", "mean", source, parent / "new" / "out")
    assert (result.returncode, result.stdout) == (2, "")
    assert "locked cannot be written to" in result.stderr
    assert not list(parent.iterdir())


# Index and shards


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_index_names_a_missing_shard(refuse, source):
    shard = next(source.glob("model-00002*"))
    shard.unlink()
    refuse("names the shard", shard.name, "missing")


def test_shard_lacks_a_named_tensor(refuse, source):
    shard = next(source.glob("model-00002*"))
    edit_index(source, lambda index: index["weight_map"].update({"model.extra.weight": shard.name}))
    refuse("model.extra.weight", shard.name, "does not hold it")


def test_shard_holds_an_unnamed_tensor(refuse, source):
    edit_index(source, lambda index: index["weight_map"].pop("model.norm.weight"))
    refuse("model.norm.weight", "does not name")


def test_tensor_in_two_shards(refuse, source):
    first, second = sorted(source.glob("*.safetensors"))[:2]
    both = load_file(second)
    both.update(list(load_file(first).items())[:1])
    save_file(both, second, metadata={"format": "pt"})
    refuse("is in two shards")


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/passwd", "sub/x.safetensors", ".."])
def test_index_names_a_path_outside_the_folder(refuse, source, name):
    edit_index(source, lambda index: index["weight_map"].update({"model.norm.weight": name}))
    refuse(name, "inside the folder")


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "x.SAFETENSORS"])
def test_index_names_a_file_of_another_kind(refuse, source, name):
    shard = next(source.glob("model-00002*"))
    shard.rename(source / name)

    def rename(index):
        index["weight_map"] = {t: name if f == shard.name else f for t, f in index["weight_map"].items()}

    edit_index(source, rename)
    refuse(name, "not a .safetensors file")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(refuse, source, text):
    (source / "model.safetensors.index.json").write_text(text)
    refuse("is not a shard index")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_safetensors(refuse, source, keep):
    shard = next(source.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:keep])
    refuse(shard.name, "truncated")


def test_trailing_bytes(refuse, source):
    shard = next(source.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes() + b"x")
    refuse(shard.name, "belong to no tensor")


def test_git_lfs_pointer(refuse, source):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    shard = next(source.glob("model-00001*"))
    shard.write_text(pointer)
    refuse(shard.name, "git-lfs pointer", "git lfs pull")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "chat_templates/tool.jinja"])
def test_git_lfs_pointer_beside_the_weights(refuse, source, name):
    (source / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    refuse(name, "git-lfs pointer", "git lfs pull")


def test_shards_that_the_index_does_not_name(convert, source, tmp_path):
    """Left from another download: no part of the model, and said so."""
    stray = {"model.layers.0.self_attn.k_proj.weight": torch.ones(32, 32)}
    save_file(stray, source / "model-00009-of-00009.safetensors")
    result = convert("mha-to-gqa", "--method", "mean", source, tmp_path / "good", "--groups", 2, "--json")
    assert "model-00009-of-00009.safetensors" in json.loads(result.out)["left_out"]
    assert not (tmp_path / "good/model-00009-of-00009.safetensors").exists()
    assert not torch.equal(tiny.tensors(tmp_path / "good")["model.layers.0.self_attn.k_proj.weight"], torch.ones(8, 32))


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


HEADERS = {
    "no JSON": b"{",
    "not an object": b"[1]",
    "unknown dtype": {"a": entry(dtype="Q9")},
    "negative shape": {"a": entry(shape=[-2])},
    "shape of text": {"a": entry(shape="2")},
    "wrong length": {"a": entry(shape=[3])},
    "hole": {"a": entry(data_offsets=[4, 12])},
    "overlap": {"a": entry(), "b": entry(data_offsets=[4, 12])},
    "offsets in fractions": {"a": entry(data_offsets=[0.0, 8.0])},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "metadata": {"__metadata__": {"a": 1}},
    "twice": b'{"a":%s,"a":%s}' % ((b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}',) * 2),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_damaged_header(refuse, source, kind):
    header = HEADERS[kind]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    shard = next(source.glob("model-00001*"))
    shard.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    refuse(shard.name, "damaged safetensors header")


# Weights and config that do not fit


def test_quantised_config(refuse, source):
    tiny.edit_config(source, quantization_config={"quant_method": "gptq"})
    refuse("quantization_config (gptq)", "unquantised")


PACKED = ("qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_packed", "weight.absmax")


@pytest.mark.parametrize("part", PACKED)
def test_packed_tensors_without_a_word_in_the_config(refuse, source, part):
    name = f"model.layers.0.mlp.up_proj.{part}"
    rewrite(source, lambda t: t.update({name: torch.zeros(4, dtype=torch.int32)}))
    refuse(name, "quantised", "original, unquantised model")


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.uint8, "U8"), (torch.bool, "BOOL")]
)
def test_weights_that_are_no_plain_floats(refuse, source, dtype, word):
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(source, lambda t: t.update({name: t[name].to(dtype)}))
    refuse(name, word, "quantised or packed")


@pytest.mark.parametrize("model_type", ["gpt_neo_y", "", None, 7, ["llama"]])
def test_unsupported_model_type(refuse, source, model_type):
    tiny.edit_config(source, model_type=model_type if model_type is not None else ...)
    refuse("model_type", "supported are: ", "llama, ", "qwen2, ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 4}, ("num_key_value_heads = 4", "hold 8 K/V heads")),
        ({"num_key_value_heads": "8"}, ("num_key_value_heads = 8", "hold 8 K/V heads")),
        ({"num_attention_heads": 4}, ("head_dim = 4", "means 8")),
        ({"num_attention_heads": 5}, ("num_attention_heads = 5",)),
        ({"num_attention_heads": None}, ("num_attention_heads = None", "positive whole number")),
        ({"num_hidden_layers": 3}, ("num_hidden_layers = 3", "layer 2 is missing")),
        ({"num_hidden_layers": 1}, ("num_hidden_layers = 1", "layer 1 is one too many")),
        ({"hidden_size": 64}, ("do not match",)),
        ({"head_dim": 8}, ("head_dim = 8", "means 4")),
        ({"model_type": "mistral", "num_key_value_heads": 4}, ("num_key_value_heads = 4",)),
        (
            {"model_type": "mistral", "num_key_value_heads": None},
            ("= null, which the class of mistral refuses", "to 8"),
        ),
        ({"model_type": "qwen3", "head_dim": ...}, ("no head_dim, which qwen3 takes as 128", "means 4")),
        ({"model_type": "qwen2", "num_key_value_heads": ...}, ("no num_key_value_heads", "takes as 32")),
        ({"num_key_value_heads": 8.0}, ("num_key_value_heads = 8.0",)),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers = 1000000000", "at most")),
        ({"num_hidden_layers": 10**8}, ("layer 2 is missing",)),
        ({"pretraining_tp": 3}, ("pretraining_tp = 3", "set it to 1")),
        ({"pretraining_tp": "8"}, ("pretraining_tp = '8'", "set it to 1")),
    ],
)
def test_config_and_shapes_disagree(refuse, source, changes, words):
    tiny.edit_config(source, **changes)
    refuse(*words)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.W_pack.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "vision_tower.layers.0.self_attn.k_proj.weight",
        "transformer.h.0.attn.c_attn.weight",
        "audio_tower.layers.0.self_attn.k_proj.weight",
        "qformer.encoder.layer.0.attention.attention.key.weight",
        "model.layers.0.cross_attn.k_proj.weight",
        "model.layers.0.encoder_attn.k_proj.weight",
        "model.mtp_block.0.self_attn.k_proj.weight",
        "mtp.layers.0.self_attn.k_proj.weight",
        "draft.model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.k_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.k_proj.base_layer.weight",
        "module.model.layers.0.self_attn.k_proj.weight",
        "_orig_mod.model.layers.0.self_attn.k_proj.weight",
    ],
)
def test_unknown_attention_tensors(refuse, source, name):
    """Of another tower, a draft head, cross-attention, an adapter, or a wrapper that training left around the model."""
    rewrite(source, lambda tensors: tensors.update({name: torch.zeros(4, 4)}))
    refuse(name, "does not have; refused")


def test_a_whole_model_inside_a_wrapper_of_training(refuse, source):
    def wrap(tensors):
        for name in list(tensors):
            tensors[f"module.{name}"] = tensors.pop(name)

    rewrite(source, wrap)
    refuse("module.model.layers.", "does not have; refused")


def test_the_layer_of_a_draft_head_after_the_last(refuse, source):
    """Multi-token prediction, as GLM and DeepSeek store it."""

    def add(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace(".1.", ".2.")] = tensors[name].clone()

    rewrite(source, add)
    refuse("num_hidden_layers = 2", "3 layers (layer 2 is one too many)")


def test_sizes_that_differ_from_layer_to_layer(refuse, source):
    """Transformers 5, `per_layer_config`."""
    tiny.edit_config(source, per_layer_config={"0": {"num_key_value_heads": 8}})
    refuse("per_layer_config, sizes that differ from layer to layer")


def test_heads_that_do_not_divide(refuse, source):
    """The class of transformers takes such a config without a word, and stops in its forward pass."""

    def cut(tensors):
        for name in filter(tiny.is_kv, list(tensors)):
            tensors[name] = tensors[name][:12].clone()

    rewrite(source, cut)
    tiny.edit_config(source, num_key_value_heads=3)
    refuse("hold 3 K/V heads", "do not divide 8 query heads", groups=1)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_two_tensors_for_one_place(refuse, source, prefix):
    name = f"{prefix}layers.{'0' if not prefix else '00'}.self_attn.k_proj.weight"
    rewrite(source, lambda tensors: tensors.update({name: torch.zeros(32, 32)}))
    refuse(name, "claim the same place" if not prefix else "does not have; refused")


def test_missing_attention_tensor(refuse, source):
    rewrite(source, lambda tensors: tensors.pop("model.layers.1.self_attn.v_proj.weight"))
    refuse("layer 1 has no self_attn.v_proj.weight")


def test_bias_on_k_only(refuse, source):
    name = "model.layers.1.self_attn.k_proj.bias"
    rewrite(source, lambda tensors: tensors.update({name: torch.zeros(32)}))
    refuse("layer 1 has a bias on one of K and V only")


def test_layers_with_different_heads(refuse, source):
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(source, lambda tensors: tensors.update({name: tensors[name][:16].clone()}))
    refuse(name, "(16, 32)", "(32, 32)")


def saved_as(family, folder, **changes):
    return tiny.save(tiny.build(family, **changes), folder / family)


def rename(old, new):
    def change(tensors):
        tensors[new] = tensors.pop(old)

    return change


NORMS = "model.layers.1.self_attn.k_layernorm.norms"
FUSED = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    ("family", "changes", "change", "words"),
    [
        (
            "olmo2",
            {},
            lambda t: t.pop("model.layers.1.self_attn.k_norm.weight"),
            ("no self_attn.k_norm.weight",),
        ),
        (
            "olmo2",
            {},
            lambda t: t.update({"model.layers.0.self_attn.k_norm.weight": torch.ones(4)}),
            ("k_norm.weight has shape (4,)", "mean (32,)"),
        ),
        (
            "cohere",
            {"use_qk_norm": True},
            lambda t: t.update({"model.layers.0.self_attn.k_norm.weight": torch.ones(32)}),
            ("k_norm.weight has shape (32,)", "mean (8, 4)"),
        ),
        (
            "stablelm",
            {"qk_layernorm": True},
            lambda t: t.pop(f"{NORMS}.5.weight"),
            ("layer 1 has no", "norms.5.weight"),
        ),
        (
            "stablelm",
            {"qk_layernorm": True},
            rename(f"{NORMS}.5.weight", f"{NORMS}.8.weight"),
            ("norms.8.weight belongs",),
        ),
        (
            "stablelm",
            {"qk_layernorm": True},
            lambda t: t.update({f"{NORMS}.3.weight": t[f"{NORMS}.3.weight"].half()}),
            ("layer 1 has self_attn.k_layernorm.norms.0.weight", "different dtypes"),
        ),
        (
            "phi3",
            {},
            lambda t: t.update({FUSED: t[FUSED][:-4].clone()}),
            ("qkv_proj.weight has shape (92, 32)", "(96, 32)"),
        ),
        ("phi3", {}, lambda t: t.pop(FUSED.replace(".1.", ".0.")), ("layer 0 has no self_attn.qkv_proj.weight",)),
        (
            "phi3",
            {},
            rename(FUSED, FUSED.replace("qkv_proj", "q_proj")),
            ("q_proj.weight", "does not have; refused"),
        ),
        (
            "qwen3",
            {},
            lambda t: t.update({FUSED: torch.ones(4, 4)}),
            ("qkv_proj.weight", "does not have; refused"),
        ),
    ],
)
def test_families_with_more_than_projections(refuse, tmp_path, family, changes, change, words):
    folder = saved_as(family, tmp_path, **changes)
    rewrite(folder, change)
    refuse(*words, path=folder)


def test_a_vision_tower_outside_a_wrapper(refuse, tmp_path):
    folder = saved_as("llava", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config["text_config"], "model_type": "llama"}))
    refuse("self_attn", "does not have; refused", path=folder)


def test_quantised_text_config(refuse, tmp_path):
    folder = saved_as("llava", tmp_path)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    tiny.edit_config(folder, text_config={**text, "quantization_config": {"quant_method": "awq"}})
    refuse("quantization_config (awq)", path=folder)


def test_nan_in_a_fused_projection_and_in_a_norm(refuse, tmp_path):
    def spoil(name, row):
        def change(tensors):
            tensors[name][row] = float("nan")

        return change

    phi3 = saved_as("phi3", tmp_path)
    rewrite(phi3, spoil(FUSED, -1))
    refuse(FUSED, "NaN or infinite", path=phi3)
    stablelm = saved_as("stablelm", tmp_path, qk_layernorm=True)
    rewrite(stablelm, spoil(f"{NORMS}.7.weight", 0))
    refuse(f"{NORMS}.4.weight to {NORMS}.7.weight", "NaN or infinite", path=stablelm)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("method", ["mean", "first", "random"])
def test_not_finite(refuse, source, value, method):
    name = "model.layers.1.self_attn.v_proj.weight"

    def spoil(tensors):
        tensors[name][-1, -1] = value

    rewrite(source, spoil)
    refuse(name, "NaN or infinite", options=("--method", method))


# OUT


def test_out_exists(convert, source, tmp_path):
    target = tmp_path / "there"
    target.mkdir()
    convert("mha-to-mqa", "--method", "mean", source, target).refused("exists", "--overwrite")
    assert not list(target.iterdir())


@pytest.mark.parametrize("name", ["", "inside", "deep/inside"])
def test_out_in_source(refuse, source, name):
    before = tiny.snapshot(source)
    for options in ((), ("--overwrite",)):
        refuse("SOURCE or lies inside it", out=source / name, options=options)
    assert tiny.snapshot(source) == before


def test_source_in_out(convert, source, tmp_path):
    holder = tiny.save(tiny.build(), tmp_path / "holder")
    shutil.copytree(source, holder / "source")
    convert("mha-to-mqa", "--method", "mean", holder / "source", holder, "--overwrite").refused("holds files of SOURCE")
    assert (holder / "source/config.json").exists()


def test_source_in_the_staging_area_of_out(convert, source, tmp_path):
    place = tmp_path / ".elsewhere.groupwise/replaced"
    shutil.copytree(source, place)
    convert("mha-to-mqa", "--method", "mean", place, tmp_path / "elsewhere").refused("holds files of SOURCE")
    assert (place / "config.json").exists()
    shutil.rmtree(place.parent)


def test_a_refusal_gives_back_what_a_killed_run_took_away(convert, source, tmp_path):
    """Killed between the two renames of --overwrite; then the source turns out to be damaged."""
    old = tiny.save(tiny.build(seed=1), tmp_path / ".there.groupwise/replaced")
    before = tiny.snapshot(old)
    rewrite(source, lambda t: t["model.layers.0.self_attn.k_proj.weight"].fill_(float("nan")))
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "there", "--overwrite").refused("NaN or infinite")
    assert tiny.snapshot(tmp_path / "there") == before


def test_odd_targets(convert, source, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    convert("mha-to-mqa", "--method", "mean", source, loop).refused("OUT")
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "x", "--max-shard-size", "9" * 400 + "GB").refused(
        "is not a size"
    )
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "x", "--max-shard-size", "").refused("is not a size")


def test_linked_weights_in_out(convert, source, tmp_path):
    """A snapshot of links, as in the Hugging Face cache: what they point to counts."""
    store = tiny.save(tiny.build(), tmp_path / "store")
    (source / "model.safetensors.index.json").unlink()
    (source / "model.safetensors").symlink_to(store / "model.safetensors")
    convert("mha-to-mqa", "--method", "mean", source, store, "--overwrite").refused("holds files of SOURCE")
    assert (store / "model.safetensors").exists()


def test_overwrite_onto_something_else(convert, source, tmp_path):
    folder, file = tmp_path / "diary", tmp_path / "file.txt"
    folder.mkdir()
    for path in (folder / "monday.txt", file):
        path.write_text("precious")
    for target in (folder, file):
        convert("mha-to-mqa", "--method", "mean", source, target, "--overwrite").refused("not a checkpoint folder")
    assert (folder / "monday.txt").read_text() == file.read_text() == "precious"


def test_not_enough_disk(refuse, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refuse("0.00 GB free", "are needed")


def test_second_conversion_at_the_same_time(convert, source, tmp_path):
    from model.common.staging import Staging

    with Staging(tmp_path / "out"):
        convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out").refused("is being written by process")


# GGUF


def test_gguf_of_another_architecture(refuse, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", tiny.build(), architecture="bert")
    refuse("architecture 'bert'", path=path)


@pytest.mark.parametrize("keep", [0, 3, 20, 500, -100])
def test_truncated_gguf(refuse, tmp_path, keep):
    path = write_gguf(tmp_path / "x.gguf", tiny.build())
    path.write_bytes(path.read_bytes()[:keep])
    refuse("x.gguf", "truncated", path=path)


def test_gguf_lfs_pointer(refuse, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    refuse("git-lfs pointer", path=path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.expert_count": 8}, ("llama.expert_count = 8", "not supported")),
        ({"llama.attention.sliding_window": 64}, ("sliding_window", "not supported")),
        ({"llama.rope.dimension_count": 2}, ("rope.dimension_count", "head size")),
        ({"llama.rope.scaling.type": "longrope"}, ("RoPE scaling 'longrope'",)),
    ],
)
def test_gguf_settings_we_do_not_know(refuse, tmp_path, metadata, words):
    refuse(*words, path=write_gguf(tmp_path / "x.gguf", tiny.build(), **metadata))


def test_gguf_rope_factors_we_do_not_know(refuse, tmp_path):
    model = tiny.build()
    model.rope_factors = [1.0, 3.3]
    refuse("rope_freqs.weight", "not Llama 3.1's", path=write_gguf(tmp_path / "x.gguf", model))


def test_gguf_not_finite(refuse, tmp_path):
    model = tiny.build()
    model.model.layers[0].self_attn.k_proj.weight.data[3, 3] = np.inf
    refuse("layers.0.self_attn.k_proj", "NaN or infinite", path=write_gguf(tmp_path / "x.gguf", model))
