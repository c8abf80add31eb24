"""Start the workers of engines, ask them, and read what the engines print about their KV caches."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.common.errors import RunError

ROOT = Path(__file__).parents[3]
INSTALLED = ROOT / ".interop"
GIB, MIB = 1 << 30, 1 << 20
VLLM_CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")
GROUPWISE_CACHE = re.compile(r"a token takes (\d+) bytes of the KV cache")
LLAMA_CPP_CACHE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells, .* (\d+)/(\d+) seqs\)")


@dataclass(frozen=True)
class Engine:
    """An engine: its environment, its worker, and how to read from its output how many tokens a KV cache holds.

    `library`, if given, must exist besides the environment. `suffix`: of the engine's model files; empty for folders.
    """

    title: str
    python: Path
    worker: Path
    tokens_in: Callable[[str, int], int]
    library: Path | None = None
    install: str = ""
    suffix: str = ""

    def missing(self) -> Path | None:
        """Return the first missing path; None if the engine is installed."""
        return next((path for path in (self.python, self.library) if path and not path.exists()), None)


def tokens_in_vllm(log: str, cache_bytes: int) -> int:
    """Return the tokens that the KV cache holds, of a server started with this cache."""
    return int(VLLM_CACHE.findall(log)[-1].replace(",", ""))


def tokens_in_llama_cpp(log: str, cache_bytes: int) -> int:
    """Return the tokens that this cache holds, from the size of a smaller one of one sequence."""
    size, cells, _, streams = LLAMA_CPP_CACHE.findall(log)[-1]
    return int(cache_bytes / (float(size) * MIB / (int(cells) * int(streams))))


def tokens_in_groupwise(log: str, cache_bytes: int) -> int:
    """Return the tokens that this cache holds, from the bytes of one."""
    return cache_bytes // int(GROUPWISE_CACHE.findall(log)[-1])


_HERE = Path(__file__).parent
_NATIVE = INSTALLED / "llama_cpp/native/bin"
ENGINES = {
    "vllm": Engine(
        "vLLM", INSTALLED / "vllm/bin/python", _HERE / "vllm_worker.py", tokens_in_vllm, install="scripts/interop vllm"
    ),
    "llama_cpp": Engine(
        "llama.cpp", INSTALLED / "llama_cpp/bin/python", _HERE / "llama_cpp_worker.py", tokens_in_llama_cpp,
        _NATIVE / "libllama.so", "scripts/interop llama_cpp, then compile it as docs/serving.md says", ".gguf",
    ),
    "groupwise": Engine("Groupwise", Path(sys.executable), _HERE / "groupwise_worker.py", tokens_in_groupwise),
}  # fmt: skip


class Worker:
    """A process that serves one model. It starts at once; the first question waits until it is ready."""

    def __init__(self, engine: Engine, model: Path, log: Path, **settings: Any) -> None:
        self.engine, self.model, self.log, self.settings = engine, model, log, settings
        settings |= {"model": str(model), "library": str(engine.library and engine.library.parent)}
        threads = str(settings["threads"])
        hidden = ("PYTHONPATH", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.ready = False
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [engine.python, engine.worker, json.dumps(settings)], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output,
            )  # fmt: skip

    def ask(self, do: str, **arguments: Any) -> Any:
        if not self.ready:
            self._read()
            self.ready = True
        assert self.process.stdin
        with suppress(BrokenPipeError):  # if it has ended, reading says why
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        return self._read().get("answer")

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            how = "was killed, perhaps for lack of memory," if code == -9 else f"ended with code {code}"
            last = " ".join(self.log.read_text().splitlines()[-1:])
            raise RunError(f"{self.engine.title} {how} on {self.model}: {last} (see {self.log})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tokens_in_cache(self, cache_bytes: int) -> int:
        return self.engine.tokens_in(self.log.read_text(), cache_bytes)

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
