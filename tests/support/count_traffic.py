"""Run `uptrain` commands under FSDP2 as drive_training.py does, and count the bytes that this process receives."""

import json
import os
from pathlib import Path
from typing import Any

import drive_training
import torch
import torch.distributed as dist

GATHER, REDUCE = "all_gather_single", "reduce_scatter_single"


def drive(jobs: list[dict[str, Any]], folder: str) -> None:
    """Run the commands. Write to FOLDER/RANK.json what was received by each kind of collective, job by job."""
    received: list[dict[str, int]] = []

    def counted(name: str) -> None:
        function = getattr(dist, name)

        def count(*arguments: Any, **options: Any) -> Any:
            tensors = [x for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)]
            n = dist.get_world_size()
            received[-1][name] += max(tensor.nbytes for tensor in tensors) * (n - 1) // n  # the whole, not the shard
            return function(*arguments, **options)

        setattr(dist, name, count)

    for name in (GATHER, REDUCE):
        counted(name)
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda: None  # the next job uses these processes
    for job in jobs:
        received.append({GATHER: 0, REDUCE: 0})
        drive_training.drive([job])
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(received))
    destroy()
