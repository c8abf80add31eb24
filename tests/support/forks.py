"""Processes that start at once: forks of a server that has imported torch, transformers and the packages."""

import io
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest import mock

import pytest
from commands import Result

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
PRELOADED = [
    "transformers", "accelerate", "torch.distributed.checkpoint", "torch._dynamo", "pytest",
    "uptrain.cli", "uptrain.commands.run", "uptrain.runs.launch", "uptrain.runs.start_and_resume",
    "uptrain.data.prepare.prepare", "uptrain.data.prepare.workers",
    "convert.cli", "convert.conversion",
    "model.decoder.loading", "model.decoder.llama", "model.checkpoint.formats.safetensors",
    "fault_injection", "drive_training",
]  # fmt: skip
HANGS = 120.0
"""Seconds after which a process is taken for hanging."""


def server() -> Any:
    """Return the context whose processes are forks of the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = f"{ROOT}{os.pathsep}{HERE}"
    # On a machine without IPv6, torch would warn of it on stderr.
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with mock.patch.dict(os.environ, settings):
        forkserver.ensure_running()
    return context


def start(
    function: Callable[..., object], *arguments: object, output: Path, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Call a function in a process of its own, whose output goes to the files `output`.out and `output`.err."""
    process: BaseProcess = server().Process(target=_child, args=(function, arguments, output, dict(environment or {})))
    process.start()
    return process


def start_ranks(
    function: Callable[..., object],
    *arguments: object,
    outputs: Sequence[Path],
    sharded: bool = False,
    settings: Mapping[str, str] | None = None,
) -> list[BaseProcess]:
    """Call a function in several processes at once, as torchrun starts them on CPUs: one for each output."""
    port, n, started = str(free_port()), len(outputs), []
    for rank, output in enumerate(outputs):
        environment = {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
        if n > 1 or sharded:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
            environment |= {name: str(value) for name, value in world.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment |= {"ACCELERATE_USE_FSDP": "true"} if sharded else {}
        environment |= settings or {}
        started.append(start(function, *arguments, output=output, environment=environment))
    return started


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def finish(processes: Sequence[BaseProcess], outputs: Sequence[Path], seconds: float = HANGS) -> list[Result]:
    """Wait for processes, and return what each did. A killed one has a negative code."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hanging = [process for process in processes if process.exitcode is None]
    for process in hanging:
        process.kill()
        process.join()
    results = []
    for process, output in zip(processes, outputs, strict=True):
        assert process.exitcode is not None
        out, err = (Path(f"{output}{suffix}").read_text() for suffix in (".out", ".err"))
        results.append(Result(process.exitcode, out, err))
    assert not hanging, results
    return results


def call(
    function: Callable[..., object],
    *arguments: object,
    output: Path,
    environment: Mapping[str, str] | None = None,
    seconds: float = HANGS,
) -> Result:
    """Call a function in a process of its own, and return what it did."""
    process = start(function, *arguments, output=output, environment=environment)
    (result,) = finish([process], [output], seconds)
    return result


def _child(
    function: Callable[..., object], arguments: tuple[object, ...], output: Path, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
    for number, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(f"{output}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    sys.modules["__main__"] = types.ModuleType("__main__")  # else each worker of this process imports pytest
    function(*arguments)


def start_program(
    program: str, *arguments: object, output: Path, before: str = "", environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Start `convert` or `uptrain` with a session of its own. `before` is code to run in it first."""
    task = (program, [str(x) for x in arguments], before)
    return start(run_program, *task, output=output, environment=environment)


def run_program(program: str, arguments: Sequence[str], before: str = "") -> None:
    """Do as the command line would, in this process, which serves for nothing else."""
    os.setsid()
    exec(before, {})
    sys.argv = [program, *arguments]
    import_module(f"{program}.cli").main()


def run_module(words: Sequence[str]) -> None:
    """Do as `python -m` does with these words."""
    sys.argv = list(words)
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def fork_modules(
    words: Sequence[object], *, env: Mapping[str, str] | None = None, check: bool = False, **_: Any
) -> "subprocess.CompletedProcess[str]":
    """Stand in for `subprocess.run` of `python -m`: fork this process, which is one of `start`."""
    program, option, *module = map(str, words)
    assert (program, option) == (sys.executable, "-m")
    with TemporaryFile() as out, TemporaryFile() as err:
        sys.stdout.flush()  # or the fork would write it, too
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            os.environ.update(env or {})
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os._exit(_code_of(module))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        texts = [_text_of(file) for file in (out, err)]
    assert not (check and code), texts
    return subprocess.CompletedProcess(list(map(str, words)), code, *texts)


def _code_of(module: Sequence[str]) -> int:
    code: object = 0
    try:
        run_module(module)
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


def _text_of(file: Any) -> str:
    file.seek(0)
    return io.TextIOWrapper(file).read()


def fork_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers of `uptrain prepare` be forks of the server, which start at once."""
    from uptrain.data.prepare import workers

    forking = types.SimpleNamespace(get_context=lambda _: server(), parent_process=multiprocessing.parent_process)
    monkeypatch.setattr(workers, "multiprocessing", forking)
