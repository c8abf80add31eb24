"""Read how much memory this process can still use on the CPU: the machine's, or less in a container or a Slurm job."""

from pathlib import Path

import psutil

_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_memory(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return the bytes that can be allocated without swapping or being killed.

    The machine's available memory, and what every control group of this process leaves, whichever is least (Linux
    Admin Guide, "Control Group v2" and "Memory Resource Controller"). `cgroups` and `own` are files of the kernel.
    """
    return min([int(psutil.virtual_memory().available), *_left_by_groups(cgroups, own)])


def _left_by_groups(cgroups: Path, own: Path) -> list[int]:
    """Return the bytes left by each control group with a limit: its limit, less its use that cannot be freed."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return []
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = cgroups / "memory"
            if not controllers:
                names, root = ("memory.max", "memory.current", "inactive_file"), cgroups
            # A container may see the host's path, and its own group at the root.
            group = root / path.lstrip("/")
            left += [_left(each, *names) for each in (group, *group.parents) if each.is_relative_to(root)]
    return [each for each in left if each is not None]


def _left(group: Path, limit: str, used: str, freeable: str) -> int | None:
    """Return the bytes that a group leaves, or None if it has no limit. `freeable` counts the cache of files."""
    try:
        most, now = (group / limit).read_text().strip(), int((group / used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return None if most == "max" else max(0, int(most) - now + int(stat.get(freeable, "0")))
    except (OSError, ValueError):
        return None
