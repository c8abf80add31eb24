"""Describe the machine and the commit of a measurement."""

import os
import subprocess
from pathlib import Path

import torch


def facts() -> dict[str, str | int]:
    """Return the processor, the usable cores, torch's version and this checkout's commit."""
    cores = len(os.sched_getaffinity(0))
    return {"cpu": cpu_model(), "cores": cores, "torch": torch.__version__, "commit": commit()}


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "unknown")


def commit() -> str:
    """Return the commit of this checkout, with a + if files differ from it."""
    git = ("git", "-C", str(Path(__file__).parent))
    name = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    return name + ("+" if subprocess.check_output([*git, "status", "--porcelain"]) else "")
