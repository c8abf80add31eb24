"""Before processes have joined: the main one works, the others wait for its file, and can be stopped."""

import os
import signal
import threading

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
