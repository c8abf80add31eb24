"""What a run leaves: an ordinary Hugging Face folder with the live model's weights."""

import json
import math
import os
import shutil
import signal

import pytest
import tiny
import torch
import written_runs
from real_runs import VOCAB, arguments, drive, evaluations, make_inputs, tensors
from transformers import AutoModelForCausalLM

from convert.output.model_card import TRAINING_DETAILS
from model import load_model
from uptrain.estimates.memory import MemoryEstimator, MemoryOptions
from uptrain.export import export
from uptrain.export.export import config_bytes, make_record
from uptrain.export.model_card import _losses, model_card
from uptrain.runs.run_folder import Run

LAYOUTS = [(1, False), pytest.param(2, True, marks=pytest.mark.slow)]


def trained(folder, n_processes=1, sharded=False, **changes):
    inputs = make_inputs(folder)
    if changes:
        inputs["model"] = tiny.save(tiny.build(vocab_size=VOCAB, num_key_value_heads=2, **changes), folder / "changed")
    drive([{"arguments": arguments(inputs, folder / "run", steps=4)}], n_processes, sharded)
    return inputs, folder / "run"


def opened(folder):
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    return model.eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("n_processes", "sharded"), LAYOUTS)
def test_logits_are_the_live_models(tmp_path, uptrain, n_processes, sharded, tied):
    inputs, run = trained(tmp_path, n_processes, sharded, tie_word_embeddings=tied)
    uptrain("export", run, tmp_path / "out", "--dtype", "float32").succeeded()
    live = load_model(inputs["model"], torch.float32)
    weights = tensors(run / "checkpoints/step-00000004")
    prefix = "model.student."
    live.load_state_dict({name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)})
    ids = torch.randint(0, VOCAB, (2, 24))
    with torch.inference_mode():
        assert (opened(tmp_path / "out")(ids).logits - live(ids)).abs().max() <= 1e-5
    assert ("lm_head.weight" in tiny.tensors(tmp_path / "out")) is not tied


@pytest.mark.parametrize(("family", "changes"), [("olmo2", {}), ("llama", {"hidden_act": "relu"})])
def test_a_model_that_transformers_runs(tmp_path, uptrain, family, changes):
    inputs, run = make_inputs(tmp_path), tmp_path / "run"
    model = tiny.build(family, vocab_size=VOCAB, num_key_value_heads=2, **changes)
    inputs["model"] = tiny.save(model, tmp_path / family)
    drive([{"arguments": arguments(inputs, run, steps=4)}])
    uptrain("export", run, tmp_path / "out", "--dtype", "float32").succeeded()
    live, exported = tensors(run / "checkpoints/step-00000004"), tiny.tensors(tmp_path / "out")
    assert exported.keys() == tiny.tensors(inputs["model"]).keys()
    assert all(torch.equal(tensor, live[f"model.student.hf_model.{name}"]) for name, tensor in exported.items())
    opened(tmp_path / "out")


def test_an_embedding_that_the_class_ties_by_default_is_written_once(tmp_path, uptrain):
    inputs, run = make_inputs(tmp_path), tmp_path / "run"
    inputs["model"] = tiny.save(tiny.build("gemma2", vocab_size=VOCAB, num_key_value_heads=2), tmp_path / "gemma2")
    config = json.loads((inputs["model"] / "config.json").read_text())
    del config["tie_word_embeddings"]  # as in the published checkpoints
    (inputs["model"] / "config.json").write_text(json.dumps(config))
    drive([{"arguments": arguments(inputs, run, steps=4)}])
    uptrain("export", run, tmp_path / "out").succeeded()
    assert tiny.tensors(tmp_path / "out").keys() == tiny.tensors(inputs["model"]).keys()
    opened(tmp_path / "out")


@pytest.mark.parametrize("part", ["all", "attention", "lora"])
def test_buffers_that_the_files_hold(tmp_path, uptrain, part):
    """Apertus has two numbers of its activation as buffers without dimensions."""
    inputs, run = make_inputs(tmp_path), tmp_path / "run"
    inputs["model"] = tiny.save(tiny.build("apertus", vocab_size=VOCAB, num_key_value_heads=2), tmp_path / "apertus")
    drive([{"arguments": arguments(inputs, run, "--trainable", part, steps=4)}])
    uptrain("export", run, tmp_path / "out", "--dtype", "float32").succeeded()
    before, after = tiny.tensors(inputs["model"]), tiny.tensors(tmp_path / "out")
    assert {name: t.shape for name, t in after.items()} == {name: t.shape for name, t in before.items()}
    scalars = [name for name, tensor in before.items() if tensor.ndim == 0]
    assert len(scalars) == 4
    assert all(torch.equal(after[name], before[name].float()) for name in scalars)
    opened(tmp_path / "out")


def test_exported_files_and_record(tmp_path, uptrain):
    inputs = make_inputs(tmp_path)
    (inputs["model"] / "groupwise.json").write_text('{"source": {"name": "parent"}}')
    run = tmp_path / "run"
    drive([{"arguments": arguments(inputs, run, steps=4)}])
    uptrain("export", run, tmp_path / "out", "--dtype", "float32").succeeded()
    for name in (*tiny.SIDE_FILES, "config.json", "generation_config.json", "groupwise.json"):
        if name != "README.md":
            assert (tmp_path / "out" / name).read_bytes() == (inputs["model"] / name).read_bytes(), name
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---")
    assert "4 of 4 steps" in card
    record = json.loads((tmp_path / "out/uptraining.json").read_text())
    assert (record["step"], record["tokens"], record["settings"]["model"]) == (4, 1024, "model")


def test_card_shows_teacher_and_recovered_fraction(tmp_path, uptrain, distilled):
    result = uptrain("export", distilled, tmp_path / "out").succeeded()
    assert f"--data HELD-OUT --teacher {distilled.with_name('parent')} --seq-len 32\n" in result.out
    card = (tmp_path / "out/README.md").read_text()
    first, *_, (step, last) = evaluations(distilled)
    above = last["loss"] - last["teacher_loss"]
    cost = first[1]["loss"] - first[1]["teacher_loss"]
    error = math.hypot(last["above_teacher_error"], above / cost * first[1]["above_teacher_error"]) / cost
    for row in (
        "| Loss | KL divergence from the teacher |",
        "| Teacher | `parent` |",
        f"| Held-out loss | {first[1]['loss']:.4f} at step 0 → {last['loss']:.4f} at step {step} |",
        f"| Teacher's loss | {last['teacher_loss']:.4f} |",
        f"| Loss above the teacher's | {above:+.4f} ± {last['above_teacher_error']:.4f} |",
        f"| Recovered fraction | none: too little held-out text (its standard error is {error:.0%}) |",
        f"| KL from the teacher | {last['kl']:.4f} ± {last['kl_error']:.4f}; agreement {last['agreement']:.1%} |",
    ):
        assert row in card, (row, card)


def test_of_a_second_run_the_loss_after_conversion_is_not_known(tmp_path, uptrain, distilled):
    """Its first evaluation is of a model that was trained already."""
    inputs = distilled.parent
    again = {"model": tmp_path / "once", "parent": inputs / "parent", "data": inputs / "data"}
    uptrain("export", distilled, again["model"]).succeeded()
    given = ("--eval-data", inputs / "held-out")
    uptrain(*arguments(again, tmp_path / "run", *given, loss="distill", steps=4)).succeeded()
    uptrain("export", tmp_path / "run", tmp_path / "out").succeeded()
    first, second = (tmp_path / "out/README.md").read_text().split("| KL from the teacher |")[:2]
    assert ("| Recovered fraction |" in first, "| Recovered fraction |" in second) == (True, False)
    last = json.loads(uptrain("status", tmp_path / "run", "--json").out)["evaluation"]
    assert (last["conversion_cost"], last["recovered_fraction"], last["teacher_loss"] > 0) == (None, None, True)


def test_export_of_an_earlier_step_has_no_later_evaluations(tmp_path, uptrain, distilled):
    uptrain("export", distilled, tmp_path / "out", "--step", 10).succeeded()
    record = json.loads((tmp_path / "out/uptraining.json").read_text())
    assert (record["step"], [evaluation["step"] for evaluation in record["evaluations"]]) == (10, [0, 4, 8])
    assert "at step 0 → " in (tmp_path / "out/README.md").read_text()


def test_card_of_a_merge_that_cost_nothing_measurable():
    metrics = {"teacher_loss": 3.0, "kl": 0.1, "agreement": 0.9}
    rows = dict(_losses([{"step": 0, "loss": 3.005, **metrics}, {"step": 5, "loss": 2.8, **metrics}], True))
    assert rows["Recovered fraction"] == "none: the conversion cost less than 0.01 nats"
    from_nothing = [{"step": 0, "loss": 9.0, **metrics}, {"step": 5, "loss": 4.0, **metrics}]
    assert "Recovered fraction" not in dict(_losses(from_nothing, False))


def test_card_of_a_recovered_fraction():
    metrics = {"teacher_loss": 2.0, "kl": 0.1, "agreement": 0.9}
    of_earlier_version = [{"step": 0, "loss": 4.0, **metrics}, {"step": 5, "loss": 2.5, **metrics}]
    rows = dict(_losses(of_earlier_version, True))
    assert (rows["Recovered fraction"], rows["Loss above the teacher's"]) == ("75.0%", "+0.5000")
    rows = dict(_losses([{**each, "above_teacher_error": 0.15} for each in of_earlier_version], True))
    assert (rows["Recovered fraction"], rows["Loss above the teacher's"]) == ("75.0% ± 7.7%", "+0.5000 ± 0.1500")


def test_card_of_a_loss_that_was_not_finite():
    rows = dict(_losses([{"step": 0, "loss": 3.0}, {"step": 5, "loss": None}], True))
    assert rows["Held-out loss"] == "3.0000 at step 0 → not finite at step 5"


def test_bfloat16_rounds_once_and_is_named_in_the_config(tmp_path, uptrain):
    _, run = trained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        uptrain("export", run, tmp_path / dtype, "--dtype", dtype).succeeded()
    exact, rounded = (tiny.tensors(tmp_path / dtype) for dtype in ("float32", "bfloat16"))
    for name, value in exact.items():
        assert torch.equal(rounded[name], value.to(torch.bfloat16)), name
    assert json.loads((tmp_path / "bfloat16/config.json").read_text())["dtype"] == "bfloat16"


def test_shards_of_5_gb_and_any_step(tmp_path, uptrain, monkeypatch):
    _, run = trained(tmp_path)
    monkeypatch.setattr("uptrain.export.export.DEFAULT_SHARD_SIZE", 40_000)
    uptrain("export", run, tmp_path / "out", "--step", 3).succeeded()
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 2
    opened(tmp_path / "out")
    assert json.loads((tmp_path / "out/uptraining.json").read_text())["step"] == 3


def test_refusals(tmp_path, uptrain):
    _, run = trained(tmp_path)
    uptrain("export", run, tmp_path / "out", "--step", 9).refused("no checkpoint of step 9", "3, 4")
    uptrain("export", tmp_path, tmp_path / "out").refused("is not a run")
    (tmp_path / "there").mkdir()
    uptrain("export", run, tmp_path / "there").refused("exists already")
    newest = run / "checkpoints/step-00000004"
    (newest / "state.json").write_bytes(b"{}")
    uptrain("export", run, tmp_path / "out").refused("state.json", "with --step (there are: 3).")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["model", "parent", "run/model", "run/checkpoints"])
def test_a_folder_inside_one_that_the_run_reads(tmp_path, uptrain, place):
    """`convert verify` would find a changed MODEL, and later runs would copy what is new in it."""
    run = written_runs.write_run(tmp_path / "run", model=str(tmp_path / "model"), teacher=str(tmp_path / "parent"))
    for name in ("model", "parent", "run/model", "run/checkpoints"):
        (tmp_path / name).mkdir()
    before = tiny.snapshot(tmp_path)
    words = f"{tmp_path / place}/deep/out lies in {tmp_path / place}, which this command reads and must not change; "
    words += "choose another OUT."
    uptrain("export", run, tmp_path / place / "deep/out").refused(words)
    assert tiny.snapshot(tmp_path) == before


def test_a_folder_beside_those_that_the_run_reads(tmp_path, uptrain):
    _, run = trained(tmp_path)
    uptrain("export", run, run / "exported").succeeded()


@pytest.mark.parametrize("function", ["find_damage", "make_record"])
def test_a_checkpoint_that_the_run_removes_meanwhile(tmp_path, uptrain, monkeypatch, function):
    _, run = trained(tmp_path)
    newest, real = run / "checkpoints/step-00000004", getattr(export, function)
    monkeypatch.setattr(export, function, lambda *given: shutil.rmtree(newest) or real(*given))
    words = f"{newest}: the run removed this checkpoint meanwhile; run the command again."
    uptrain("export", run, tmp_path / "out").refused(words)
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_replaced_meanwhile(tmp_path, uptrain, monkeypatch):
    """What is not trained comes from MODEL's files, which were opened before."""
    inputs = make_inputs(tmp_path)
    drive([{"arguments": arguments(inputs, tmp_path / "run", "--trainable", "attention", steps=4)}])
    real, file = export._write_weights, inputs["model"] / "model.safetensors"

    def replaced(*given):
        (tmp_path / "other").write_bytes(file.read_bytes())
        (tmp_path / "other").replace(file)
        return real(*given)

    monkeypatch.setattr(export, "_write_weights", replaced)
    result = uptrain("export", tmp_path / "run", tmp_path / "out")
    result.refused(f"{inputs['model']} changed while it was read; export again")
    assert not (tmp_path / "out").exists()


def test_a_killed_export_leaves_nothing_in_the_next(tmp_path, uptrain):
    _, run = trained(tmp_path)
    left = tmp_path / ".out.groupwise/folder"
    left.mkdir(parents=True)
    (left / "model-00001-of-00006.safetensors").write_bytes(b"of a killed export")
    (left.parent / "journal.jsonl").write_text('{"inputs": {}}\n')
    uptrain("export", run, tmp_path / "out").succeeded()
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]
    assert not left.exists()


def test_the_card_of_a_run_under_way_says_how_much_of_it_is_done(tmp_path, uptrain):
    inputs, run = make_inputs(tmp_path), tmp_path / "run"
    options = ("--alpha", 0.5, "--original-tokens", 256 * 24, "--save-every-steps", 1, "--keep-last", 99)
    drive([{"arguments": [*arguments(inputs, run)[:6], *map(str, options), *arguments(inputs, run)[8:]]}])
    undecayed = " of 12 (not finished: its learning rate has not decayed)"
    for step, alpha, where in ((3, "0.125", undecayed), (11, "0.4583", " of 12 (not finished)"), (12, "0.5", "")):
        out = tmp_path / f"out-{step}"
        result = uptrain("export", run, out, "--step", step).succeeded()
        wrote, following = result.out.splitlines()
        assert wrote == f"Wrote {out}: the model after step {step}{where}, in float32."
        assert following == f"Next: uptrain evaluate {out} --data HELD-OUT --seq-len 32"
        assert f"| α | {alpha} of the original pre-training |" in (out / "README.md").read_text()


def test_a_stopped_export_leaves_nothing(tmp_path, uptrain, monkeypatch):
    """A scheduler sends SIGTERM."""
    _, run = trained(tmp_path)
    monkeypatch.setattr(export, "_write_files", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    before = {path.name for path in tmp_path.iterdir()}
    assert uptrain("export", run, tmp_path / "out").code == 1
    assert {path.name for path in tmp_path.iterdir()} == before


def test_both_keys_of_the_dtype_name_what_was_written(tmp_path, uptrain):
    inputs, run = make_inputs(tmp_path), tmp_path / "run"
    tiny.edit_config(inputs["model"], dtype="float32", torch_dtype="float16")
    drive([{"arguments": arguments(inputs, run, steps=4)}])
    uptrain("export", run, tmp_path / "out", "--dtype", "bfloat16").succeeded()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")


def test_a_byte_order_mark_is_not_exported(tmp_path):
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}', encoding="utf-8-sig")
    assert config_bytes(tmp_path, "bfloat16") == b'{"dtype": "bfloat16"}'


def test_a_float16_model_is_exported_in_bfloat16(tmp_path, uptrain):
    inputs, run = make_inputs(tmp_path), tmp_path / "run"
    model = tiny.save(tiny.build(vocab_size=VOCAB, num_key_value_heads=2), tmp_path / "half", "float16")
    drive([{"arguments": arguments({**inputs, "model": model}, run, steps=4)}])
    uptrain("export", run, tmp_path / "out").succeeded()
    assert {tensor.dtype for tensor in tiny.tensors(tmp_path / "out").values()} == {torch.bfloat16}


def test_a_teacher_in_the_hubs_cache_has_its_name_there(tmp_path, uptrain):
    inputs = make_inputs(tmp_path)
    snapshot = tmp_path / "hub/models--org--parent/snapshots" / ("0" * 40)
    shutil.copytree(inputs["parent"], snapshot)
    drive([{"arguments": arguments({**inputs, "parent": snapshot}, tmp_path / "run", loss="distill", steps=4)}])
    uptrain("export", tmp_path / "run", tmp_path / "out").succeeded()
    assert "| Teacher | `org/parent` |" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(("name", "base"), [("org/child", "base_model: org/child\n"), ("child", "")])
def test_the_card_of_a_model_that_has_none(tmp_path, name, base):
    inputs, run = trained(tmp_path)
    record = make_record(Run.read(run), run, run / "checkpoints/step-00000004")
    record["settings"]["model"] = name
    card = model_card(inputs["model"], record).decode()
    assert "The text above describes the model before this training, which changed all weights." in card
    (inputs["model"] / "README.md").write_text(
        "---\nbase_model: a/b\nmodel-index:\n- name: x\ntags: [c]\n---\n# Card\n"
    )
    described = model_card(inputs["model"], record).decode()
    assert described.startswith(f"---\n{base or 'base_model: a/b' + chr(10)}tags: [c]\n---\n\n# Card\n")
    (inputs["model"] / "README.md").unlink()
    card = model_card(inputs["model"], record).decode()
    assert card.startswith(f"---\n{base}library_name: transformers\ntags: [groupwise]\n---\n")
    assert "This training changed all weights." in card and "above" not in card


def test_a_trained_model_is_not_verified_as_a_conversion(tmp_path, uptrain, convert):
    inputs = make_inputs(tmp_path)
    parent, merged, run, out = (inputs["parent"], *(tmp_path / name for name in ("merged", "run", "out")))
    convert("mha-to-gqa", parent, merged, "--groups", 2, "--method", "mean").succeeded()
    drive([{"arguments": arguments({**inputs, "model": merged}, run, steps=4)}])
    uptrain("export", run, out).succeeded()
    convert("verify", parent, out).refused(
        f"{out} was trained after its conversion (uptraining.json)", "give the converted model that the run began with"
    )
    convert("verify", parent, run).refused(f"{run} is the folder of a run", "give the converted model that the run")
    convert("verify", merged, merged).refused(f"SOURCE and OUT are one folder, {merged}")
    convert("verify", merged, parent).refused(
        f"{parent} has no groupwise.json", f"but {merged} was; the order is convert verify SOURCE OUT."
    )
    convert("to-hf", out, tmp_path / "copy").succeeded()
    convert("verify", out, tmp_path / "copy").succeeded()


def test_conversions_of_a_trained_model(tmp_path, uptrain, convert):
    """Their cards refer to no file that they lack, and what was trained again is not verified."""
    _, run = trained(tmp_path)
    source, copy, merged = (tmp_path / name for name in ("source", "copy", "merged"))
    uptrain("export", run, source).succeeded()
    convert("to-hf", source, copy).succeeded()
    convert("mha-to-mqa", source, merged, "--method", "mean").succeeded()
    details, moved = (sentence.decode() for sentence in TRAINING_DETAILS)
    assert details in (source / "README.md").read_text() and details in (copy / "README.md").read_text()
    card = (merged / "README.md").read_text()
    assert moved in card and details not in card
    for out in (copy, merged):
        convert("verify", source, out).succeeded()
        (out / "uptraining.json").write_text('{"step": 8}')  # as of a later training
        convert("verify", source, out).refused(f"{out} was trained after its conversion (uptraining.json)")


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_key_value_heads", "vocab_size", "intermediate_size"])
def test_a_config_that_does_not_fit_is_refused(tmp_path, uptrain, key):
    """Before the folder appears."""
    _, run = trained(tmp_path)
    path = run / "model/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, key: 2 * config[key]}))
    uptrain("export", run, tmp_path / "out").refused(f"{path} does not describe the checkpoint's model: ")
    assert not (tmp_path / "out").exists()


def test_a_run_from_random_weights_says_nothing_of_a_conversion(uptrain, convert, tmp_path):
    inputs, converted = make_inputs(tmp_path), tmp_path / "converted"
    convert("mha-to-gqa", inputs["parent"], converted, "--groups", 2, "--method", "mean").succeeded()
    run, out = tmp_path / "run", tmp_path / "out"
    fixed = ("--data", inputs["data"], "--steps", 1, "--lr", 1e-8, "--global-batch-tokens", 256)
    uptrain("run", "--init", converted, *fixed, "--out", run).succeeded()
    uptrain("export", run, out).succeeded()
    assert not (out / "groupwise.json").exists()
    card = (out / "README.md").read_text()
    assert "Conversion by Groupwise" not in card and "All weights are trained from random ones." in card


def test_after_training_nothing_holds_of_the_merge_alone(uptrain, convert, tmp_path):
    """The card says what training changed, and the plan shares only what is still the parent's."""
    converted, run, out = tmp_path / "converted", tmp_path / "run", tmp_path / "out"
    inputs = make_inputs(tmp_path)
    parent = inputs["parent"]
    convert("mha-to-gqa", parent, converted, "--groups", 2, "--method", "mean").succeeded()
    uptrain(*arguments({**inputs, "model": converted}, run, "--trainable", "all", steps=4)).succeeded()
    uptrain("export", run, out, "--dtype", "float32").succeeded()
    assert "this training, which changed all weights" in (out / "README.md").read_text()
    shared = {
        model: MemoryEstimator.read(model, parent, 32).memory(MemoryOptions("attention", 1)).shared
        for model in (converted, out)
    }
    assert shared[converted] > 0 == shared[out]
    plan = ("--steps", 1, "--lr", 1, "--global-batch-tokens", 256, "--seq-len", 32, "--json")
    assert "averaged" in json.loads(uptrain("plan", converted, *plan).out)["first_loss"]
    assert "averaged" not in json.loads(uptrain("plan", out, *plan).out)["first_loss"]
