"""`uptrain plan` tells what a run will be, and refuses what it cannot know."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from caches import write_cache
from llama_2_7b import write_llama_2_7b
from safetensors.torch import load_file, save_file
from tiny_tokenizers import make_tokenizer
from torch.utils.flop_counter import FlopCounterMode

from model.common.console import format_bytes
from uptrain.budget import identify, pretraining
from uptrain.budget.budget import BudgetOptions
from uptrain.data.prepare.tokenizer import load_tokenizer
from uptrain.data.run_data import seq_len_of
from uptrain.data.token_cache import MANIFEST, CacheManifest, CacheShard
from uptrain.estimates.training_time import TIME_FORMULA
from uptrain.models.trainable_choices import TRAINABLE
from uptrain.runs.resolve_settings import resolve_settings
from uptrain.runs.settings import RunOptions
from uptrain.training.learning_rate import Schedule, learning_rate

SIZE = ("--global-batch-tokens", "64K", "--seq-len", "1000", "--lr", "1e-3")
TINY_SHAPE = ("llama", tiny.HIDDEN, tiny.N_LAYERS, tiny.N_HEADS, 40, 67)


@pytest.fixture
def cache(tmp_path):
    """Return the manifest of a cache of 100,000 tokens in 25 windows; planning reads no more."""
    folder = tmp_path / "cache"
    folder.mkdir()
    shard = CacheShard("tokens-00000.bin", "documents-00000.bin", 100_000, 10, "a" * 64, "b" * 64)
    (folder / MANIFEST).write_bytes(CacheManifest(4000, "uint16", 67, "", (shard,)).to_json())
    return folder


@pytest.fixture
def teacher(tmp_path):
    return tiny.save(tiny.build(seed=1), tmp_path / "teacher", "bfloat16")


@pytest.fixture
def known(monkeypatch):
    """Put two originals of the tiny model's shape into the table."""
    rows = [
        pretraining.PretrainingRecord(
            f"tiny-{n}", f"tiny-{n}", TINY_SHAPE, n * 10**9, 2**20, n * 1e-3, "sure", "this test"
        )
        for n in (1, 2)
    ]
    monkeypatch.setattr(identify, "ORIGINALS", (*pretraining.ORIGINALS, *rows))


@pytest.fixture
def llama_2_of_tiny_shape(monkeypatch):
    """Give Llama 2 7B the shape of the tiny model, but for one token of the vocabulary."""
    row = replace(identify.find_original("llama-2-7b"), shape=(*TINY_SHAPE[:-1], TINY_SHAPE[-1] + 1))
    monkeypatch.setattr(identify, "ORIGINALS", (row,))


def plan(uptrain, *arguments):
    result = uptrain("plan", *arguments, "--json").succeeded()
    assert not result.err
    return json.loads(result.out)


def beyond_context(length):
    return (
        f"windows of {length} tokens are longer than the model's context of 64 (config.json): it has not learned "
        "positions beyond that."
    )


def test_alpha_of_stated_tokens(uptrain, source):
    planned = plan(uptrain, source, "--alpha", 0.05, "--original-tokens", "1B", *SIZE)
    assert (planned["steps"], planned["tokens"], planned["alpha"]) == (782, 50_048_000, 0.05)
    assert (planned["global_batch_tokens"], planned["seq_len"], planned["windows_per_step"]) == (64_000, 1000, 64)
    assert (planned["original"], planned["data"], planned["warnings"]) == (None, None, [beyond_context("1,000")])
    n_params = sum(t.numel() for t in tiny.tensors(source).values())
    assert (planned["n_params"], planned["n_kv_heads"]) == (n_params, 8)
    assert planned["tokens_per_parameter"] == pytest.approx(50_048_000 / n_params)
    assert "uptrain evaluate" in planned["first_loss"]


@pytest.mark.parametrize(("context", "length"), [(64, 64), (131_072, 4096)])
def test_windows_are_as_long_as_those_of_the_run(uptrain, source, context, length):
    """Without --seq-len, `run` on texts takes the model's context, 4096 at most."""
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    assert seq_len_of(["texts"], source, None) == length
    planned = plan(uptrain, source, "--steps", 5, "--lr", 1e-3, "--global-batch-tokens", "8192")
    assert (planned["seq_len"], planned["windows_per_step"]) == (length, 8192 // length)
    del config["max_position_embeddings"]
    (source / "config.json").write_text(json.dumps(config))
    planned = plan(uptrain, source, "--steps", 5, "--lr", 1e-3, "--global-batch-tokens", "8192")
    assert planned["seq_len"] == seq_len_of(["texts"], source, None) == 2048  # the default of Llama's class


def test_learning_rates_are_those_of_the_run(uptrain, source):
    planned = plan(uptrain, source, "--steps", 1000, "--warmup-steps", 30, *SIZE)
    assert planned["schedule"] == {
        "kind": "wsd", "peak_lr": 1e-3, "total_steps": 1000, "warmup_steps": 30, "decay_fraction": 0.2,
        "original_steps": 0, "decay_start": 800,
    }  # fmt: skip
    schedule = Schedule("wsd", 1e-3, 1000, 30)
    rates = {row["step"]: row["lr"] for row in planned["learning_rates"]}
    assert rates == {step: learning_rate(schedule, step) for step in rates}
    assert {0, 29, 800, 999} <= set(rates)


@pytest.mark.parametrize("kind", ["cosine", "constant", "inverse-sqrt"])
def test_other_schedules(uptrain, source, kind):
    planned = plan(uptrain, source, "--steps", 10, "--schedule", kind, *SIZE, "--original-tokens", "1M")
    assert (planned["schedule"]["kind"], planned["schedule"]["decay_start"]) == (kind, None)
    assert planned["schedule"]["original_steps"] == 16
    assert planned["alpha"] == pytest.approx(0.64)
    unknown = uptrain("plan", source, "--steps", 10, "--schedule", kind, *SIZE)
    if kind == "inverse-sqrt":
        unknown.refused("continues the original pre-training, whose length is unknown; give --original-tokens")
    else:
        unknown.succeeded()


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_shortest_runs(uptrain, source, steps):
    planned = plan(uptrain, source, "--steps", steps, *SIZE)
    assert all(0 < row["lr"] <= 1e-3 for row in planned["learning_rates"])
    uptrain("plan", source, "--steps", steps, *SIZE).succeeded()


def test_a_converted_model_finds_its_original_by_name(uptrain, convert, source, tmp_path, known):
    source = source.rename(tmp_path / "Tiny-2")
    assert plan(uptrain, source, "--alpha", 0.05)["original"]["name"] == "tiny-2", "before it is converted, too"
    out = tmp_path / "gqa"
    convert("mha-to-gqa", "--method", "mean", source, out, "--groups", 2).succeeded()
    planned = plan(uptrain, out, "--alpha", 0.05)
    assert planned["original"] == {
        "name": "tiny-2", "tokens": 2 * 10**9, "batch_tokens": 2**20, "steps": 1907, "peak_lr": 2e-3,
        "certainty": "sure", "source": "this test", "note": "",
    }  # fmt: skip
    assert (planned["steps"], planned["n_kv_heads"]) == (96, 2)
    assert planned["schedule"]["peak_lr"] == pytest.approx(2e-3 / 3)
    assert plan(uptrain, out, "--alpha", 0.05, "--original", "tiny-1")["steps"] == 48


def test_ambiguous_and_unknown_originals_are_refused(uptrain, source, known, monkeypatch):
    words = ("shape is that of tiny-1 (1 B tokens), tiny-2 (2 B tokens); say which with --original NAME",)
    uptrain("plan", source, "--alpha", 0.05).refused(*words, "--original-tokens", "--lr")
    monkeypatch.setattr(identify, "ORIGINALS", pretraining.ORIGINALS)
    uptrain("plan", source, "--alpha", 0.05).refused("not in the table", "--original-tokens", "e.g. 2T", "--lr")
    uptrain("plan", source, "--steps", 5, "--lr", 1e-3).refused("not in the table", "--global-batch-tokens")


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize("length", ["--tokens 20k", "--alpha 0.05"])
def test_the_options_that_a_refusal_names_are_enough(uptrain, source, tmp_path, command, length):
    """Of a model that is not in the table, as Llama 3, Mistral, Qwen and Gemma are not."""
    given = length.split()
    texts = ("--data", "texts", "--out", tmp_path / "run") if command == "run" else ()
    refused = uptrain(command, source, *texts, *given).refused("not in the table", "To begin without knowing them")
    advice = refused.err.rstrip(".\n").split("knowing them, ")[1]
    options = advice.removeprefix("add ").removeprefix(f"replace {length} by ").split()
    planned = plan(uptrain, source, *options, *(given if advice.startswith("add ") else ()))
    assert planned["steps"] >= 50 and planned["schedule"]["peak_lr"] == 5e-5


def test_epochs_over_a_cache(uptrain, source, cache):
    size = ("--global-batch-tokens", 40_000, "--lr", 1e-3, "--data", cache)
    once = plan(uptrain, source, "--steps", 2, *size)
    assert once["data"] == {"cache": str(cache), "tokens": 100_000, "windows": 25, "epochs": 0.8}
    assert (once["seq_len"], once["windows_per_step"], once["warnings"]) == (4000, 10, [beyond_context("4,000")])
    assert once["first_loss"] == f"Measure it with: uptrain evaluate {source} --data HELD-OUT"
    often = plan(uptrain, source, "--steps", 5, *size)
    repeated = "the data are read 2.00 times; prepare more tokens to see each only once."
    assert often["warnings"] == [repeated, beyond_context("4,000")]
    said = uptrain("plan", source, "--steps", 5, *size).err
    assert " ".join(said.split()) == f"Warning: {repeated} Warning: {beyond_context('4,000')}"


def test_data_are_not_planned_to_be_read_a_thousand_times(uptrain, source, cache):
    size = ("--global-batch-tokens", 40_000, "--lr", 1e-3, "--data", cache)
    uptrain("plan", source, "--tokens", "200M", *size).refused(
        "the data would be read 2,000 times", "prepare more tokens", "give --steps 5000 in place of --tokens"
    )
    meant = plan(uptrain, source, "--steps", 5000, *size)
    assert meant["warnings"][0].startswith("the data are read 2,000 times;")
    assert plan(uptrain, source, "--tokens", "10M", *size)["data"]["epochs"] == 100


def test_texts_are_planned_without_their_epochs(uptrain, source, tmp_path):
    """Only tokenising counts the tokens of texts."""
    folder, file = tmp_path / "texts", tmp_path / "more.jsonl"
    folder.mkdir()
    (folder / "one.txt").write_text("A text.")
    file.write_text('{"text": "A text."}\n')
    for texts in (folder, file):
        assert plan(uptrain, source, "--steps", 5, *SIZE, "--data", texts)["data"] is None
        text = " ".join(uptrain("plan", source, "--steps", 5, *SIZE, "--data", texts).out.replace("\\\n", " ").split())
        assert "epochs known after `uptrain prepare`" in text
        assert f"uptrain prepare --data {texts} --tokenizer {source}" in text
        assert text.endswith("--lr 0.001 --seq-len 1000 --data CACHE --out RUN")
    several = ("--data", f"{folder}=1", "--data", "hub:some/texts=0.5")
    text = " ".join(uptrain("plan", source, "--steps", 5, *SIZE, *several).out.replace("\\\n", " ").split())
    assert f"uptrain prepare --data {folder}=1 --data hub:some/texts=0.5 --tokenizer" in text
    (tmp_path / "empty").mkdir()
    uptrain("plan", source, "--steps", 5, *SIZE, "--data", tmp_path / "empty").refused("--data", "empty")


@pytest.mark.parametrize(
    ("steps", "schedule", "expected"),
    [(3, "wsd", 4.2), (3, "cosine", 3.2), (2, "wsd", 3.2), (1, "constant", 1.2), (19, "wsd", 4.2), (20, "wsd", 6.2)],
)
def test_room_for_the_checkpoints_that_the_run_keeps(uptrain, source, steps, schedule, expected):
    needed = plan(uptrain, source, "--steps", steps, *SIZE, "--schedule", schedule)["memory"]["kv"]
    assert needed["disk_bytes"] == round(expected * (needed["masters_bytes"] + needed["optimizer_bytes"]))


def test_memory_and_time_for_processes_and_teacher(uptrain, source, teacher):
    one = plan(uptrain, source, "--tokens", "1B", *SIZE)
    needed = one["memory"]["all"]
    states = needed["replicated_bytes_per_process"] - needed["activations_bytes"] - needed["logits_bytes"]
    assert states == 18 * one["n_params"]
    four = plan(uptrain, source, "--tokens", "1B", *SIZE, "--processes", 4, "--teacher", teacher)
    needed = four["memory"]["all"]
    besides = needed["gathered_bytes"] + needed["activations_bytes"] + needed["logits_bytes"]
    assert needed["sharded_bytes_per_process"]["4"] - besides == 18 * one["n_params"] / 4
    assert list(needed["sharded_bytes_per_process"]) == ["2", "4", "8"]
    many = plan(uptrain, source, "--tokens", "1B", *SIZE, "--processes", 16)
    assert list(many["memory"]["kv"]["sharded_bytes_per_process"]) == ["2", "4", "8", "16"]
    uneven = uptrain("plan", source, "--tokens", "1B", *SIZE, "--processes", 3)
    uneven.refused("64 windows of 1000 tokens cannot be divided evenly among 3 processes")
    time = four["time"]["all"]
    embedding = 67 * tiny.HIDDEN  # is only looked up
    multiplied = one["n_params"] - embedding
    assert time["flops"] == 8 * multiplied * four["tokens"]
    assert time["hours"]["H100"] == pytest.approx(time["device_hours"]["H100"] / 4)
    trained = four["memory"]["kv"]["gradients_bytes"] // 4
    assert four["memory"]["kv"]["disk_bytes"] == round(6.2 * 12 * trained)
    assert four["time"]["kv"]["flops"] == (6 * multiplied + 2 * trained) * four["tokens"]


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("phi", {}), ("gemma2", {}), ("gpt_oss", {})],
)
def test_flops_are_those_of_the_products_that_torch_counts(uptrain, tmp_path, family, changes):
    """Beside them, the plan counts norms and biases as products."""
    model = tiny.build(family, **changes)
    path = tiny.save(model, tmp_path / "model")
    planned = plan(uptrain, path, "--steps", 1, "--global-batch-tokens", 2, "--seq-len", 2, "--lr", 1e-3)
    model.config._experts_implementation = "eager"  # torch counts no grouped products
    with FlopCounterMode(display=False) as counter:
        model(torch.tensor([[1, 2]])).logits.sum().backward()
    counted = {str(operation): flops for operation, flops in counter.get_flop_counts()["Global"].items()}
    attention = sum(flops for name, flops in counted.items() if "bmm" in name or "attention" in name)
    products = sum(counted.values()) - attention
    vectors = sum(x.numel() for x in model.parameters() if x.dim() == 1)
    vectors += sum(x.numel() for name, x in model.named_parameters() if name.endswith("_proj_bias")) // 2  # of experts
    assert planned["time"]["all"]["flops"] == products + 2 * 6 * vectors


@pytest.mark.parametrize(
    "family",
    [
        "dots1", "flex_olmo", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "mixtral", "olmoe", "phimoe",
        "qwen2_moe", "qwen3_moe", "solar_open",
    ],
)  # fmt: skip
def test_of_experts_only_those_count_that_a_token_uses(uptrain, tmp_path, family):
    local = ("granitemoe", "granitemoeshared", "mixtral", "phimoe")
    key = {"dots1": "n_routed_experts", "solar_open": "n_routed_experts", **dict.fromkeys(local, "num_local_experts")}
    model = tiny.build(family, **{key.get(family, "num_experts"): 4})
    path = tiny.save(model, tmp_path / "model")
    part = ("--trainable", "attention")
    planned = plan(uptrain, path, "--steps", 1, "--global-batch-tokens", 2, "--seq-len", 2, "--lr", 1e-3, *part)
    model.config._experts_implementation = "eager"  # torch counts no grouped products
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.tensor([[1, 2]]))
    counted = {str(operation): flops for operation, flops in counter.get_flop_counts()["Global"].items()}
    products = sum(flops for name, flops in counted.items() if "bmm" not in name and "attention" not in name)
    vectors = sum(x.numel() for x in tiny.tensors(path).values() if x.dim() == 1)
    trained = planned["memory"]["attention"]["gradients_bytes"] // 4
    assert planned["time"]["attention"]["flops"] == 2 * (4 * (products // 4 + vectors) + 2 * trained)


@pytest.mark.parametrize(("trainable", "share"), [("all", 1 / 3), ("attention", 0.44), ("kv", 0.48), ("lora", 0.49)])
def test_recomputing_takes_another_forward_pass(uptrain, tmp_path, trainable, share):
    """Of the layers, so the share is larger the less is trained besides."""
    model, _ = write_llama_2_7b(tmp_path)
    fixed = (model, "--steps", 2, "--global-batch-tokens", 65536, "--seq-len", 4096, "--lr", 1e-4)
    assert plan(uptrain, *fixed)["time"][trainable]["recomputing_share"] == pytest.approx(share, abs=0.015)
    shown = uptrain("plan", *fixed, "--trainable", trainable).out
    assert re.search(r"with --activation-checkpointing \d\d% more", " ".join(shown.split()))


@pytest.mark.parametrize(("processes", "windows"), [(1, 4), (2, 2), (4, 1)])
def test_a_micro_batch_is_not_larger_than_a_step(uptrain, source, processes, windows):
    size = ("--global-batch-tokens", 2048, "--seq-len", 512, "--lr", 1e-3, "--processes", processes, "--memory", "1GB")
    memory = plan(uptrain, source, "--steps", 20, *size)["memory"]
    assert memory["micro_batch_tokens"] == 512 * windows
    fitting = {n: fit["micro_batch_tokens"] for n, fit in memory["fitting"].items()}
    assert fitting == {"1": 2048, "2": 1024, "4": 512}
    assert "--micro-batch 4 " in memory["fitting"]["1"]["command"]


def test_a_chosen_micro_batch_and_rank(uptrain, source):
    given = (source, "--steps", 20, "--global-batch-tokens", 2048, "--seq-len", 512, "--lr", 1e-3)
    default, chosen = (plan(uptrain, *given, *size)["memory"] for size in ((), ("--micro-batch", 2)))
    assert (default["micro_batch_tokens"], chosen["micro_batch_tokens"]) == (2048, 1024)
    assert 2 * chosen["all"]["activations_bytes"] == default["all"]["activations_bytes"]
    assert plan(uptrain, *given, "--micro-batch", 8)["memory"]["micro_batch_tokens"] == 2048  # as many as a step has
    fitting = plan(uptrain, *given, "--micro-batch", 2, "--memory", "1GB")["memory"]["fitting"]
    assert {n: fit["micro_batch_tokens"] for n, fit in fitting.items()} == {"1": 1024, "2": 1024, "4": 512}

    lora = (*given, "--trainable", "lora")
    trained = [plan(uptrain, *lora, *rank)["memory"]["lora"]["masters_bytes"] for rank in ((), ("--lora-rank", 8))]
    assert trained[0] == 2 * trained[1]
    command = " ".join(uptrain("plan", *lora, "--lora-rank", 8, "--micro-batch", 2).out.replace("\\\n", " ").split())
    assert "--trainable lora --lora-rank 8 --micro-batch 2 --data CACHE" in command
    command = " ".join(uptrain("plan", *lora, "--lora-rank", 8, "--memory", "1GB").out.replace("\\\n", " ").split())
    assert command.split("Next:")[1].count("--lora-rank 8") == 1
    uptrain("plan", *given, "--lora-rank", 8).refused("--lora-rank is for --trainable lora, not all")
    uptrain("plan", *lora, "--lora-rank", 33).refused("--lora-rank 33 is more than 32, the largest rank of the model's")


def test_memory_of_the_parts_side_by_side(uptrain, source, teacher):
    result = uptrain("plan", source, "--steps", 5, *SIZE, "--teacher", teacher, "--details")
    memory = plan(uptrain, source, "--steps", 5, *SIZE, "--teacher", teacher)["memory"]
    assert result.out[: result.out.index("Time for")].rstrip().splitlines()[-1].split()[:3] == [
        "host,",
        "while",
        "reading",
    ]
    for label, key in (("frozen weights", "frozen_bytes"), ("one device, or DDP", "replicated_bytes_per_process")):
        (line,) = (line for line in result.out.splitlines() if line.startswith(label))
        assert line.removeprefix(label).split() == [
            word for part in TRAINABLE for word in format_bytes(memory[part][key]).split()
        ]
    assert memory["all"]["replicated_bytes_per_process"] > memory["attention"]["replicated_bytes_per_process"]
    assert memory["attention"]["replicated_bytes_per_process"] > memory["kv"]["replicated_bytes_per_process"]
    table = result.out[result.out.index("Memory of a device") : result.out.index("Next:")]
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 80


def test_a_part_that_the_model_does_not_have(uptrain, tmp_path):
    phi3 = tiny.save(tiny.build("phi3"), tmp_path / "phi3")
    assert plan(uptrain, phi3, "--steps", 5, *SIZE)["memory"]["kv"] is None
    lines = uptrain("plan", phi3, "--steps", 5, *SIZE, "--details").out.splitlines()
    assert next(line for line in lines if line.startswith("gradients")).split()[-3] == "–"
    uptrain("plan", phi3, "--steps", 5, *SIZE, "--trainable", "kv").refused(
        "in one tensor", "use --trainable attention"
    )


def test_text(uptrain, source, llama_2_of_tiny_shape):
    result = uptrain("plan", source, "--alpha", 0.05, "--original", "llama-2-7b", "--details")
    (warning,) = result.succeeded().err.splitlines()
    assert warning.startswith("Warning: --original llama-2-7b has another shape than the model")
    for word in ("23,842", "100 B", "sure", "arXiv 2307.09288", "decay from step", "█", "1 H100"):
        assert word in " ".join(result.out.split()), word


def test_without_details_the_text_is_short(uptrain, tmp_path):
    """It has the memory of the part to train only, and no formulas, which docs/training.md has."""
    model, teacher = write_llama_2_7b(tmp_path)
    given = ("plan", model, "--teacher", teacher, "--alpha", 0.0025)
    out, memory = uptrain(*given).out, json.loads(uptrain(*given, "--json").out)["memory"]
    (row,) = (line for line in out.splitlines() if line.startswith("one device, or DDP"))
    both = [total["replicated_bytes_per_process"] for total in (memory["attention"], memory["attention"]["minimum"])]
    assert row.split()[4:] == " ".join(map(format_bytes, both)).split()
    text = " ".join(out.split())
    words = ("steps 1,193", "4,194,304 tokens", "wsd, peak 5e-05", "137 h on 1 H100", "99.87 GB for checkpoints")
    for word in (*words, "2 windows at a time 1 window, --activation-checkpointing", "--details shows all choices"):
        assert word in text, word
    page = " ".join((Path(__file__).parents[2] / "docs/training.md").read_text().split())
    for formula in (memory["formula"], TIME_FORMULA):
        assert formula not in text
    for part in (TIME_FORMULA.partition(" / ")[0], "8 bytes per trained parameter"):
        assert part in page and part not in text
    assert "loss at step 0" not in text and "loss at step 0" in uptrain(*given, "--details").out


def test_the_text_begins_with_an_answer_and_ends_with_the_next_command(uptrain, source, teacher):
    (source / "groupwise.json").write_text(json.dumps({"source": {"name": "parent"}, "method": "fit"}))
    given = ("plan", source, "--steps", 20, *SIZE, "--teacher", teacher)
    out, details = (uptrain(*given, *more).out for more in ((), ("--details",)))
    lines = [" ".join(line.split()) for line in details.splitlines()]
    text = " ".join(out.replace("\\\n", " ").split())
    memory = plan(uptrain, *given[1:])["memory"]["attention"]
    needed = format_bytes(memory["replicated_bytes_per_process"])
    assert f"in short training attention takes {needed} on one device, and < 1 s on 1 H100 parameters" in text
    assert lines.count("all attention* kv lora") == 2
    assert [line for line in lines if "1.000e-03" in line] == ["1.000e-03 at step 4 to 16"]
    options = f"--global-batch-tokens 64000 --lr 0.001 --seq-len 1000 --teacher {teacher}"
    prepare = f"uptrain prepare --data TEXTS --tokenizer {source} --seq-len 1000 --tokens 1.29M --out CACHE"
    assert text.endswith(f"Next: {prepare} uptrain run {source} --steps 20 {options} --data CACHE --out RUN")
    many = " ".join(uptrain(*given, "--processes", 2).out.replace("\\\n", " ").split())
    size_of_each = format_bytes(memory["sharded_bytes_per_process"]["2"])
    assert f"training attention takes {size_of_each} on each of 2 devices" in many
    assert f"--out CACHE GPUS=2 scripts/uptrain_multi_gpu.sh run {source} --steps 20" in many


def test_the_next_command_fits_the_memory_and_trains_the_part(uptrain, source):
    given = ("plan", source, "--steps", 20, *SIZE, "--trainable", "kv")
    chosen = " ".join(uptrain(*given).out.replace("\\\n", " ").split())
    assert "in short training kv takes" in chosen and "Memory of a device for --trainable kv" in chosen
    assert "--trainable (* chosen)" in uptrain(*given, "--details").out
    assert chosen.endswith("--trainable kv --data CACHE --out RUN")
    needed = plan(uptrain, *given[1:])["memory"]["kv"]
    room = (needed["replicated_bytes_per_process"] + needed["minimum"]["replicated_bytes_per_process"]) // 2
    fitting = " ".join(uptrain(*given, "--memory", room).out.replace("\\\n", " ").split())
    command = plan(uptrain, *given[1:], "--memory", room)["memory"]["fitting"]["1"]["command"]
    assert "--trainable kv" in command and "--micro-batch 8 " not in command  # 8 is the default here
    # A CPU computes in float32 by default, and would be slow in bfloat16.
    assert " --precision bf16" in command and "--precision" not in fitting
    command = command.replace(" --precision bf16", "")
    assert fitting.endswith(
        f"--out CACHE {command} --steps 20 --global-batch-tokens 64000 --lr 0.001 --data CACHE --out RUN"
    )
    assert uptrain(*given, "--memory", 10**4).out.rstrip().endswith("nothing fits 1 device of 10 kB")


def test_nothing_is_written(uptrain, source):
    before = tiny.snapshot(source.parent)
    plan(uptrain, source, "--steps", 5, *SIZE)
    assert tiny.snapshot(source.parent) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("exactly one of --alpha, --tokens and --steps, for example --alpha 0.0025; given: none",)),
        (("--alpha", 0.1, "--tokens", "1B"), ("given: --alpha and --tokens",)),
        (("--alpha", 5), ("--alpha 5.0", "0.05 means 5 %")),
        (("--alpha", "0.25%"), ("--alpha", "give a share: 0.0025 for 0.25 %.")),
        (("--alpha", "x"), ("'--alpha'",)),
        (("--tokens", "5x"), ("'--tokens'", "'5x' is not a count; give a whole number such as 4096, or 4K")),
        (("--steps", 0), ("'--steps'", "not a whole number of at least 1")),
        (("--steps", 5, "--lr", 0), ("--lr 0.0", "above 0")),
        (("--steps", 5, "--original", "gpt-5"), ("--original gpt-5: unknown; known are llama-1-7b",)),
        (("--steps", 5, "--schedule", "linear"), ("'wsd', 'cosine', 'constant', 'inverse-sqrt'",)),
        (("--steps", 5, "--warmup-steps", 6, *SIZE), ("6 warm-up steps do not fit", "room for 0 to 4")),
        (("--steps", 5, "--lr", 1e-3, "--global-batch-tokens", "4M", "--seq-len", 2048), ("3999744 or 4001792",)),
        (("--steps", 5, "--processes", 0, *SIZE), ("'--processes'",)),
        (("--steps", 5, "--data", "nowhere"), ("--data nowhere: no such file or folder",)),
        (("--steps", 5, "--teacher", "nowhere", *SIZE), ("nowhere: no such file or folder",)),
    ],
)
def test_bad_input(uptrain, source, arguments, words):
    uptrain("plan", source, *arguments).refused(*words)


def test_bad_models_and_caches(uptrain, source, cache, tmp_path):
    uptrain("plan", tmp_path / "none", "--steps", 5, *SIZE).refused("no such file or folder")
    uptrain("plan", source, "--steps", 5, *SIZE, "--data", cache).refused(
        f"{cache} has windows of 4000 tokens, not 1000; leave --seq-len out"
    )
    (source / "groupwise.json").write_text("{")
    uptrain("plan", source, "--steps", 5, *SIZE).refused("groupwise.json is damaged")
    (source / "groupwise.json").unlink()
    tiny.edit_config(source, intermediate_size=...)
    uptrain("plan", source, "--steps", 5, *SIZE).refused("intermediate_size = None")
    other = tiny.save(tiny.build("mpt"), tmp_path / "mpt")
    tiny.edit_config(other, intermediate_size=...)
    uptrain("plan", other, "--steps", 5, *SIZE).refused("the memory of model_type 'mpt' cannot be estimated")


def test_a_tensor_without_dimensions(uptrain, tmp_path):
    source = tiny.save(tiny.build(), tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    save_file({**weights, "scale": torch.ones(())}, source / "model.safetensors")
    assert plan(uptrain, source, "--steps", 5, *SIZE)["memory"]["all"]["logits_bytes"] > 0


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("mean", "far above the parent's, since heads were averaged"),
        ("pca", "above the parent's; in docs/study.md, it is below that of the mean"),
        ("fit", "above the parent's; in docs/study.md, the default merge adds 1 to 15 %"),
        ("latent", "above the parent's; docs/latent.md"),
    ],
)
def test_the_loss_to_expect_follows_from_the_merge(uptrain, source, method, expected):
    record = {
        "source": {"name": "parent", "groupwise": {"source": {"name": "old"}, "method": "first"}},
        "method": method,
    }
    (source / "groupwise.json").write_text(json.dumps(record))
    assert plan(uptrain, source, "--steps", 10, *SIZE)["first_loss"].startswith(expected)


def test_adafactor_needs_a_rate_as_in_a_run(uptrain, source, llama_2_of_tiny_shape):
    options = ("--steps", 10, "--original", "llama-2-7b", "--global-batch-tokens", "64K", "--seq-len", 1000)
    words = "--optimizer adafactor needs --lr"
    uptrain("plan", source, *options, "--optimizer", "adafactor").refused(words)
    assert plan(uptrain, source, *options, "--optimizer", "adafactor", "--lr", 1e-4)["schedule"]["peak_lr"] == 1e-4


@pytest.mark.parametrize(("method", "peak"), [("mean", 1e-4), ("fit", 5e-5), ("latent", 2e-5)])
def test_the_default_peak_follows_from_the_conversion(uptrain, source, llama_2_of_tiny_shape, method, peak):
    (source / "groupwise.json").write_text(json.dumps({"source": {"name": "parent"}, "method": method}))
    budget = ("--steps", 10, "--original", "llama-2-7b", "--global-batch-tokens", "64K", "--seq-len", 1000)
    planned = plan(uptrain, source, *budget)
    assert planned["schedule"]["peak_lr"] == planned["default_peak_lrs"]["attention"] == peak
    shown = " ".join(uptrain("plan", source, *budget, "--details").out.split())
    assert ("for --trainable: all 2e-05, attention 5e-05, kv 0.0001, lora 0.0001" in shown) == (method == "fit")
    given = (*budget, "--lr", 3e-4)
    assert plan(uptrain, source, *given)["default_peak_lrs"] is None
    assert "for --trainable: all" not in " ".join(uptrain("plan", source, *given, "--details").out.split())
    # A run resolves the same, for each part.
    budget_options = BudgetOptions(steps=10, original="llama-2-7b", global_batch_tokens=64_000)
    for part, default in {None: peak, **planned["default_peak_lrs"]}.items():
        options = RunOptions(
            budget=budget_options, model=source, init=None, data=("cache",), out=source.parent / "run",
            schedule="wsd", optimizer="adamw", weight_decay=0.0, seed=0, keep_last=2, micro_batch=1, trainable=part,
        )  # fmt: skip
        assert resolve_settings(options, source, 1000)[0].lr == default


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt_neox", {}, "under other names than the files do"),
        ("phi3", tiny.LONGROPE, "use windows of 16 tokens at most (--seq-len 16)"),
        ("mistral", {"sliding_window": 16}, None),
    ],
)
def test_what_run_refuses_is_not_planned(uptrain, tmp_path, monkeypatch, family, changes, words):
    folder = tiny.save(tiny.build(family, **changes), tmp_path / "model")
    fixed = ("plan", folder, "--steps", 5, "--lr", 1e-3, "--global-batch-tokens", 256, "--seq-len", 32, "--json")
    if words is None:
        assert json.loads(uptrain(*fixed).out)["warnings"] == []
        return
    uptrain(*fixed).refused(words)
    monkeypatch.setattr("uptrain.commands.plan.find_spec", lambda name: None)
    assert "was not checked, because that needs torch" in json.loads(uptrain(*fixed).out)["warnings"][0]


def test_a_cache_of_another_tokenizer_is_not_planned(uptrain, tmp_path):
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=302), tmp_path / "model"), 300)
    data = write_cache(tmp_path / "cache", [[[1, 2, 3] * 40]], 32, 302, tokenizer="0" * 64)
    fixed = ("plan", model, "--steps", 5, "--lr", 1e-3, "--global-batch-tokens", 256)
    uptrain(*fixed, "--data", data).refused(f"{data} was made with another tokenizer than that of {model}")
    own = write_cache(tmp_path / "own", [[[1, 2, 3] * 40]], 32, 302, tokenizer=load_tokenizer(model).sha256)
    uptrain(*fixed, "--data", own).succeeded()


def test_experts_are_not_planned_to_be_trained(uptrain, tmp_path):
    folder = tiny.save(tiny.build("mixtral"), tmp_path / "model")
    fixed = ("plan", folder, "--steps", 5, "--lr", 1e-3, "--global-batch-tokens", 256, "--seq-len", 32, "--json")
    for options in ((), ("--trainable", "lora")):
        uptrain(*fixed, *options).refused("under other names than the files do", "use --trainable attention")
    plan = json.loads(uptrain(*fixed, "--trainable", "attention").succeeded().out)
    assert [plan["memory"][part] is None for part in ("all", "attention", "kv", "lora")] == [True, False, False, True]
    shown = uptrain(*fixed[:-1], "--trainable", "attention", "--details").succeeded().out
    row = next(line.split() for line in shown.splitlines() if line.startswith("one device, or DDP"))
    assert (row[4], row[-1]) == ("–", "–") and row[5] != "–"


def test_few_steps_of_the_originals_batch(uptrain, source, llama_2_of_tiny_shape):
    fixed = ("--tokens", "20M", "--original", "llama-2-7b")
    assert plan(uptrain, source, *fixed)["steps"] == 5
    other, warning = plan(uptrain, source, *fixed)["warnings"]
    assert warning.startswith("the original's batch of 4,194,304 tokens leaves 5 steps")
    assert plan(uptrain, source, *fixed, "--global-batch-tokens", 131072)["warnings"] == [other]
    assert other.startswith("--original llama-2-7b has another shape")


def test_vocabularies_that_differ_are_not_planned(uptrain, tmp_path):
    model = tiny.save(tiny.build(vocab_size=257), tmp_path / "model")
    teacher = tiny.save(tiny.build(vocab_size=300), tmp_path / "teacher")
    fixed = ("plan", model, "--steps", 5, "--lr", 1e-3, "--global-batch-tokens", 256, "--seq-len", 32)
    uptrain(*fixed, "--teacher", teacher).refused(f"the teacher {teacher} has 300 tokens, the student 257")
    uptrain(*fixed, "--teacher", model).refused(f"--teacher {model} is the same model as MODEL; give the parent")
    other = make_tokenizer(tiny.save(tiny.build(vocab_size=257, seed=1), tmp_path / "other"), 257, eos=False)
    make_tokenizer(model, 256, bos=False, eos=False)
    uptrain(*fixed, "--teacher", other).refused(f"the teacher {other} has other ids than the student for")
    tiny.edit_config(model, vocab_size=250)
    uptrain(*fixed).refused("has 257 rows in model.embed_tokens.weight, but its config.json says vocab_size = 250")


def test_a_converted_model_without_its_parent_gets_the_advice_of_the_run(convert, uptrain, source, tmp_path):
    out = tmp_path / "merged"
    convert("mha-to-gqa", "--method", "mean", source, out, "--groups", 2).succeeded()
    budget = ("--steps", 4, "--lr", 1e-3, "--global-batch-tokens", 256, "--seq-len", 64)
    (advice,) = plan(uptrain, out, *budget)["warnings"]
    assert "distilling from that parent (--teacher FOLDER)" in advice
    assert plan(uptrain, out, *budget, "--teacher", source)["warnings"] == []


def test_a_family_that_convert_does_not_know(uptrain, tmp_path):
    """`run` may train it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32)).save_pretrained(tmp_path / "model")
    budget = ("--steps", 4, "--lr", 1e-3, "--global-batch-tokens", 2048, "--trainable", "all")
    uptrain("plan", tmp_path / "model", *budget).refused("'gpt2' is none of them", "`uptrain run` says")
