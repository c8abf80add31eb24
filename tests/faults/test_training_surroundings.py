"""A run survives what is around it: its display, its folder's history, data that do not fit, a lack of memory."""

import errno
import json
import shutil
from types import SimpleNamespace

import caches
import pytest
import real_runs
import tiny
import torch
from tiny_tokenizers import SENTENCES, make_tokenizer

from model.common import console
from model.common.machine import available_memory
from uptrain.budget.memory import MemoryEstimator, MemoryOptions
from uptrain.data.token_cache import TokenCache
from uptrain.runs import progress, resolve_settings
from uptrain.runs import run as run_module
from uptrain.training import loop
from uptrain.training.metrics_log import Metrics


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return real_runs.make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_a_display_that_cannot_be_written(uptrain, inputs, tmp_path, monkeypatch, number):
    def full(*arguments, **options):
        raise OSError(number, "no")

    uptrain(*real_runs.arguments(inputs, tmp_path / "shown")).succeeded()
    monkeypatch.setattr(progress, "echo", full)
    uptrain(*real_runs.arguments(inputs, tmp_path / "silent")).succeeded()
    real_runs.assert_same_run(tmp_path / "shown", tmp_path / "silent")


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


@pytest.mark.parametrize("option", ["--data", "--eval-data"])
def test_nothing_to_predict(uptrain, inputs, tmp_path, option):
    empty = caches.write_cache(tmp_path / "empty", [[[1], [2], [3]] * 40], 32, real_runs.VOCAB)
    more = (option, empty) if option == "--eval-data" else ()
    changed = inputs if more else {**inputs, "data": empty}
    uptrain(*real_runs.arguments(changed, tmp_path / "run", *more)).refused(f"{option} {empty} has nothing to predict")
    assert not (tmp_path / "run").exists()


def test_a_missing_model_or_text_is_named(uptrain, inputs, tmp_path):
    run = ("run", inputs["model"], "--data", inputs["data"], "--out", tmp_path / "run", "--steps", 1, "--lr", 1)
    run += ("--global-batch-tokens", 256)
    nowhere = tmp_path / "nowhere"
    uptrain(*run, "--eval-data", nowhere).refused(f"--eval-data {nowhere}: no such file or folder")
    uptrain(*run, "--teacher", nowhere).refused(f"{nowhere}: no such file or folder; give a model's folder")
    uptrain("evaluate", nowhere, "--data", inputs["data"]).refused(f"{nowhere}: no such file or folder")
    two = uptrain(*run, "--data", inputs["held_out"], "--seq-len", 32)
    two.refused(f"--data {inputs['data']} is a token cache, which stands alone")


def test_names_of_models_in_the_hubs_cache(uptrain, inputs, tmp_path, monkeypatch):
    folder = tmp_path / "cache/models--acme--tiny"
    shutil.copytree(inputs["model"], folder / "snapshots" / ("a" * 40))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    named, direct = tmp_path / "named", tmp_path / "direct"
    uptrain(*real_runs.arguments({**inputs, "model": "acme/tiny"}, named, steps=4)).succeeded()
    uptrain(*real_runs.arguments(inputs, direct, steps=4)).succeeded()
    real_runs.assert_same_run(named, direct)
    uptrain("evaluate", "acme/other", "--data", inputs["data"]).refused("hf download acme/other")


def test_a_run_from_random_weights_says_nothing_of_a_conversion(uptrain, convert, inputs, tmp_path):
    converted = tmp_path / "converted"
    convert("mha-to-gqa", inputs["parent"], converted, "--groups", 2, "--method", "mean").succeeded()
    run, out = tmp_path / "run", tmp_path / "out"
    fixed = ("--data", inputs["data"], "--steps", 1, "--lr", 1e-8, "--global-batch-tokens", 256)
    uptrain("run", "--init", converted, *fixed, "--out", run).succeeded()
    uptrain("export", run, out).succeeded()
    assert not (out / "groupwise.json").exists()
    card = (out / "README.md").read_text()
    assert "Conversion by Groupwise" not in card and "All weights are trained from random ones." in card


def test_after_training_nothing_holds_of_the_merge_alone(uptrain, convert, inputs, tmp_path):
    """The card says what training changed, and the plan shares only what is still the parent's."""
    converted, run, out = tmp_path / "converted", tmp_path / "run", tmp_path / "out"
    parent = inputs["parent"]
    convert("mha-to-gqa", parent, converted, "--groups", 2, "--method", "mean").succeeded()
    arguments = real_runs.arguments({**inputs, "model": converted}, run, "--trainable", "all", steps=4)
    uptrain(*arguments).succeeded()
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


def test_the_advice_counts_adapters(uptrain, inputs, tmp_path, monkeypatch):
    ranks = []
    real = resolve_settings.MemoryEstimator.read
    monkeypatch.setattr(
        resolve_settings.MemoryEstimator, "read", lambda *given: ranks.append(given[-1]) or real(*given)
    )
    uptrain(
        "run",
        inputs["model"],
        "--data",
        inputs["data"],
        "--out",
        tmp_path / "run",
        "--steps",
        1,
        "--lr",
        1,
        "--global-batch-tokens",
        256,
        "--max-minutes",
        0,
    ).succeeded()
    assert ranks == [resolve_settings.DEFAULT_RANK]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to"), MemoryError("8.00 MiB")])
def test_a_lack_of_memory_is_one_line(uptrain, inputs, tmp_path, monkeypatch, error):
    def lacking(*arguments, **options):
        raise error

    monkeypatch.setattr(loop, "_backward", lacking)
    result = uptrain(*real_runs.arguments(inputs, tmp_path / "run"))
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("Error: after step 0, memory ran out (")
    assert "`uptrain resume" in result.err and "Traceback" not in result.err
    assert "also with a smaller --micro-batch" in result.err
    monkeypatch.setattr("uptrain.evaluate_folder.evaluate", lacking)
    result = uptrain("evaluate", inputs["model"], "--data", inputs["data"])
    assert (result.code, result.err.splitlines()[-1][:26]) == (1, "Error: not enough memory (")


def test_files_that_are_left_out_are_named(uptrain, tmp_path):
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "model"), 300)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "A.TXT").write_text("\n".join(SENTENCES * 20))
    (texts / "notes.md").write_text("left out")
    run = ("run", model, "--data", texts, "--out", tmp_path / "run", "--steps", 1, "--lr", 1e-3, "--seq-len", 32)
    result = uptrain(*run, "--global-batch-tokens", 64).succeeded()
    warning = f"Warning: --data: 1 files of an unknown format are left out, such as {texts / 'notes.md'}."
    assert warning in result.err.splitlines()
    assert "1 documents" in result.err


def test_a_teacher_with_another_tokenizer(uptrain, tmp_path):
    """Of the same size, with two tokens exchanged."""
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300, num_key_value_heads=2), tmp_path / "model"), 300)
    teacher = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "teacher"), 300)
    content = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SENTENCES * 20))
    run = ("run", model, "--data", texts, "--teacher", teacher, "--steps", 1, "--lr", 1e-3, "--seq-len", 32)
    run += ("--global-batch-tokens", 64)
    uptrain(*run, "--out", tmp_path / "same").succeeded()
    (teacher / "tokenizer.json").write_text(json.dumps(content))
    words = f"the teacher {teacher} has other ids than the student for 2 tokens, such as 'a'"
    uptrain(*run, "--out", tmp_path / "other").refused(words)
    assert not (tmp_path / "other.data").exists()
    evaluate = ("evaluate", model, "--data", texts, "--teacher", teacher, "--seq-len", 32)
    uptrain(*evaluate).refused(words)


def test_an_uneven_step_is_refused_before_texts_are_tokenised(uptrain, tmp_path, monkeypatch):
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "model"), 300)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(SENTENCES * 20))
    monkeypatch.setenv("WORLD_SIZE", "3")
    run = ("run", model, "--data", texts, "--out", tmp_path / "run", "--steps", 1, "--lr", 1e-3, "--seq-len", 32)
    uptrain(*run, "--global-batch-tokens", 64).refused("2 windows cannot be divided evenly among 3 processes")
    assert not (tmp_path / "run.data").exists()


def test_a_damaged_checkpoint_takes_no_place(uptrain, inputs, tmp_path):
    """Of the last two that are kept."""
    run = tmp_path / "run"
    more = ("--save-every-steps", 3, "--keep-last", 2, "--schedule", "constant")
    uptrain(*real_runs.arguments(inputs, run, *more, steps=6)).succeeded()
    assert real_runs.checkpoints(run) == ["step-00000003", "step-00000006"]
    next((run / "checkpoints/step-00000006/tensors").glob("*.distcp")).write_bytes(b"")
    longer = tmp_path / "longer"
    shutil.copytree(run, longer)
    settings = json.loads((longer / "run.json").read_text())
    settings["settings"]["save_every"], settings["settings"]["steps"] = 4, 8
    (longer / "run.json").write_text(json.dumps(settings))
    uptrain("resume", longer).succeeded()
    assert real_runs.checkpoints(longer) == ["step-00000004", "step-00000008"]
    uptrain("resume", run).succeeded()
    assert real_runs.checkpoints(run) == ["step-00000003", "step-00000006"]


@pytest.mark.parametrize(("rank", "shows"), [("0", True), ("1", False)])
def test_one_process_draws_the_bar(monkeypatch, rank, shows):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    drawn = []

    class Recorded(console.Progress):
        def __init__(self, *columns, **options):
            drawn.append(columns)
            super().__init__(*columns, **options)

    monkeypatch.setattr(console, "Progress", Recorded)
    with console.progress_bar("Evaluating", 3, quiet=False, unit="windows") as advance:
        advance(1)
    assert bool(drawn) == shows


def test_a_limit_of_the_control_group(tmp_path, monkeypatch):
    """The least of the machine and of every group with a limit; what the kernel can free counts as free."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**12))
    own = tmp_path / "own"
    assert available_memory(tmp_path / "none", own) == 10**12

    def write(group, **files):
        group.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (group / name.replace("__", ".")).write_text(f"{content}\n")

    v2 = tmp_path / "v2"
    write(v2 / "job", memory__max="max", memory__high="max", memory__current=5, memory__stat="inactive_file 2")
    write(
        v2 / "job/step", memory__max=50_000, memory__current=30_000, memory__stat="inactive_file 4000\nactive_file 900"
    )
    own.write_text("0::/job/step\n")
    assert available_memory(v2, own) == 24_900
    (v2 / "job/step/memory.stat").unlink()
    assert available_memory(v2, own) == 20_000
    write(v2 / "job", memory__high=21_000, memory__current=20_000)
    assert available_memory(v2, own) == 1_002
    own.write_text("0::/job/other\n")  # no such group: those above it count
    assert available_memory(v2, own) == 1_002
    v1 = tmp_path / "v1"
    write(v1 / "memory", memory__limit_in_bytes=9000, memory__usage_in_bytes=9500, memory__stat="total_inactive_file 0")
    for controllers in ("memory", "cpuset,memory"):
        own.write_text(f"9:name=systemd:/\n4:{controllers}:/docker/abc\n0::/\n")
        assert available_memory(v1, own) == 0
    write(v1 / "memory", memory__limit_in_bytes=2**63 - 4096)
    assert available_memory(v1, own) == 10**12


@pytest.mark.parametrize(("free", "named"), [(1_239_999, "1.23MB"), (0, "0.01MB")])
def test_the_advice_names_a_size_that_the_plan_takes(uptrain, inputs, tmp_path, monkeypatch, free, named):
    monkeypatch.setattr("uptrain.runs.device_memory.usable_memory", lambda: free)
    out = tmp_path / "run"
    large = tiny.save(tiny.build(hidden_size=256, intermediate_size=512), tmp_path / "large")
    run = ("run", large, "--data", inputs["data"], "--out", out, "--steps", 1, "--lr", 1)
    uptrain(*run, "--global-batch-tokens", 256).refused("`uptrain plan", f"--memory {named}")
    plan = ("--steps", 1, "--lr", 1, "--global-batch-tokens", 256, "--seq-len", 32, "--memory", named)
    uptrain("plan", large, *plan).succeeded()


def test_a_tokenizer_that_cannot_be_compared_is_told(uptrain, inputs, tmp_path):
    student = shutil.copytree(inputs["model"], tmp_path / "student")
    make_tokenizer(student)
    arguments = real_runs.arguments({**inputs, "model": student}, tmp_path / "run", loss="distill", steps=4)
    ran = uptrain(*arguments)
    assert "the same tokenizer is not checked" in ran.err


def test_a_longer_run_that_repeats_its_data_says_so(uptrain, inputs, tmp_path):
    run, longer = tmp_path / "run", tmp_path / "longer"
    uptrain(*real_runs.arguments(inputs, run, steps=4)).succeeded()
    windows = TokenCache.open(inputs["data"]).n_windows
    per_step = json.loads((run / "run.json").read_text())["settings"]["global_batch"]
    ran = uptrain("extend", run, "--out", longer, "--steps", 2 * windows // per_step, "--max-minutes", 0).succeeded()
    assert "Warning: the data are read 1.89 times" in ran.err


def test_an_empty_option_is_no_default(uptrain, inputs, tmp_path, monkeypatch):
    """As a variable of the shell that is not set gives it. A folder's data are not meant, even from inside a cache."""
    monkeypatch.chdir(inputs["data"])
    out = tmp_path / "run"
    words = "the path is empty. Is a variable of the shell unset?"
    uptrain(*real_runs.arguments(inputs, out, "--eval-data", "")).refused(f"--eval-data: {words}")
    uptrain(*real_runs.arguments({**inputs, "data": ""}, out, "--seq-len", 32)).refused(f"--data: {words}")
    assert not out.exists()


@pytest.mark.parametrize("variables", [{"RANK": "1"}, {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a"}])
def test_ranks_that_no_launcher_has_set(uptrain, inputs, tmp_path, monkeypatch, variables):
    """A cluster may set them in each process; errors are printed all the same."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    uptrain("status", tmp_path / "none").refused("none does not exist")
    if "WORLD_SIZE" in variables:
        uptrain(*real_runs.arguments(inputs, tmp_path / "run")).refused("WORLD_SIZE=2 is set, but not LOCAL_RANK")


@pytest.mark.parametrize("value", ["abc", "0", "-1", "1.5"])
def test_a_world_size_that_is_no_number(uptrain, inputs, tmp_path, monkeypatch, value):
    monkeypatch.setenv("WORLD_SIZE", value)
    words = f"the variable WORLD_SIZE is {value!r}, not a number of processes"
    uptrain(*real_runs.arguments(inputs, tmp_path / "run")).refused(words)
    uptrain("evaluate", inputs["model"], "--data", inputs["data"]).refused(words)


def test_a_state_that_cannot_be_written_at_the_end(uptrain, inputs, tmp_path, monkeypatch):
    """The run is saved. So is the reason for which it failed, which is printed."""
    real = run_module._write_state

    def full(folder, status, *rest):
        if status != "running":
            raise OSError(errno.ENOSPC, "No space left on device", "run_state.json")
        real(folder, status, *rest)

    monkeypatch.setattr(run_module, "_write_state", full)
    result = uptrain(*real_runs.arguments(inputs, tmp_path / "run")).succeeded()
    assert "Warning: run_state.json could not be written" in result.err
    monkeypatch.setattr(run_module, "train", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    result = uptrain(*real_runs.arguments(inputs, tmp_path / "failing"))
    assert (result.code, "run_state.json could not" in result.err, "full" in result.err.splitlines()[-1]) == (
        1,
        True,
        True,
    )


def test_metrics_that_are_removed_meanwhile(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.path.touch()
    metrics.path.unlink()
    assert metrics.write({"step": 1, "event": "e"}) == ""
    assert json.loads(metrics.path.read_text()) == {"step": 1, "event": "e"}


def test_a_run_behind_a_link(uptrain, tmp_path):
    """The data beside the real folder are found after both were moved."""
    model = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "model"), 300)
    (tmp_path / "texts.txt").write_text("\n".join(SENTENCES * 9))
    out = tmp_path / "before/run"
    out.parent.mkdir()
    fixed = ("--seq-len", 32, "--steps", 2, "--lr", 1e-3, "--global-batch-tokens", 256, "--max-minutes", 0)
    uptrain("run", model, "--data", tmp_path / "texts.txt", "--out", out, *fixed).succeeded()
    out.parent.rename(tmp_path / "after")
    (tmp_path / "latest").symlink_to("after/run")
    uptrain("resume", tmp_path / "latest").succeeded()
