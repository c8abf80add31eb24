"""Write the model card of an exported model: the initial model's card, followed by a section on the uptraining."""

from pathlib import Path
from typing import Any

from model.checkpoint.hf_folder import read_config
from model.common.console import warn
from model.common.counts import format_count
from model.common.model_card import UPTRAINING_DETAILS, front_matter, is_utf8, of_derived_model
from model.common.printable import markdown, markdown_code
from model.files.names import MODEL_CARD
from model.files.paths import leads_outside
from model.files.read import MAX_CONFIG_BYTES, read_bytes_up_to
from model.language_model import text_config_key
from uptrain.budget.conversion_record import was_uptrained
from uptrain.report.history import format_recovered, recovery
from uptrain.training.loss_values import format_above_teacher, format_loss
from uptrain.training.losses import LOSSES

BEGIN, END = "<!-- groupwise uptraining: begin -->", "<!-- groupwise uptraining: end -->"


def model_card(source: Path, record: dict[str, Any]) -> bytes:
    """Return `README.md`. `source` is the folder of the initial model, `record` the content of uptraining.json."""
    path = source / MODEL_CARD
    has_card = path.is_file() and not leads_outside(path, source)
    if has_card and not is_utf8(read_bytes_up_to(path, MAX_CONFIG_BYTES)):
        warn(f"{path} is not UTF-8, so the new model card does not contain it; convert it with iconv.")
        has_card = False
    model = record["settings"]["model"]
    base_model = model if "/" in model else None  # a name on the hub has an owner
    card = read_bytes_up_to(path, MAX_CONFIG_BYTES) if has_card else front_matter(base_model, ["groupwise"])
    if has_card and model:
        card = b"".join(of_derived_model(card, base_model))
    is_wrapper = text_config_key(read_config(source)[1]) is not None
    return card.strip() + b"\n\n" + _section(record, has_card, was_uptrained(source), is_wrapper).encode()


def _section(record: dict[str, Any], has_card: bool, was_trained: bool, is_wrapper: bool) -> str:
    settings, budget = record["settings"], record["budget"]
    begun = f"from {markdown_code(settings['model'])}" if settings["model"] else "from scratch"
    done = record["step"] / settings["steps"]
    alpha = (
        f"{budget['alpha'] * done:.4g} of the original pre-training" if budget["alpha"] else "original size not given"
    )
    rows = [
        (
            "Trained",
            f"{begun}, {record['step']:,} of {settings['steps']:,} steps, {format_count(record['tokens'])} tokens",
        ),
        *([("α", alpha)] if settings["model"] else []),
        ("Loss", LOSSES[settings["loss"]]),
        *([("Teacher", markdown_code(settings["teacher"]))] if settings["teacher"] else []),
        *([("Teacher's logits", markdown_code(settings["teacher_logits"]))] if settings.get("teacher_logits") else []),
        (
            "Learning rate",
            markdown(
                f"{settings['schedule']}, peak {settings['lr']:.3g}, {settings['optimizer']}, {settings['precision']}"
            ),
        ),
        ("Data", markdown(f"token cache {record['data_sha256'][:16]}…")),
        *_losses(record["evaluations"], starts_converted=bool(settings["model"]) and not was_trained),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"""{BEGIN}
## {"Uptraining" if settings["model"] else "Training"} by Groupwise

| | |
|---|---|
{table}

{_what_changed(settings, has_card, is_wrapper)} {UPTRAINING_DETAILS}
{END}
"""


def _what_changed(settings: dict[str, Any], has_card: bool, is_wrapper: bool) -> str:
    """Return a sentence that holds against what the initial model's card, if it has one, says of its weights."""
    if not settings["model"]:
        return "All weights are trained from random ones."
    changed = {"all": "all weights", "attention": "the weights of attention", "kv": "the weights of keys and values"}
    part = changed.get(
        settings.get("trainable", "all"), "the linear maps of all layers (by adapters, which were merged)"
    )
    subject = "The text above describes the model before this training, which" if has_card else "This training"
    return f"{subject} changed {part}{' in its language model, on text alone' if is_wrapper else ''}."


def _losses(evaluations: list[dict[str, Any]], starts_converted: bool) -> list[tuple[str, str]]:
    """Return the rows of losses. Only a run that starts at a converted model has the loss after conversion."""
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    before, after = (f"{format_loss(e['loss'])} at step {e['step']:,}" for e in (first, last))
    rows = [("Held-out loss", f"{before} → {after}")]
    if "teacher_loss" in last:
        rows.append(("Teacher's loss", format_loss(last["teacher_loss"])))
        # Runs of earlier versions have no errors.
        above = format_above_teacher(last["loss"], last["teacher_loss"], last.get("above_teacher_error"))
        rows.append(("Loss above the teacher's", above))
        recovered = format_recovered(recovery(first, last))
        if recovered and starts_converted:
            rows.append(("Recovered fraction", recovered))
        kl = format_loss(last["kl"], error=last.get("kl_error"))
        rows.append(("KL from the teacher", f"{kl}; agreement {last['agreement']:.1%}"))
    return rows
