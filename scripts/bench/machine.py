"""Describe the machine and the commit of a measurement."""

import os
import subprocess
from pathlib import Path

import torch


def facts() -> dict[str, str | int]:
    """Return the processor, the usable cores, torch's version and this checkout's commit, with a + if files differ."""
    cpus = (line.split(": ", 1)[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    git = ("git", "-C", str(Path(__file__).parent))
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    changed = "+" if subprocess.check_output([*git, "status", "--porcelain"]) else ""
    cores = len(os.sched_getaffinity(0))
    return {"cpu": next(cpus, "unknown"), "cores": cores, "torch": torch.__version__, "commit": commit + changed}
