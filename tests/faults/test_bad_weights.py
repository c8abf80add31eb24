"""Weights that do not fit their config get one clear line, exit code 2, and leave nothing behind."""

import json
import os

import pytest
import tiny
import torch
from damage import rewrite
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer
from transformers import T5Config, T5ForConditionalGeneration

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_quantised_config(refuse_source, source):
    tiny.edit_config(source, quantization_config={"quant_method": "gptq"})
    refuse_source("quantization_config (gptq)", "unquantised")
    tiny.edit_config(source, quantization_config=None, compression_config={"quant_method": "compressed-tensors"})
    refuse_source("compression_config (compressed-tensors)", "unquantised", "the original's, remove compression_config")


def test_an_encoder_alone(refuse_source, tmp_path):
    config = T5Config(vocab_size=67, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
    folder = tiny.save(T5ForConditionalGeneration(config), tmp_path / "t5")
    rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("decoder.")])
    refuse_source("an encoder without a decoder", "no KV cache", path=folder)


PACKED = ("qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_packed", "weight.absmax")


@pytest.mark.parametrize("part", PACKED)
def test_packed_tensors_without_a_word_in_the_config(refuse_source, source, part):
    name = f"model.layers.0.mlp.up_proj.{part}"
    rewrite(source, lambda t: t.update({name: torch.zeros(4, dtype=torch.int32)}))
    refuse_source(name, "quantised", "original, unquantised model")


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.uint8, "U8"), (torch.bool, "BOOL")]
)
def test_weights_that_are_no_plain_floats(refuse_source, source, dtype, word):
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(source, lambda t: t.update({name: t[name].to(dtype)}))
    refuse_source(name, word, "quantised or packed")


@pytest.mark.parametrize("model_type", ["gpt_neo_y", "", None, 7, ["llama"]])
def test_unsupported_model_type(refuse_source, source, model_type):
    tiny.edit_config(source, model_type=model_type if model_type is not None else ...)
    refuse_source("model_type", "supported are: ", "llama, ", "qwen2, ")


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
        ({"pretraining_tp": "8"}, ("pretraining_tp = '8'; it must be a positive whole number",)),
    ],
)
def test_config_and_shapes_disagree(refuse_source, source, changes, words):
    tiny.edit_config(source, **changes)
    refuse_source(*words)


@pytest.mark.parametrize("tied", [False, None, ...])
def test_no_lm_head(refuse_source, source, tied):
    """Absent and null, `tie_word_embeddings` is false to the class, which would draw an LM head at random."""
    tiny.edit_config(source, tie_word_embeddings=tied)
    rewrite(source, lambda tensors: tensors.pop("lm_head.weight"))
    refuse_source("lacks the tensor lm_head.weight", "set tie_word_embeddings to true")


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
    ],
)
def test_unknown_attention_tensors(refuse_source, source, name):
    """Of another tower, a draft head, cross-attention, or an adapter."""
    rewrite(source, lambda tensors: tensors.update({name: torch.zeros(4, 4)}))
    refuse_source(name, "does not have; refused")


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "base_model.model."])
def test_a_model_inside_a_wrapper_of_training(refuse_source, source, wrapper):
    def wrap(tensors):
        for name in list(tensors):
            tensors[f"{wrapper}{name}"] = tensors.pop(name)

    rewrite(source, wrap)
    refuse_source(f"tensor {wrapper}model.layers.", f"begins with '{wrapper}'", "save the model without the wrapper")


def test_one_more_tensor_of_a_wrapper(refuse_source, source):
    name = "base_model.model.model.layers.0.self_attn.k_proj.base_layer.weight"
    rewrite(source, lambda tensors: tensors.update({name: torch.zeros(4, 4)}))
    refuse_source(name, "begins with 'base_model.model.'", "save the model without the wrapper")


def test_the_layer_of_a_draft_head_after_the_last(refuse_source, source):
    """Multi-token prediction, as GLM and DeepSeek store it."""

    def add(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace(".1.", ".2.")] = tensors[name].clone()

    rewrite(source, add)
    refuse_source("num_hidden_layers = 2", "3 layers (layer 2 is one too many)")


def test_sizes_that_differ_from_layer_to_layer(refuse_source, source):
    """Transformers 5, `per_layer_config`."""
    tiny.edit_config(source, per_layer_config={"0": {"num_key_value_heads": 8}})
    refuse_source("per_layer_config, sizes that differ from layer to layer")


def test_heads_that_do_not_divide(refuse_source, source):
    """The class of transformers takes such a config without a word, and stops in its forward pass."""

    def cut(tensors):
        for name in filter(tiny.is_kv, list(tensors)):
            tensors[name] = tensors[name][:12].clone()

    rewrite(source, cut)
    tiny.edit_config(source, num_key_value_heads=3)
    refuse_source("hold 3 K/V heads", "do not divide 8 query heads", groups=1)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_two_tensors_for_one_place(refuse_source, source, prefix):
    name = f"{prefix}layers.{'0' if not prefix else '00'}.self_attn.k_proj.weight"
    rewrite(source, lambda tensors: tensors.update({name: torch.zeros(32, 32)}))
    refuse_source(name, "claim the same place" if not prefix else "does not have; refused")


def test_missing_attention_tensor(refuse_source, source):
    rewrite(source, lambda tensors: tensors.pop("model.layers.1.self_attn.v_proj.weight"))
    refuse_source("layer 1 has no self_attn.v_proj.weight")


def test_bias_on_k_only(refuse_source, source):
    name = "model.layers.1.self_attn.k_proj.bias"
    rewrite(source, lambda tensors: tensors.update({name: torch.zeros(32)}))
    refuse_source("layer 1 has a bias on one of K and V only")


def test_layers_with_different_heads(refuse_source, source):
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(source, lambda tensors: tensors.update({name: tensors[name][:16].clone()}))
    refuse_source(name, "(16, 32)", "(32, 32)")


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
            ("k_norm.weight has shape (4,)", "imply (32,)"),
        ),
        (
            "cohere",
            {"use_qk_norm": True},
            lambda t: t.update({"model.layers.0.self_attn.k_norm.weight": torch.ones(32)}),
            ("k_norm.weight has shape (32,)", "imply (8, 4)"),
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
def test_families_with_more_than_projections(refuse_source, tmp_path, family, changes, change, words):
    folder = saved_as(family, tmp_path, **changes)
    rewrite(folder, change)
    refuse_source(*words, path=folder)


def test_a_vision_tower_outside_a_wrapper(refuse_source, tmp_path):
    folder = saved_as("llava", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config["text_config"], "model_type": "llama"}))
    refuse_source("self_attn", "does not have; refused", path=folder)


def test_quantised_text_config(refuse_source, tmp_path):
    folder = saved_as("llava", tmp_path)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    tiny.edit_config(folder, text_config={**text, "quantization_config": {"quant_method": "awq"}})
    refuse_source("quantization_config (awq)", path=folder)


def test_nan_in_a_fused_projection_and_in_a_norm(refuse_source, tmp_path):
    def spoil(name, row):
        def change(tensors):
            tensors[name][row] = float("nan")

        return change

    phi3 = saved_as("phi3", tmp_path)
    rewrite(phi3, spoil(FUSED, -1))
    refuse_source(FUSED, "NaN or infinite", path=phi3)
    stablelm = saved_as("stablelm", tmp_path, qk_layernorm=True)
    rewrite(stablelm, spoil(f"{NORMS}.7.weight", 0))
    refuse_source(f"{NORMS}.4.weight to {NORMS}.7.weight", "NaN or infinite", path=stablelm)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("method", ["mean", "first", "random"])
def test_not_finite(refuse_source, source, value, method):
    name = "model.layers.1.self_attn.v_proj.weight"

    def spoil(tensors):
        tensors[name][-1, -1] = value

    rewrite(source, spoil)
    refuse_source(name, "NaN or infinite", options=("--method", method))


SIGNALLING_NAN = {
    "float32": (torch.int32, 0x7F800001),
    "bfloat16": (torch.int16, 0x7F81),
    "float16": (torch.int16, 0x7C01),
}


@pytest.mark.parametrize("method", [("--method", "mean"), ("--method", "pca", "--calibration", "none")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("negative", [False, True])
def test_a_signalling_nan_is_refused_without_a_warning(refuse_source, tmp_path, dtype, negative, method):
    """Casts of it set the processor's flag for an invalid operation, of which numpy warns."""
    name = "model.layers.0.self_attn.v_proj.weight"
    path = tiny.save(tiny.build(), tmp_path / "signalling", dtype)
    kind, bits = SIGNALLING_NAN[dtype]

    def spoil(tensors):
        tensors[name].view(kind)[0, 0] = bits | torch.iinfo(kind).min if negative else bits

    rewrite(path, spoil)
    refuse_source(name, "holds NaN or infinite values", options=method, path=path)


@pytest.mark.parametrize("metadata", [{"format": "pt", "by": "\ud800"}, {"format": "pt", "\udc80": "me"}])
def test_half_a_letter_in_the_metadata(refuse_source, source, metadata):
    path = min(source.glob("*.safetensors"))
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps({**json.loads(content[8:start]), "__metadata__": metadata}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[start:])
    refuse_source(path.name, "damaged safetensors header", "surrogates not allowed")


def test_a_shard_whose_name_is_not_utf_8(refuse_source, source):
    path, index = min(source.glob("*.safetensors")), source / "model.safetensors.index.json"
    odd = path.rename(source / os.fsdecode(b"na\xefve.safetensors"))
    index.write_text(index.read_text().replace(json.dumps(path.name), json.dumps(odd.name)))
    refuse_source("'na\\udcefve.safetensors'", "not a plain file name")


@pytest.mark.parametrize("name", ["latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"])
def test_a_checkpoint_of_megatron(refuse_source, tmp_path, name):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"10")
    folder = tmp_path / "run"
    refuse_source(f"{folder} itself holds no weights", "a checkpoint of Megatron", "export it", path=folder)


def test_an_archive_of_nemo(refuse_source, tmp_path):
    path = tmp_path / "model.nemo"
    path.write_bytes(b"tar")
    refuse_source("an archive of NeMo", "export it as a Hugging Face folder first", path=path)


def test_biases_that_the_config_does_not_declare(convert, tmp_path):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300, attention_bias=True), tmp_path / "source"), 300)
    tiny.edit_config(folder, attention_bias=False)
    tensor, reason = (
        "holds the tensor model.layers.0.self_attn.k_proj.bias",
        "unknown to its config.json; correct model_type, or the setting of its biases",
    )
    calibrated = convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024)
    calibrated.refused(f"{tensor}, {reason}")
    convert("mha-to-mla", folder, tmp_path / "out", "--calibration", "none").refused(tensor, reason)
    assert not (tmp_path / "out").exists()


def test_an_empty_tensor(convert, tmp_path):
    folder = make_tokenizer(tiny.save(tiny.build("qwen3", vocab_size=300), tmp_path / "source"), 300)
    tensors = tiny.tensors(folder) | {"extra": torch.zeros(0, 4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options = ("--groups", 2, "--calibration", "self", "--calibration-tokens", 1024, "--refine", 0)
    convert("mha-to-gqa", folder, tmp_path / "out", *options).refused(
        "holds a tensor unknown to its config.json: extra"
    )
