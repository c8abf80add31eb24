"""What the options of `uptrain run` come to, and which do not go together."""

import errno
import json
import re
import shutil

import caches
import pytest
import real_runs
import tiny
import torch
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer

from model.common.counts import format_count
from uptrain.budget.budget import BudgetOptions, default_trainable
from uptrain.data.token_cache import TokenCache
from uptrain.runs import checks, launch, start_and_resume
from uptrain.runs.resolve_settings import resolve_settings
from uptrain.runs.settings import RunOptions
from uptrain.training import loop
from uptrain.training.metrics_log import Metrics


@pytest.fixture
def settings(uptrain, inputs, tmp_path):
    """Return what a run's options come to; it makes one step."""

    def run(*options, folder=inputs["model"]):
        out = tmp_path / "run"
        shutil.rmtree(out, ignore_errors=True)
        fixed = ("--data", inputs["data"], "--out", out, "--lr", 1e-3, "--global-batch-tokens", 256)
        uptrain("run", *([folder] if folder else []), *fixed, *options, "--max-minutes", 0).succeeded()
        return json.loads((out / "run.json").read_text())["settings"]

    return run


def test_defaults(settings):
    stored = settings("--steps", 50)
    assert (stored["save_every"], stored["eval_every"], stored["keep_last"]) == (5, 5, 2)
    assert (stored["loss"], stored["optimizer"], stored["trainable"]) == ("next-token", "adamw", "all")
    assert (stored["weight_decay"], stored["seed"], stored["spike_sigma"]) == (0.0, 0, None)
    assert (stored["schedule"], stored["decay_fraction"], stored["warmup_steps"]) == ("wsd", 0.2, 12)
    assert stored["micro_batch"] == stored["global_batch"] == 256 // 32


def test_the_default_micro_batch_is_a_processs_part_of_a_step(uptrain, inputs, tmp_path, monkeypatch):
    """Of two processes here, of which only one is started."""
    budget = BudgetOptions(steps=2, global_batch_tokens=256, lr=1e-3)
    fixed = {"schedule": "wsd", "optimizer": "adamw", "weight_decay": 0.0, "seed": 0, "keep_last": 2, "init": None}
    options = RunOptions(budget, inputs["model"], data=(str(inputs["data"]),), out=tmp_path / "run", **fixed)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resolve_settings(options, inputs["model"], 32)[0].micro_batch == 4


def test_a_converted_model_trains_its_attention(settings, inputs, convert, tmp_path):
    """Any other model trains everything, as does one whose attention has unknown names."""
    out = tmp_path / "converted"
    convert("mha-to-gqa", "--method", "mean", inputs["parent"], out, "--groups", 2).succeeded()
    assert settings("--steps", 2, folder=out)["trainable"] == "attention"
    assert settings("--steps", 2, "--trainable", "all", folder=out)["trainable"] == "all"
    assert settings("--steps", 2, "--init", inputs["parent"], folder=None)["trainable"] == "all"
    assert default_trainable(out, {"model_type": "llama"}) == "attention"
    assert default_trainable(out, {"model_type": "gpt2"}) == "all"


def test_a_model_whose_heads_were_not_merged_trains_everything(settings, inputs, convert, uptrain, tmp_path):
    parent = inputs["parent"]
    n_heads = json.loads((parent / "config.json").read_text())["num_key_value_heads"]
    merged, repeated, copied, again = (tmp_path / name for name in ("merged", "repeated", "copied", "again"))
    convert("mha-to-gqa", "--method", "mean", parent, merged, "--groups", 2).succeeded()
    convert("repeat-kv", merged, repeated, "--groups", n_heads).succeeded()
    convert("to-hf", parent, copied).succeeded()
    convert("to-hf", merged, again).succeeded()
    found = {folder.name: settings("--steps", 2, folder=folder)["trainable"] for folder in (repeated, copied, again)}
    assert found == {"repeated": "attention", "copied": "all", "again": "attention"}, "merged at some time, or never"
    plan = json.loads(uptrain(
        "plan", copied, "--steps", 2, "--lr", 1e-3, "--global-batch-tokens", 256, "--seq-len", 32, "--json"
    ).out)  # fmt: skip
    assert plan["first_loss"].startswith("Measure it with: uptrain evaluate")


def test_the_earlier_name_of_an_option(uptrain, settings):
    assert settings("--steps", 50, "--save-every-steps", 3)["save_every"] == 3
    shown = uptrain("run", "--help").out
    assert "--save-every N" in shown and "--save-every-steps" not in shown


def test_options_that_are_missing_or_unknown(uptrain):
    uptrain("run", "model", "--steps", 5).refused("Missing option '--data'. `", "run --help` shows all options.")
    uptrain("resume", "run", "--max-minute", 5).refused("No such option '--max-minute'. Did you mean '--max-minutes'?")
    other = uptrain("status", "run", "--lr", 1e-5)
    other.refused("No such option '--lr'. `", "status --help` shows all options.")
    assert "Did you mean" not in other.err
    for name in ("resume", "extend"):
        uptrain(name, "run", "--lr", 1e-5).refused("--lr cannot change", "`uptrain extend` trains it for longer")


def test_an_original_of_another_shape(uptrain, inputs, tmp_path):
    """Only if `--original` names it: otherwise the shape decides."""
    steps = ("--steps", 2, "--lr", 1e-3, "--global-batch-tokens", 256)
    words = "--original llama-2-7b has another shape than the model (hidden_size 4,096, not 32; num_hidden_layers"
    commands = {
        "plan": ("plan", inputs["model"], "--seq-len", 32),
        "run": ("run", inputs["model"], "--data", inputs["data"], "--out", tmp_path / "run", "--max-minutes", 0),
    }
    for command in commands.values():
        refused = uptrain(*command, *steps, "--original", "llama-2-7b")
        refused.refused(words, "give them as --original-tokens, --global-batch-tokens and --lr")
        assert not (tmp_path / "run").exists()
        assert "another shape" not in uptrain(*command, *steps).succeeded().err


def test_only_steps_make_a_run_read_its_data_a_hundred_times(uptrain, inputs, tmp_path):
    fixed = ("run", inputs["model"], "--data", inputs["data"], "--out", tmp_path / "run", "--max-minutes", 0)
    size = ("--lr", 1e-3, "--global-batch-tokens", 256)
    many = ("--alpha", 0.05, "--original-tokens", "2B")
    times = uptrain(*fixed, *size, *many).refused("the data would be read ", " times, and more than 100 are refused")
    assert not (tmp_path / "run").exists()
    n_steps = re.search(r"give --steps (\d+) in place of --alpha", times.err)[1]
    assert "Warning: the data are read " in uptrain(*fixed, *size, "--steps", n_steps).succeeded().err


def test_the_help_shows_no_range_without_bounds(uptrain):
    shown = uptrain("run", "--help").out
    assert "[x>=0]" in shown and "None" not in shown


def test_with_a_teacher_it_is_distillation(settings, inputs):
    assert settings("--steps", 2, "--teacher", inputs["parent"])["loss"] == "distill"


def test_only_kv_is_trained(uptrain, settings, inputs, tmp_path):
    options = ("--trainable", "kv", "--optimizer", "adafactor", "--weight-decay", 0.1, "--activation-checkpointing")
    stored = settings("--steps", 2, *options)
    assert (stored["trainable"], stored["optimizer"], stored["weight_decay"]) == ("kv", "adafactor", 0.1)
    uptrain("export", tmp_path / "run", tmp_path / "out", "--dtype", "float32").succeeded()
    before, after = tiny.tensors(inputs["model"]), tiny.tensors(tmp_path / "out")
    assert {n for n, t in after.items() if not torch.equal(t, before[n])} == {n for n in before if tiny.is_kv(n)}


def test_adafactor_needs_a_rate(uptrain, inputs, tmp_path):
    fixed = ("run", inputs["model"], "--data", inputs["data"], "--steps", 2, "--global-batch-tokens", 256)
    uptrain(*fixed, "--out", tmp_path / "run", "--optimizer", "adafactor").refused("--optimizer adafactor needs --lr")


def test_logits_are_no_data(uptrain, inputs, tmp_path):
    logits = tmp_path / "logits"
    uptrain("teach", inputs["parent"], "--data", inputs["data"], "--out", logits, "--top-k", 4).succeeded()
    fixed = ("run", inputs["model"], "--data", logits, "--steps", 2, "--lr", 1e-3, "--global-batch-tokens", 256)
    uptrain(*fixed, "--out", tmp_path / "run").refused(f"{logits} holds a teacher's logits, not tokens")
    prepare = ("prepare", "--tokenizer", inputs["model"], "--seq-len", 32, "--out", tmp_path / "cache", "--data")
    uptrain(*prepare, logits).refused(f"--data {logits} holds a teacher's logits; give texts.")
    given = (part if part != logits else inputs["data"] for part in fixed)
    tokens = uptrain(*given, "--out", tmp_path / "run", "--teacher-logits", inputs["data"])
    tokens.refused(f"{inputs['data']} is a token cache; give what `uptrain teach` made of it.")


def test_a_folder_of_texts_with_a_manifest_of_its_own(uptrain, inputs, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "tokens-00000.txt").write_text("a text " * 200)
    (texts / "manifest.json").write_text('{"files": ["tokens-00000.txt"]}')
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "model"), 300)
    evaluated = uptrain("evaluate", model, "--data", texts, "--json").succeeded()
    assert json.loads(evaluated.out)["targets"] > 100
    (run := tmp_path / "a-run").mkdir()
    for name in ("run.json", "metrics.jsonl"):
        (run / name).touch()
    refused = uptrain("evaluate", inputs["model"], "--data", run)
    refused.refused(f"--data {run} is a training run, a token cache or logits; give the texts that it was made of.")


def test_the_file_of_a_tokenizer_is_not_its_folder(uptrain, inputs, tmp_path):
    file = inputs["model"] / "tokenizer.json"
    result = uptrain("prepare", "--data", tmp_path, "--tokenizer", file, "--seq-len", 32, "--out", tmp_path / "c")
    result.refused(f"{file} is a file; give its folder: {inputs['model']}")


def test_from_nothing(uptrain, settings, inputs, tmp_path):
    stored = settings("--steps", 2, "--init", inputs["model"], "--seed", 3, folder=None)
    assert (stored["model"], stored["seed"]) == ("", 3)
    uptrain("export", tmp_path / "run", tmp_path / "out").succeeded()
    card = (tmp_path / "out/README.md").read_text()
    assert "## Training by Groupwise" in card
    assert "from scratch, 1 of 2 steps" in card
    assert "α" not in card


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("{model}", "--init", "{model}"), ["either MODEL, or --init"]),
        ((), ["either MODEL, or --init"]),
        (("{model}", "--loss", "mix"), ["--loss mix learns from a teacher", "--teacher FOLDER"]),
        (("{model}", "--steps", 3), ["exactly one of --alpha, --tokens and --steps"]),
    ],
)
def test_incompatible_options(uptrain, inputs, tmp_path, options, words):
    fixed = ("--data", inputs["data"], "--out", tmp_path / "run", "--lr", 1e-3, "--global-batch-tokens", 256)
    budget = ("--tokens", 512)
    uptrain("run", *(str(o).format(**inputs) for o in options), *fixed, *budget).refused(*words)
    assert not (tmp_path / "run").exists()


def test_deepspeed(uptrain, inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    uptrain(*real_runs.arguments(inputs, tmp_path / "run")).refused("DeepSpeed is not supported", "fsdp2.yaml")


def test_a_run_that_sees_data_again_says_so(uptrain, inputs, tmp_path):
    fixed = ("--data", inputs["data"], "--lr", 1e-3, "--global-batch-tokens", 256, "--max-minutes", 0)
    for steps, times in ((2, 0), (40, 1)):
        result = uptrain("run", inputs["model"], *fixed, "--out", tmp_path / f"{steps}", "--steps", steps)
        assert (result.code, result.err.count("Warning: the data are read ")) == (0, times)


def test_options_are_refused_before_texts_are_tokenised(uptrain, tmp_path):
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=302), tmp_path / "model"), 300)
    texts = tmp_path / "texts.txt"
    texts.write_text("One long text. " * 400)
    fixed = ("run", model, "--data", texts, "--seq-len", 32, "--out", tmp_path / "run")
    uptrain(*fixed, "--steps", 2, "--global-batch-tokens", 256).refused("give --lr")
    uptrain(*fixed, "--steps", 2, "--global-batch-tokens", 250, "--lr", 1e-3).refused(
        "whole number of windows of 32 tokens"
    )
    options = ("--steps", 2, "--global-batch-tokens", 256, "--lr", 1e-3)
    uptrain(*fixed, *options, "--loss", "distill").refused("name it with --teacher")
    uptrain(*fixed, *options, "--eval-data", tmp_path / "nowhere").refused("nowhere")
    uptrain(*fixed, *options, "--teacher", tmp_path / "nowhere").refused("nowhere")
    other = caches.write_cache(tmp_path / "other", [[[1, 2, 3] * 20]], 32, 302, tokenizer="0" * 64)
    uptrain(*fixed, *options, "--eval-data", other).refused("another tokenizer")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "other", "texts.txt"}


def test_the_teacher_is_not_the_model_itself(uptrain, inputs, tmp_path):
    fixed = ("run", inputs["model"], "--data", inputs["data"], "--out", tmp_path / "run", "--lr", 1e-3, "--steps", 2)
    copy = shutil.copytree(inputs["model"], tmp_path / "copy")
    uptrain(*fixed, "--global-batch-tokens", 256, "--teacher", copy).refused(
        f"--teacher {copy} is the same model as MODEL; give the parent that MODEL was converted from"
    )
    assert not (tmp_path / "run").exists()


def test_a_run_lies_outside_of_its_models(uptrain, inputs, tmp_path):
    for name in ("model", "parent"):
        out = inputs[name] / "runs/first"
        for command in (
            real_runs.arguments(inputs, out, loss="distill"),
            ("teach", inputs[name], "--data", inputs["data"], "--out", out),
            ("prepare", "--tokenizer", inputs[name], "--data", inputs["data"], "--seq-len", 32, "--out", out),
        ):
            uptrain(*command).refused(f"{out} lies in {inputs[name]}, which this command reads and must not change")
            assert not out.parent.exists()
    run = tmp_path / "run"
    uptrain(*real_runs.arguments(inputs, run, steps=4)).succeeded()
    out = inputs["model"] / "longer"
    uptrain("extend", run, "--out", out, "--steps", 9).refused(f"{out} lies in {inputs['model']}")


def test_a_teacher_that_was_merged_too(uptrain, convert, inputs, tmp_path):
    """It has fewer heads than the parent of MODEL, by groupwise.json. One of another size may have any number."""
    merged, other, smaller = (tmp_path / name for name in ("merged", "other", "smaller"))
    for out, groups in ((merged, 2), (other, 1)):
        convert("mha-to-gqa", "--method", "mean", inputs["parent"], out, "--groups", groups).succeeded()
    tiny.save(tiny.build(vocab_size=real_runs.VOCAB, num_key_value_heads=1, num_hidden_layers=1), smaller)
    fixed = ("plan", merged, "--steps", 5, "--lr", 1e-3, "--global-batch-tokens", 256, "--seq-len", 32)
    warning = (
        f"Warning: the teacher {other} has 1 K/V heads, but the parent of {merged} had 8 K/V heads: the teacher was"
    )
    for teacher, warns in ((other, True), (inputs["parent"], False), (smaller, False)):
        given = {**inputs, "model": merged, "parent": teacher}
        run = uptrain(*real_runs.arguments(given, tmp_path / "run", "--max-minutes", 0, loss="distill"))
        shutil.rmtree(tmp_path / "run")
        for result in (run, uptrain(*fixed, "--teacher", teacher)):
            result.succeeded()
            assert (warning in result.err) == warns
    for model, teacher, warns in ((inputs["parent"], merged, True), (smaller, merged, False)):
        swapped = uptrain("plan", model, *fixed[2:], "--teacher", teacher)
        swapped.succeeded()
        assert (f"the teacher {merged} was converted from" in swapped.err) == warns
    (other / "groupwise.json").unlink()  # as another program saves it, with fewer heads than the teacher
    assert "swapped" not in uptrain("plan", other, *fixed[2:], "--teacher", merged).succeeded().err
    taught = uptrain("teach", merged, "--data", inputs["data"], "--out", tmp_path / "logits", "--top-k", 4)
    assert f"Warning: {merged} is a converted model" in taught.err
    again = uptrain("teach", inputs["parent"], "--data", inputs["data"], "--out", tmp_path / "more", "--top-k", 4)
    assert (again.code, again.err) == (0, "")


@pytest.mark.parametrize("held_out", [True, False])
def test_a_run_whose_loss_rose_says_so(uptrain, inputs, tmp_path, held_out):
    fixed = ("run", inputs["model"], "--data", inputs["data"], "--global-batch-tokens", 256, "--steps", 12)
    fixed += ("--eval-data", inputs["held_out"]) if held_out else ()
    warning = f"Warning: the {'held-out' if held_out else 'training'} loss rose from "
    for lr, warns in ((30, True), (1e-3, False)):
        run, out = tmp_path / f"run-{lr}", tmp_path / f"out-{lr}"
        for result in (uptrain(*fixed, "--lr", lr, "--out", run), uptrain("export", run, out)):
            result.succeeded()
            assert (warning in result.err) == warns, result.err
            assert (f"start a new run with a lower --lr (it was {lr:g})" in result.err) == warns


def test_a_full_disk_at_the_end_fails_no_saved_run(uptrain, inputs, tmp_path, monkeypatch):
    states = []
    write_run_state = start_and_resume._write_run_state
    monkeypatch.setattr(
        start_and_resume, "_write_run_state", lambda *given: states.append(given[1]) or write_run_state(*given)
    )
    flush = Metrics.flush

    def full_at_the_end(metrics):
        if "finished" in states:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(metrics)

    monkeypatch.setattr(Metrics, "flush", full_at_the_end)
    result = uptrain("run", inputs["model"], "--data", inputs["data"], "--out", tmp_path / "run", "--lr", 1e-3,
                     "--global-batch-tokens", 256, "--steps", 2)  # fmt: skip
    result.succeeded()
    assert "were not written, but the run is saved: [Errno 28] No space left on device" in result.err
    assert json.loads((tmp_path / "run/run_state.json").read_text())["status"] == "finished"


def test_resume_compares_only_the_tensors_that_it_reads_again(uptrain, inputs, tmp_path):
    model, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(inputs["model"], model)
    fixed = ("--data", inputs["data"], "--lr", 1e-3, "--global-batch-tokens", 256, "--trainable", "kv", "--steps", 3)
    uptrain("run", model, *fixed, "--out", out, "--max-minutes", 0).succeeded()
    tensors = tiny.tensors(model)
    trained = next(name for name in tensors if tiny.is_kv(name))
    save_file({**tensors, trained: tensors[trained] + 1}, model / "model.safetensors", {"format": "pt"})
    uptrain("resume", out, "--max-minutes", 0).succeeded()
    frozen = next(name for name in tensors if not tiny.is_kv(name))
    save_file({**tensors, frozen: tensors[frozen] + 1}, model / "model.safetensors", {"format": "pt"})
    uptrain("resume", out).refused(f"{model} holds other tensors than when the run began")


def test_a_run_says_first_what_it_does(uptrain, inputs, tmp_path):
    out, options = tmp_path / "run", ("--trainable", "kv", "--eval-data", inputs["held_out"], "--eval-every", 3)
    result = uptrain(*real_runs.arguments(inputs, out, *options, "--max-minutes", 0, loss="distill"))
    tensors = tiny.tensors(inputs["model"])
    trained, total = (
        format_count(sum(t.numel() for name, t in tensors.items() if tiny.is_kv(name) or every))
        for every in (False, True)
    )
    assert result.err.splitlines()[0] == (
        f"Training kv, {trained} of {total} parameters: 12 steps of 256 tokens, peak learning rate 0.001, loss: KL "
        "divergence from the teacher, held-out loss every 3 steps."
    )
    assert "; Ctrl-C saves and stops" in result.err
    assert "Training kv" not in uptrain("resume", out, "--max-minutes", 0).err


def test_windows_beyond_the_context_are_warned_of(uptrain, tmp_path):
    inputs = real_runs.make_inputs(tmp_path, max_position_embeddings=16)
    result = uptrain(*real_runs.arguments(inputs, tmp_path / "run", steps=4)).succeeded()
    assert "Warning: windows of 32 tokens are longer than the model's context of 16" in result.err


def test_other_formats_and_runs_are_no_models(uptrain, inputs, tmp_path):
    out = tmp_path / "run"
    uptrain(*real_runs.arguments(inputs, out, steps=4)).succeeded()
    export = f"It is the folder of a run; make a model of it first: uptrain export {out} OUT"
    gguf = tmp_path / "parent.gguf"
    gguf.write_bytes(b"GGUF")
    to_hf = f"{gguf} is not a Hugging Face folder; make one of it first: convert to-hf {gguf} OUT"
    for folder, words in ((out, export), (gguf, to_hf)):
        for changed in ({**inputs, "model": folder}, {**inputs, "parent": folder}):
            uptrain(*real_runs.arguments(changed, tmp_path / "other", loss="distill")).refused(words)
            size = ("--steps", 5, "--lr", 1e-3, "--global-batch-tokens", 256, "--seq-len", 32)
            uptrain("plan", changed["model"], "--teacher", changed["parent"], *size).refused(words)
    assert not (tmp_path / "other").exists()


def test_held_out_windows_that_a_model_cannot_take(uptrain, tmp_path):
    """They may be longer than those of the training, of which alone the student is asked."""
    inputs = real_runs.make_inputs(tmp_path)
    inputs["held_out"] = caches.write_cache(tmp_path / "longer", [[list(range(128))] * 4], 128, real_runs.VOCAB)
    size = {"vocab_size": real_runs.VOCAB, "max_position_embeddings": 256}
    inputs["model"] = tiny.save(tiny.build("phi3", num_key_value_heads=2, **size), tmp_path / "g")
    long = {**tiny.LONGROPE, "original_max_position_embeddings": 48}
    inputs["parent"] = tiny.save(tiny.build("phi3", **long, **size), tmp_path / "p")
    command = real_runs.arguments(inputs, tmp_path / "run", "--eval-data", inputs["held_out"], loss="distill")
    uptrain(*command).refused(f"{inputs['parent']}: model_type 'phi3' cannot be trained", "windows of 128 tokens")
    assert not (tmp_path / "run").exists()


def test_held_out_windows_beyond_the_context_are_warned_of(uptrain, inputs, tmp_path):
    longer = caches.write_cache(tmp_path / "longer", [[list(range(128))] * 4], 128, real_runs.VOCAB)
    run = uptrain(*real_runs.arguments(inputs, tmp_path / "run", "--eval-data", longer, steps=4))
    for result in (run, uptrain("evaluate", inputs["model"], "--data", longer)):
        result.succeeded()
        assert "Warning: windows of 128 tokens are longer than the model's context of 64" in result.err


def pretend_gpu(monkeypatch, capability=(9, 0)):
    monkeypatch.setattr(launch, "uses_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


LLAMA_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(("precision", "head_dim", "words"), [
    ("bf16", 128, None), ("fp32", 128, "--precision fp32 has no flash attention"),
    ("bf16", 100, "heads of 100 dimensions have no flash attention"), ("bf16", 512, "heads of 512 dimensions"),
])  # fmt: skip
def test_what_has_no_flash_attention_attends_document_by_document(monkeypatch, precision, head_dim, words):
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(launch, "torch_has_packed_attention", lambda: True)
    warning = launch._packing_warning({**LLAMA_7B, "head_dim": head_dim}, precision)
    assert warning is None if words is None else words in warning


@pytest.mark.parametrize(("device", "recent", "native", "warns"), [
    (True, False, True, True), (True, True, True, False), (False, False, True, False), (True, False, False, False),
])  # fmt: skip
def test_a_torch_without_packed_attention(monkeypatch, device, recent, native, warns):
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(launch, "uses_gpu", lambda: device)
    monkeypatch.setattr(launch, "torch_has_packed_attention", lambda: recent)
    warning = launch._packing_warning(LLAMA_7B if native else {"model_type": "phi"}, "bf16")
    assert (warning is not None and "install a newer torch" in warning) == warns


@pytest.mark.parametrize("option", ["--activation-checkpointing", "--compile"])
def test_options_for_layers_that_transformers_does_not_name(uptrain, inputs, tmp_path, monkeypatch, option):
    """They would silently do nothing."""
    monkeypatch.setattr(checks, "layer_class_names", lambda folder: ())
    out = tmp_path / "run"
    uptrain(*real_runs.arguments(inputs, out, option)).refused(f"so {option} cannot be used; leave it out.")
    assert not out.exists()
    uptrain(*real_runs.arguments(inputs, out, "--max-minutes", 0)).succeeded()
    if option == "--activation-checkpointing":
        uptrain("resume", out, option).refused(f"so {option} cannot be used")


@pytest.mark.parametrize(("capability", "warns"), [((7, 5), True), ((8, 0), False)])
def test_a_gpu_older_than_ampere_attends_document_by_document(monkeypatch, capability, warns):
    pretend_gpu(monkeypatch, capability)
    monkeypatch.setattr(launch, "torch_has_packed_attention", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    warning = launch._packing_warning(LLAMA_7B, "bf16")
    assert (warning is not None and "the GPU (Tesla T4) is older than Ampere" in warning) == warns


def test_a_gpu_without_cuda_attends_document_by_document(monkeypatch):
    monkeypatch.setattr(launch, "uses_gpu", lambda: True)
    monkeypatch.setattr(launch, "torch_has_packed_attention", lambda: True)
    assert "only CUDA GPUs have flash attention" in launch._packing_warning(LLAMA_7B, "bf16")


def test_a_run_says_that_the_gpu_has_no_bfloat16(uptrain, inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(start_and_resume, "emulates_bfloat16", lambda device: True)
    err = uptrain(*real_runs.arguments(inputs, tmp_path / "run", "--max-minutes", 0)).succeeded().err
    said = "The GPU has no bf16 of its own (before Ampere), so it computes in fp32."
    assert err.splitlines()[0].endswith(said)


def test_held_out_windows_that_are_longer(uptrain, inputs, tmp_path, monkeypatch):
    """No more tokens at a time than in training."""
    longer = caches.write_cache(tmp_path / "longer", [[list(range(128))] * 4], 64, real_runs.VOCAB)
    sizes = []
    real = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *given: sizes.append(given[2]) or real(*given))
    for held_out, out in ((inputs["held_out"], "equal"), (longer, "longer-run")):
        arguments = real_runs.arguments(inputs, tmp_path / out, "--eval-data", held_out, "--micro-batch", 5, steps=4)
        uptrain(*arguments).succeeded()
    assert {*sizes[:5]} == {5} and {*sizes[5:]} == {2}, sizes
    assert TokenCache.open(longer).seq_len == 2 * TokenCache.open(inputs["data"]).seq_len
