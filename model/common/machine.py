"""Read which cores and how much memory this process can use.

In a container or a Slurm job, they are less than the machine's.
"""

import os
from pathlib import Path

import psutil

_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V1 = (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))
"""Files of the limits and of the use, and the parts of the use that the kernel frees when memory is short."""


def n_cores() -> int:
    """Return the number of cores that this process may use; all cores on macOS, which does not report the affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return the bytes that can be allocated without swapping or being killed.

    The machine's available memory, and what every control group of this process leaves, whichever is least (Linux
    Admin Guide, "Control Group v2" and "Memory Resource Controller"). `cgroups` and `own` are files of the kernel.
    """
    return min([int(psutil.virtual_memory().available), *_left_by_groups(cgroups, own)])


def _left_by_groups(cgroups: Path, own: Path) -> list[int]:
    """Return the bytes left by each control group with a limit: its limit, less its use that cannot be freed."""
    try:
        lines = own.read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root, files = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
            # A container may see the host's path, and its own group at the root.
            group = root / path.lstrip("/")
            left += [_left(each, *files) for each in (group, *group.parents) if each.is_relative_to(root)]
    return [each for each in left if each is not None]


def _left(group: Path, limits: tuple[str, ...], used: str, freeable: tuple[str, ...]) -> int | None:
    """Return the bytes that a group leaves, or None if it has no limit."""
    now = _number(group / used)
    most = [limit for name in limits if (limit := _number(group / name)) is not None]
    if now is None or not most:
        return None
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        freed = sum(int(stat.get(name, "0")) for name in freeable)
    except (OSError, ValueError):
        freed = 0
    return max(0, min(most) - max(0, now - freed))


def _number(path: Path) -> int | None:
    """Return the number in a file; None for `max`, and for what cannot be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
