"""Measure training speed: tokens/s of our Llama ÷ a peer's, forward + backward + AdamW (fused for both).

Both train on the same batch, alternating (ABAB …), in this process; medians are compared. The loss is next-token
cross-entropy. The peer is transformers' LlamaForCausalLM with the same weights and sdpa attention, its default, or
litgpt's GPT of the same shape with 2 K/V heads. Both multiply float32 as `uptrain run` does: on a CPU by oneDNN, where
that does not round. (By default the peers use MKL; see train_loop.) The last two columns divide the operations of our
step (6 for each token and parameter but the embedding's, and those of attention) per second by those of one large
matrix product in the same precision, and by the peak of a GPU's data sheet in bfloat16 (MFU).

    python -m scripts.bench.train_step --sizes 7M 25M --precision fp32 bf16 --compile no yes
    python -m scripts.bench.train_step --sizes 8B-layers --precision bf16 --compile no yes --length 2048    # on a GPU
    pip install --no-deps litgpt lightning lightning-utilities torchmetrics jsonargparse
    python -m scripts.bench.train_step --peer litgpt --sizes 25M
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM as Theirs

from model.decoder.config import read_llama_config
from model.decoder.devices import fast_float32_matmul
from model.decoder.llama import LlamaForCausalLM as Ours
from scripts.bench.machine import write_rows
from scripts.bench.rounds import in_turns, median_ratio, medians, seconds
from scripts.bench.training_inputs import SIZES
from uptrain.estimates.training_time import PEAK_FLOPS

VOCAB = {"7M": 8192, "25M": 16384, "100M": 16384, "8B-layers": 32768}
Step = Callable[[], float]
Loss = Callable[[torch.Tensor], torch.Tensor]


def make_steps(
    peer: str, size: str, precision: str, compiled: bool, batch: int, length: int, device: str
) -> tuple[Step, Step, int]:
    """Return a training step of our model and one of the peer, and the number of parameters."""
    n_kv_heads = n_heads = SIZES[size]["num_attention_heads"]
    if peer == "litgpt":
        n_kv_heads = 2
    elif size == "8B-layers":
        n_kv_heads = n_heads // 4  # 8, as in Llama-3-8B
    config = TheirConfig(
        **SIZES[size], num_key_value_heads=n_kv_heads,
        vocab_size=VOCAB[size], max_position_embeddings=length, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    ours = Ours(read_llama_config(config.to_dict())).to(device).train()
    theirs, their_loss = litgpt(config) if peer == "litgpt" else transformers(config)
    theirs.to(device).train()
    if peer == "transformers":
        ours.load_state_dict(theirs.state_dict())
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    if compiled:
        inside: Any = theirs
        for layer in (*(inside.transformer.h if peer == "litgpt" else inside.model.layers), *ours.model.layers):
            layer.compile()
    ids = torch.randint(0, VOCAB[size], (batch, length), device=device)

    def our_loss(ids: torch.Tensor) -> torch.Tensor:
        loss_sum, n_valid = ours(ids, ids)
        mean: torch.Tensor = loss_sum / n_valid
        return mean

    return (
        make_step(ours, lambda: our_loss(ids), precision, device),
        make_step(theirs, lambda: their_loss(ids), precision, device),
        sum(p.numel() for p in ours.parameters()),
    )


def transformers(config: TheirConfig) -> tuple[torch.nn.Module, Loss]:
    model = Theirs(config)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = model(ids, labels=ids, use_cache=False).loss
        return total

    return model, loss


def litgpt(config: TheirConfig) -> tuple[torch.nn.Module, Loss]:
    from litgpt.model import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    model = GPT(Config(
        block_size=config.max_position_embeddings, vocab_size=config.vocab_size, padded_vocab_size=config.vocab_size,
        n_layer=config.num_hidden_layers, n_head=config.num_attention_heads, n_query_groups=config.num_key_value_heads,
        n_embd=config.hidden_size, intermediate_size=config.intermediate_size, rotary_percentage=1.0,
        parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    ))  # fmt: skip
    return model, lambda ids: chunked_cross_entropy(model(ids)[:, :-1], ids[:, 1:], chunk_size=0)


def make_step(model: torch.nn.Module, loss: Callable[[], torch.Tensor], precision: str, device: str) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    half = precision == "bf16"

    def step() -> float:
        with torch.autocast(device, torch.bfloat16) if half else contextlib.nullcontext():
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.item()

    return step


def compare(ours: Step, theirs: Step, rounds: int, largest_difference: float) -> dict[str, float]:
    """Time alternating steps, and return the medians in seconds and the median of the pairs' ratios."""
    for _ in range(2):
        first_ours, first_theirs = ours(), theirs()
    assert abs(first_ours - first_theirs) < largest_difference, (first_ours, first_theirs)
    ways = {"ours": partial(seconds, ours), "theirs": partial(seconds, theirs)}
    times = in_turns(ways, rounds, warm_up=0)
    both = medians(times)
    return {"ours_s": both["ours"], "theirs_s": both["theirs"], "ratio": median_ratio(times, "theirs", "ours")}


def operations(size: str, n_parameters: int, batch: int, length: int) -> float:
    """Return the floating-point operations of a step's matrix products: forward, and twice that for the gradients."""
    shape = SIZES[size]
    n_multiplied = n_parameters - VOCAB[size] * shape["hidden_size"]  # all but the embedding
    causal_attention = 6 * shape["num_hidden_layers"] * shape["hidden_size"] * length  # for a token, on average
    return float(batch * length * (6 * n_multiplied + causal_attention))


def operations_per_s(precision: str, device: str) -> float:
    """Return the speed of a matrix product of 4096 x 4096, the best of five."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, times = torch.ones(4096, 4096, dtype=dtype, device=device), []
    with fast_float32_matmul(device):
        for _ in range(6):
            started = time.perf_counter()
            (a @ a)[0, 0].item()  # waits for a GPU
            times.append(time.perf_counter() - started)
    return float(2 * 4096**3 / min(times[1:]))


def peak_operations_per_s(device: str) -> float | None:
    """Return the peak in bfloat16 that a GPU's data sheet gives; None if it is not known. An H200's is an H100's."""
    is_cuda = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device).replace("H200", "H100") if is_cuda else ""
    return next((peak for card, peak in PEAK_FLOPS.items() if card in name), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("transformers", "litgpt"), default="transformers")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["7M", "25M"])
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--compile", nargs="+", choices=("no", "yes"), default=["no"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    rows = []
    titles = ["parameters", "precision", "compile", "ours, tokens/s", f"{options.peer}, tokens/s", "ratio"]
    print(f"| {' | '.join([*titles, 'of a product', 'MFU'])} |")
    print("|---|---|---|---|---|---|---|---|")
    for size in options.sizes:
        for precision in options.precision:
            for compiled in options.compile:
                ours, theirs, n = make_steps(
                    options.peer, size, precision, compiled == "yes", options.batch, options.length, options.device
                )
                # litgpt has other initial weights; both begin with nearly equal probabilities.
                largest_difference = 0.02 if options.peer == "transformers" else 0.5
                with fast_float32_matmul(options.device):
                    row = compare(ours, theirs, options.rounds, largest_difference)
                tokens = options.batch * options.length
                speed = operations(size, n, options.batch, options.length) / row["ours_s"]
                row["share"] = speed / operations_per_s(precision, options.device)
                peak = peak_operations_per_s(options.device)
                mfu = speed / peak if peak else None
                print(
                    f"| {n / 1e6:.1f} M | {precision} | {compiled} | {tokens / row['ours_s']:,.0f} | "
                    f"{tokens / row['theirs_s']:,.0f} | {row['ratio']:.2f} | {row['share']:.0%} "
                    f"| {'–' if mfu is None else f'{mfu:.0%}'} |",
                    flush=True,
                )
                kind = {"size": size, "parameters": n, "precision": precision, "compile": compiled}
                rows.append({**kind, "mfu": mfu, **row})
    if options.json:
        write_rows(options.json, rows, device=options.device)


if __name__ == "__main__":
    main()
