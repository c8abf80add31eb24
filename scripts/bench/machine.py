"""Describe the machine and the commit of a measurement."""

import platform
import subprocess
from pathlib import Path

import torch

from model.common.machine import n_cores


def facts() -> dict[str, str | int]:
    """Return the processor, the usable cores, the GPU if any, torch's version and this checkout's commit."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"cpu": cpu_model(), "cores": n_cores(), **gpu, "torch": torch.__version__, "commit": commit()}


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = (line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or "unknown")


def commit() -> str:
    """Return the commit of this checkout, with a + if files differ from it; `unknown` for a copy without git."""
    git = ("git", "-C", str(Path(__file__).parent))
    if subprocess.run([*git, "rev-parse"], check=False, capture_output=True).returncode:
        return "unknown"
    name = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    return name + ("+" if subprocess.check_output([*git, "status", "--porcelain"]) else "")


def read_kb(path: Path, key: str) -> int:
    """Return the kB that a file of /proc gives for a key; 0 if the process has ended."""
    try:
        lines = path.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
