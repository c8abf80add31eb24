"""Serve a folder by the project's own decoder, and time its steps. Runs in the project's environment.

A decode cell's KV cache is allocated for all its tokens, and holds zeros: reading them takes as long as reading others.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from worker_loop import clock_of, serve_engine, settings

SETTINGS = settings()
clock = clock_of(SETTINGS)
sys.path.insert(0, str(Path(__file__).parents[3]))
import torch  # noqa: E402

from model.decoder.generation import decode, prefill  # noqa: E402
from model.decoder.kv_cache import KVCache  # noqa: E402
from model.decoder.llama import LlamaForCausalLM  # noqa: E402
from model.decoder.loading import load_model  # noqa: E402
from scripts.bench.machine import commit  # noqa: E402

DTYPE = getattr(torch, SETTINGS["dtype"])
SPARE = 64
"""Tokens that the cache of a decode cell may grow by."""


class Server:
    """One model, and the KV cache of the present cell."""

    def __init__(self) -> None:
        torch.set_num_threads(SETTINGS["threads"])
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_model(SETTINGS["model"], DTYPE, self.device)
        assert isinstance(model, LlamaForCausalLM)
        self.model = model
        self.model.prepack()
        cache = self.cache_of(1, 1)
        print(f"a token takes {cache.nbytes} bytes of the KV cache", flush=True)

    def facts(self) -> dict[str, object]:
        return {"version": commit(), "threads": torch.get_num_threads()}

    def prefill(self, batch: int, context: int) -> float:
        ids_BT = torch.randint(3, self.model.config.vocab_size, (batch, context), device=self.device)
        cache = self.cache_of(batch, context)
        return self.seconds_of(lambda: prefill(self.model, ids_BT, cache).argmax(-1))

    def open(self, batch: int, context: int) -> None:
        self.cache = self.cache_of(batch, context + SPARE)
        self.cache.make_room(context + SPARE)
        self.cache.length = context
        self.ids_B = torch.randint(3, self.model.config.vocab_size, (batch,), device=self.device)

    def decode(self, steps: int) -> list[float]:
        return [self.seconds_of(self.step) for _ in range(steps)]

    def close(self) -> None:
        del self.cache

    def step(self) -> None:
        self.ids_B = decode(self.model, self.ids_B, self.cache).argmax(-1)

    def cache_of(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.model.config, batch, capacity, DTYPE, self.device)

    def seconds_of(self, work: Callable[[], object]) -> float:
        self.synchronise()
        started = clock()
        work()
        self.synchronise()
        return clock() - started

    def synchronise(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    serve_engine(SETTINGS, Server())
