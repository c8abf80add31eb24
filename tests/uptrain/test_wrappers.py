"""Models with images or sound: the language model inside is trained, and all else stays as its files hold it."""

import json
import re

import pytest
import tiny
import torch
from real_runs import (
    LAYOUT_CASES,
    LAYOUTS,
    VOCAB,
    arguments,
    assert_stops_change_nothing,
    drive,
    events,
    make_inputs,
    records,
)
from transformers import AutoConfig, AutoModelForMultimodalLM

from model.common.errors import CheckpointError
from model.decoder.config import read_llama_config
from model.decoder.llama import LlamaForCausalLM
from model.decoder.loading import load_model
from model.language_model import language_config
from uptrain.budget.identify import SHAPE_KEYS, find_original, known_originals, shape_warning
from uptrain.export.export import config_bytes
from uptrain.models.load import load_student

TRAINED = sorted(set(tiny.WRAPPERS) - {"paligemma"})
KINDS = {"own decoder": "llava", "class of transformers": "gemma3"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Write a merged LLaVA and a merged Gemma 3 in bfloat16, their parents, and data."""
    folder = tmp_path_factory.mktemp("inputs")
    made = make_inputs(folder)
    for family in KINDS.values():
        for name, n_kv_heads in (("model", 2), ("parent", 8)):
            model = tiny.build(family, vocab_size=VOCAB, num_key_value_heads=n_kv_heads)
            made[family, name] = tiny.save(model, folder / f"{family}-{name}", "bfloat16")
    return made


def of_family(inputs, family):
    return {**inputs, "model": inputs[family, "model"], "parent": inputs[family, "parent"]}


def is_trained(name):
    of_text = "language_model." in name or "text_model." in name
    return of_text and "vision" not in name and ("self_attn." in name or "input_layernorm" in name)


def random_ids():
    return torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(0))


def open_whole(folder):
    model, loading = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def replace_tensors(folder, change):
    """Save what `change` returns of the tensors of a folder, by name; return the folder."""
    weights = change(tiny.tensors(folder))
    tiny.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", TRAINED)
def test_logits_of_a_text_are_those_of_the_whole_model(tmp_path, family):
    folder, ids = tiny.save(tiny.build(family), tmp_path / family), random_ids()
    ours, theirs = load_model(folder, torch.float32), open_whole(folder)
    assert isinstance(ours, LlamaForCausalLM) == (tiny.inner(family) in ("llama", "mistral", "qwen2"))
    # transformers' class around Cohere 2 leaves out the scale of Cohere 2's own class.
    scale = getattr(theirs.config.text_config, "logit_scale", 1.0)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), scale * theirs(input_ids=ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lm_head", ["lm_head.", "language_model.lm_head."])
@pytest.mark.parametrize("body", ["language_model.model.", "model.language_model."])
def test_both_spellings_of_names_are_read(tmp_path, body, lm_head):
    folder, ids = tiny.save(tiny.build("llava"), tmp_path / "model"), random_ids()
    expected = load_model(folder)(ids)

    def spelled(name):
        return name.replace("language_model.lm_head.", lm_head).replace("language_model.model.", body)

    replace_tensors(folder, lambda weights: {spelled(name): tensor for name, tensor in weights.items()})
    assert torch.equal(load_model(folder)(ids), expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_what_the_language_models_config_leaves_out_is_its_class_default(family):
    """LLaVA 1.5 leaves out nearly everything."""
    config = language_config({"model_type": "llava", "text_config": {"model_type": family}})
    assert read_llama_config(config) == read_llama_config(AutoConfig.for_model(family).to_dict())


@pytest.mark.parametrize("family", TRAINED)
@pytest.mark.parametrize("part", ["attention", "lora"])
def test_an_export_is_the_whole_model_with_what_was_trained(inputs, tmp_path, uptrain, family, part):
    """What is not of the language model keeps its bytes, whatever its dtype is."""
    folder = tiny.save(tiny.build(family, vocab_size=VOCAB, num_key_value_heads=2), tmp_path / family, "bfloat16")
    tower = next(name for name in tiny.tensors(folder) if not is_text(name))
    replace_tensors(
        folder, lambda weights: {**weights, tower: weights[tower].float() / 3, "vision.ids": torch.arange(5)}
    )
    replace_tensors(folder, lambda weights: {**weights, "vision.nan": torch.full((2,), float("nan"))})
    inputs, run, out = {**inputs, "model": folder}, tmp_path / "run", tmp_path / "out"
    drive([{"arguments": arguments(inputs, run, "--trainable", part, steps=4)}])
    uptrain("export", run, out).succeeded()
    before, after = tiny.tensors(folder), tiny.tensors(out)
    assert list(before) == list(after)
    assert after["vision.nan"].isnan().all()
    changed = {name for name in after if name != "vision.nan" and not torch.equal(after[name], before[name])}
    assert {name for name in after if after[name].dtype != before[name].dtype} == set()
    assert {name for name in after if is_trained(name) and name.endswith("q_proj.weight")} <= changed
    assert all(is_trained(name) if part == "attention" else is_text(name) for name in changed)
    replace_tensors(
        out,
        lambda weights: {name: tensor for name, tensor in weights.items() if name not in ("vision.ids", "vision.nan")},
    )
    open_whole(out)
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def is_text(name):
    return any(part in name for part in ("language_model.", "text_model.", "lm_head."))


@pytest.mark.parametrize("family", KINDS.values(), ids=KINDS)
def test_an_export_computes_what_was_trained(inputs, tmp_path, uptrain, family):
    run, ids = tmp_path / "run", random_ids()
    drive([{"arguments": arguments(of_family(inputs, family), run, "--trainable", "attention", steps=4)}])
    uptrain("export", run, tmp_path / "out", "--dtype", "float32").succeeded()
    live = load_student(inputs[family, "model"], "attention")
    trained = load_student(tmp_path / "out", "attention")
    with torch.no_grad():
        assert (trained(ids) - live(ids)).abs().max() > 1e-4
        torch.testing.assert_close(open_whole(tmp_path / "out")(input_ids=ids).logits, trained(ids), rtol=0, atol=1e-6)


def test_an_export_names_its_dtype_wherever_the_config_does(tmp_path):
    folder = tiny.save(tiny.build("llava"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert "dtype" not in config["text_config"]
    assert json.loads(config_bytes(folder, "bfloat16")) == {**config, "dtype": "bfloat16"}
    hubs = {**config, "dtype": "float16", "text_config": {**config["text_config"], "torch_dtype": "float16"}}
    tiny.edit_config(folder, **hubs)
    exported = json.loads(config_bytes(folder, "bfloat16"))
    assert exported == {**hubs, "dtype": "bfloat16", "text_config": {**hubs["text_config"], "torch_dtype": "bfloat16"}}


@pytest.mark.parametrize("layout", LAYOUT_CASES)
@pytest.mark.parametrize("family", KINDS.values(), ids=KINDS)
def test_stopped_and_resumed_is_bit_equal(inputs, tmp_path, family, layout):
    more = ("--trainable", "attention", "--precision", "bf16")
    assert_stops_change_nothing(of_family(inputs, family), tmp_path, LAYOUTS[layout], *more)


@pytest.mark.parametrize("family", KINDS.values(), ids=KINDS)
def test_the_way_from_a_parent_to_an_export(inputs, tmp_path, convert, uptrain, family):
    """By defaults: attention is trained, and what is frozen is shared with the teacher."""
    inputs, model, run = of_family(inputs, family), tmp_path / "merged", tmp_path / "run"
    merged = convert("mha-to-gqa", "--method", "mean", inputs["parent"], model, "--groups", 2).succeeded()
    assert f"uptrain run {model}" in merged.out
    inputs["model"] = model
    planned = uptrain("plan", model, "--teacher", inputs["parent"], "--data", inputs["data"], *budget()).succeeded()
    uptrain("plan", model, "--trainable", "lora", *budget()).succeeded()
    started = uptrain(*arguments(inputs, run, loss="distill", steps=4)).succeeded()
    for said in (planned.err, started.err):
        assert f"of model_type '{family}', only the language model inside is trained, on text alone" in flat(said)
    assert json.loads((run / "run.json").read_text())["settings"]["trainable"] == "attention"
    (event,) = events(run, "started")
    frozen = [p for n, p in load_student(model, "attention").named_parameters() if "mlp." in n]
    assert event["shared_bytes"] >= sum(parameter.nbytes for parameter in frozen)
    assert records(run)[-1]["step"] == 4
    uptrain("export", run, tmp_path / "out").succeeded()
    open_whole(tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "changed the weights of attention in its language model, on text alone." in card
    result = uptrain(
        "evaluate", tmp_path / "out", "--teacher", inputs["parent"], "--data", inputs["held_out"], "--json"
    ).succeeded()
    assert f"of model_type '{family}', only the language model inside is measured, on text alone." in flat(result.err)
    assert json.loads(result.out)["kl"] > 0


def budget():
    return ("--steps", 4, "--lr", 1e-3, "--global-batch-tokens", 256)


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("family", KINDS.values(), ids=KINDS)
def test_a_stored_tied_lm_head_is_exported_in_the_dtype_of_its_embedding(inputs, tmp_path, uptrain, family):
    """As files have it that were made of a state dict."""
    model = tiny.build(family, vocab_size=VOCAB, num_key_value_heads=2)
    folder, out = tiny.save(model, tmp_path / "model", "float16"), tmp_path / "out"
    lm_head, embedding = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    replace_tensors(folder, lambda weights: {**weights, lm_head: weights[embedding].clone()})
    tie(folder)
    drive([{"arguments": arguments({**inputs, "model": folder}, tmp_path / "run", steps=4)}])
    uptrain("export", tmp_path / "run", out).succeeded()
    assert {tiny.tensors(out)[name].dtype for name in (lm_head, embedding)} == {torch.bfloat16}
    uptrain("evaluate", out, "--data", inputs["held_out"]).succeeded()


@pytest.mark.parametrize("family", KINDS.values(), ids=KINDS)
def test_what_cannot_be_read_is_refused(tmp_path, family):
    folder = tiny.save(tiny.build(family), tmp_path / "model")
    tiny.edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match="quanti"):
        load_model(folder)
    tiny.edit_config(folder, quantization_config=...)
    replace_tensors(folder, lambda weights: {f"base_model.{name}": tensor for name, tensor in weights.items()})
    with pytest.raises(CheckpointError, match="0 layers"):
        load_model(folder)


def test_a_changed_tensor_outside_the_language_model_is_found(inputs, tmp_path, uptrain):
    """The export would hold it."""
    folder, run = tiny.save(tiny.build("llava", vocab_size=VOCAB), tmp_path / "model"), tmp_path / "run"
    inputs = {**inputs, "model": folder}
    drive([{"arguments": arguments(inputs, run, "--trainable", "kv"), "stop_in": 3}])
    tower = next(name for name in tiny.tensors(folder) if "vision" in name)
    replace_tensors(folder, lambda weights: {**weights, tower: weights[tower] + 1})
    for command in (["resume", run], ["export", run, tmp_path / "out"]):
        uptrain(*command).refused(f"{folder} holds other tensors than when the run began")


def test_what_is_not_possible_is_refused(inputs, tmp_path, uptrain):
    model, run = inputs["llava", "model"], tmp_path / "run"
    given = of_family(inputs, "llava")
    uptrain(*arguments(given, run, "--trainable", "all")).refused("--trainable all", "'llava'", "--trainable attention")
    uptrain("plan", model, "--trainable", "all", *budget()).refused("--trainable all", "'llava'")
    scratch = [each for each in arguments(given, run) if each != str(model)]
    uptrain(*scratch, "--init", model).refused("--init", "'llava'", "language model of its own")


def test_a_model_that_is_not_causal_is_refused(inputs, tmp_path, uptrain, convert):
    folder = tiny.save(tiny.build("paligemma", vocab_size=VOCAB), tmp_path / "model")
    refusal = "'paligemma' attends to later tokens of its prompts"
    uptrain(*arguments({**inputs, "model": folder}, tmp_path / "run")).refused(refusal)
    uptrain("evaluate", folder, "--data", inputs["held_out"]).refused(refusal)
    uptrain("plan", folder, *budget()).refused(refusal)
    merged = convert("mha-to-gqa", "--method", "mean", folder, tmp_path / "out", "--groups", 2).succeeded()
    assert "so uptrain does not measure or train it" in merged.out


@pytest.mark.parametrize("family", KINDS.values(), ids=KINDS)
def test_an_lm_head_that_contradicts_the_config_is_refused(tmp_path, family):
    """config.json ties it to the embedding, and the files hold another."""
    folder = tie(tiny.save(tiny.build(family), tmp_path / "model"))

    def with_other_lm_head(weights):
        embedding = weights["language_model.model.embed_tokens.weight"]
        return {**weights, "language_model.lm_head.weight": embedding + 1}

    named = r"language_model\.lm_head\.weight differs .* set text_config\.tie_word_embeddings to false"
    with pytest.raises(CheckpointError, match=named):
        load_model(replace_tensors(folder, with_other_lm_head))
    tie(folder, inner=False)
    load_model(folder)


@pytest.mark.parametrize("family", [*KINDS.values(), "mistral3", "janus"])
def test_if_only_the_wrapper_ties_the_lm_head_a_stored_one_is_used(inputs, tmp_path, uptrain, family):
    """Version 5 of transformers saves such configs of models with an LM head of their own, and of others without."""
    folder, ids = tiny.save(tiny.build(family, vocab_size=VOCAB), tmp_path / family), random_ids()
    tie(folder, inner=False)
    of_body = next(name for name in tiny.tensors(folder) if name.endswith("embed_tokens.weight"))
    lm_head = "language_model.lm_head.weight" if of_body.startswith("language_model.") else "lm_head.weight"
    replace_tensors(folder, lambda weights: {**weights, lm_head: weights[of_body].flip(0)})
    untied = load_model(folder)(ids)
    torch.testing.assert_close(untied, open_whole(folder)(input_ids=ids).logits, rtol=0, atol=1e-6)
    uptrain("evaluate", folder, "--data", inputs["held_out"]).succeeded()
    run = tmp_path / "run"
    drive([{"arguments": arguments({**inputs, "model": folder}, run, "--activation-checkpointing", steps=4)}])
    uptrain("export", run, tmp_path / "out").succeeded()
    assert torch.equal(tiny.tensors(tmp_path / "out")[lm_head], tiny.tensors(folder)[lm_head])
    replace_tensors(folder, lambda weights: {name: tensor for name, tensor in weights.items() if name != lm_head})
    tied = load_model(folder)(ids)
    torch.testing.assert_close(tied, open_whole(folder)(input_ids=ids).logits, rtol=0, atol=1e-6)
    assert not torch.equal(tied, untied)
    uptrain("evaluate", folder, "--data", inputs["held_out"]).succeeded()


@pytest.mark.parametrize("family", KINDS.values(), ids=KINDS)
def test_a_bias_of_the_lm_head_is_refused(tmp_path, family):
    """No language model here has one, so it would be left out."""
    folder = tiny.save(tiny.build(family, tie_word_embeddings=False), tmp_path / "model")
    replace_tensors(folder, lambda weights: {**weights, "lm_head.bias": torch.ones(67)})
    with pytest.raises(CheckpointError, match=r"tensor.* lm_head\.bias"):
        load_model(folder)


def test_tensors_of_the_wrong_shape_are_named_as_in_the_files(inputs, tmp_path, uptrain):
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    for family in KINDS.values():
        folder = tiny.save(tiny.build(family, vocab_size=VOCAB), tmp_path / family)
        replace_tensors(folder, lambda weights: {**weights, name: weights[name][:-1].clone()})
        with pytest.raises(CheckpointError, match=rf" {re.escape(name)}"):
            load_model(folder)
        config = json.loads((folder / "config.json").read_text())
        tiny.edit_config(folder, text_config={**config["text_config"], "vocab_size": VOCAB + 1})
        refused = uptrain("plan", folder, "--data", inputs["data"], *budget()).refused()
        assert f"{VOCAB} rows in language_model.model.embed_tokens.weight" in flat(refused.err)
        assert f"text_config.vocab_size = {VOCAB + 1}" in flat(refused.err)


@pytest.mark.parametrize("place", ["text_config", "top"])
def test_the_ids_that_end_a_text_may_be_in_either_config(tmp_path, place):
    folder = tiny.save(tiny.build("llava"), tmp_path / "model")
    (folder / "generation_config.json").unlink()
    text = json.loads((folder / "config.json").read_text())["text_config"]
    tiny.edit_config(
        folder, text_config={**text, "eos_token_id": 5}, **({} if place == "text_config" else {"eos_token_id": 6})
    )
    assert load_model(folder).stop_ids == ((5,) if place == "text_config" else (6,))


def test_the_original_of_a_language_model_inside_is_found():
    """Its vocabulary has tokens of images that the original lacks."""
    vicuna = find_original("llama-2-7b")
    text = {"model_type": vicuna.shape[0], **dict(zip(SHAPE_KEYS, vicuna.shape[1:], strict=True)), "vocab_size": 32064}
    inside = language_config({"model_type": "llava", "text_config": text})
    assert known_originals(inside, ["meta-llama/Llama-2-7b-hf"]) == (vicuna,)
    assert shape_warning(inside, "llama-2-7b") is None
    assert "hidden_size" in shape_warning({**inside, "hidden_size": 64}, "llama-2-7b")
    assert known_originals(text, ["meta-llama/Llama-2-7b-hf"]) == ()
    assert "vocab_size" in shape_warning(text, "llama-2-7b")


def tie(folder, inner=True):
    """Tie LM head and embedding in a wrapper's config, and in its language model's if `inner`; return the folder."""
    text = json.loads((folder / "config.json").read_text())["text_config"]
    tiny.edit_config(folder, tie_word_embeddings=True, text_config={**text, "tie_word_embeddings": inner})
    return folder


def test_two_names_of_one_tensor_are_refused(tmp_path):
    folder = tiny.save(tiny.build("llava"), tmp_path / "model")
    name = "language_model.lm_head.weight"
    replace_tensors(folder, lambda weights: {**weights, "lm_head.weight": weights[name] + 1})
    with pytest.raises(CheckpointError, match=r"holds both .*lm_head\.weight and .*lm_head\.weight"):
        load_model(folder)


def test_a_missing_tensor_is_named(tmp_path):
    for family in KINDS.values():
        folder = tiny.save(tiny.build(family), tmp_path / family)
        lost = "model.layers.1.mlp.up_proj.weight"
        replace_tensors(folder, lambda weights: {n: t for n, t in weights.items() if not n.endswith(lost)})  # noqa: B023
        with pytest.raises(
            CheckpointError, match=r"lacks the tensor language_model\.model\.layers\.1\.mlp\.up_proj\.weight"
        ):
            load_model(folder)
