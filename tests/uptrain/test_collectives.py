"""What the main process does alone, while the others wait."""

import os
import time
from datetime import timedelta

import forks
import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from model.common.errors import InputError, RunError
from uptrain.distributed import accelerator as accelerators
from uptrain.distributed import collectives
from uptrain.distributed.collectives import (
    all_gather,
    destroy_process_group,
    on_main,
    on_main_without_group,
    warn_on_local_main,
)


def slow_work(seconds):
    time.sleep(seconds)
    return "done"


def refuse():
    raise InputError("no such thing")


@pytest.mark.parametrize(("rank", "local_rank", "printed"), [("0", "0", True), ("1", "1", False), ("8", "0", True)])
def test_warnings_are_printed_once_per_machine(monkeypatch, capsys, rank, local_rank, printed):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    warn_on_local_main(None, "one", None, "another")
    assert capsys.readouterr().err == "Warning: one\nWarning: another\n" * printed


def wait_for_slow_work():
    accelerator = accelerators.make_accelerator("fp32", ())
    accelerator.wait_for_everyone()  # processes may start further apart than the patience below
    _set_pg_timeout(timedelta(seconds=5), dist.group.WORLD)
    for seconds in (0, 12, 0):
        started = time.monotonic()
        result = on_main(accelerator, lambda seconds=seconds: slow_work(seconds))
        assert result == "done" and time.monotonic() - started >= seconds - 1
    with pytest.raises(InputError, match="no such thing"):
        on_main(accelerator, refuse)
    with pytest.raises(ZeroDivisionError if accelerator.is_main_process else RunError, match="by zero"):
        on_main(accelerator, lambda: 1 // 0)
    assert all_gather(accelerator, accelerator.process_index) == [0, 1, 2]
    destroy_process_group()
    print("ended")


@pytest.mark.slow
def test_work_may_take_longer_than_collectives(tmp_path):
    outputs = [tmp_path / str(rank) for rank in range(3)]
    results = forks.finish(forks.start_ranks(wait_for_slow_work, outputs=outputs), outputs)
    assert [(result.code, result.out, result.err) for result in results] == [(0, "ended\n", "")] * 3


def work_first(disks, begun):
    """Run work of two seconds on the main process, each on its own disk; others come when it has begun."""
    folder = disks[int(os.environ["RANK"])] / "runs/run.data"
    collectives._SHARED_DISK_SECONDS = 0.0

    def work():
        begun.touch()
        time.sleep(2)
        folder.mkdir(parents=True)
        (folder / "done").touch()

    while os.environ["RANK"] != "0" and not begun.exists():
        time.sleep(0.01)
    try:
        on_main_without_group(work, folder / "done")
        print("done")
    except InputError as error:
        print(error)


@pytest.mark.parametrize("shared", [True, False])
def test_machines_that_wait_for_the_main_one(tmp_path, shared):
    """Without a shared disk, they would wait for ever. A marker of an earlier start, which was killed, says nothing."""
    disks = [tmp_path / "disk", tmp_path / ("disk" if shared else "other")]
    marker = disks[1] / "runs/.run.data.started"
    marker.parent.mkdir(parents=True)
    marker.write_text("of another start")
    outputs = [tmp_path / str(rank) for rank in range(2)]
    settings = {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "17"}
    started = forks.start_ranks(work_first, disks, tmp_path / "begun", outputs=outputs, settings=settings)
    results = forks.finish(started, outputs)
    refused = f"not every process finds {disks[1]}/runs/run.data; put the run into a folder that all machines share."
    assert [result.out for result in results] == ["done\n", "done\n" if shared else f"{refused}\n"], results
    assert marker.exists() != shared


def test_one_machine_needs_no_marker(tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "_SHARED_DISK_SECONDS", 0.0)
    done = tmp_path / "run.data/done"

    def work():
        assert not list(tmp_path.iterdir())
        done.parent.mkdir()
        done.touch()

    for world_size in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", world_size)
        on_main_without_group(work, done)
        done.unlink()
        done.parent.rmdir()
