"""`uptrain status`: where a run stands, in whatever condition its folder is."""

import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time

import pytest
from written_runs import evaluation, event, step, with_teacher, write_checkpoint, write_run

import uptrain.commands.status as status_command
import uptrain.report.status as status_module
from model.common.console import format_duration
from model.common.processes import pid_namespace, process_start
from uptrain.report.status import SPEED_STEPS

NOBODY = 2**22 + 1
"""A process id above the largest of Linux."""


def read_json(result):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    result.succeeded()
    return json.loads(result.out, parse_constant=refuse)


def test_run_that_was_resumed_and_finished(distilled, uptrain):
    status = read_json(uptrain("status", distilled, "--json", "--verify"))
    records = [json.loads(line) for line in (distilled / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in records if "loss" in r]
    last = steps[-1]
    assert (status["status"], status["reason"]) == ("finished", "finished")
    assert (status["step"], status["total_steps"]) == (12, 12)
    assert (status["tokens"], status["total_tokens"], status["share"]) == (last["tokens"], 12 * 256, 1.0)
    assert [status[key] for key in ("loss", "learning_rate", "grad_norm")] == [
        last[key] for key in ("loss", "learning_rate", "grad_norm")
    ]
    assert status["objective"] == "KL divergence from the teacher"
    assert status["tokens_per_s"] == statistics.median(r["tokens_per_s"] for r in steps)
    assert status["seconds_left"] == 0
    measured = next(r["evaluation"] for r in reversed(records) if "evaluation" in r)
    assert status["evaluation"].items() >= measured.items()
    assert status["evaluation"]["step"] == 12
    assert [entry["step"] for entry in status["checkpoints"]] == [8, 10, 12]
    assert [entry["kept_for_extend"] for entry in status["checkpoints"]] == [False, True, False]
    assert [entry["damage"] for entry in status["checkpoints"]] == ["", "", ""]
    assert all(entry["bytes"] > 100_000 for entry in status["checkpoints"])
    shown = uptrain("status", distilled, "--verify").out
    for words in ("12 of 12 (100.0%)", "kept for `extend`, whole", "KL divergence", "recovered fraction"):
        assert words in shown
    assert "time left" not in shown


STATES = {
    "not started": (None, ["not started", "next uptrain resume"]),
    "running": ({"status": "running", "step": 0, "reason": "", "pid": os.getpid()}, ["running as process"]),
    "died": ({"status": "running", "step": 0, "reason": "", "pid": NOBODY}, ["no process", "next uptrain resume"]),
    "preempted": (
        {"status": "preempted", "step": 3, "reason": "SIGTERM", "pid": 1},
        ["stopped (SIGTERM), and saved", "next uptrain resume"],
    ),
    "finished": (
        {"status": "finished", "step": 50, "reason": "finished", "pid": 1},
        ["finished", "next uptrain resume"],  # it has no checkpoint to export
    ),
    "halted": ({"status": "halted", "step": 9, "reason": "3 of the last 100", "pid": 1}, ["halted: 3 of the last 100"]),
    "failed": ({"status": "failed", "step": 9, "reason": "no space", "pid": 1}, ["failed: no space"]),
}


def test_another_process_with_the_same_id(tmp_path, uptrain):
    """It began at another time than the run."""
    mine = process_start(os.getpid())
    for started, status in ((mine, "running"), (mine - 60, "died"), (None, "running")):
        run = write_run(tmp_path / status / str(started), state=STATES["running"][0] | {"started": started})
        assert read_json(uptrain("status", run, "--json"))["status"] == status


@pytest.mark.parametrize("elsewhere", [{"host": "another"}, {"pid_namespace": "pid:[1]"}])
def test_a_run_of_another_machine_or_container(tmp_path, uptrain, elsewhere):
    """Its process cannot be seen, so nobody may be told to start a second one."""
    here = {"host": socket.gethostname(), "pid_namespace": pid_namespace()}
    for name, place, status in (("here", here, "died"), ("there", here | elsewhere, "running")):
        run = write_run(tmp_path / name, [step(1)], state=STATES["died"][0] | place)
        assert read_json(uptrain("status", run, "--json"))["status"] == status
    shown = " ".join(uptrain("status", run).out.split())
    assert f"of {(here | elsewhere)['host']}, whose processes cannot be seen from here" in shown
    assert "uptrain resume" not in shown


@pytest.mark.parametrize("status", STATES)
def test_every_state(tmp_path, uptrain, status):
    state, words = STATES[status]
    run = write_run(tmp_path / "run", state=state)
    shown_status = read_json(uptrain("status", run, "--json"))
    assert (shown_status["status"], shown_status["step"], shown_status["tokens"], shown_status["checkpoints"]) == (
        status,
        0,
        0,
        [],
    )
    assert (
        shown_status["tokens_per_s"]
        is shown_status["seconds_left"]
        is shown_status["evaluation"]
        is shown_status["loss"]
        is None
    )
    result = uptrain("status", run).succeeded()
    for word in (*words, "0 of 50 (0.0%)", "checkpoints none"):
        assert word in " ".join(result.out.split())


def test_status_of_a_running_run(tmp_path, uptrain):
    speeds = [100.0, 10_000.0, *[200.0] * 8]
    records = [with_teacher(0, 5.0), *(step(n, 3.0, tokens_per_s=v) for n, v in enumerate(speeds, 1))]
    records += [with_teacher(10, 2.75)]
    state = {"status": "running", "step": 0, "reason": "", "pid": os.getpid()}
    run = write_run(tmp_path / "run", records, state, parent={"run": "/runs/short", "step": 8})
    status = read_json(uptrain("status", run, "--json"))
    assert status["share"] == 10 / 50
    assert (status["tokens"], status["total_tokens"], status["alpha"]) == (10_000, 50_000, 0.05)
    assert status["tokens_per_s"] == 200
    assert status["seconds_left"] == 40 * 1000 / 200
    assert status["evaluation"]["recovered_fraction"] == (5.0 - 2.75) / (5.0 - 2.0)
    assert 0 <= status["seconds_since_last_line"] < 60
    shown = " ".join(uptrain("status", run).out.split())
    for words in ("0.01 of 0.05", "200 tokens/s", "3 min, eval", "75.0%", "agreement 50.0%", "/runs/short from step 8"):
        assert words in shown


def test_standard_errors_are_shown(tmp_path, uptrain):
    """The evaluations of earlier versions have none."""
    last = with_teacher(1, 2.75, above_teacher_error=0.0625, kl_error=0.0125)
    run = write_run(tmp_path / "run", [with_teacher(0, 5.0, above_teacher_error=0.125), step(1), last])
    shown = " ".join(uptrain("status", run).out.split())
    for words in (
        "above the teacher's +0.7500 ± 0.0625",
        "KL from the teacher 0.2500 ± 0.0125 nats per token",
        "recovered fraction 75.0% ± 2.3%",
    ):
        assert words in shown
    measured = read_json(uptrain("status", run, "--json"))["evaluation"]
    # The error of the loss now, and a quarter of that after conversion, by the cost of 3 nats.
    assert measured["recovered_fraction_error"] == pytest.approx(math.hypot(0.0625, 0.25 * 0.125) / 3)
    begun_earlier = write_run(tmp_path / "begun_earlier", [with_teacher(0, 5.0), step(1), last])
    measured = read_json(uptrain("status", begun_earlier, "--json"))["evaluation"]
    assert (measured["recovered_fraction"], measured["recovered_fraction_error"]) == (0.75, 0.0625 / 3)
    written = write_run(tmp_path / "earlier", [with_teacher(0, 5.0), step(1), with_teacher(1, 2.75)])
    measured = read_json(uptrain("status", written, "--json"))["evaluation"]
    assert (measured["recovered_fraction"], measured["recovered_fraction_error"]) == (0.75, None)


def test_a_loss_that_rose_is_shown_beside_the_first(tmp_path, uptrain):
    run = write_run(tmp_path / "run", [evaluation(0, 2.0314), step(1), evaluation(1, 3.2)])
    status = read_json(uptrain("status", run, "--json"))
    assert (status["first_evaluation"]["loss"], status["evaluation"]["loss"]) == (2.0314, 3.2)
    assert "rose from 2.0314 to 3.2000" in status["warning"]
    shown = " ".join(uptrain("status", run).out.split())
    assert "3.2000 nats per token at step 1 (2.0314 at step 0)" in shown
    assert "warning the held-out loss rose from 2.0314 to 3.2000" in shown
    fell = write_run(tmp_path / "fell", [evaluation(0, 2.0), step(1), evaluation(1, 1.9)])
    assert read_json(uptrain("status", fell, "--json"))["warning"] is None


def test_fewer_tokens_than_planned(tmp_path, uptrain):
    """A cache's last window is shorter than the others."""
    records = [step(n, tokens=n * 1000 - 16) for n in range(1, 51)]
    shown = " ".join(uptrain("status", write_run(tmp_path / "run", records)).out.split())  # a narrow table folds it
    assert "49,984; 16 fewer than planned, because the last window of the data is short" in shown
    assert "tokens 39,984 of 50,000" in " ".join(
        uptrain("status", write_run(tmp_path / "other", records[:40])).out.split()
    )


def test_speed_is_that_of_the_last_steps(tmp_path, uptrain):
    speeds = [900.0] * 40 + [300.0] * SPEED_STEPS
    run = write_run(tmp_path / "run", [step(n, tokens_per_s=v) for n, v in enumerate(speeds, 1)], steps=100)
    assert read_json(uptrain("status", run, "--json"))["tokens_per_s"] == 300


def test_skipped_steps_and_failed_saves_are_shown(tmp_path, uptrain):
    """Updates left out, saves that failed, numbers that are not finite."""
    records = [step(n) for n in range(1, 11)] + [step(n, None, skipped=True) for n in range(11, 20)]
    records += [event(20, "not saved", why="full"), step(20, None, grad_norm=None, skipped=True), evaluation(20, None)]
    run = write_run(tmp_path / "run", records)
    status = read_json(uptrain("status", run, "--json"))
    assert (status["loss"], status["grad_norm"], status["evaluation"]["loss"]) == (None, None, None)
    assert (status["skipped_steps"], status["not_saved_steps"]) == ([*range(11, 21)], [20])
    shown = uptrain("status", run).out
    assert "10: step … 13, 14, 15, 16, 17, 18, 19, 20\n" in "\n".join(map(str.rstrip, shown.splitlines())) + "\n"
    assert shown.count("not finite") == 3


def test_a_divergence_that_rounding_made_negative(tmp_path, uptrain):
    """A student that is its teacher."""
    run = write_run(tmp_path / "run", [with_teacher(0, 2.0, kl=-1e-9), step(1, -1e-9)])
    shown = " ".join(uptrain("status", run).out.split())
    assert "KL from the teacher 0.0000 nats per token" in shown
    assert "training loss 0.0000 nats per token" in shown


def test_evaluation_of_a_lost_step_is_ignored(tmp_path, uptrain):
    """Lines that waited for room on the disk are lost if the run is killed then; it continues after them."""
    records = [step(4), evaluation(8, 2.5), step(9)]
    status = read_json(uptrain("status", write_run(tmp_path / "run", records), "--json"))
    assert (status["step"], status["evaluation"]) == (9, None)


@pytest.mark.parametrize(("model", "expected"), [("/models/gqa", 0.5), ("", None)])
def test_a_model_from_nothing_recovers_nothing(tmp_path, uptrain, model, expected):
    records = [with_teacher(0, 4.0), step(1), with_teacher(1, 3.0)]
    status = read_json(uptrain("status", write_run(tmp_path / "run", records, model=model), "--json"))
    assert status["evaluation"]["recovered_fraction"] == expected


def test_unfinished_line_is_ignored(tmp_path, uptrain):
    run = write_run(tmp_path / "run", [step(1), step(2)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert read_json(uptrain("status", run, "--json"))["step"] == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", '{"settings": ', ("run.json is damaged",)),
        ("run.json", '{"settings": {"colour": 1, "track": []}}', ("run.json is damaged", "another version")),
        ("run.json", "[]", ("run.json is damaged",)),
        ("metrics.jsonl", '{"step": 1, "event": "x"}\n{"st\n', ("metrics.jsonl:2 is damaged", "remove the line")),
        ("metrics.jsonl", "\x00\x00\n", ("metrics.jsonl:1 is damaged",)),
        ("metrics.jsonl", "\x00" * 2**21, ("metrics.jsonl:1 is longer than 1,048,576 bytes",)),
        ("run_state.json", "", ("run_state.json is damaged", "uptrain resume")),
    ],
)
def test_damaged_files_are_named(tmp_path, uptrain, name, content, words):
    run = write_run(tmp_path / "run", [step(1)])
    (run / name).write_text(content)
    uptrain("status", run).refused(*words)


def test_a_folder_in_place_of_the_state(tmp_path, uptrain):
    """No file replaces it, so resuming does not help."""
    run = write_run(tmp_path / "run", [step(1)])
    (run / "run_state.json").mkdir()
    uptrain("status", run).refused(f"{run}/run_state.json is a folder, not a file; move it away.")


def test_folders_without_a_run(tmp_path, uptrain):
    uptrain("status", tmp_path / "nowhere").refused("nowhere does not exist", "uptrain run")
    uptrain("status", tmp_path).refused("is not a run")
    uptrain("status").refused("RUN")


def test_damaged_checkpoint(tmp_path, uptrain):
    run = write_run(tmp_path / "run", [step(1)])
    write_checkpoint(run, 1, keep=True)
    path = write_checkpoint(run, 2) / "tensors" / "0.distcp"
    uptrain("status", run, "--verify").succeeded()
    path.write_bytes(b"1" + bytes(99))
    uptrain("status", run).succeeded()
    result = uptrain("status", run, "--verify")
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert f"{path} has changed since" in result.err
    assert result.out.count("DAMAGED") == result.out.count("whole") == 1
    result = uptrain("status", run, "--verify", "--json")
    assert result.code == 1
    assert [bool(entry["damage"]) for entry in json.loads(result.out)["checkpoints"]] == [False, True]


@pytest.mark.parametrize(("newest", "expected"), [
    ({"kept_for_extend": False}, "export RUN FOLDER"), ({"kept_for_extend": False, "damage": ""}, "export RUN FOLDER"),
    ({"kept_for_extend": False, "damage": "it has changed"}, "resume RUN"), ({"kept_for_extend": None}, "resume RUN"),
])  # fmt: skip
def test_a_finished_run_with_a_damaged_checkpoint_is_resumed(newest, expected):
    """`uptrain export` would refuse the newest."""
    status = {"run": "RUN", "status": "finished", "checkpoints": [{"kept_for_extend": True, "damage": ""}, newest]}
    assert status_command._next(status) == [("next", f"uptrain {expected}")]


def test_checkpoint_without_a_readable_state(tmp_path, uptrain):
    run = write_run(tmp_path / "run")
    (write_checkpoint(run, 2) / "state.json").write_text("{")
    assert read_json(uptrain("status", run, "--json"))["checkpoints"][0]["kept_for_extend"] is None
    assert "its state cannot be read" in uptrain("status", run).out


@pytest.mark.parametrize("function", ["is_kept_for_extend", "find_damage"])
def test_checkpoint_may_vanish_meanwhile(tmp_path, uptrain, monkeypatch, function):
    """The resumed run removes old checkpoints."""
    run = write_run(tmp_path / "run")
    write_checkpoint(run, 1)
    write_checkpoint(run, 2)
    real = getattr(status_module, function)

    def vanish(*given):
        if given[-1].name.endswith("1"):
            shutil.rmtree(given[-1])
        return real(*given)

    monkeypatch.setattr(status_module, function, vanish)
    status = read_json(uptrain("status", run, "--json", "--verify"))
    assert [entry["step"] for entry in status["checkpoints"]] == [2]


def test_status_starts_without_torch(tmp_path):
    run = write_run(tmp_path / "run", [with_teacher(0, 5.0), step(1), with_teacher(1, 4.0)])
    write_checkpoint(run, 1)
    code = (
        "import sys; from uptrain.cli import cli; cli.main(['status', sys.argv[1]], standalone_mode=False); "
        "sys.exit(bool({'torch', 'numpy', 'transformers', 'accelerate', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run)], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (99, "99 s"), (100, "2 min"), (3599, "1 h 0 min"), (7500, "2 h 5 min"), (200_000, "2 days 7 h")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_a_clock_that_is_ahead(uptrain, tmp_path):
    """Of a shared disk."""
    run = write_run(tmp_path / "run", [step(1)], {"status": "finished", "step": 1, "reason": "", "pid": 1})
    os.utime(run / "metrics.jsonl", (time.time() + 60,) * 2)
    assert json.loads(uptrain("status", run, "--json").out)["seconds_since_last_line"] == 0


def test_metrics_that_are_missing(uptrain, tmp_path):
    run = write_run(tmp_path / "run", [], {"status": "finished", "step": 50, "reason": "", "pid": 1})
    assert "metrics.jsonl is missing; restore it" in uptrain("status", run).err


def test_metrics_that_have_lost_lines(uptrain, tmp_path):
    """Such as a file that is empty since a power failure."""
    state = {"status": "finished", "step": 3, "reason": "", "pid": 1}
    run = write_run(tmp_path / "run", [step(number) for number in (1, 2, 3)], state)
    assert not uptrain("status", run).succeeded().err
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for kept in (0, 2):
        (run / "metrics.jsonl").write_text("".join(lines[:kept]))
        result = uptrain("status", run).succeeded()
        words = f"Warning: {run}/metrics.jsonl ends at step {kept}, but the run has been at step 3; restore the file."
        assert result.err.startswith(words)
        assert result.err.count("\n") == 1
