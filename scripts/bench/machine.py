"""Describe the machine and the commit of a measurement, and write them with its results."""

import json
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from model.common.machine import n_cores

Row = dict[str, Any]


def describe_machine() -> dict[str, str | int]:
    """Return the processor, the usable cores and torch's threads, the GPU if any, torch's version and our commit."""
    import torch  # here, since `commit` is used by programs that need no torch

    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    cores = {"cores": n_cores(), "threads": torch.get_num_threads()}
    return {"cpu": cpu_model(), **cores, **gpu, "torch": torch.__version__, "commit": commit()}


def write_rows(path: Path, rows: list[Row], **more: Any) -> None:
    """Write measurements as JSON, with the description of the machine and more keys, which win."""
    path.write_text(json.dumps({**describe_machine(), **more, "rows": rows}, indent=2) + "\n")


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = (line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or "unknown")


def commit() -> str:
    """Return the commit of this checkout, with a + if files differ from it; `unknown` for a copy without git."""
    git = ("git", "-C", str(Path(__file__).parent))
    if not shutil.which("git") or subprocess.run([*git, "rev-parse"], check=False, capture_output=True).returncode:
        return "unknown"
    name = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    return name + ("+" if subprocess.check_output([*git, "status", "--porcelain"]) else "")


def read_bytes(path: Path, key: str) -> int:
    """Return the bytes that a file of /proc gives for a key; 0 if the process has ended. Its kB are 1,024 bytes."""
    try:
        lines = path.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(key)), 0)
