"""Serve a folder by vLLM's engine, and time its steps. Runs in the environment .interop/vllm.

A decode cell takes requests whose KV caches vLLM's own connector for such measurements fills: a real prefill of 32
times 4,096 tokens would take minutes and leave the same bytes to read.
"""

import os
import random

from worker_loop import clock_of, serve_engine, settings

SETTINGS = settings()
clock = clock_of(SETTINGS)
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": str(SETTINGS["cache_gib"]),
}  # fmt: skip
import torch  # noqa: E402
import vllm  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm_filling import Filling  # noqa: E402

ENDLESS = 200
"""Tokens that a request of a decode cell may generate: more than are timed, less than the room beside its context."""


class Server:
    """One model, and the requests of the present cell."""

    def __init__(self) -> None:
        torch.set_num_threads(SETTINGS["threads"])
        on_gpu = {"kv_cache_memory_bytes": SETTINGS["cache_gib"] << 30} if torch.cuda.is_available() else {}
        self.llm = vllm.LLM(
            model=SETTINGS["model"], dtype=SETTINGS["dtype"], max_model_len=SETTINGS["context"],
            max_num_seqs=SETTINGS["batch"], enable_prefix_caching=False, seed=0,
            hf_overrides={"max_position_embeddings": SETTINGS["context"]}, enforce_eager=SETTINGS["eager"],
            kv_transfer_config=KVTransferConfig(
                kv_connector="Filling", kv_connector_module_path="vllm_filling", kv_role="kv_both"
            ),
            **on_gpu,
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.n_vocab = self.engine.model_config.get_vocab_size()
        self.random = random.Random(0)
        self.number = 0
        self.requests: list[str] = []

    def facts(self) -> dict[str, object]:
        return {"version": vllm.__version__, "threads": torch.get_num_threads()}

    def add(self, batch: int, context: int, new: int) -> None:
        parameters = vllm.SamplingParams(
            temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        for _ in range(batch):
            self.number += 1
            prompt = [self.random.randrange(3, self.n_vocab) for _ in range(context)]
            self.engine.add_request(str(self.number), {"prompt_token_ids": prompt}, parameters)
            self.requests.append(str(self.number))

    def prefill(self, batch: int, context: int) -> float:
        Filling.on = False
        self.add(batch, context, 1)
        started = clock()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        seconds = clock() - started
        self.requests.clear()
        return seconds

    def open(self, batch: int, context: int) -> None:
        """Fill the KV cache of all requests, and decode until all of them take part in a step."""
        Filling.on = True
        self.add(batch, context, ENDLESS)
        for _ in range(100):
            if len(self.engine.step()) == batch:
                return
        raise AssertionError("not all requests run together")

    def decode(self, steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            started = clock()
            running = len(self.engine.step())
            times.append(clock() - started)
            assert running == len(self.requests), f"{running} of {len(self.requests)} requests took part"
        return times

    def close(self) -> None:
        self.engine.abort_request(self.requests)
        self.requests.clear()
        while self.engine.has_unfinished_requests():
            self.engine.step()


if __name__ == "__main__":
    serve_engine(SETTINGS, Server())
