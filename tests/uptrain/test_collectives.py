"""What the main process does alone, while the others wait."""

import time
from datetime import timedelta

import forks
import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from model.common.errors import InputError, RunError
from uptrain.distributed import accelerator as accelerators
from uptrain.distributed.collectives import destroy_process_group, gather, on_main


def slow_work(seconds):
    time.sleep(seconds)
    return "done"


def refuse():
    raise InputError("no such thing")


def wait_for_slow_work():
    accelerator = accelerators.make_accelerator("fp32", ())
    accelerator.wait_for_everyone()  # processes may start further apart than the patience below
    _set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    for seconds in (0, 5, 0):
        started = time.monotonic()
        result = on_main(accelerator, lambda seconds=seconds: slow_work(seconds))
        assert result == "done" and time.monotonic() - started >= seconds - 1
    with pytest.raises(InputError, match="no such thing"):
        on_main(accelerator, refuse)
    with pytest.raises(ZeroDivisionError if accelerator.is_main_process else RunError, match="by zero"):
        on_main(accelerator, lambda: 1 // 0)
    assert gather(accelerator, accelerator.process_index) == [0, 1, 2]
    destroy_process_group()
    print("ended")


def test_work_may_take_longer_than_collectives(tmp_path):
    outputs = [tmp_path / str(rank) for rank in range(3)]
    results = forks.finish(forks.start_ranks(wait_for_slow_work, outputs=outputs), outputs)
    assert [(result.code, result.out, result.err) for result in results] == [(0, "ended\n", "")] * 3
