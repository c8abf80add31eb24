"""The newest checkpoint that is as it was written is taken, and what was wrong with newer ones is said."""

import errno
import json
import shutil

import pytest
import real_runs
import tiny
from fault_injection import Fault, Faults, run
from faulty_runs import error_of, succeed
from real_runs import assert_same_run, checkpoints, events

DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "flipped": lambda path: path.write_bytes(flip(path.read_bytes())),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


def flip(data):
    """Change one bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.fixture(scope="module")
def killed(runs, tmp_path_factory):
    """Return a run with the checkpoints of steps 4 and 8, killed in step 9."""
    return killed_run(runs, tmp_path_factory.mktemp("killed"))


def killed_run(runs, folder, processes=1):
    arguments = runs.arguments(folder / "run", "--keep-last", 2)
    run(*arguments, folder=folder, processes=processes, faults=Faults([Fault("kill", "before write 9")]))
    assert checkpoints(folder / "run") == ["step-00000004", "step-00000008"]
    return folder / "run"


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["tensors/__0_0.distcp", "tensors/.metadata", "state.json", "manifest.json"])
def test_is_seen_and_named(killed, tmp_path, name, kind):
    from uptrain.checkpoints.files import find_damage

    checkpoint = shutil.copytree(killed / "checkpoints/step-00000008", tmp_path / "step-00000008")
    assert not find_damage(checkpoint)
    DAMAGE[kind](checkpoint / name)
    assert str(checkpoint / name) in find_damage(checkpoint)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tensors/__0_0.distcp", "flipped"),
        ("manifest.json", "missing"),
        pytest.param("state.json", "empty", marks=pytest.mark.slow),
        pytest.param("tensors/.metadata", "truncated", marks=pytest.mark.slow),
        pytest.param("tensors/__0_0.distcp", "missing", marks=pytest.mark.slow),
    ],
)
def test_falls_back(runs, killed, tmp_path, name, kind):
    out = shutil.copytree(killed, tmp_path / "run")
    path = out / "checkpoints/step-00000008" / name
    DAMAGE[kind](path)
    (result,) = succeed(("resume", out), tmp_path)
    rejected, ready = result.err.splitlines()[:2]
    assert rejected.startswith(f"Not used: {path}")
    assert ready.startswith("READY: resumed at step 4 on 1 x cpu;")
    (event,) = events(out, "resumed")
    assert event["step"] == 4
    assert event["rejected"] == [rejected.removeprefix("Not used: ")]
    assert_same_run(out, runs.expected())


def test_a_disk_that_cannot_be_read_is_no_damage(runs, killed, tmp_path, monkeypatch, uptrain):
    """The newest checkpoint may be whole. It is neither left out nor removed."""
    out = shutil.copytree(killed, tmp_path / "run")

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("uptrain.checkpoints.files.checksum", stale)
        result = uptrain("resume", out)
        verified = uptrain("status", out, "--verify", "--json")
    assert result.code == 1
    assert f"a file of {out}/checkpoints/step-00000008 cannot be read ([Errno 116] Stale file handle" in result.err
    damages = [each["damage"] for each in json.loads(verified.out)["checkpoints"]]
    assert (verified.code, [damage[:27] for damage in damages]) == (1, ["cannot be read: [Errno 116]"] * 2)
    assert checkpoints(out) == ["step-00000004", "step-00000008"]
    uptrain("resume", out).succeeded()
    assert_same_run(out, runs.expected())


@pytest.mark.slow
def test_falls_back_in_all_processes(runs, tmp_path):
    out = killed_run(runs, tmp_path, 2)
    path = out / "checkpoints/step-00000008/tensors/__1_0.distcp"
    DAMAGE["flipped"](path)
    results = succeed(("resume", out), tmp_path, 2)
    assert f"Not used: {path} has changed since it was written" in results[0].err
    assert not results[1].err
    assert_same_run(out, runs.expected(2))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_all_damaged(killed, tmp_path, processes):
    """Then nothing is changed: starting again is for people to decide."""
    out = shutil.copytree(killed, tmp_path / "run")
    for name in checkpoints(out):
        DAMAGE["empty"](out / "checkpoints" / name / "state.json")
    (out / ".lock").unlink(missing_ok=True)  # of the run that was killed
    before = tiny.snapshot(out)
    error = error_of(run("resume", out, folder=tmp_path, processes=processes), 2)
    assert error.startswith(f"no checkpoint in {out}/checkpoints is whole: ")
    assert "step-00000004/state.json has 0 bytes instead of " in error
    assert "step-00000008/state.json has 0 bytes instead of " in error
    assert tiny.snapshot(out) == before


def test_an_older_one_that_is_damaged_is_rotated_away(runs, killed, tmp_path):
    out = shutil.copytree(killed, tmp_path / "run")
    DAMAGE["empty"](out / "checkpoints/step-00000004/state.json")
    succeed(("resume", out), tmp_path)
    assert_same_run(out, runs.expected())
    assert "step-00000004" not in checkpoints(out)


def test_going_back_never_removes_the_only_whole_one(runs, killed, tmp_path):
    """With --keep-last 1, the damaged newest one would be all that rotation leaves."""
    out = shutil.copytree(killed, tmp_path / "run")
    settings = json.loads((out / "run.json").read_text())
    settings["settings"]["keep_last"] = 1
    (out / "run.json").write_text(json.dumps(settings))
    DAMAGE["flipped"](out / "checkpoints/step-00000008/tensors/__0_0.distcp")
    succeed(("resume", out), tmp_path, faults=Faults([Fault("SIGTERM", "before _backward 5")]))
    assert "step-00000006" in checkpoints(out)
    succeed(("resume", out), tmp_path)
    assert events(out, "resumed")[-1]["step"] == 6
    assert_same_run(out, runs.expected())


def test_a_damaged_checkpoint_takes_no_place(uptrain, runs, tmp_path):
    """Of the last two that are kept."""
    run = tmp_path / "run"
    more = ("--save-every-steps", 3, "--keep-last", 2, "--schedule", "constant")
    uptrain(*real_runs.arguments(runs.inputs, run, *more, steps=6)).succeeded()
    assert checkpoints(run) == ["step-00000003", "step-00000006"]
    next((run / "checkpoints/step-00000006/tensors").glob("*.distcp")).write_bytes(b"")
    longer = tmp_path / "longer"
    shutil.copytree(run, longer)
    settings = json.loads((longer / "run.json").read_text())
    settings["settings"]["save_every"] = 4
    settings["settings"]["steps"] = settings["budget"]["steps"] = 8
    (longer / "run.json").write_text(json.dumps(settings))
    uptrain("resume", longer).succeeded()
    assert checkpoints(longer) == ["step-00000004", "step-00000008"]
    uptrain("resume", run).succeeded()
    assert checkpoints(run) == ["step-00000003", "step-00000006"]
