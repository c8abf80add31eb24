"""A stand-in for the engines in the benchmark of engines: it prints what they print, and its times are given.

As a program it is the worker. A step takes 1 ms, and 1 ms for each K/V head; a prefill 1 ms for each token.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STOP = "STAND_IN_STOPS_AT"
"""An environment variable: the context at which a worker ends, as one does that runs out of memory."""
VLLM_LINE = (
    "(MainProcess pid=1) INFO 11-24 05:55:45 [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Maximum "
    "concurrency for 1,024 tokens per request: 45.50x"
)
LLAMA_CPP_LINE = (
    "llama_kv_cache: size =  405.00 MiB (   768 cells,  30 layers,  8/8 seqs), "
    "K (f16):  202.50 MiB, V (f16):  202.50 MiB"
)

GROUPWISE_LINE = "a token takes 8 bytes of the KV cache"


def install() -> None:
    """Put the stand-in in the place of all engines, and small models without a tokenizer in that of the large one."""
    from scripts.bench.engines import client, models

    for name, engine in client.ENGINES.items():
        client.ENGINES[name] = client.Engine(engine.title, Path(sys.executable), Path(__file__), engine.tokens_in)
    models.smollm2 = lambda work: work / "no tokenizer"
    models.RANDOM_SHAPE |= {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 2, "vocab_size": 64
    }  # fmt: skip


def main() -> None:
    sys.path.insert(0, str(ROOT / "scripts/bench/engines"))
    from worker_loop import serve, settings

    given = settings()
    heads = json.loads((Path(given["model"]) / "config.json").read_text())["num_key_value_heads"]

    def facts() -> dict[str, str]:
        print(VLLM_LINE, LLAMA_CPP_LINE, GROUPWISE_LINE, sep="\n", flush=True)
        return {"version": "0"}

    def open_(batch: int, context: int) -> None:
        if str(context) == os.environ.get(STOP):
            sys.exit("out of memory")

    actions = {
        "facts": facts, "prefill": lambda batch, context: 1e-3 * batch * context, "open": open_,
        "decode": lambda steps: [9.0] + [1e-3 * (1 + heads)] * (steps - 1), "close": lambda: None,
    }  # fmt: skip
    serve(given, actions)


if __name__ == "__main__":
    main()
