"""Training speed: tokens/s of our Llama code ÷ transformers' LlamaForCausalLM, forward + backward + AdamW.

Both train the same weights on the same batch, in turns (ABAB …), in this process; medians are compared. The loss is
next-token cross-entropy; transformers runs with sdpa attention, as it does by default.

    python scripts/bench/train_step.py --sizes 7M 25M --precision fp32 bf16 --compile no yes
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM as Theirs

from model.llama import LlamaForCausalLM as Ours
from model.llama_config import read_llama_config

SIZES = {
    "7M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8},
    "25M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6},
}
VOCAB = {"7M": 8192, "25M": 16384}
Step = Callable[[], float]


def make_steps(
    size: str, precision: str, compiled: bool, batch: int, length: int, device: str
) -> tuple[Step, Step, int]:
    """Return one training step of ours and one of theirs, and the number of parameters."""
    config = TheirConfig(
        **SIZES[size], num_key_value_heads=SIZES[size]["num_attention_heads"], vocab_size=VOCAB[size],
        max_position_embeddings=length, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = Theirs(config).to(device).train()
    ours = Ours(read_llama_config(config.to_dict())).to(device).train()
    ours.load_state_dict(theirs.state_dict())
    if compiled:
        for layers in (theirs.model.layers, ours.model.layers):
            for layer in layers:
                layer.compile()
    ids = torch.randint(0, VOCAB[size], (batch, length), device=device)

    def their_loss() -> torch.Tensor:
        return theirs(ids, labels=ids, use_cache=False).loss

    def our_loss() -> torch.Tensor:
        loss_sum, n_valid = ours(ids, ids)
        return loss_sum / n_valid

    return (
        make_step(ours, our_loss, precision, device),
        make_step(theirs, their_loss, precision, device),
        sum(p.numel() for p in ours.parameters()),
    )


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


def compare(ours: Step, theirs: Step, rounds: int) -> dict[str, float]:
    """Time the steps in turns; return medians in seconds, and the median of the pairs' ratios."""
    for _ in range(2):
        first_ours, first_theirs = ours(), theirs()
    assert abs(first_ours - first_theirs) < 0.02, (first_ours, first_theirs)
    times: list[tuple[float, float]] = []
    for turn in range(rounds):
        pair = {}
        for name, step in (("ours", ours), ("theirs", theirs))[:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            step()
            pair[name] = time.perf_counter() - started
        times.append((pair["ours"], pair["theirs"]))
    return {
        "ours_s": statistics.median(a for a, _ in times),
        "theirs_s": statistics.median(b for _, b in times),
        "ratio": statistics.median(b / a for a, b in times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--compile", nargs="+", choices=("no", "yes"), default=["no"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    rows = []
    print("| parameters | precision | compile | ours, tokens/s | transformers, tokens/s | ratio |")
    print("|---|---|---|---|---|---|")
    for size in options.sizes:
        for precision in options.precision:
            for compiled in options.compile:
                ours, theirs, n = make_steps(
                    size, precision, compiled == "yes", options.batch, options.length, options.device
                )
                row = compare(ours, theirs, options.rounds)
                tokens = options.batch * options.length
                print(
                    f"| {n / 1e6:.1f} M | {precision} | {compiled} | {tokens / row['ours_s']:,.0f} | "
                    f"{tokens / row['theirs_s']:,.0f} | {row['ratio']:.2f} |",
                    flush=True,
                )
                rows.append({"size": size, "parameters": n, "precision": precision, "compile": compiled, **row})
    if options.json:
        options.json.write_text(
            json.dumps({"device": options.device, "torch": torch.__version__, "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
