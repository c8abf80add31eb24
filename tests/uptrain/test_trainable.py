"""Training a part of a model: the rest keeps the checkpoint's bytes, and the part learns as in full training."""

import json
import re

import pytest
import tiny
import torch
from first_steps import assert_first_step_is_of_full_training
from real_runs import (
    LAYOUT_CASES,
    LAYOUTS,
    VOCAB,
    arguments,
    assert_layouts_train_alike,
    assert_same_run,
    assert_stops_change_nothing,
    drive,
    make_inputs,
    tensors,
)

from model.families import FAMILIES
from model.families.family import Wrapper
from uptrain.models.frozen_parameters import freeze_all_but
from uptrain.models.load import load_student

PARTS = ("attention", "kv")
OF_PART = {
    "attention": re.compile(r"self_attn\.|input_layernorm"),
    "kv": re.compile(r"self_attn\.[kv]_proj\."),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Write the model and its parent in bfloat16, in which parameters that are not trained stay."""
    return make_inputs(tmp_path_factory.mktemp("inputs"), "bfloat16", attention_bias=True)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "mixed"])
# Our own code, and transformers'; Gemma's embedding is scaled, by a buffer, and tied to the LM head.
@pytest.mark.parametrize("family", ["llama", "phi", "gemma"])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_first_step_is_that_of_full_training(tmp_path, family, dtype, part, autocast):
    folder = tiny.save(tiny.build(family, num_key_value_heads=2, tie_word_embeddings=True), tmp_path / "model", dtype)
    assert_first_step_is_of_full_training(folder, part, OF_PART[part], autocast)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", ["llama", "phi", "qwen3"])
def test_only_trained_parameters_have_masters(tmp_path, family, part):
    """Norms and other modules of transformers stay float32: they compute with their parameters as they are."""
    folder = tiny.save(tiny.build(family, num_key_value_heads=2), tmp_path / "model", "bfloat16")
    for name, parameter in load_student(folder, part).named_parameters():
        trained = bool(OF_PART[part].search(name))
        in_place = family != "llama" and "norm" in name
        assert parameter.requires_grad is trained, name
        assert parameter.dtype == (torch.float32 if trained or in_place else torch.bfloat16), name


STOCK = [name for name in tiny.STOCK if not isinstance(FAMILIES[name], Wrapper)]


@pytest.mark.parametrize("family", STOCK)
def test_every_family_names_its_parts(tmp_path, family):
    """What the class creates agrees with the table: attention, a norm before it if the family has one, keys, values."""
    config = tiny.make_config(family)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = tiny.build(family)
    names = FAMILIES[family].names
    layer = [name.split(f"{names.layers}.0.", 1) for name, _ in model.named_parameters()]
    modules = {parts[1].split(".")[0] for parts in layer if len(parts) == 2}
    norms = {"input_layernorm", "attention_layernorm", "norm_1", "ln_attn"} & modules
    assert norms == ({names.attention_norm} if names.attention_norm else set())
    freeze_all_but(model, "attention", tmp_path)
    of_layer = {n for n, p in model.named_parameters() if p.requires_grad and f"{names.layers}.0." in n}
    assert {n.split(f"{names.layers}.0.", 1)[1].split(".")[0] for n in of_layer} == {*names.attention, *norms}
    if names.fused is None:
        freeze_all_but(model, "kv", tmp_path)
        of_layer = {n for n, p in model.named_parameters() if p.requires_grad and f"{names.layers}.0." in n}
        assert {n.split(".")[-2] for n in of_layer} == {names.key, names.value}


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize("part", PARTS)
def test_an_export_keeps_the_bytes_of_the_rest(inputs, tmp_path, uptrain, family, part):
    if family != "llama":
        model = tiny.build(family, vocab_size=VOCAB, num_key_value_heads=2)
        inputs = {**inputs, "model": tiny.save(model, tmp_path / family, "bfloat16")}
    run = tmp_path / "run"
    drive([{"arguments": arguments(inputs, run, "--trainable", part, steps=4)}])
    stored = tensors(run / "checkpoints/step-00000004")
    assert all(OF_PART[part].search(name) for name in stored if name.startswith("model.")), stored.keys()
    assert all(tensor.dtype == torch.float32 for tensor in stored.values())
    uptrain("export", run, tmp_path / "out").succeeded()
    before, after = tiny.tensors(inputs["model"]), tiny.tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) is not bool(OF_PART[part].search(name)), name
        assert tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", LAYOUT_CASES)
def test_stopped_and_resumed_is_bit_equal(inputs, tmp_path, layout, part):
    precision = "fp32" if part == "kv" else "bf16"
    assert_stops_change_nothing(inputs, tmp_path, LAYOUTS[layout], "--trainable", part, "--precision", precision)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_layouts_train_alike(inputs, tmp_path, part):
    assert_layouts_train_alike(inputs, tmp_path, "--trainable", part)


@pytest.mark.parametrize("part", ["attention", "lora"])
def test_shards_can_use_flash_attention(inputs, tmp_path, part):
    """It needs states in bfloat16. FSDP2 rounds them in any case, so nothing else changes."""
    jobs = [
        {
            "arguments": arguments(inputs, tmp_path / name, "--trainable", part, "--precision", "bf16", steps=4),
            "wide": name == "float32",
            "dtypes": str(tmp_path / f"{name}.json"),
        }
        for name in ("bfloat16", "float32")
    ]
    drive(jobs, 1, True)
    for name in ("bfloat16", "float32"):
        assert json.loads((tmp_path / f"{name}.json").read_text()) == [f"torch.{name}"]
    assert_same_run(tmp_path / "bfloat16", tmp_path / "float32")


def test_extended_run_trains_the_same_part(inputs, tmp_path):
    short, longer, straight = tmp_path / "short", tmp_path / "longer", tmp_path / "straight"
    jobs = [
        {"arguments": arguments(inputs, short, "--trainable", "kv", steps=6)},
        {"arguments": ["extend", str(short), "--out", str(longer), "--steps", "8"]},
        {"arguments": arguments(inputs, straight, "--trainable", "kv", "--warmup-steps", 3, steps=8)},
    ]
    drive(jobs)
    assert_same_run(longer, straight)


def edit(run, **changes):
    content = json.loads((run / "run.json").read_text())
    content["settings"] |= changes
    (run / "run.json").write_text(json.dumps(content))


def test_another_part_and_another_model_are_refused(inputs, tmp_path, uptrain):
    model = tmp_path / "model"
    tiny.save(tiny.build(vocab_size=VOCAB, num_key_value_heads=2), model)
    run = tmp_path / "run"
    drive([{"arguments": arguments({**inputs, "model": model}, run, "--trainable", "kv"), "stop_in": 2}])
    recorded = (run / "run.json").read_text()
    edit(run, trainable="all")
    uptrain("resume", run).refused("run.json is damaged", "identities do not match settings.trainable = all")
    edit(run, trainable="attention")
    for command in (("resume", run), ("export", run, tmp_path / "out")):
        uptrain(*command).refused("another --trainable than attention", "restore it, or start a new run")
    (run / "run.json").write_text(recorded)
    weights = tiny.tensors(model)
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] += 1
    tiny.save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    for command in (("resume", run), ("export", run, tmp_path / "out")):
        uptrain(*command).refused("holds other tensors than when the run began")
    model.rename(tmp_path / "elsewhere")
    for command in (("resume", run), ("export", run, tmp_path / "out")):
        uptrain(*command).refused(f"{model} does not exist; the run reads the tensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("{phi3}", "--trainable", "kv"), ["holds queries, keys and values in one tensor (qkv_proj)", "attention"]),
        (("--init", "{model}", "--trainable", "kv"), ["--trainable kv trains a part of MODEL"]),
        (
            ("{gpt2}", "--trainable", "attention"),
            ["--trainable attention: how model_type 'gpt2' names attention"],
        ),
        (("{model}", "--trainable", "head"), ["'head' is not one of 'all', 'attention', 'kv'"]),
    ],
)
def test_refusals(inputs, tmp_path, uptrain, options, words):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gpt2", vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    phi3 = tiny.save(tiny.build("phi3", vocab_size=VOCAB), tmp_path / "phi3")
    folders = {**inputs, "gpt2": tmp_path / "gpt2", "phi3": phi3}
    fixed = ("--data", inputs["data"], "--out", tmp_path / "run", "--lr", 1e-3, "--global-batch-tokens", 256)
    uptrain("run", *(o.format(**folders) for o in options), *fixed, "--steps", 2).refused(*words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("part", ["all", "lora"])
def test_a_family_that_is_not_converted(inputs, tmp_path, uptrain, part):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gptj", vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=64, rotary_dim=8
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gptj")
    run, out = tmp_path / "run", tmp_path / "out"
    drive([{"arguments": arguments({**inputs, "model": tmp_path / "gptj"}, run, "--trainable", part, steps=4)}])
    uptrain("export", run, out, "--dtype", "float32").succeeded()
    before, after = tiny.tensors(tmp_path / "gptj"), tiny.tensors(out)
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    linear = {name for name in before if re.search(r"(_proj|fc_in|fc_out)\.weight$", name)}
    assert changed == (set(before) if part == "all" else linear)
