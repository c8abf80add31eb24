"""`uptrain teach` that is killed resumes: the logits are the same bytes."""

import random
import time

import forks
import pytest
import real_runs
import tiny
from self_kill import kill_at_every_step

from uptrain.data import teacher_logits

SMALL = "from uptrain.data import teacher_logits; teacher_logits.SHARD_BYTES = 20_000"
KILLS = 20


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return the arguments of a command without --out. Its logits have several shards."""
    monkeypatch.setattr(teacher_logits, "SHARD_BYTES", 20_000)
    inputs = real_runs.make_inputs(tmp_path / "inputs")
    return ("teach", inputs["parent"], "--data", inputs["data"], "--top-k", 16)


@pytest.fixture
def expected(uptrain, command, tmp_path):
    uptrain(*command, "--out", tmp_path / "expected").succeeded()
    files = tiny.snapshot(tmp_path / "expected")
    assert len(files) > 8
    return files


@pytest.mark.parametrize("share", [pytest.param((), marks=pytest.mark.slow), ("--shard", "2/2")])
def test_killed_at_every_step_to_the_disk(uptrain, tmp_path, command, expected, share):
    kills = kill_at_every_step(
        tmp_path,
        "uptrain",
        lambda out: (*command, "--out", out, *share),
        lambda out: uptrain(*command, "--out", out).succeeded(),
        expected,
        before=SMALL,
    )
    assert kills >= (8 if share else 16)


@pytest.mark.slow
def test_killed_at_random_moments(uptrain, tmp_path, command, expected):
    """Twenty kills, each of the command that continues after the last. Writing is slowed down, to be hit."""
    rng, out, killed = random.Random(0), tmp_path / "out", 0
    slow = f"{SMALL}; import os, time; s = os.fsync; os.fsync = lambda d: (time.sleep(0.02), s(d))"
    journal = tmp_path / ".out.groupwise/journal.jsonl"
    while killed < KILLS:
        if out.exists():
            assert tiny.snapshot(out) == expected
            out.rename(tmp_path / f"finished{killed}")
        output = tmp_path / f"output{killed}"
        process = forks.start_program("uptrain", *command, "--out", out, output=output, before=slow)
        # Half of them after work has begun.
        while killed % 2 and process.is_alive() and not (journal.exists() and journal.stat().st_size):
            time.sleep(0.001)
        time.sleep(rng.random() * 0.4)
        if process.is_alive():
            process.kill()
            killed += 1
        forks.finish([process], [output])
        assert not out.exists() or tiny.snapshot(out) == expected
    if not out.exists():
        uptrain(*command, "--out", out).succeeded()
    assert tiny.snapshot(out) == expected
