"""One machine's view of a shared disk is older than another's, or fails: all processes take the same decision."""

import errno
import json
import os
import threading

import forks
import pytest

from model.common.errors import InputError, RunError
from uptrain.checkpoints import store
from uptrain.checkpoints.files import MANIFEST, STATE, checksum
from uptrain.distributed import accelerator as accelerators
from uptrain.distributed.collectives import destroy_process_group

SECOND = "1"
"""The rank whose disk lags."""


def write_checkpoint(folder, step):
    """Write a checkpoint with two files of tensors, which no model fits."""
    checkpoint = folder / f"step-{step:08d}"
    (checkpoint / "tensors").mkdir(parents=True)
    state = {"step": step, "tokens": 9, "skipped": [], "not_finite": [], "grad_norms": [1.0], "keep": False}
    (checkpoint / STATE).write_text(json.dumps(state))
    names = (STATE, "tensors/__0_0.distcp", "tensors/__1_0.distcp")
    for name in names[1:]:
        (checkpoint / name).write_bytes(b"tensors")
    sums = {name: checksum(checkpoint / name) for name in names}
    (checkpoint / MANIFEST).write_text(json.dumps({"format": 1, "files": sums}))
    return checkpoint


def on_two_ranks(function, tmp_path):
    """Call a function of a store and its folder on two ranks; return what each prints."""
    outputs = [tmp_path / f"output-{rank}" for rank in range(2)]
    started = forks.start_ranks(on_a_rank, function, tmp_path / "checkpoints", outputs=outputs)
    results = forks.finish(started, outputs)
    assert [(result.code, result.err) for result in results] == [(0, "")] * 2, results
    return [result.out.splitlines() for result in results]


def on_a_rank(function, folder):
    accelerator = accelerators.make_accelerator("fp32", ())
    checkpoints = store.CheckpointStore(folder, accelerator, keep_last=2, save_every=1, check_lock=lambda: None)
    function(checkpoints, os.environ["RANK"] == SECOND)
    destroy_process_group()


def print_newest(checkpoints):
    try:
        found = checkpoints.newest()
    except (InputError, RunError) as error:
        print(f"{type(error).__name__}: {error}")
        return
    print(found.folder.name, found.state["step"], *found.rejected)


def hide(monkeypatch, suffix):
    """Hide the paths that end with `suffix` from this process, as a client of NFS does that remembers their absence."""
    real = os.stat

    def stat(path, *arguments, **options):
        if str(path).endswith(suffix):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)


def find_late_files(checkpoints, lags):
    store._NFS_SECONDS = 20
    with pytest.MonkeyPatch.context() as patch:
        if lags:
            hide(patch, "__0_0.distcp")
            threading.Timer(1, patch.undo).start()
        print_newest(checkpoints)
    with pytest.MonkeyPatch.context() as patch:
        if lags:
            hide(patch, ("step-00000008", "step-00000008/state.json", "manifest.json"))
            threading.Timer(1, patch.undo).start()
        print_newest(checkpoints)
    print(checkpoints._damaged)


def test_a_file_that_one_machine_sees_late_is_no_damage(tmp_path):
    for step in (4, 8):
        write_checkpoint(tmp_path / "checkpoints", step)
    assert on_two_ranks(find_late_files, tmp_path) == [["step-00000008 8"] * 2 + ["[]"]] * 2


def find_no_files(checkpoints, lags):
    store._NFS_SECONDS = 0
    with pytest.MonkeyPatch.context() as patch:
        if lags:
            hide(patch, "step-00000008/tensors/__0_0.distcp")
        print_newest(checkpoints)
        print(checkpoints._damaged)
    (checkpoints.folder / "step-00000008/tensors/__0_0.distcp").unlink(missing_ok=True)
    print_newest(checkpoints)
    print([path.name for path in checkpoints._damaged])


def test_a_file_that_one_machine_does_not_see_is_no_damage(tmp_path):
    """Rotation would remove the checkpoint. One that no machine sees is missing."""
    for step in (4, 8):
        write_checkpoint(tmp_path / "checkpoints", step)
    newest = tmp_path / "checkpoints/step-00000008"
    file = newest / "tensors/__0_0.distcp"
    expected = [
        f"RunError: a file of {newest} cannot be read (process 1 does not find {file}, but another does); try again "
        "when its disk can be read.",
        "[]",
        f"step-00000004 4 {file}: No such file or directory",
        "['step-00000008']",
    ]
    assert on_two_ranks(find_no_files, tmp_path) == [expected] * 2


def read_a_stale_state(checkpoints, lags):
    real = store.read_state

    def stale(checkpoint):
        try:
            raise OSError(errno.ESTALE, "Stale file handle", str(checkpoint / STATE))
        except OSError as error:
            raise InputError("damaged") from error

    with pytest.MonkeyPatch.context() as patch:
        if lags:
            patch.setattr(store, "read_state", stale)
        print_newest(checkpoints)
    store.read_state = real if lags else stale
    print_newest(checkpoints)
    print(checkpoints._damaged)


def test_the_state_is_read_once_for_all(tmp_path):
    """Else a process whose disk fails in that moment would take another checkpoint, and all would wait forever."""
    for step in (4, 8):
        write_checkpoint(tmp_path / "checkpoints", step)
    newest = tmp_path / "checkpoints/step-00000008"
    expected = [
        "step-00000008 8",
        f"RunError: a file of {newest} cannot be read ([Errno 116] Stale file handle: '{newest / STATE}'); try again "
        "when its disk can be read.",
        "[]",
    ]
    assert on_two_ranks(read_a_stale_state, tmp_path) == [expected] * 2
