"""Measure decoding speed and KV cache size against the number of K/V heads, ours and transformers', in one run.

Each number of K/V heads has a random model of the same shape. For each batch and context length, the KV cache is filled
with random numbers, then --steps greedy steps are timed one by one. Ours and transformers' alternate, and the numbers
of heads alternate every few steps, because a machine's speed varies. Medians are compared. On a CPU, the bytes that a
step must read (weights and cache) per second are also divided by the speed at which the memory is read. Writes a table
(JSON and Markdown) and a figure like figure 6 of the GQA paper (Ainslie et al. 2023): time per token against K/V heads.

    python -m scripts.bench.decode --batches 1 8 --contexts 256 1024 4096 --out docs/bench/decode

--compile theirs: transformers' model is compiled by torch, with its StaticCache. --compile both: ours too, and is then
not prepacked, which torch cannot compile. Only MHA and MQA are then measured, since a model takes a minute to compile.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM as Theirs

from model.common.plot_style import PLOT_STYLE
from model.decoder.config import read_llama_config
from model.decoder.generation import decode
from model.decoder.kv_cache import KVCache
from model.decoder.llama import LlamaForCausalLM as Ours
from model.decoder.transformers_classes import cache_argument
from scripts.bench.machine import Row, write_rows

SHAPES: dict[str, dict[str, Any]] = {
    # of the parents in scripts/study/plans/merges.toml
    "study": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
              "vocab_size": 4096},
    "small": {"hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 4, "num_attention_heads": 16,
              "vocab_size": 32000},
    "large": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
              "vocab_size": 32000},
}  # fmt: skip
ROUND, WARM_UP = 10, 2
"""Timed steps per round, and warm-up steps before them."""


def make_models(
    shape: dict[str, Any], n_kv_heads: int, dtype: torch.dtype, device: str, compiled: str
) -> tuple[Ours, Theirs]:  # fmt: skip
    """Return our model and transformers', with the same random weights. `compiled`: neither, theirs or both."""
    config = TheirConfig(**shape, num_key_value_heads=n_kv_heads, max_position_embeddings=1 << 17)
    torch.manual_seed(0)
    theirs = Theirs(config).eval()
    torch.nn.Module.to(theirs, device, dtype)
    with torch.device("meta"):
        ours = Ours(read_llama_config(config.to_dict()))
    ours.load_state_dict(theirs.state_dict(), assign=True)
    if compiled != "neither":
        theirs.forward = torch.compile(theirs.forward)
    if compiled == "both":
        ours.model.forward = torch.compile(ours.model.forward, dynamic=True)  # type: ignore[method-assign]
    else:
        ours.prepack()
    return ours.eval(), theirs


class Decoding:
    """Our model and transformers', each with a filled KV cache, and the times of their steps."""

    @torch.inference_mode()
    def __init__(self, ours: Ours, theirs: Theirs, batch: int, context: int, steps: int, compiled: str) -> None:
        self.ours, self.theirs = ours, theirs
        self.device = ours.lm_head_weight.device
        room = context + steps
        is_static = compiled != "neither"
        self.their_cache = StaticCache(theirs.config, room) if is_static else DynamicCache(config=theirs.config)
        self.their_arguments = {cache_argument(theirs): self.their_cache}
        self.cache = KVCache(ours.config, batch, room, ours.lm_head_weight.dtype, self.device)
        self.cache.make_room(room if compiled == "both" else context)
        shape = (batch, context, ours.config.n_kv_heads, ours.config.head_dim)
        for index, layer in enumerate(self.cache.layers):
            k_BSKD, v_BSKD = (torch.randn(shape, device=self.device, dtype=theirs.dtype) for _ in range(2))
            layer.store(0, k_BSKD, v_BSKD, whole=False)
            self.their_cache.update(k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2), index)
        self.cache.length = context
        self.cached_bytes = 2 * len(self.cache.layers) * k_BSKD.nbytes
        weights = (p.nbytes for name, p in theirs.named_parameters() if "embed_tokens" not in name)
        self.read_bytes = self.cached_bytes + sum(weights)
        self.our_ids = self.their_ids = torch.randint(0, ours.config.vocab_size, (batch,), device=self.device)
        self.times: dict[str, list[float]] = {"ours": [], "theirs": []}

    @torch.inference_mode()
    def run(self, steps: int) -> None:
        """Time alternating steps of both.

        The first steps come right after another model's, whose data fill the caches, and are not counted.
        """
        for step in range(WARM_UP + steps):
            for name in ("ours", "theirs") if step % 2 else ("theirs", "ours"):
                synchronise(self.device)
                started = time.perf_counter()
                if name == "ours":
                    self.our_ids = decode(self.ours, self.our_ids, self.cache).argmax(-1)
                else:
                    output = self.theirs(self.their_ids[:, None], **self.their_arguments)
                    self.their_ids = output.logits[:, -1].argmax(-1)
                synchronise(self.device)
                if step >= WARM_UP:
                    self.times[name].append(time.perf_counter() - started)

    def row(self) -> Row:
        ours_s, theirs_s = (statistics.median(self.times[name]) for name in ("ours", "theirs"))
        return {
            "ours_s": ours_s, "theirs_s": theirs_s, "ratio": theirs_s / ours_s, "cache_bytes": self.cached_bytes,
            "bytes_per_s": self.read_bytes / ours_s,
        }  # fmt: skip


def memory_bytes_per_s(device: torch.device) -> float | None:
    """Return the speed at which a CPU reads memory, the best of several sums of 1 GB; None for another device."""
    if device.type != "cpu":
        return None
    numbers, times = torch.ones(1 << 28), []
    for _ in range(7):
        started = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - started)
    return numbers.nbytes / min(times)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(rows: list[Row]) -> str:
    lines = [
        "| K/V heads | batch | context | cache MB | ours ms/step | transformers ms/step | ratio | ours, MHA ÷ this "
        "| of the memory's speed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    mha = {(r["batch"], r["context"]): r["ours_s"] for r in rows if r["n_kv_heads"] == r["n_heads"]}
    for r in rows:
        gain = mha[r["batch"], r["context"]] / r["ours_s"]
        share = f"{r['bytes_per_s'] / r['memory_bytes_per_s']:.0%}" if r["memory_bytes_per_s"] else "–"
        lines.append(
            f"| {r['n_kv_heads']} | {r['batch']} | {r['context']} | {r['cache_bytes'] / 1e6:.1f} "
            f"| {1e3 * r['ours_s']:.1f} | {1e3 * r['theirs_s']:.1f} | {r['ratio']:.2f} | {gain:.2f} | {share} |"
        )
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draw time per token against K/V heads, for the largest batch and context."""
    import matplotlib
    from matplotlib.figure import Figure

    batch, context = max((r["batch"], r["context"]) for r in rows)
    shown = sorted((r for r in rows if (r["batch"], r["context"]) == (batch, context)), key=lambda r: r["n_kv_heads"])
    heads = [r["n_kv_heads"] for r in shown]
    with matplotlib.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.subplots()
        for key, label, style in (("theirs_s", "transformers", "s--"), ("ours_s", "Groupwise", "o-")):
            axes.plot(heads, [1e3 * r[key] / batch for r in shown], style, label=label)
        axes.set_xscale("log", base=2)
        axes.invert_xaxis()  # MHA on the left, as in the figure of serving
        axes.set_xticks(heads, [f"{h}\nMQA" if h == 1 else f"{h}\nMHA" if h == heads[-1] else str(h) for h in heads])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("K/V heads")
        axes.set_ylabel("milliseconds per generated token")
        axes.set_title(f"Decoding, batch {batch}, context {context}")
        axes.legend()
        figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--shape", choices=SHAPES, default="large" if cuda else "small")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", choices=("neither", "theirs", "both"), default="neither")
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.md and OUT.png")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    n_heads, rows, rounds = shape["num_attention_heads"], [], -(-options.steps // ROUND)
    numbers = [n_heads >> i for i in range(n_heads.bit_length())]
    numbers = numbers if options.compile == "neither" else [numbers[0], numbers[-1]]
    memory_speed = memory_bytes_per_s(torch.device(options.device))
    dtype = getattr(torch, options.dtype)
    models = {n: make_models(shape, n, dtype, options.device, options.compile) for n in numbers}
    for batch, context in itertools.product(options.batches, options.contexts):
        steps = rounds * (WARM_UP + ROUND)
        decodings = {n: Decoding(*models[n], batch, context, steps, options.compile) for n in numbers}
        for _ in range(rounds):
            for decoding in decodings.values():
                decoding.run(ROUND)
        for n, decoding in decodings.items():
            row = {"n_heads": n_heads, "n_kv_heads": n, "batch": batch, "context": context, **decoding.row()}
            rows.append(row | {"memory_bytes_per_s": memory_speed})
            print(table(rows).splitlines()[-1], flush=True)
    rows.sort(key=lambda row: -row["n_kv_heads"])
    print(table(rows))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        setup = {"device": options.device, "dtype": options.dtype, "compile": options.compile, "shape": shape}
        write_rows(options.out.with_suffix(".json"), rows, **setup)
        options.out.with_suffix(".md").write_text(table(rows) + "\n")
        draw(rows, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
