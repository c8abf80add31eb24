"""A run that was stopped and resumed is the run uninterrupted."""

import json

import pytest
import tiny
from real_runs import LAYOUTS, VOCAB, arguments, assert_same_run, drive, make_inputs, steps

CELLS = [
    pytest.param(layout, precision, loss, marks=() if (layout, precision, loss) in FAST else pytest.mark.slow)
    for FAST in [{("one process", "fp32", "next-token"), ("FSDP2 x 2", "bf16", "distill")}]
    for layout in LAYOUTS
    for precision in ("fp32", "bf16")
    for loss in ("next-token", "distill")
]


@pytest.mark.parametrize(("layout", "precision", "loss"), CELLS)
def test_stopped_three_times_is_bit_equal(inputs, tmp_path, layout, precision, loss):
    """Stopped twice in the first epoch (steps 0 to 5) and once in the second."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    more = ("--precision", precision, "--eval-data", inputs["held_out"], "--eval-every", 4)
    resume = {"arguments": ["resume", str(pieces)]}
    jobs = [
        {"arguments": arguments(inputs, whole, *more, loss=loss)},
        {"arguments": arguments(inputs, pieces, *more, loss=loss), "stop_in": 1},
        {**resume, "stop_in": 3},
        {**resume, "stop_in": 7},
        resume,
    ]
    drive(jobs, *LAYOUTS[layout])
    assert len(steps(whole)) == 12
    assert_same_run(whole, pieces)


@pytest.mark.parametrize("loss", ["next-token", "distill"])
def test_with_evaluations(inputs, tmp_path, loss):
    """Evaluating between steps ends nothing. The LM head has a bias."""
    model = tiny.build("phi", vocab_size=VOCAB, num_key_value_heads=2)
    inputs = {**inputs, "model": tiny.save(model, tmp_path / "phi")}
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    more = ("--eval-data", inputs["held_out"], "--eval-every", 4)
    jobs = [
        {"arguments": arguments(inputs, whole, *more, loss=loss)},
        {"arguments": arguments(inputs, pieces, *more, loss=loss), "stop_in": 2},
        {"arguments": ["resume", str(pieces)]},
    ]
    drive(jobs)
    assert_same_run(whole, pieces)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ([("settings", "lr", 0.5)], ["settings.lr = 0.5, but the budget has", "settings cannot be edited"]),
        ([("settings", "steps", 99)], ["settings.steps = 99, but the budget has 12"]),
        (
            [("settings", "steps", 1), ("settings", "warmup_steps", 0), ("budget", "steps", 1)],
            ["step-00000002 is beyond the run's 1 steps"],
        ),
        ([("settings", "global_batch", 4)], ["settings.global_batch = 4, but the budget has steps of 256 tokens"]),
        ([("settings", "teacher", "other")], ["has settings.teacher = other, but no identities.teacher"]),
    ],
)  # fmt: skip
def test_settings_that_were_edited(inputs, tmp_path, uptrain, edits, words):
    run = tmp_path / "run"
    drive([{"arguments": arguments(inputs, run), "stop_in": 1}])
    content = json.loads((run / "run.json").read_text())
    for part, key, value in edits:
        content[part][key] = value
    (run / "run.json").write_text(json.dumps(content))
    before = tiny.snapshot(run)
    uptrain("resume", run).refused(*words)
    assert tiny.snapshot(run) == before


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_any_number_of_processes_sees_the_same_samples(inputs, tmp_path, sharded):
    """2 → 1 → 4 → 2 processes, against one."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    drive([{"arguments": arguments(inputs, whole)}])
    resume = {"arguments": ["resume", str(pieces)]}
    drive([{"arguments": arguments(inputs, pieces), "stop_in": 2}], 2, sharded)
    drive([{**resume, "stop_in": 4}], 1)
    drive([{**resume, "stop_in": 8}], 4, sharded)
    drive([resume], 2, sharded)
    same = ("windows_crc32", "learning_rate", "tokens")
    assert steps(pieces, *same) == steps(whole, *same)
    for (step, loss), (_, expected) in zip(steps(pieces, "loss"), steps(whole, "loss"), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5), step


def test_resumed_with_less_memory(inputs, tmp_path, uptrain):
    """Micro-batch and checkpointing change from then on, and losses by rounding only."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    drive([{"arguments": arguments(inputs, whole, "--micro-batch", 4)}])
    more = ["resume", str(pieces), "--micro-batch", "1", "--activation-checkpointing"]
    began = {"arguments": arguments(inputs, pieces, "--micro-batch", 4), "stop_in": 2}
    drive([began, {"arguments": more, "stop_in": 6}, {"arguments": ["resume", str(pieces)]}])
    settings = json.loads((pieces / "run.json").read_text())["settings"]
    assert (settings["micro_batch"], settings["activation_checkpointing"]) == (1, True)
    same = ("windows_crc32", "learning_rate", "tokens")
    assert steps(pieces, *same) == steps(whole, *same)
    assert steps(pieces, "loss") != steps(whole, "loss")
    for (step, loss), (_, expected) in zip(steps(pieces, "loss"), steps(whole, "loss"), strict=True):
        assert loss == pytest.approx(expected, rel=1e-5), step


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_a_finished_run_does_not_change(inputs, tmp_path, uptrain, monkeypatch, schedule):
    """Neither are models built for it; with a damaged checkpoint or state, it trains on."""
    run = tmp_path / "run"
    more = ("--eval-data", inputs["held_out"], "--save-every", 3, "--schedule", schedule)
    uptrain(*arguments(inputs, run, *more, steps=4)).succeeded()
    before = tiny.snapshot(run)
    with monkeypatch.context() as patch:
        patch.setattr("uptrain.runs.start_and_resume.build", None)
        patch.setattr("uptrain.runs.start_and_resume.build_initial", None)
        result = uptrain("resume", run, "--micro-batch", 1)
    assert (result.code, result.err) == (0, "")
    assert f"{run} is finished already, and has not changed." in result.out
    assert f"uptrain export {run} FOLDER" in result.out
    assert (f"uptrain extend {run} --out RUN2 --steps N" in result.out) == (schedule == "wsd")
    assert tiny.snapshot(run) == before
    (run / "run_state.json").write_text("{")
    assert "Finished" in uptrain("resume", run).out
    (run / "checkpoints/step-00000004/state.json").write_text("{}")
    assert "Finished" in uptrain("resume", run).out
    assert [step for (step,) in steps(run)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_finished_run_of_two_processes(inputs, tmp_path):
    run = tmp_path / "run"
    drive([{"arguments": arguments(inputs, run, steps=4)}], 2, True)
    before = tiny.snapshot(run)
    drive([{"arguments": ["resume", str(run)]}], 2, True)
    assert tiny.snapshot(run) == before


def test_extended_run_is_the_longer_run_up_to_the_decay(inputs, tmp_path):
    """12 steps extended to 20: the same as 20 from the beginning, all the way, since the branch is before any decay."""
    short, longer, straight = tmp_path / "short", tmp_path / "longer", tmp_path / "straight"
    drive(
        [
            {"arguments": arguments(inputs, short, steps=12)},
            {"arguments": ["extend", str(short), "--out", str(longer), "--steps", "20"]},
            {"arguments": arguments(inputs, straight, steps=20)},
        ]
    )
    assert_same_run(longer, straight)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_models_of_transformers_in_shards(tmp_path, tied):
    """The main process reads student and parent, and the other gets its shards: as one process has them whole."""
    changes = {"vocab_size": VOCAB, "tie_word_embeddings": tied}
    inputs = make_inputs(tmp_path) | {
        "model": tiny.save(tiny.build("phi", num_key_value_heads=2, **changes), tmp_path / "phi"),
        "parent": tiny.save(tiny.build("phi", seed=1, **changes), tmp_path / "phi-parent"),
    }
    losses = []
    for layout in ("one process", "FSDP2 x 2"):
        run = tmp_path / layout
        more = ("--eval-data", inputs["held_out"])
        drive([{"arguments": arguments(inputs, run, *more, loss="distill", steps=4)}], *LAYOUTS[layout])
        losses.append([loss for _, loss in steps(run, "loss")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_replicas_of_shards_train_as_one_process_does(inputs, tmp_path):
    """Two replicas of two shards, as over two nodes. Parameters that the teacher shares are sharded too."""
    sizes = {"DP_REPLICATE_SIZE": "2", "DP_SHARD_SIZE": "2"}
    settings = {f"PARALLELISM_CONFIG_{name}": size for name, size in sizes.items()}
    settings["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    more = ("--trainable", "kv", "--eval-data", inputs["held_out"], "--micro-batch", 1)
    whole, replicas = tmp_path / "whole", tmp_path / "replicas"
    drive([{"arguments": arguments(inputs, whole, *more, loss="distill", steps=4)}], on_cpu=True)
    stopped = {"arguments": arguments(inputs, replicas, *more, loss="distill", steps=4), "stop_in": 2}
    drive([stopped, {"arguments": ["resume", str(replicas)]}], 4, sharded=True, on_cpu=True, settings=settings)
    assert len(steps(whole, "loss")) == 4
    for key in ("loss", "grad_norm"):
        expected, found = ([value for _, value in steps(run, key)] for run in (whole, replicas))
        assert found == pytest.approx(expected, rel=1e-5)
