"""Processes before they have joined, where the others wait for the main one, and as they leave their group."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from uptrain.distributed.collectives import main_process_first


def test_the_main_process_works(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    main_process_first((tmp_path / "done").touch, tmp_path / "done")
    assert (tmp_path / "done").exists()


def test_another_waits_for_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    later = threading.Timer(0.3, (tmp_path / "done").touch)
    later.start()
    main_process_first(lambda: pytest.fail("only the main process works"), tmp_path / "done")
    assert (tmp_path / "done").exists()


def test_a_waiting_process_can_be_stopped(tmp_path, monkeypatch):
    """As the launcher does when the main process has failed."""
    monkeypatch.setenv("RANK", "1")
    later = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    later.start()
    with pytest.raises(KeyboardInterrupt):
        main_process_first(lambda: None, tmp_path / "done")


DESTROY = """
from pathlib import Path

import torch
import torch.distributed as dist

from uptrain.distributed.collectives import destroy_process_group


class Owner:
    def __init__(self):
        self.group, self.itself = dist.group.WORLD, self  # only the garbage collector frees it


def gloo_threads():
    return [name for name in (path.read_text() for path in Path("/proc/self/task").glob("*/comm")) if "gloo" in name]


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.broadcast(torch.zeros(1), 0)
Owner()
assert gloo_threads()
destroy_process_group()
assert not gloo_threads(), gloo_threads()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
def test_no_thread_of_gloo_is_left_when_the_group_is_destroyed():
    """Such a thread aborts the process if it wants the interpreter lock while the interpreter ends."""
    subprocess.run([sys.executable, "-c", DESTROY], check=True, timeout=100)
