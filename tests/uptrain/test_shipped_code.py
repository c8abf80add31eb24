"""Models that only our own modelling code opens: evaluated, uptrained, exported; code in their folders is not run."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from real_runs import VOCAB, arguments, drive, make_inputs, records, tensors

import model.remote_code
from model import load_model
from model.decoder.transformers_model import TransformersModel
from model.remote_code.configuration_gpt_neox_gqa import GPTNeoXGQAConfig
from model.remote_code.configuration_t5_gqa import T5GQAConfig
from model.remote_code.modeling_gpt_neox_gqa import GPTNeoXGQAForCausalLM
from model.remote_code.modeling_t5_gqa import T5GQAForConditionalGeneration
from uptrain.budget.identify import SHAPE_KEYS, known_originals
from uptrain.budget.pretraining import ORIGINALS

AUTO_MAP = {
    "AutoConfig": "configuration_gpt_neox_gqa.GPTNeoXGQAConfig",
    "AutoModelForCausalLM": "modeling_gpt_neox_gqa.GPTNeoXGQAForCausalLM",
}
CODE = ("configuration_gpt_neox_gqa.py", "modeling_gpt_neox_gqa.py")


def save(folder: Path, **changes) -> Path:
    """Write a converted Pythia whose code, should anybody run it, stops."""
    config = GPTNeoXGQAConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=64, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    tiny.save(GPTNeoXGQAForCausalLM(config), folder)
    tiny.edit_config(folder, auto_map=AUTO_MAP)
    for name in CODE:
        (folder / name).write_text("raise SystemExit('this was not to be run')\n")
    return folder


@pytest.fixture
def t5(tmp_path: Path) -> Path:
    config = T5GQAConfig(
        vocab_size=VOCAB, d_model=32, d_kv=4, d_ff=40, num_layers=2, num_heads=8, num_key_value_heads=2
    )
    return tiny.save(T5GQAForConditionalGeneration(config), tmp_path / "t5")


@pytest.mark.parametrize("tied", [False, True])
def test_run_and_export(tmp_path, uptrain, tied):
    inputs = make_inputs(tmp_path)
    inputs["model"] = save(tmp_path / "pythia", tie_word_embeddings=tied)
    drive([{"arguments": arguments(inputs, tmp_path / "run", steps=4)}])
    assert len([r for r in records(tmp_path / "run") if "loss" in r]) == 4
    uptrain("export", tmp_path / "run", tmp_path / "out", "--dtype", "float32").succeeded()

    assert (tmp_path / "out/config.json").read_bytes() == (inputs["model"] / "config.json").read_bytes()
    for name in CODE:  # as it is today, in place of the model's copy
        ours = Path(model.remote_code.__file__).parent / name
        assert (tmp_path / "out" / name).read_bytes() == ours.read_bytes(), name
    before, after = tiny.tensors(inputs["model"]), tiny.tensors(tmp_path / "out")
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    weights = tensors(tmp_path / "run/checkpoints/step-00000004")
    assert torch.equal(after[name], weights[f"model.student.hf_model.{name}"])
    assert not torch.equal(after[name], before[name])
    opened = load_model(tmp_path / "out")
    assert isinstance(opened, TransformersModel)
    assert isinstance(opened.hf_model, GPTNeoXGQAForCausalLM)


def test_a_run_resumes_from_its_checkpoint(tmp_path):
    inputs = make_inputs(tmp_path)
    inputs["model"] = save(tmp_path / "pythia")
    run, longer = tmp_path / "run", tmp_path / "longer"
    extend = ["extend", str(run), "--out", str(longer), "--steps", "6"]
    drive([{"arguments": arguments(inputs, run, steps=4)}, {"arguments": extend}])
    assert [r["step"] for r in records(longer) if "loss" in r][-1] == 6


def test_evaluate(tmp_path, uptrain):
    inputs = make_inputs(tmp_path)
    result = uptrain("evaluate", save(tmp_path / "pythia"), "--data", inputs["held_out"], "--json").succeeded()
    assert json.loads(result.out)["perplexity"] == pytest.approx(VOCAB, rel=0.1)


def test_encoder_decoders_are_refused(tmp_path, uptrain, t5):
    inputs = make_inputs(tmp_path)
    why = "is an encoder-decoder, and only causal language models can be trained"
    inputs["model"] = t5
    uptrain(*arguments(inputs, tmp_path / "run", steps=4)).refused("model_type 't5_gqa'", why)
    uptrain("evaluate", t5, "--data", inputs["held_out"]).refused("model_type 't5_gqa'", why)
    tiny.edit_config(t5, model_type="t5")
    uptrain(*arguments(inputs, tmp_path / "run", steps=4)).refused("model_type 't5'", why)
    assert not (tmp_path / "run").exists()


def test_code_of_others_is_not_run(tmp_path, uptrain):
    inputs = make_inputs(tmp_path)
    inputs["model"] = save(tmp_path / "pythia")
    tiny.edit_config(inputs["model"], model_type="something_else")
    uptrain(*arguments(inputs, tmp_path / "run", steps=4)).refused("custom code")


def test_the_original_of_a_converted_pythia_is_recognised():
    (pythia,) = [original for original in ORIGINALS if original.name == "pythia-160m"]
    config = dict(zip(("model_type", *SHAPE_KEYS), pythia.shape, strict=True)) | {"model_type": "gpt_neox_gqa"}
    assert known_originals(config, ()) == (pythia,)
