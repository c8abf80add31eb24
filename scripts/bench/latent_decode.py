"""Measure decoding speed and KV cache size of latent attention against MHA and GQA, all in our decoder.

Each way of attention has a random model of the same shape. Its KV cache is filled with random numbers. Greedy steps of
all models alternate, because a machine's speed varies, and medians are compared.

    python -m scripts.bench.latent_decode --batch 8 --context 4096 --out docs/bench/latent_decode
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from model.checkpoint.latent_norm import LATENT_NORM_KEY, norm_weight
from model.common.counts import counted
from model.decoder.config import read_llama_config
from model.decoder.generation import decode
from model.decoder.kv_cache import KVCache
from model.decoder.llama import LlamaForCausalLM
from scripts.bench.machine import write_rows

HIDDEN, HEADS, LAYERS, HEAD_DIM = 1024, 16, 4, 64
COMMON = {
    "hidden_size": HIDDEN, "intermediate_size": 2752, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "vocab_size": 32000, "max_position_embeddings": 1 << 17,
}  # fmt: skip
GROUPS, LATENTS = (16, 4, 1), ((448, 64), (64, 64))
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device != "cpu" else torch.float32
    runs = [_Run(name, config, options, dtype) for name, config in configs().items()]
    for _ in range(WARM_UP + options.steps):
        for run in runs:
            run.step()
    rows = [run.row() for run in runs]
    print(table(rows))
    if options.out:
        given = {**vars(options), "out": str(options.out)}
        write_rows(options.out.with_suffix(".json"), rows, options=given)


def configs() -> dict[str, dict[str, Any]]:
    """Return config.json of each model, by name."""
    llama = {**COMMON, "model_type": "llama", "head_dim": HEAD_DIM}
    llamas = {counted(n, "K/V head"): {**llama, "num_key_value_heads": n} for n in GROUPS}
    deepseek = {
        **COMMON, "model_type": "deepseek_v3", "q_lora_rank": None, "qk_nope_head_dim": HEAD_DIM,
        "v_head_dim": HEAD_DIM, "first_k_dense_replace": LAYERS, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False,
    }  # fmt: skip
    latents = {
        f"latent {latent} + {rope}": {
            **deepseek, "kv_lora_rank": latent, "qk_rope_head_dim": rope,
            LATENT_NORM_KEY: {"kind": "eps", "weight": norm_weight("eps", latent)},
        }
        for latent, rope in LATENTS
    }  # fmt: skip
    return llamas | latents


class _Run:
    """One model with a filled KV cache, and the times of its steps."""

    @torch.inference_mode()
    def __init__(self, name: str, config: dict[str, Any], options: argparse.Namespace, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.name, self.device = name, options.device
        self.model = LlamaForCausalLM(read_llama_config(config)).to(options.device, dtype).eval()
        self.model.prepack()
        room = options.context + options.steps + WARM_UP
        self.cache = KVCache(self.model.config, options.batch, room, dtype, options.device)
        self.cache.make_room(options.context)
        for layer in self.cache.layers:
            layer.k_BKRD.normal_()
            layer.v_BKRD.normal_()
        self.cache.length = options.context
        self.cached_elements = sum(heads * size for heads, size in self.model.config.cached_shapes)
        n_tokens = options.batch * options.context * len(self.cache.layers)
        self.cached_bytes = n_tokens * self.cached_elements * dtype.itemsize
        self.ids = torch.zeros(options.batch, dtype=torch.long, device=options.device)
        self.times: list[float] = []

    @torch.inference_mode()
    def step(self) -> None:
        started = time.perf_counter()
        self.ids = decode(self.model, self.ids, self.cache).argmax(-1)
        self.ids.tolist()  # waits for a GPU
        self.times.append(time.perf_counter() - started)

    def row(self) -> dict[str, Any]:
        step = statistics.median(self.times[WARM_UP:])
        return {
            "name": self.name, "cached_elements": self.cached_elements, "cache_bytes": self.cached_bytes, "step_s": step
        }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| attention | elements cached per token and layer | KV cache, MB | ms/step |", "|---|---|---|---|"]
    lines += [
        f"| {r['name']} | {r['cached_elements']} | {r['cache_bytes'] / 1e6:.0f} | {1e3 * r['step_s']:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
