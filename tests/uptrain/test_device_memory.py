"""The memory of a run: what the plan estimates, what fits, and what `uptrain run` does where nothing fits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import real_runs
import tiny
import torch
from llama_2_7b import QKVO, llama_2_7b, write_llama_2_7b

from model.common.errors import InputError, RankError
from model.decoder import chunk_size
from model.geometry import ModelSizes
from uptrain.estimates.memory import (
    MemoryEstimator,
    MemoryOptions,
    layer_activation_bytes,
)
from uptrain.estimates.memory_fit import first_that_fits, micro_batch_sizes
from uptrain.estimates.parameter_counts import count_parameters
from uptrain.models.load import load_student, load_teacher
from uptrain.models.teacher_sharing import equal_tensors, share, shareable
from uptrain.runs import device_memory, resolve_settings


def models(taught=True, changed=frozenset(), **more):
    sizes = ModelSizes(32, 32, 8, 128, 4096)
    teacher = llama_2_7b(32) if taught else ()
    own = llama_2_7b(8)
    same = frozenset(tensor.name for tensor in {*own} & {*teacher} if tensor.name not in changed)
    return MemoryEstimator(tuple(own), tuple(teacher), same, {"model_type": "llama"}, sizes, 11008, 2048, **more)


def test_other_families_are_read_in_float32_and_with_the_whole_teacher():
    native = models()
    other = replace(native, config={"model_type": "qwen3"})
    needed = native.memory(MemoryOptions("attention", 1))
    read = needed.frozen + needed.masters + needed.teacher
    assert native.host_bytes(needed) == read - needed.shared
    assert other.host_bytes(needed) == max(read, 4 * count_parameters(native.tensors)) > native.host_bytes(needed)


PARTS = [
    ("all", 6_738_415_616 - 2 * 32 * 3072 * 4096),
    ("attention", 32 * (2 * 4096**2 + 2 * 1024 * 4096 + 4096)),
    ("kv", 32 * 2 * 1024 * 4096),
]


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize(("part", "n_trained"), PARTS)
def test_memory_of_llama_2_7b(part, n_trained, taught):
    """Trained parameters take 18 bytes, and a teacher what of it is no part of the student."""
    subject = models(taught)
    needed = subject.memory(MemoryOptions(part, 2))
    n_params = count_parameters(subject.tensors)
    assert needed.masters + needed.copies + needed.gradients + needed.optimizer == 18 * n_trained
    assert needed.frozen == 2 * (n_params - n_trained)
    assert needed.teacher == taught * 2 * 6_738_415_616
    alone = {"all": 0, "attention": 32 * (4 * 4096**2 + 4096), "kv": 32 * 2 * 4096**2}[part]
    assert needed.teacher - needed.shared == taught * 2 * (alone or 6_738_415_616)
    states = 18 * n_trained + needed.frozen + needed.teacher - needed.shared
    assert needed.per_device(1) == needed.replicated() == states + needed.activations + needed.logits
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 11008 + 2)
    ends = 2 * 32000 * 4096 + 4096
    own = {"all": ends + 4096 * (4 * 4096 + 3 * 11008 + 2), "attention": 4096 * (4 * 4096 + 1), "kv": 2 * 4096**2}[part]
    lm_head, chunk = (4 * 32000 * 4096 if part == "all" else 0), max(1 << 23, 4096 * 4096) * (16 if taught else 6)
    of_layer = {"all": layer, "attention": 2 * 4096**2 + 2 * 1024 * 4096 + 4096, "kv": 2 * 1024 * 4096}[part]
    moments = (  # in the loss, in the backward pass of the last layer, and at its end
        needed.activations + needed.logits + 0.5 * lm_head,
        needed.activations + 0.5 * lm_head + 8 * of_layer,
        8 * (ends if part == "all" else 0),
    )
    whole_gradients = max(moments) - needed.activations - needed.logits
    assert needed.gathered == 2 * (ends + 2 * layer + taught * own) + whole_gradients
    divided = 16 * n_trained + needed.frozen + needed.teacher - needed.shared
    assert needed.per_device(8) == divided // 8 + needed.gathered + needed.activations + needed.logits
    assert subject.host_bytes(needed) == 4 * n_trained + needed.frozen + needed.teacher - needed.shared
    assert needed.logits == chunk + lm_head


def test_what_the_merge_changed_is_not_shared():
    needed = models(changed=QKVO).memory(MemoryOptions("kv", 1))
    assert needed.teacher - needed.shared == 2 * 32 * 4 * 4096**2


@pytest.mark.parametrize("part", ["attention", "lora"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi", "gemma", "gemma2", "gemma3_text", "gpt_oss"])
def test_frozen_parameters_take_what_their_modules_hold(tmp_path, convert, family, tied, part):
    """Norms, scaled embeddings and joined experts of transformers' classes are float32, and the teacher has its own."""
    parent = tiny.save(tiny.build(family, tie_word_embeddings=tied), tmp_path / "parent", "bfloat16")
    model = tmp_path / "model"
    convert("mha-to-gqa", "--method", "mean", parent, model, "--groups", 2).succeeded()
    student = load_student(model, part, 4)
    needed = MemoryEstimator.read(model, parent, 32, lora_rank=4).memory(MemoryOptions(part, 1))
    parameters = list(student.parameters())
    assert needed.frozen == sum(p.nbytes for p in parameters if not p.requires_grad)
    assert needed.masters == sum(p.nbytes for p in parameters if p.requires_grad)
    owners = shareable(student, equal_tensors(model, part, parent), torch.bfloat16)
    teacher = load_teacher(parent, "bf16", skip=owners, float32_states=False)
    assert needed.teacher == sum(p.nbytes for p in load_teacher(parent, "bf16", float32_states=False).parameters())
    assert needed.shared == share(owners, teacher, torch.bfloat16)


def test_a_7b_fits_where_it_should():
    """With its teacher on one device, windows of 2,048 tokens: attention into 60 GB, keys and values into 24 GB."""
    subject = models(changed=QKVO)
    assert first_that_fits(subject, ["attention"], 60e9, 4).flags == "--trainable attention"
    assert first_that_fits(subject, ["kv"], 24e9, 4) == MemoryOptions("kv", 2, activation_checkpointing=True)
    assert subject.memory(MemoryOptions("attention", 1)).per_device(1) <= 60e9
    assert subject.memory(MemoryOptions("kv", 1, activation_checkpointing=True)).per_device(1) <= 24e9


def test_activations_of_llama_2_7b():
    sizes = ModelSizes(32, 32, 8, 128, 4096)
    kept = {part: layer_activation_bytes(sizes, 11008, part, 2) for part in ("all", "attention", "kv")}
    kv = 10 * 4096 + 4 * 4096 + 4 * 1024 + 6 * 11008
    assert kept == {"kv": kv, "attention": kv + 4 * 4096, "all": kv + 10 * 4096 + 2 * 11008}
    subject = models()
    assert subject.memory(MemoryOptions("kv", 3)).activations == 3 * 2048 * 32 * kv
    assert subject.memory(MemoryOptions("kv", 3, activation_checkpointing=True)).activations == 3 * 2048 * (
        32 * 4 * 4096 + kv
    )


def test_float32_has_no_copies_and_wider_teachers():
    half, full = (models(precision=precision).memory(MemoryOptions("kv", 1)) for precision in ("bf16", "fp32"))
    assert full.copies == 0 < half.copies
    assert (full.teacher, full.frozen) == (2 * half.teacher, half.frozen)


def test_states_of_adafactor_are_rows_and_columns():
    needed = models(optimizer="adafactor").memory(MemoryOptions("kv", 1))
    assert needed.optimizer == 32 * 2 * 4 * (1024 + 4096)


def test_the_first_way_that_fits():
    """The largest micro-batch before recomputing, and recomputing before a smaller part."""
    subject = models()
    assert list(micro_batch_sizes(2048, 100)) == [4, 2, 1]
    assert list(micro_batch_sizes(2048, 3)) == [3, 1], "no more than a device has in a step"

    def bytes_of(*way, devices=1):
        return subject.memory(MemoryOptions(*way)).per_device(devices)

    parts = ("all", "attention", "kv")
    for way in (("all", 4), ("all", 2), ("all", 1), ("all", 4, True), ("attention", 4), ("kv", 1, True)):
        first = first_that_fits(subject, parts, bytes_of(*way), 4)
        assert subject.memory(first).per_device(1) <= bytes_of(*way)
    assert first_that_fits(subject, parts, bytes_of("all", 2), 4) == MemoryOptions("all", 2)
    assert first_that_fits(subject, parts, bytes_of("all", 2) - 1, 4) == MemoryOptions("all", 1)
    assert first_that_fits(subject, ["attention"], bytes_of("attention", 1) - 1, 4).activation_checkpointing
    assert first_that_fits(subject, parts, bytes_of("kv", 1, True) - 1, 4) is None
    assert first_that_fits(subject, parts, bytes_of("attention", 1, devices=8), 4, 8) is not None


@pytest.fixture
def seven(tmp_path):
    """Return the headers of Llama-2-7B after the default conversion, and of its parent."""
    return write_llama_2_7b(tmp_path)


def test_plan_names_commands_that_fit(uptrain, seven):
    model, teacher = seven
    fixed = ("plan", model, "--teacher", teacher, "--alpha", 0.0025, "--seq-len", 2048, "--processes", 16)
    fitting = json.loads(uptrain(*fixed, "--memory", "24GB", "--json").out)["memory"]["fitting"]
    assert list(fitting) == ["1", "2", "4", "8", "16"]
    assert all(way["bytes_per_process"] <= 24e9 for way in fitting.values())
    one = fitting["1"]
    assert (one["trainable"], one["activation_checkpointing"], one["micro_batch_tokens"]) == ("kv", True, 4096)
    options = "--trainable kv --activation-checkpointing --precision bf16 --micro-batch 2 --seq-len 2048"
    assert one["command"] == f"uptrain run {model} --teacher {teacher} {options}"
    assert fitting["2"]["command"].startswith(f"GPUS=2 scripts/uptrain_multi_gpu.sh run {model}")
    text = " ".join(uptrain(*fixed, "--memory", "24GB").out.split())
    of_one = " ".join(uptrain(*fixed[:-2], "--memory", "24GB").out.split())
    assert "training kv takes" in of_one and "peak 0.0001, " in of_one, "the rate of the part that fits"
    assert "Options that fit into 24 GB" in text and "--activation-checkpointing" in text
    assert "--trainable attention" in fitting["8"]["command"], "all is not tried after a conversion"
    small = json.loads(uptrain(*fixed, "--memory", "3 GB", "--json").out)["memory"]["fitting"]
    assert set(small.values()) == {None}
    other = json.loads(uptrain(*fixed, "--memory", "24GB", "--optimizer", "adamw8bit", "--json").out)
    assert "--optimizer adamw8bit --precision bf16 --micro-batch" in other["memory"]["fitting"]["1"]["command"]
    assert "none fits" in uptrain(*fixed, "--memory", "5GB").out
    uptrain(*fixed, "--optimizer", "adafactor").refused("--optimizer adafactor needs --lr")
    uptrain(*fixed, "--optimizer", "adafactor", "--lr", 1e-3).succeeded()
    assert json.loads(uptrain(*fixed, "--memory", "24GiB", "--json").out)["memory"]["fitting"]["1"]
    for wrong in ("24 bytes", "GB", "-1GB"):
        uptrain(*fixed, f"--memory={wrong}").refused("is not a size; write for example 24GB")
    for wrong in ("24", "24 B"):
        uptrain(*fixed, f"--memory={wrong}").refused("is less than 10,000 bytes; give a unit, for example 24GB")


@pytest.fixture
def data(tmp_path):
    return real_runs.make_inputs(tmp_path / "inputs")["data"]


def test_a_run_that_does_not_fit_is_refused_before_weights_are_read(uptrain, seven, data, tmp_path, monkeypatch):
    """The folders hold no weights at all, so reading them would fail with another message."""
    model, teacher = seven
    fixed = ("run", model, "--teacher", teacher, "--data", data, "--steps", 2, "--lr", 1e-4, "--precision", "bf16")
    fixed += ("--global-batch-tokens", 2048, "--out", tmp_path / "run", "--trainable", "all")
    monkeypatch.setattr(device_memory, "usable_memory", lambda: int(24e9))
    uptrain(*fixed).refused(
        "--trainable all needs an estimated 12", "24 GB free", f"this fits: uptrain run {model} --teacher {teacher}",
        "--trainable kv", "or try anyway, with --micro-batch 1",
    )  # fmt: skip
    monkeypatch.setattr(device_memory, "usable_memory", lambda: int(3e9))
    uptrain(*fixed).refused("nothing fits", f"uptrain plan {model} --memory 3GB")
    assert not (tmp_path / "run").exists()


def test_the_estimate_is_of_the_shards_of_one_replica(seven, monkeypatch):
    model, teacher = seven
    needed = models().memory(MemoryOptions("kv", 1))
    assert needed.per_device(4) < needed.per_device(2)
    monkeypatch.setattr(device_memory, "usable_memory", lambda: needed.per_device(4))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert device_memory.fitting_micro_batch(models(), MemoryOptions("kv", 1), 4, model, teacher) == 1
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    for kind in ("REPLICATE", "SHARD"):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_DP_{kind}_SIZE", "2")
    with pytest.raises(InputError, match="--trainable kv needs"):
        device_memory.fitting_micro_batch(models(), MemoryOptions("kv", 1), 4, model, teacher)


def test_a_busy_gpu_is_named_by_its_process(seven, monkeypatch):
    """The first process prints the errors of all, but another GPU may have less memory."""
    model, teacher = seven
    monkeypatch.setattr(device_memory, "usable_memory", lambda: int(3e9))
    monkeypatch.setattr(device_memory, "uses_gpu", lambda: True)
    monkeypatch.setenv("RANK", "3")
    for local_rank, kind, words in (
        ("0", InputError, "--trainable kv needs"),
        ("3", RankError, "process 3: --trainable"),
    ):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(kind, match=words):
            device_memory.fitting_micro_batch(models(), MemoryOptions("kv", 1), 4, model, teacher)


@pytest.mark.parametrize("windows", [1, 3, 32, 256])
def test_the_default_micro_batch_is_the_largest_that_fits(uptrain, tmp_path, monkeypatch, windows):
    """Chunks of logits take the most of a tiny model, so those are made small."""
    inputs = real_runs.make_inputs(tmp_path / "inputs")
    monkeypatch.setattr(chunk_size, "MIN_CHUNK_LOGITS", 0)
    subject = replace(MemoryEstimator.read(inputs["model"], None, 32, "fp32"), repeats_kv=True)
    size = subject.memory(MemoryOptions("all", windows)).per_device(1)
    monkeypatch.setattr(device_memory, "usable_memory", lambda: size)
    out = tmp_path / "run"
    fixed = ("run", inputs["model"], "--data", inputs["data"], "--lr", 1e-3, "--steps", 2)
    fixed += ("--global-batch-tokens", 8192)
    uptrain(*fixed, "--out", out, "--max-minutes", 0).succeeded()
    chosen = json.loads((out / "run.json").read_text())["settings"]["micro_batch"]
    assert chosen <= windows < 2 * chosen
    other = tmp_path / "other"
    result = uptrain(*fixed, "--out", other, "--max-minutes", 0, "--micro-batch", 300)
    result.succeeded()
    # A step has 256 windows.
    assert ("--trainable all --micro-batch 256 needs an estimated" in result.err) == (windows < 256)
    assert ("the run may fail for lack of memory" in result.err) == (windows < 256)
    assert json.loads((other / "run.json").read_text())["settings"]["micro_batch"] == 300


def test_a_reserve_is_left_free(monkeypatch):
    """Measured memory is up to 7.4 % above the estimate, so one that takes all free memory would fail in a step."""
    monkeypatch.setattr(device_memory, "available_memory", lambda: 10_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    free = device_memory.usable_memory()
    assert free * 1.074 < 5_000 < free * 1.1


def test_models_without_an_estimate_take_the_default(uptrain, tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "usable_memory", lambda: 0)
    inputs = real_runs.make_inputs(tmp_path / "inputs")
    tiny.edit_config(inputs["model"], model_type="gpt2")
    config = json.loads(Path(inputs["model"], "config.json").read_text())
    assert not device_memory.has_estimate(config)
    out = tmp_path / "run"
    fixed = ("run", "--init", inputs["parent"], "--data", inputs["data"], "--lr", 1e-3, "--steps", 2)
    uptrain(*fixed, "--global-batch-tokens", 256, "--out", out, "--max-minutes", 0).succeeded()
    assert json.loads((out / "run.json").read_text())["settings"]["micro_batch"] == 256 // 32


@pytest.mark.parametrize("value", ["abc", "0", "-1"])
def test_a_number_of_processes_that_is_none(monkeypatch, value):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    with pytest.raises(InputError, match=rf"the variable LOCAL_WORLD_SIZE is '{value}', not a number of processes"):
        device_memory.usable_memory()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    assert device_memory.usable_memory() > 0


def test_the_advice_counts_adapters(uptrain, tmp_path, monkeypatch):
    inputs, ranks = real_runs.make_inputs(tmp_path / "inputs"), []
    real = resolve_settings.MemoryEstimator.read
    monkeypatch.setattr(
        resolve_settings.MemoryEstimator, "read", lambda *given: ranks.append(given[-1]) or real(*given)
    )
    fixed = ("--steps", 1, "--lr", 1, "--global-batch-tokens", 256, "--max-minutes", 0)
    uptrain("run", inputs["model"], "--data", inputs["data"], "--out", tmp_path / "run", *fixed).succeeded()
    assert ranks == [resolve_settings.DEFAULT_LORA_RANK]


@pytest.mark.parametrize(("free", "named"), [(1_239_999, "1.23MB"), (0, "0.01MB")])
def test_the_advice_names_a_size_that_the_plan_takes(uptrain, data, tmp_path, monkeypatch, free, named):
    monkeypatch.setattr("uptrain.runs.device_memory.usable_memory", lambda: free)
    out = tmp_path / "run"
    large = tiny.save(tiny.build(hidden_size=256, intermediate_size=512), tmp_path / "large")
    run = ("run", large, "--data", data, "--out", out, "--steps", 1, "--lr", 1)
    uptrain(*run, "--global-batch-tokens", 256).refused("`uptrain plan", f"--memory {named}")
    plan = ("--steps", 1, "--lr", 1, "--global-batch-tokens", 256, "--seq-len", 32, "--memory", named)
    uptrain("plan", large, *plan).succeeded()
