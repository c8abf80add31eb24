"""`uptrain evaluate` against transformers, document by document, in one process and two."""

import json
import math
from types import SimpleNamespace

import caches
import numpy as np
import pytest
import real_runs
import tiny
import torch
from faulty_runs import succeed
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM

from uptrain.data.token_cache import TokenCache
from uptrain.training.eval_metrics import TOTALS, EvalResult
from uptrain.training.logits import tokens_per_chunk


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return a model, and a teacher much like it: they often choose the same token."""
    folder = tmp_path_factory.mktemp("inputs")
    teacher = tiny.build(vocab_size=real_runs.VOCAB, num_key_value_heads=2)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.5 * parameter.std() * torch.randn_like(parameter)
    return {**real_runs.make_inputs(folder), "parent": tiny.save(teacher, folder / "teacher")}


@pytest.fixture(scope="module")
def expected(inputs):
    """Return the measures from sums over each document alone, and their standard errors from those of each window."""
    cache = TokenCache.open(inputs["held_out"])
    models = [AutoModelForCausalLM.from_pretrained(inputs[name], dtype=torch.float32) for name in ("model", "parent")]
    of_windows = np.zeros((cache.n_windows, 5))
    for window, sums in enumerate(of_windows):
        ids, documents = cache.window(window)
        for number in range(documents.max() + 1):
            part = torch.from_numpy(ids[documents == number])
            with torch.inference_mode():
                p, q = (model(part[None]).logits[0, :-1].double().log_softmax(1) for model in models)
            losses = [-x.gather(1, part[1:, None]).sum() for x in (p, q)]
            same = (p.argmax(1) == q.argmax(1)).sum()
            sums += [len(part) - 1, *losses, (q.exp() * (q - p)).sum(), same]
    sums = of_windows.sum(0)
    assert 0 < sums[4] < sums[0]
    means = dict(zip(("loss", "teacher_loss", "kl", "agreement"), sums[1:] / sums[0], strict=True))
    targets, losses, teacher_losses, divergences, _ = of_windows[of_windows[:, 0] > 0].T
    errors = {
        "loss_error": ratio_error(losses, targets),
        "above_teacher_error": ratio_error(losses - teacher_losses, targets),
        "kl_error": ratio_error(divergences, targets),
    }
    counts = {"targets": int(sums[0]), "seq_len": cache.seq_len}
    return {**counts, **means, **errors, "perplexity": math.exp(means["loss"])}


def ratio_error(totals, targets):
    """Return the standard error of Σ totals / Σ targets, where each window is a sample."""
    residuals = totals - totals.sum() / targets.sum() * targets
    return math.sqrt(len(targets) * residuals.var(ddof=1)) / targets.sum()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("with_teacher", [True, False])
def test_every_target_counts_once(inputs, tmp_path, expected, processes, with_teacher):
    teacher = ("--teacher", inputs["parent"]) if with_teacher else ()
    arguments = ("evaluate", inputs["model"], "--data", inputs["held_out"], *teacher, "--micro-batch", 2, "--json")
    first, *others = succeed((*arguments, "--precision", "fp32"), tmp_path, processes)
    assert not any(result.out for result in others)
    printed = json.loads(first.out)
    assert (printed.pop("model"), printed.pop("data")) == (str(inputs["model"]), str(inputs["held_out"]))
    without_teacher = ("targets", "seq_len", "loss", "loss_error", "perplexity")
    wanted = {k: v for k, v in expected.items() if with_teacher or k in without_teacher}
    assert printed == pytest.approx(wanted, rel=1e-5, abs=1e-7)


def measured(totals):
    """Return the result of windows whose targets, losses, teacher's losses and divergences are given, [window, 4]."""
    targets, losses, teacher_losses, divergences = totals.T
    columns = dict(zip(TOTALS, np.zeros((len(TOTALS), len(totals))), strict=True))
    columns |= {"windows": targets > 0, "targets": targets, "loss": losses, "teacher_loss": teacher_losses}
    columns |= {"above_teacher": losses - teacher_losses, "kl": divergences}
    totals_WS = torch.from_numpy(np.stack([columns[name] for name in TOTALS], axis=1))
    return EvalResult.from_sums(totals_WS.T @ totals_WS, with_teacher=True)


def test_errors_against_a_bootstrap_over_windows():
    """The windows have different numbers of targets, and losses that go with those of the teacher."""
    rng = np.random.default_rng(0)
    targets = rng.integers(50, 512, size=300)
    of_teacher = targets * rng.normal(3.0, 0.4, size=300)
    above = targets * rng.normal(0.1, 0.05, size=300)
    totals = np.stack([targets, of_teacher + above, of_teacher, targets * rng.gamma(2.0, 0.05, size=300)], axis=1)
    samples = totals[rng.integers(300, size=(4000, 300))].sum(axis=1)
    n, losses, teacher_losses, divergences = samples.T
    result = measured(totals)
    assert result.loss_error == pytest.approx((losses / n).std(), rel=0.1)
    assert result.above_teacher_error == pytest.approx(((losses - teacher_losses) / n).std(), rel=0.1)
    assert result.kl_error == pytest.approx((divergences / n).std(), rel=0.1)
    assert result.above_teacher_error < result.loss_error / 5


def test_windows_without_targets_are_no_samples():
    totals = np.array([[100.0, 300, 290, 5], [80, 250, 230, 3], [90, 280, 260, 6]])
    with_empty = np.concatenate([totals, np.zeros((5, 4))])
    assert measured(with_empty) == measured(totals)


def test_a_single_window_has_no_error(uptrain, inputs, tmp_path):
    cache = caches.write_cache(tmp_path / "cache", [[[5, 6, 7, 8], [9, 10, 11]]], 8, real_runs.VOCAB)
    arguments = ("evaluate", inputs["model"], "--teacher", inputs["parent"], "--data", cache)
    printed = json.loads(uptrain(*arguments, "--json").succeeded().out)
    assert [printed[name] for name in ("loss_error", "above_teacher_error", "kl_error")] == [None, None, None]
    assert "±" not in uptrain(*arguments).out
    several = uptrain(*arguments[:-1], inputs["held_out"]).out
    assert [line.split()[0] for line in several.splitlines() if "±" in line] == ["loss", "above", "KL"]


def test_invalid_evaluations_are_refused(uptrain, inputs, tmp_path):
    other = tiny.save(tiny.build(vocab_size=67), tmp_path / "other")
    data = ("--data", inputs["held_out"], "--json")
    uptrain("evaluate", inputs["model"], *data, "--teacher", other).refused("has 67 tokens, the student 257")
    empty = caches.write_cache(tmp_path / "empty", [[[5], [6], [7]]], 32, real_runs.VOCAB)
    uptrain("evaluate", inputs["model"], "--data", empty).refused("nothing to predict")
    narrow = tiny.save(tiny.build("phi3", vocab_size=real_runs.VOCAB, **tiny.LONGROPE), tmp_path / "narrow")
    uptrain("evaluate", narrow, *data).refused("windows of 32 tokens", "beyond 16 tokens", "(--seq-len 16)")
    rope = {**tiny.LONGROPE["rope_parameters"], "short_factor": [2.0] * 2}  # as the long one: the same at any length
    one_set = tiny.build("phi3", vocab_size=real_runs.VOCAB, **{**tiny.LONGROPE, "rope_parameters": rope})
    uptrain("evaluate", tiny.save(one_set, tmp_path / "one_set"), *data).succeeded()
    falcon = tiny.save(tiny.build("falcon", vocab_size=real_runs.VOCAB, alibi=True), tmp_path / "falcon")
    uptrain("evaluate", falcon, *data).refused("'falcon'", "ALiBi")
    for family, change in (("qwen3", {"is_causal": False}), ("gemma3_text", {"use_bidirectional_attention": True})):
        both_ways = tiny.save(tiny.build(family, vocab_size=real_runs.VOCAB, **change), tmp_path / family)
        uptrain("evaluate", both_ways, *data).refused("attention to later tokens", "only causal models")
    tiny.make_config("t5").save_pretrained(tmp_path / "t5")  # gives no context
    (tmp_path / "text.txt").write_text("some words\n")
    uptrain("evaluate", tmp_path / "t5", "--data", tmp_path / "text.txt").refused("is an encoder-decoder")


def test_texts_are_tokenised_into_a_temporary_folder(uptrain, tmp_path):
    """Messages do not name it, and --json prints none."""
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=302), tmp_path / "model"), 300)
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "some words"}\n')
    result = uptrain("evaluate", model, "--data", text, "--seq-len", 16)
    assert (result.code, "Tokenised: 1 document," in result.err) == (0, True), result.err
    assert uptrain("evaluate", model, "--data", text, "--seq-len", 16, "--json").err == ""
    text.write_text('{"text": ""}\n')
    refusal = uptrain("evaluate", model, "--data", text, "--seq-len", 16)
    refusal.refused("no tokens; none of 1 records gave a document (1 empty)")
    assert "kept" not in refusal.err and "groupwise-" not in refusal.err


@pytest.mark.timeout(60)
def test_a_short_text_in_a_long_window(uptrain, inputs, tmp_path):
    """Padding to 200,000 tokens would take minutes and gigabytes."""
    documents = [[[5, 6, 7, 8], [9, 10, 11]]]
    losses = []
    for seq_len in (8, 200_000):
        cache = caches.write_cache(tmp_path / str(seq_len), documents, seq_len, real_runs.VOCAB)
        losses.append(json.loads(uptrain("evaluate", inputs["model"], "--data", cache, "--json").out)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_texts_on_several_machines(uptrain, inputs, tmp_path, monkeypatch):
    """The cache of texts is in a temporary folder of one of them."""
    text = tmp_path / "texts/a.txt"
    text.parent.mkdir()
    text.write_text("text")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    result = uptrain("evaluate", inputs["model"], "--data", text.parent)
    result.refused("tokenised on one machine only", f"uptrain prepare --data {text.parent} --tokenizer", "--out CACHE")


def scaled_lm_head(folder, factor):
    """Return the folder of a model whose logits are those of another times a factor."""
    model = tiny.build(vocab_size=real_runs.VOCAB)
    with torch.no_grad():
        model.lm_head.weight *= factor
    return tiny.save(model, folder)


def test_a_perplexity_beyond_float64_is_null_in_json(uptrain, inputs, tmp_path):
    model = scaled_lm_head(tmp_path / "model", 1e4)
    printed = json.loads(uptrain("evaluate", model, "--data", inputs["held_out"], "--json").out)
    assert (type(printed["loss"]), printed["perplexity"]) == (float, None)


def test_differences_that_rounding_made_negative(uptrain, inputs, monkeypatch):
    means = {"targets": 9, "loss": 2.0, "teacher_loss": 2.000000001, "kl": -1e-9, "agreement": 1.0}
    errors = {"loss_error": None, "above_teacher_error": None, "kl_error": None}
    result = means | errors | {"perplexity": 7.389, "seq_len": 32}
    monkeypatch.setattr("uptrain.evaluate_folder.evaluate_folder", lambda options, quiet: result)
    shown = " ".join(uptrain("evaluate", inputs["model"], "--data", inputs["held_out"]).out.split())
    assert "loss 2.0000 nats per token" in shown
    assert "above the teacher's +0.0000 KL from the teacher 0.0000" in shown


def test_losses_that_are_not_finite_are_refused(uptrain, inputs, tmp_path):
    broken = scaled_lm_head(tmp_path / "model", float("nan"))
    words = f"{broken} computes a loss of nan on {inputs['held_out']}: its weights are damaged, or too large for fp32."
    uptrain("evaluate", broken, "--data", inputs["held_out"], "--json").refused(words)
    uptrain("evaluate", inputs["model"], "--teacher", broken, "--data", inputs["held_out"]).refused(words)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi"])
def test_in_bfloat16_a_model_does_not_differ_from_itself(inputs, tmp_path, family):
    """Hidden states between layers are float32 in both. In a teacher of bfloat16 they would be rounded."""
    model = tiny.save(tiny.build(family, vocab_size=real_runs.VOCAB).bfloat16(), tmp_path / "model")
    given = ("--data", inputs["held_out"], "--teacher", model, "--precision", "bf16", "--json")
    (result,) = succeed(("evaluate", model, *given), tmp_path)
    same = json.loads(result.out)
    assert (same["kl"], same["agreement"], same["teacher_loss"]) == (0.0, 1.0, same["loss"])


@pytest.mark.parametrize("part", ["all", "attention"])
def test_in_bfloat16_a_run_begins_at_its_teacher(inputs, tmp_path, part):
    """With `attention`, both share embedding and MLP. Powers of two in queries and keys change no logit."""
    student = tiny.build(vocab_size=real_runs.VOCAB).bfloat16()
    with torch.no_grad():
        student.model.layers[0].self_attn.q_proj.weight *= 2
        student.model.layers[0].self_attn.k_proj.weight /= 2
    model = tiny.save(student, tmp_path / "model")
    arguments = real_runs.arguments({**inputs, "model": model}, tmp_path / "run", steps=4)
    tiny.save(tiny.build(vocab_size=real_runs.VOCAB).bfloat16(), tmp_path / "teacher")
    given = (
        "--teacher",
        tmp_path / "teacher",
        "--trainable",
        part,
        "--precision",
        "bf16",
        "--eval-data",
        inputs["held_out"],
    )
    succeed((*arguments, *given), tmp_path)
    first = next(record for record in real_runs.records(tmp_path / "run") if "evaluation" in record)["evaluation"]
    assert (first["kl"], first["agreement"], first["teacher_loss"]) == (0.0, 1.0, first["loss"])


def test_a_second_text_is_refused(tmp_path, uptrain):
    """The last alone would be read."""
    model = tiny.save(tiny.build(), tmp_path / "model")
    uptrain("evaluate", model, "--data", "a", "--data", "b").refused("--data is given 2 times", "one folder")
    budget = ("--steps", 4, "--lr", 1e-3, "--global-batch-tokens", 256)
    uptrain("run", model, "--data", "a", *budget, "--eval-data", "a", "--eval-data", "b", "--out", "run").refused(
        "--eval-data is given 2 times"
    )


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 32), ("meta", 261)])
def test_a_gpu_evaluates_in_the_chunks_of_training(device, tokens):
    """It reads the LM head once per chunk: 1 GB in bfloat16 for Llama 3."""
    model = SimpleNamespace(lm_head_weight=torch.empty(128256, 4096, dtype=torch.bfloat16, device=device))
    assert tokens_per_chunk(model, 8192) == tokens
