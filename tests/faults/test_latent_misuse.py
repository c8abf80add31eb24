"""Misuses of `convert mha-to-mla`: one line that says what to do, exit code 2, and nothing left behind."""

import json
import logging

import latent
import pytest
import tiny
import torch
from commands import left_behind
from damage import edit_tensors, rewrite
from llama_pairs import ROPES
from safetensors.torch import load_file, save_file
from self_kill import kill_at_every_step
from tiny_tokenizers import make_tokenizer
from transformers import AutoConfig

from model.tokenizer import open_tokenizer

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
BY_WEIGHTS = ("--calibration", "none")
SIZE = ("--latent", 12, "--rope", 8)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7F800000])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_rescaled_tensors_hold_finite_numbers(refused, tmp_path, name, bits):
    """Signalling NaN, quiet NaN and infinity. A source with another epsilon than 1e-6 needs rescaled tensors."""
    path = latent.make_source(tmp_path / "other", rms_norm_eps=1e-5)

    def spoil(tensors):
        tensors[name].view(torch.int32)[-1, -1] = bits

    rewrite(path, spoil)
    refused(f"the tensor {name} holds NaN or infinite values", path=path)


def test_rescaled_tensors_fit_into_their_dtype(refused, tmp_path):
    """An epsilon below 1e-6 makes numbers larger, here tenfold."""
    path = latent.make_source(tmp_path / "other", dtype="float16", rms_norm_eps=1e-8)
    name = "model.layers.1.mlp.down_proj.weight"

    def enlarge(tensors):
        tensors[name][0, 0] = 30000.0

    rewrite(path, enlarge)
    words = (f"the converted {name} does not fit into its dtype float16", "use --dtype bfloat16")
    refused(*words, path=path, options=("--latent", 13, "--rope", 8, "--latent-norm", "bias", *BY_WEIGHTS))


@pytest.fixture
def source(tmp_path):
    return latent.make_source(tmp_path / "source")


@pytest.fixture
def refused(convert, source, tmp_path):
    """Convert, and check the refusal: one line with all words."""

    def run(*words, options=(*SIZE, *BY_WEIGHTS), path=None):
        convert("mha-to-mla", path or source, tmp_path / "out", *options).refused(*words)
        assert not left_behind(tmp_path)

    return run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--latent", 12, "--rope", 7), ("--rope 7 is odd", "even")),
        (("--latent", 12, "--rope", 66), ("--rope 66 is more than the 64", "at most 64")),
        (("--latent", 65, "--rope", 8), ("--latent 65 is more", "at most 64")),
        (
            (),
            ("the default of --latent, 512, is too large", "at most 64", "such as --latent 32 --rope 32;", "inspect "),
        ),
        (("--rope", 8), ("the default of --latent, 568, is too large", "at most 64")),
        (("--rope", 576), ("--rope 576 leaves nothing of the 576 elements", "give --latent")),
        (("--latent", 1, "--rope", 8, "--latent-norm", "bias"), ("--latent 1 leaves nothing", "--latent-norm bias")),
        ((*SIZE, *BY_WEIGHTS, "--refine", 100), ("--refine needs a calibration text", "--calibration none")),
        ((*SIZE, *BY_WEIGHTS, "--calibration-tokens", 100), ("--calibration-tokens needs a calibration text",)),
        ((*SIZE, *BY_WEIGHTS, "--device", "cpu"), ("--device needs a calibration text",)),
        (SIZE, ("tokenizer.json is damaged",)),
        ((*SIZE, "--device", "cuda:7"), ("--device cuda:7 is not available",)),
        ((*SIZE, "--method", "transmla", *BY_WEIGHTS), ("--method transmla is for comparison", "calibration text")),
        ((*SIZE, "--method", "care", *BY_WEIGHTS), ("second moments of activations", "or give --method svd")),
        ((*SIZE, "--method", "svd", *BY_WEIGHTS, "--refine", 100), ("--refine needs a calibration text",)),
        ((*SIZE, "--method", "care", "--frequencies", "longrope"), ("--method care", "--frequencies stock")),
        (("--latent", 12, "--rope", 16, "--method", "svd"), ("--method svd", "--rope 8")),
        ((*SIZE, "--max-shard-size", "big"), ("'big' is not a size",)),
    ],
)
def test_options_that_do_not_fit(refused, options, words):
    refused(*words, options=options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--latent", 0), ("--latent", "0 is not in the range")),
        (("--rope", 1), ("--rope", "1 is not in the range")),
        (("--latent-norm", "learned"), ("'learned' is not one of", "eps", "bias")),
        (("--frequencies", "yarn"), ("'yarn' is not one of",)),
        (("--dtype", "float16"), ("--dtype", "'float16' is not", "bfloat16")),
        (("--groups", 2), ("No such option",)),
        (("--refit",), ("No such option",)),
        (("--method", "mean"), ("'mean' is not one of",)),
    ],
)
def test_values_that_no_model_can_have(convert, source, tmp_path, options, words):
    convert("mha-to-mla", source, tmp_path / "out", *options).refused(*words)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen2", {}, ("'qwen2'", "queries have biases")),
        ("qwen3", {}, ("'qwen3'", "normalises queries and keys")),
        ("olmo2", {}, ("'olmo2'", "normalises queries and keys")),
        ("gemma2", {}, ("'gemma2'", "logits are capped")),
        ("phi3", {}, ("'phi3'", "fused")),
        ("gpt_neox", {}, ("'gpt_neox'",)),
        ("mpt", {}, ("'mpt'", "rotating")),
        ("mixtral", {}, ("'mixtral'", "its decoder differs")),
        ("llava", {}, ("'llava'", "reads more than text")),
        ("ernie4_5", {}, ("'ernie4_5'", "neighbouring numbers")),
        ("llama", {"attention_bias": True}, ("attention_bias = true", "no bias for queries")),
        ("llama", {"mlp_bias": True}, ("mlp_bias = true",)),
        ("mistral", {"sliding_window": 16}, ("sliding window of 16",)),
        (
            "mistral",
            {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            ("sliding window of 8 tokens", "no longer than the window", "to null, and remove layer_types"),
        ),
        ("llama", {"rope_parameters": ROPES["dynamic"]}, ("RoPE of type dynamic", "fixed")),
    ],
)
def test_sources_that_the_class_cannot_compute(refused, tmp_path, family, changes, words):
    model = tiny.build(family, **changes)
    refused(*words, path=tiny.save(model, tmp_path / "other"))


def test_a_window_that_no_text_reaches_changes_nothing(convert, tmp_path):
    source = latent.make_source(tmp_path / "source", "mistral", max_position_embeddings=64)
    tiny.edit_config(source, sliding_window=64)
    convert("mha-to-mla", source, tmp_path / "converted", *SIZE, *BY_WEIGHTS).succeeded()
    tiny.edit_config(source, sliding_window=63)
    convert("mha-to-mla", source, tmp_path / "other", *SIZE, *BY_WEIGHTS).refused("sliding window of 63")


def test_models_that_are_not_causal(refused, source, tmp_path):
    """By the name of the class, and by tensors, which a class without a name may have."""
    tiny.edit_config(source, architectures=["LlamaForSequenceClassification"])
    refused("LlamaForSequenceClassification", "only causal language models")
    tiny.edit_config(source, architectures=5)
    refused("architecture 5", "only causal language models")
    other = tiny.save(latent.make_model(), tmp_path / "other")
    tiny.edit_config(other, architectures=...)
    weights = load_file(other / "model.safetensors")
    save_file({**weights, "score.weight": torch.ones(2, 64)}, other / "model.safetensors")
    refused("score.weight", "only causal language models", path=other)


def test_a_class_of_latent_attention_already(convert, source, refused, tmp_path):
    convert("mha-to-mla", source, tmp_path / "mla", *SIZE, *BY_WEIGHTS).succeeded()
    refused("deepseek_v3", "latent attention (MLA)", path=tmp_path / "mla")
    merge = ("mha-to-gqa", tmp_path / "mla", tmp_path / "out", "--groups", 2)
    for command in (merge, ("inspect", tmp_path / "mla", "--heads")):
        for more in ((), ("--json",)):
            convert(*command, *more).refused(
                f"{tmp_path / 'mla'}: this is an output of convert mha-to-mla",
                "`uptrain run` and `uptrain evaluate` take",
            )


def test_transformers_does_not_warn_of_a_key_where_a_tokenizer_is_opened(convert, tmp_path):
    """It does where the model is opened; a note says that this is harmless."""
    source = make_tokenizer(latent.make_source(tmp_path / "source", vocab_size=300), 300)
    convert("mha-to-mla", source, tmp_path / "mla", "--latent", 12, "--rope", 16, *BY_WEIGHTS).succeeded()
    assert "unrecognised key, beta_fast, which is harmless" in (tmp_path / "mla/README.md").read_text()
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("transformers.modeling_rope_utils")
    logger.addHandler(handler)
    try:
        open_tokenizer(tmp_path / "mla")
    finally:
        logger.removeHandler(handler)
    assert not records


def test_scaled_rotations_have_no_stock_frequencies(refused, tmp_path):
    source = latent.make_source(tmp_path / "llama3", rope_parameters=ROPES["llama3"])
    refused("--frequencies stock", "longrope", path=source, options=(*SIZE, *BY_WEIGHTS, "--frequencies", "stock"))


@pytest.mark.parametrize("rope", [16, 6])
def test_methods_for_comparison_name_the_sizes_that_a_scaled_rotation_allows(refused, tmp_path, rope):
    source = make_tokenizer(
        latent.make_source(tmp_path / "llama3", vocab_size=300, rope_parameters=ROPES["llama3"]), 300
    )
    options = ("--latent", 12, "--rope", rope, "--method", "svd")
    refused("--method svd", "divides the heads' 8; give --rope 8, or a divisor", path=source, options=options)


def test_float16_cannot_hold_small_numbers(refused, tmp_path):
    refused(
        "float16", "--dtype bfloat16", "--latent-norm bias", path=latent.make_source(tmp_path / "half", dtype="float16")
    )


def test_options_without_use(refused, tmp_path):
    source = latent.make_source(tmp_path / "mqa", num_key_value_heads=1)
    options = ("--latent", 8, "--rope", 8, "--calibration-tokens", 1024)
    refused("--calibration-tokens has no use", "leave it out", path=source, options=options)


def test_damaged_weights(refused, source):
    def damaged(name, tensor):
        return torch.full_like(tensor, torch.nan) if name.endswith("layers.1.self_attn.v_proj.weight") else tensor

    edit_tensors(source, damaged)
    refused("v_proj.weight holds NaN")


def test_quantised_weights(refused, source):
    tiny.edit_config(source, quantization_config={"quant_method": "gptq"})
    refused("quantization_config (gptq)")


def test_config_and_embedding_disagree(refused, source):
    tiny.edit_config(source, vocab_size=70)
    refused("vocab_size = 70", "67 rows")


def test_an_lm_head_that_is_missing(refused, source):
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        if "lm_head.weight" in tensors:
            del tensors["lm_head.weight"]
            file.unlink()
            if tensors:
                save_file(tensors, file, {"format": "pt"})
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    refused("lacks the tensor lm_head.weight")


def test_out_exists(convert, source, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/notes.txt").write_text("mine")
    command = ("mha-to-mla", source, tmp_path / "there", *SIZE, *BY_WEIGHTS)
    assert "--overwrite" not in convert(*command).refused("exists; choose another name.").err
    convert(*command, "--overwrite").refused("not a checkpoint folder")
    assert (tmp_path / "there/notes.txt").read_text() == "mine"
    convert("mha-to-mla", source, source, *SIZE, *BY_WEIGHTS, "--overwrite").refused("is SOURCE")


def test_overwriting_and_a_dry_run(convert, source, tmp_path):
    target = tmp_path / "target"
    convert("mha-to-mla", source, target, *SIZE, *BY_WEIGHTS, "--dry-run").succeeded()
    assert not target.exists() and not left_behind(tmp_path)
    convert("mha-to-mla", source, target, *SIZE, *BY_WEIGHTS).succeeded()
    first = tiny.snapshot(target)
    convert("mha-to-mla", source, target, "--latent", 14, "--rope", 8, *BY_WEIGHTS, "--overwrite").succeeded()
    assert tiny.snapshot(target) != first
    convert("mha-to-mla", source, target, *SIZE, *BY_WEIGHTS, "--overwrite").succeeded()
    assert tiny.snapshot(target) == first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"latent": None}, ("latent is missing",)),
        ({"latent": {"latent": 12}}, ("damaged",)),
        ({"pair_indices": [0.0]}, ("latent.pair_indices does not fit",)),
        ({"pair_indices": [0.0, 1.0, 2.0, "x"]}, ("latent.pair_indices",)),
        ({"pair_indices": [0.0, 1.0, 2.0, 300.0]}, ("pair index 300", "4 RoPE pairs")),
        ({"norm": "none"}, ("latent.norm",)),
        ({"dtype": "float16"}, ("latent.dtype has an unknown value",)),
        ({"refine_tokens": 100}, ("refine need a calibration",)),
        ({"rope": 9}, ("--rope 9 is odd",)),
        ({"latent_size": 1 << 40}, ("--latent",)),
    ],
)
def test_a_record_that_is_damaged(convert, source, tmp_path, change, words):
    target = tmp_path / "target"
    convert("mha-to-mla", source, target, *SIZE, *BY_WEIGHTS).succeeded()
    record = json.loads((target / "groupwise.json").read_text())
    if "latent" in change:
        record["latent"] = change["latent"]
    elif "refine_tokens" in change:
        record["refine"] = change["refine_tokens"]
    elif "latent_size" in change:
        record["latent"]["latent"] = change["latent_size"]
    else:
        record["latent"] |= change
    (target / "groupwise.json").write_text(json.dumps(record))
    convert("verify", source, target).refused(*words)


def test_killed_at_every_third_step_to_the_disk(convert, source, tmp_path):
    def arguments(out):
        return ("mha-to-mla", source, out, *SIZE, *BY_WEIGHTS, "--workers", 1)

    def finish(out):
        return out.exists() or convert(*arguments(out)).succeeded()

    convert("mha-to-mla", source, tmp_path / "expected", *SIZE, *BY_WEIGHTS).succeeded()
    expected = tiny.snapshot(tmp_path / "expected")
    assert kill_at_every_step(tmp_path, "convert", arguments, finish, expected, every=3) >= 10


def test_a_text_that_is_too_short(convert, tmp_path):
    source = make_tokenizer(latent.make_source(tmp_path / "source", vocab_size=300), 300)
    (tmp_path / "short.txt").write_text("too short")
    result = convert("mha-to-mla", source, tmp_path / "out", *SIZE, "--calibration", tmp_path / "short.txt")
    result.refused("has only", "tokens")
    result = convert("mha-to-mla", source, tmp_path / "out", *SIZE, "--calibration-tokens", 7)
    result.refused("--calibration-tokens 7 is too few")


def test_a_damaged_side_file_is_refused_before_hours_of_calibration(convert, tmp_path, monkeypatch):
    source = make_tokenizer(
        tiny.save(tiny.build("mistral", vocab_size=300, sliding_window=None), tmp_path / "source"), 300
    )
    (source / "tokenizer_config.json").write_text("[1, 2")

    def calibrate(*arguments):
        raise AssertionError("calibrates")

    monkeypatch.setattr("convert.calibration.calibrate.calibrate", calibrate)
    options = ("--latent", 8, "--rope", 8, "--frequencies", "stock", "--calibration-tokens", 1024)
    convert("mha-to-mla", source, tmp_path / "out", *options).refused("tokenizer_config.json: not valid JSON")


def test_special_tokens_that_the_source_leaves_out_are_those_of_its_class(convert, tmp_path):
    """DeepSeek-V3's class has 0 and 1 for them."""
    source, out = latent.make_source(tmp_path / "source"), tmp_path / "converted"
    tiny.edit_config(source, bos_token_id=..., eos_token_id=...)
    (source / "generation_config.json").unlink()
    convert("mha-to-mla", source, out, *SIZE, *BY_WEIGHTS).succeeded()
    for folder in (source, out):
        opened = AutoConfig.from_pretrained(folder)
        assert (opened.bos_token_id, opened.eos_token_id) == (1, 2)
