"""A build of a token cache that is killed, stopped or refused resumes."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import forks
import numpy as np
import pytest
import tiny
from commands import left_behind
from self_kill import kill_at_every_step
from waiting import processes_of, wait_until

from model.common.errors import InputError
from model.files.staging import Staging
from uptrain.data.prepare import work_units, workers
from uptrain.data.prepare.tokenise import shard_names
from uptrain.data.token_cache import TokenCache

# Kills and signals

SMALL_UNITS = "from uptrain.data.prepare import work_units; work_units.UNIT_BYTES = 1000"


@pytest.fixture
def ids_source(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"input_ids": rng.integers(300, size=20).tolist()}) + "\n" for _ in range(40)))
    return path


@pytest.mark.parametrize("share", [(), ("--shard", "2/2")])
def test_killed_at_every_step_to_the_disk(uptrain, tmp_path, monkeypatch, ids_source, share):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 1000)
    arguments = ("prepare", "--data", ids_source, "--vocab-size", 300, "--seq-len", 8, "--tokens", 700, "--workers", 2)
    uptrain(*arguments, "--out", tmp_path / "expected").succeeded()
    expected = tiny.snapshot(tmp_path / "expected")
    kills = kill_at_every_step(
        tmp_path,
        "uptrain",
        lambda out: (*arguments, "--out", out, *share),
        lambda out: uptrain(*arguments, "--out", out).succeeded(),
        expected,
        before=SMALL_UNITS,
    )
    assert kills >= (2 if share else 8)


SLOW = (
    "import os, time; from uptrain.data.prepare import work_units; work_units.UNIT_BYTES = 200_000; fsync = os.fsync; "
    "os.fsync = lambda descriptor: (time.sleep(0.05), fsync(descriptor))"
)


@pytest.fixture
def start_slow(tmp_path):
    """Start a command that takes seconds; return its process, and a function that waits for its end."""

    def run(*arguments):
        process = forks.start_program("uptrain", *arguments, output=tmp_path / "slow", before=SLOW)
        return process, lambda: forks.finish([process], [tmp_path / "slow"])[0]

    return run


@pytest.fixture(scope="module")
def long_source(tmp_path_factory):
    path = tmp_path_factory.mktemp("long") / "a.jsonl"
    record = json.dumps({"text": "The checkpoint folder is the interface. " * 100}) + "\n"
    path.write_bytes(record.encode() * 1000)  # 4 MB, about a second
    return path


@pytest.fixture(scope="module")
def expected_of_long(tmp_path_factory, long_source, tokenizer):
    """Return the files of the cache of the long source."""
    out = tmp_path_factory.mktemp("expected") / "out"
    arguments = ("prepare", "--data", long_source, "--tokenizer", tokenizer, "--seq-len", 64, "--workers", 1)
    process = forks.start_program("uptrain", *arguments, "--out", out, output=out.with_name("output"), before=SLOW)
    forks.finish([process], [out.with_name("output")])[0].succeeded()
    return tiny.snapshot(out)


TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
FAST = [(False, [TERM]), (True, [USR1]), (False, [TERM, TERM])]
CASES = [(group, signals) for group in (False, True) for signals in ([TERM], [INT], [USR1], [TERM, TERM])]


@pytest.mark.parametrize(
    ("whole_group", "signals"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_signal_in_the_middle(
    uptrain, start_slow, tmp_path, monkeypatch, tokenizer, long_source, expected_of_long, signals, whole_group
):
    monkeypatch.setattr(work_units, "UNIT_BYTES", 200_000)
    source, out = long_source, tmp_path / "out"
    arguments = ("prepare", "--data", source, "--tokenizer", tokenizer, "--seq-len", 64, "--workers", 1, "--out", out)
    process, finish = start_slow(*arguments)
    journal = tmp_path / ".out.groupwise/journal.jsonl"
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 3)
    for number in signals:
        (os.killpg if whole_group else os.kill)(process.pid, number)
    result = finish()
    assert result.code == 1
    assert result.err.strip() == "Error: interrupted; finished work is kept, and the same command continues."
    wait_until(lambda: not processes_of(process.pid))
    assert not out.exists()
    units_done = [json.loads(line)["name"] for line in journal.read_text().splitlines()[1:]]
    names = [name for number in units_done for name in shard_names(int(number))]
    finished = {name: (tmp_path / ".out.groupwise/folder" / name).stat().st_ino for name in names}
    assert finished
    uptrain(*arguments).succeeded()
    assert {name: (out / name).stat().st_ino for name in finished} == finished
    assert tiny.snapshot(out) == expected_of_long


def workers_of(session):
    return [pid for pid in processes_of(session) if b"spawn_main" in read_process(pid, "cmdline")]


def imports(pid):
    """Return whether the interpreter of a worker has started, and imports compiled modules."""
    return b".cpython-" in read_process(pid, "maps")


def read_process(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""


@pytest.mark.parametrize("number", [INT, signal.SIGHUP])
def test_signal_while_workers_start(tmp_path, tokenizer, long_source, end_afterwards, number):
    """A terminal sends it to all processes; workers that still import their code print nothing."""
    out = tmp_path / "out"
    with (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "uptrain", "prepare", "--data", long_source, "--tokenizer", tokenizer,
                "--seq-len", "64", "--workers", "2", "--out", out,
            ],
            stderr=err, start_new_session=True, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
        )  # fmt: skip
        end_afterwards(process)
        wait_until(lambda: any(map(imports, workers_of(process.pid))))
        os.killpg(process.pid, number)
        assert process.wait() == 1
    shown = (tmp_path / "err").read_text().strip()
    assert shown == "Error: interrupted; nothing is finished yet, and the same command starts again."
    wait_until(lambda: not processes_of(process.pid))
    assert list(tmp_path.glob("*out*")) == list(tmp_path.glob(".out*")) == []


@pytest.mark.parametrize("n_workers", [1, 2])
def test_killed_worker(start_slow, tmp_path, tokenizer, long_source, n_workers):
    arguments = ("prepare", "--data", long_source, "--tokenizer", tokenizer, "--seq-len", 64, "--workers", n_workers)
    process, finish = start_slow(*arguments, "--out", tmp_path / "out")
    journal = tmp_path / ".out.groupwise/journal.jsonl"
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 3)
    workers = workers_of(process.pid)
    assert len(workers) == n_workers
    os.kill(workers[0], signal.SIGKILL)
    result = finish()
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert result.err.startswith(
        "Error: a worker process was killed, perhaps for lack of memory: try fewer --workers, or divide very long "
        "documents; finished work"
    )
    assert "the same command continues from there" in result.err


def test_a_pool_that_broke_before_the_next_piece(prepare, ids_source, monkeypatch):
    """A worker may be killed while this process is busy elsewhere."""

    def submit(*arguments):
        raise BrokenProcessPool

    monkeypatch.setattr(workers.ProcessPoolExecutor, "submit", submit)
    result = prepare(ids_source, ids=True)
    assert (result.code, "a worker process was killed, perhaps for lack of memory" in result.err) == (1, True)


def test_two_builds_of_one_cache(prepare, tmp_path, ids_source):
    with Staging(tmp_path / "out"):
        prepare(ids_source, ids=True).refused("is being written by process", "out")
    assert not (tmp_path / ".out.groupwise").exists()
    prepare(ids_source, ids=True, options=("--shard", "1/2")).succeeded()
    with Staging(tmp_path / "out.shard-1-of-2"):
        prepare(ids_source, ids=True).refused("is being written by process", "out.shard-1-of-2")
    prepare(ids_source, ids=True).succeeded()


def test_share_made_with_another_tokenizer(prepare, ids_source):
    prepare(ids_source, ids=True, options=("--shard", "1/2")).succeeded()
    prepare(ids_source).refused(
        ".out.shard-1-of-2.groupwise holds the finished work of a command with a --vocab-size, no tokenizer; give the "
    )


def test_full_disk(prepare, ids_source, monkeypatch):
    record_file = Staging.record_file

    def full(self, name, record):
        record_file(self, name, record)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Staging, "record_file", full)
    result = prepare(ids_source, ids=True)
    assert result.code == 1
    assert "No space left on device; finished work is kept in" in result.err
    monkeypatch.undo()
    prepare(ids_source, ids=True).succeeded()


def test_full_disk_before_anything_is_finished(prepare, tmp_path, ids_source, monkeypatch):
    def full(self, name, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Staging, "record_file", full)
    result = prepare(ids_source, ids=True)
    assert result.code == 1
    assert result.err.endswith("No space left on device; nothing is finished yet, and the same command starts again.\n")
    assert left_behind(tmp_path) == []
    monkeypatch.undo()
    prepare(ids_source, ids=True).succeeded()


# The cache afterwards


def test_truncated_cache(prepare, tmp_path, ids_source):
    prepare(ids_source, ids=True).succeeded()
    os.truncate(tmp_path / "out/tokens-00000.bin", 100)
    with pytest.raises(InputError, match=r"tokens-00000\.bin has 100 bytes where the manifest says 1600; prepare"):
        TokenCache.open(tmp_path / "out")
