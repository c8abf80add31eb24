"""Runs of `uptrain` in which something goes wrong at a chosen moment.

They are forks, so that a run starts in a fraction of a second. What they do is called out as it happens ("save 8:
before rename .unfinished-step-00000008"), and a fault strikes where a pattern matches what is called out.
"""

import errno
import functools
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forks
from commands import Result


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where, and in which process."""

    action: str
    """`kill`; `kill 1`: that rank, from this one; `no space`; `unreadable`; signals to itself, as in
    `SIGTERM later SIGINT`; `launcher SIGTERM`."""
    at: str
    """A pattern of what is called out."""
    rank: int = 0
    often: bool = False
    """Strikes every time, not only the first."""


@dataclass(frozen=True)
class Faults:
    """All that is to go wrong in a run, and what else differs from an ordinary one."""

    strikes: Sequence[Fault] = ()
    losses: dict[int, float] = field(default_factory=dict)
    """Step (counted from 0) → what the loss is multiplied by."""
    losses_rank: int = 0
    constants: dict[str, int] = field(default_factory=dict)
    """Of `uptrain.training.loop` and `spikes`."""
    max_file_bytes: int | None = None
    free_bytes: int | None = None
    drops_sharding: bool = False
    """Whether accelerate is as it is, which ignores FSDP on a CPU."""
    trace: Path | None = None
    """Where to write all that is called out."""


def run(*arguments: object, folder: Path, processes: int = 1, **more: Any) -> list[Result]:
    """Run a command in some processes; return what each did. A killed one has a negative code."""
    started = start(*arguments, folder=folder, processes=processes, **more)
    return forks.finish(started, _outputs(folder, processes))


def start(
    *arguments: object,
    folder: Path,
    faults: Faults | None = None,
    processes: int = 1,
    sharded: bool = False,
) -> list[Any]:
    """Start a command in some processes, forks of a server."""
    task = ([str(x) for x in arguments], faults or Faults(), folder)
    return forks.start_ranks(_sabotaged, *task, outputs=_outputs(folder, processes), sharded=sharded)


def launch(program: str, *arguments: object, folder: Path, faults: Faults) -> "subprocess.CompletedProcess[str]":
    """Run a command in two processes by a launcher that people use: `torchrun` or `accelerate`."""
    from real_runs import HERE, environment

    path = folder / "task"
    path.write_bytes(pickle.dumps(([str(x) for x in arguments], faults, folder)))
    config = HERE.parents[1] / "scripts/launch/accelerate/ddp.yaml"
    accelerate = ["--config_file", config, "--num_processes=2", f"--main_process_port={forks.free_port()}"]
    line = {
        "torchrun": ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={forks.free_port()}"],
        "accelerate": ["accelerate.commands.launch", *accelerate],
    }[program]
    return subprocess.run(
        [sys.executable, "-m", *line, __file__, path],
        env=environment(), capture_output=True, text=True, timeout=forks.HANGS, check=False,
    )  # fmt: skip


def _output(folder: Path, rank: int) -> str:
    return str(folder / f"output-{rank}")


def _outputs(folder: Path, processes: int) -> list[Path]:
    return [Path(_output(folder, rank)) for rank in range(processes)]


def _sabotaged(arguments: list[str], faults: Faults, folder: Path) -> None:
    rank = int(os.environ.get("RANK", "0"))
    Path(_output(folder, rank) + ".pid").write_text(str(os.getpid()))
    sys.argv = ["uptrain", *arguments]
    if "ACCELERATE_USE_FSDP" in os.environ and not faults.drops_sharding:
        import fsdp_on_cpu  # noqa: F401
    _Saboteur(faults, rank, folder).install()
    from uptrain.cli import main

    main()


class _Saboteur:
    """Calls out what a process does, and lets the faults strike."""

    def __init__(self, faults: Faults, rank: int, folder: Path) -> None:
        self._faults, self._rank, self._folder = faults, rank, folder
        self._struck: set[Fault] = set()
        self._step, self._during, self._gathers = -1, "", 0

    def install(self) -> None:
        self._install_disk()
        self._install_training()
        if self._faults.max_file_bytes is not None:
            limit = self._faults.max_file_bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if self._faults.free_bytes is not None:
            usage = namedtuple("usage", "total used free")
            shutil.disk_usage = lambda path: usage(1, 1, self._faults.free_bytes)

    def _install_disk(self) -> None:
        for name in ("mkdir", "rename", "replace", "write_text", "write_bytes"):
            self._wrap(Path, name, lambda path, *_: name_of(path))
        self._wrap(os, "fsync", lambda descriptor: name_of(Path(f"/proc/self/fd/{descriptor}").readlink()))
        self._wrap(os, "unlink", lambda path, *_: name_of(path))
        self._wrap(shutil, "rmtree", lambda path, *_: name_of(path))
        self._halve("write_bytes")

    def _install_training(self) -> None:
        from uptrain.checkpoints import store, tensors
        from uptrain.training import evaluate, loop, loss_module, metrics_log, spikes

        for name, value in self._faults.constants.items():
            (module,) = (each for each in (loop, spikes) if hasattr(each, name))
            setattr(module, name, value)
        self._wrap(tensors, "save_tensors", lambda *_: "")
        self._wrap(store, "checksum", lambda path: name_of(path))
        self._wrap(store, "all_gather", self._note_gather)
        self._wrap(store.CheckpointStore, "save", self._note_save)
        self._wrap(loop, "windows_of_step", self._note_step)
        self._wrap(loop, "_backward", lambda *_: str(self._step))
        self._wrap(evaluate, "micro_batches", lambda *_: "of evaluation")
        self._wrap(metrics_log.Metrics, "flush", lambda me: str(self._step))
        self._wrap(
            metrics_log.Metrics, "write", lambda me, record: f"{record['step']} {record.get('event', '')}".strip()
        )
        forward = loss_module.LossModule.forward

        def poisoned(me: Any, *arguments: Any, **options: Any) -> Any:
            result = forward(me, *arguments, **options)
            bad = me.training and self._rank == self._faults.losses_rank
            return result * self._faults.losses.get(self._step, 1.0) if bad else result

        loss_module.LossModule.forward = poisoned
        rotate = store.CheckpointStore.rotate

        def rotating(me: Any, newest: int, decay_start: int | None) -> str:
            self._during = f"rotate {newest}: "
            result = rotate(me, newest, decay_start)
            self._during = ""
            return result

        store.CheckpointStore.rotate = rotating

    def _note_step(self, step: int, *_: Any) -> str:
        self._step, self._during = step, ""
        return str(step)

    def _note_save(self, me: Any, loss_module: Any, optimizer: Any, state: dict[str, Any], *_: Any) -> str:
        self._during, self._gathers = f"save {state['step']}: ", 0
        return ""

    def _note_gather(self, *_: Any) -> str:
        self._gathers += 1
        return str(self._gathers)

    def _wrap(self, owner: Any, name: str, describe: Callable[..., str]) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*arguments: Any, **options: Any) -> Any:
            what = f"{name} {describe(*arguments)}".strip()
            self._call_out(f"before {what}")
            result = real(*arguments, **options)
            self._call_out(f"after {what}")
            return result

        setattr(owner, name, call)

    def _halve(self, name: str) -> None:
        """Write contents in two halves, with a moment between them."""
        whole = getattr(Path, name)

        def call(path: Path, content: bytes) -> int:
            if not any("half" in fault.at for fault in self._faults.strikes) and self._faults.trace is None:
                return whole(path, content)
            with path.open("wb") as file:
                file.write(content[: len(content) // 2])
                file.flush()
                self._call_out(f"half of {name_of(path)} written")
            return whole(path, content)

        setattr(Path, name, call)

    def _call_out(self, what: str) -> None:
        what = self._during + what
        if self._faults.trace is not None and self._rank == 0:
            with self._faults.trace.open("a") as file:
                file.write(what + "\n")
        for fault in self._faults.strikes:
            again = fault.often or fault not in self._struck
            if again and fault.rank == self._rank and re.fullmatch(fault.at, what):
                self._struck.add(fault)
                self._strike(fault.action)

    def _strike(self, action: str) -> None:
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action.startswith("kill "):
            victim = Path(_output(self._folder, int(action.removeprefix("kill "))) + ".pid")
            os.kill(int(victim.read_text()), signal.SIGKILL)
        elif action == "no space":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif action == "unreadable":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        elif action.startswith("launcher "):
            os.kill(os.getppid(), signal.Signals[action.removeprefix("launcher ")])
            _wait_for_request()
        else:
            for word in action.split():
                if word == "later":
                    time.sleep(1.2)  # what `uptrain.distributed.signals` takes for one request ends after a second
                else:
                    os.kill(os.getpid(), signal.Signals[word])


def _wait_for_request() -> None:
    from uptrain.distributed.signals import stop_request

    end = time.monotonic() + forks.HANGS / 4
    while not stop_request.reason and time.monotonic() < end:
        time.sleep(0.01)


def name_of(path: Any) -> str:
    return Path(path).name


if __name__ == "__main__":
    from fault_injection import _sabotaged as sabotaged  # where the task's classes are

    _arguments, _faults, _folder = pickle.loads(Path(sys.argv[1]).read_bytes())
    sabotaged(_arguments, _faults, _folder)
