"""The model card of an exported model: the source's own, whole, and a section on the uptraining after it."""

from pathlib import Path
from typing import Any

from uptrain.counts import show_count

BEGIN, END = "<!-- groupwise uptraining: begin -->", "<!-- groupwise uptraining: end -->"

_LOSS = {
    "next-token": "next-token cross-entropy",
    "distill": "KL divergence from `{teacher}`",
    "mix": "half next-token cross-entropy, half KL divergence from `{teacher}`",
}


def model_card(source: Path, record: dict[str, Any]) -> bytes:
    """Return `README.md`. `source` is the folder the run began with, `record` what uptraining.json holds."""
    path = source / "README.md"
    card = path.read_bytes() if path.is_file() else b"---\nlibrary_name: transformers\ntags: [groupwise]\n---"
    return card.strip() + b"\n\n" + _section(record).encode()


def _section(record: dict[str, Any]) -> str:
    s, budget = record["settings"], record["budget"]
    begun = f"from `{s['model']}`" if s["model"] else "from nothing"
    alpha = f"{budget['alpha']:.4g} of the original pre-training" if budget["alpha"] else "original size not given"
    rows = [
        ("Trained", f"{begun}, {record['step']:,} of {s['steps']:,} steps, {show_count(record['tokens'])} tokens"),
        *([("α", alpha)] if s["model"] else []),
        ("Loss", _LOSS[s["loss"]].format(teacher=s["teacher"])),
        ("Learning rate", f"{s['schedule']}, peak {s['lr']:.3g}, {s['optimizer']}, {s['precision']}"),
        ("Data", f"token cache {record['data_sha256'][:16]}…"),
        *_losses(record["evaluations"]),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""{BEGIN}
## {"Uptraining" if s["model"] else "Training"} by Groupwise

| | |
|---|---|
{table}

Details are in `uptraining.json`.
{END}
"""


def _losses(evaluations: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    rows = [
        ("Held-out loss", f"{first['loss']:.4f} at step {first['step']:,} → {last['loss']:.4f} at {last['step']:,}")
    ]
    if "teacher_loss" in last:
        gap = first["loss"] - last["teacher_loss"]
        recovered = f"{(first['loss'] - last['loss']) / gap:.1%}" if gap > 0 else "undefined"
        rows.append(("Teacher's loss", f"{last['teacher_loss']:.4f}; recovered fraction {recovered}"))
        rows.append(("KL to the teacher", f"{last['kl']:.4f}; same choice at {last['agreement']:.1%} of tokens"))
    return rows
