"""Folders of runs written by hand, as `uptrain run` would leave them, for what reads them."""

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BATCH = 1000
"""Tokens of a step."""
SETTINGS = {
    "model": "/models/gqa", "data": "/caches/train", "loss": "next-token", "steps": 50, "global_batch": 4,
    "micro_batch": 2, "schedule": "wsd", "lr": 1e-3, "warmup_steps": 5, "decay_fraction": 0.2, "optimizer": "adamw",
    "weight_decay": 0.0, "trainable": "all", "precision": "fp32", "seed": 0, "save_every": 10, "keep_last": 2,
    "eval_every": 10, "eval_data": "/caches/held-out", "teacher": "", "original_steps": 0, "spike_sigma": None,
    "compile": False, "activation_checkpointing": False, "track": [],
}  # fmt: skip
Record = dict[str, Any]


def write_run(
    folder: Path,
    records: Iterable[Record] = (),
    state: Record | None = None,
    parent: Record | None = None,
    **settings: Any,
) -> Path:
    settings = SETTINGS | settings
    budget = {"steps": settings["steps"], "global_batch_tokens": BATCH, "tokens": settings["steps"] * BATCH}
    budget |= {"peak_lr": settings["lr"], "alpha": 0.05, "original_tokens": 20 * budget["tokens"], "original": None}
    run = {"settings": settings, "budget": budget, "cache_sha256": "c" * 64, "identities": {}}
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run | {"versions": {"groupwise": "0.1"}, "parent": parent}))
    if records:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if state is not None:
        (folder / "run_state.json").write_text(json.dumps(state))
    return folder


def step(number: int, loss: float | None = 3.0, **more: Any) -> Record:
    fixed = {"learning_rate": 1e-3, "grad_norm": 0.5, "windows_crc32": 1, "tokens_per_s": 200.0}
    return {"step": number, "loss": loss, "tokens": number * BATCH, **fixed, **more}


def evaluation(step: int, loss: float | None, **more: Any) -> Record:
    return {"step": step, "evaluation": {"targets": 100, "loss": loss, **more}}


def with_teacher(
    step: int, loss: float | None, teacher_loss: float = 2.0, kl: float | None = 0.25, **errors: float
) -> Record:  # fmt: skip
    """Return an evaluation, without the standard errors that earlier versions did not write, unless they are given."""
    return evaluation(step, loss, teacher_loss=teacher_loss, kl=kl, agreement=0.5, **errors)


def event(step: int, name: str, **more: Any) -> Record:
    began = {"time": 1.7e9, "processes": 2, "threads": 1, "device": "cpu"} if name in ("started", "resumed") else {}
    return {"step": step, "event": name, **began, **more}


def write_checkpoint(run: Path, step: int, keep: bool = False) -> Path:
    """Write a whole checkpoint, of 100 bytes beside its state and manifest."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    (folder / "tensors").mkdir(parents=True)
    files = {"tensors/0.distcp": bytes(100), "state.json": json.dumps({"step": step, "keep": keep}).encode()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    sums = {name: {"size": len(content), "crc32": [zlib.crc32(content)]} for name, content in files.items()}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": sums}))
    return folder
