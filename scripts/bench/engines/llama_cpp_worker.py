"""Serve a GGUF file by llama.cpp's library, and time its steps. Runs in the environment .interop/llama_cpp.

A decode cell fills the KV cache with the state of a short prompt, repeated to the context's length, through the calls
that save and restore a sequence: a real prefill of 16,384 tokens would take minutes and leave the same bytes to read.
"""

import ctypes
import os

import numpy as np
from llama_cpp_state import repeated
from worker_loop import clock_of, serve_engine, settings

SETTINGS = settings()
clock = clock_of(SETTINGS)
os.environ["LLAMA_CPP_LIB_PATH"] = SETTINGS["library"]
import llama_cpp  # noqa: E402

SHORT, SPARE = 64, 256
"""Tokens of the prompt whose state is repeated; positions that a sequence has beyond its context."""


class Server:
    """One model, and the context of the present cell."""

    def __init__(self) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            SETTINGS["model"].encode(), llama_cpp.llama_model_default_params()
        )
        assert self.model, SETTINGS["model"]
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.rng = np.random.default_rng(0)
        self.context = None

    def facts(self) -> dict[str, str]:
        """Return the version; the context made here prints the size of the KV cache."""
        self.start(1, 4096)
        self.close()
        return {"version": f"of llama-cpp-python {llama_cpp.__version__}"}

    def start(self, batch: int, context: int) -> None:
        """Make a context for `batch` sequences of this length."""
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_seq_max, parameters.n_ctx = batch, batch * (context + SPARE)
        parameters.n_threads = parameters.n_threads_batch = SETTINGS["threads"]
        parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.no_perf = True
        self.size = parameters.n_batch
        self.context = llama_cpp.llama_init_from_model(self.model, parameters)
        assert self.context, f"no context for {batch} x {context}"
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch, self.length = batch, context

    def run(self, tokens: list[tuple[int, int]], wanted: set[int]) -> None:
        """Compute tokens, given as (sequence, position), with the logits of the positions wanted."""
        batch = llama_cpp.llama_batch_init(self.size, 0, 1)
        for begin in range(0, len(tokens), self.size):
            part = tokens[begin : begin + self.size]
            batch.n_tokens = len(part)
            for i, (sequence, position) in enumerate(part):
                batch.token[i] = int(self.rng.integers(self.n_vocab))
                batch.pos[i], batch.n_seq_id[i], batch.logits[i] = position, 1, position in wanted
                batch.seq_id[i][0] = sequence
            code = llama_cpp.llama_decode(self.context, batch)
            assert code == 0, f"llama_decode returned {code}"
        llama_cpp.llama_synchronize(self.context)
        llama_cpp.llama_batch_free(batch)

    def prefill(self, batch: int, context: int) -> float:
        self.start(batch, context)
        tokens = [(sequence, position) for sequence in range(batch) for position in range(context)]
        started = clock()
        self.run(tokens, {context - 1})
        seconds = clock() - started
        self.close()
        return seconds

    def open(self, batch: int, context: int) -> None:
        """Fill the KV cache of all sequences."""
        self.start(batch, context)
        self.run([(0, position) for position in range(SHORT)], {SHORT - 1})
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        short = np.zeros(size, "u1")
        assert llama_cpp.llama_state_seq_get_data(self.context, as_bytes(short), size, 0) == size
        state = repeated(short, SHORT, context)
        for sequence in range(batch):
            assert llama_cpp.llama_state_seq_set_data(self.context, as_bytes(state), len(state), sequence) == len(state)
            assert llama_cpp.llama_memory_seq_pos_max(self.memory, sequence) == context - 1

    def decode(self, steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            started = clock()
            self.run([(sequence, self.length) for sequence in range(self.batch)], {self.length})
            times.append(clock() - started)
            self.length += 1
        return times

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        self.context = None


def as_bytes(array: np.ndarray) -> ctypes.Array:
    return (ctypes.c_uint8 * len(array)).from_buffer(array)


if __name__ == "__main__":
    serve_engine(SETTINGS, Server())
