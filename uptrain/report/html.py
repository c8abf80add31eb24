"""Make the HTML page of a report: one self-contained file, for any screen size, dark mode and print."""

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape as escape_html
from pathlib import Path
from typing import Any

from model.checkpoint.hub import name_of
from model.common.counts import counted, format_count
from model.common.printable import printable
from uptrain.report.history import History, format_recovered
from uptrain.training.loss_values import format_loss, perplexity

GENERATOR = '<meta name="generator" content="Groupwise">'
"""What tells a report from other pages."""
_CSS = """
:root { color-scheme: light dark; --ink: #1c1c1e; --muted: #6e6e73; --line: #d9d9de; --page: #ffffff;
  --series-0: #0072b2; --series-1: #d55e00; --series-2: #009e73; --series-3: #cc79a7; --series-4: #e69f00;
  --series-5: #56b4e9; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #ececf0; --muted: #a0a0a8; --line: #3a3a40;
  --page: #16161a; --series-0: #56b4e9; --series-1: #ff8a3d; --series-2: #2fc79a; --series-3: #e3a1c6;
  --series-4: #f0b93a; --series-5: #a8d8f5; } }
body { margin: 0 auto; max-width: 72rem; padding: 1.2rem; background: var(--page); color: var(--ink);
  font: 1rem/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; } p { margin: .3rem 0; }
.muted { color: var(--muted); }
.figures, .panels { display: grid; gap: 1rem; padding: 0; margin: 1.2rem 0; }
.figures { grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); }
.figures div { border-top: 2px solid var(--line); padding-top: .4rem; }
.figures dt { color: var(--muted); font-size: .85rem; } .figures dd { margin: 0; font-size: 1.25rem; font-weight: 600; }
.panels { grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); }
.panels figure { margin: 0; break-inside: avoid; } .panels svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { border-bottom: 1px solid var(--line); padding: .28rem .9rem .28rem 0; text-align: left; vertical-align: top; }
thead th { color: var(--muted); font-weight: 500; white-space: nowrap; }
tbody th { font-weight: 500; white-space: nowrap; }
.numbers td, .numbers th { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
@media print { body { max-width: none; padding: 0; } .panels { grid-template-columns: 1fr 1fr; }
  .wide { overflow: visible; } h2 { break-after: avoid; } tr { break-inside: avoid; } }
"""


def escape(text: str) -> str:
    return escape_html(printable(text))


def make_page(histories: Sequence[History], names: Sequence[str], drawings: Iterable[str]) -> str:
    """Return the HTML page; `drawings` are SVG elements."""
    panels = "".join(f"<figure>{svg}</figure>\n" for svg in drawings)
    title = escape(" · ".join(names))
    of_names = [f" of {escape(name)}" for name in names] if len(names) > 1 else [""]
    summaries = "".join(_summary(h, of_name) for h, of_name in zip(histories, of_names, strict=True))
    sections = "".join(_section(h, of_name) for h, of_name in zip(histories, of_names, strict=True))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{GENERATOR}
<title>{title}</title>
<style>{_CSS}</style>
</head>
<body>
<h1>{title}</h1>
{summaries}<div class="panels">
{panels}</div>
{sections}</body>
</html>
"""


def _section(history: History, of_name: str) -> str:
    """Return the tables of a run; `of_name`: the suffix of their headings, empty for a single run."""
    parts = [f"<h2>Settings{of_name}</h2>", _facts(_settings(history))]
    if history.evaluations:
        parts += [f"<h2>Evaluations{of_name}</h2>", _evaluations(history.evaluations)]
    events = [(e["step"], _event(e)) for e in history.events]
    events += [(step, "update skipped: its gradient was not finite, or a spike") for step in history.skipped_steps]
    if events:
        rows = [(f"{step:,}", text) for step, text in sorted(events)]
        parts += [f"<h2>Events{of_name}</h2>", _table(("step", "what happened"), rows)]
    return "\n".join(parts) + "\n"


def _summary(history: History, of_name: str) -> str:
    """Return the summary of a run: its progress and latest losses."""
    settings, budget = history.run.settings, history.run.budget
    share = f", α = {budget.alpha:.4g} of the original pre-training when finished" if budget.alpha else ""
    origin = f"Uptraining of {name_of(Path(settings.model))}" if settings.model else "Training from scratch"
    key_figures = [("steps", f"{history.step:,} of {settings.steps:,}"), ("tokens", format_count(history.tokens))]
    if history.steps:
        key_figures.append(("training loss", format_loss(history.steps[-1]["loss"])))
    if history.evaluations:
        last = history.evaluations[-1]
        key_figures.append(("held-out loss", format_loss(last["loss"])))
        if "kl" in last:
            key_figures += [
                ("teacher's loss", format_loss(last["teacher_loss"])),
                ("KL from the teacher", format_loss(last["kl"], error=last.get("kl_error"))),
            ]
        if recovered := format_recovered(last):
            key_figures.append(("recovered fraction", recovered))
    entries = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in key_figures)
    heading = f"<h2>Summary{of_name}</h2>\n" if of_name else ""
    about = escape(f"{origin}{share}. Losses and KL divergence in nats per token.")
    return f"{heading}<p class='muted'>{about}</p>\n<dl class='figures'>{entries}</dl>\n"


def _settings(history: History) -> list[tuple[str, str]]:
    run, settings = history.run, history.run.settings
    budget = run.budget
    rows = [
        ("Model", name_of(Path(settings.model)) or "from scratch"),
        ("Teacher", name_of(Path(settings.teacher or settings.teacher_logits)) or "none"),
        ("Minimised", history.objective),
        ("Budget", f"{settings.steps:,} steps, {format_count(budget.tokens)} tokens"),
        ("A step", f"{budget.global_batch_tokens:,} tokens in {settings.global_batch:,} windows"),
        (
            "Learning rate",
            f"{settings.schedule}, peak {settings.lr:.3g}, {counted(settings.warmup_steps, 'step')} of warm-up",
        ),
        ("Optimizer", f"{settings.optimizer}, weight decay {settings.weight_decay:g}, trains {settings.trainable}"),
        ("Precision", f"{settings.precision}, parameters float32"),
        ("Seed", str(settings.seed)),
        ("Data", f"token cache {run.cache_sha256[:16]}…"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
    ]
    if budget.alpha and budget.original_tokens:
        rows.insert(4, ("α", f"{budget.alpha:.4g} of {format_count(budget.original_tokens)} tokens"))
    if run.parent:
        rows.append(("Extends", f"{Path(run.parent['run']).name} from step {run.parent['step']:,}"))
    return rows


def _evaluations(evaluations: Sequence[dict[str, Any]]) -> str:
    headings = ["step", "tokens", "loss", "perplexity"]
    with_teacher = any("kl" in e for e in evaluations)
    headings += ["teacher's loss", "KL", "agreement", "recovered"] if with_teacher else []
    rows = []
    for e in evaluations:
        loss = e["loss"]
        of_loss = math.inf if loss is None else perplexity(loss)
        shown = f"{of_loss:.4g}" if math.isfinite(of_loss) else "—"
        row = [f"{e['step']:,}", f"{e['tokens']:,}", format_loss(loss), shown]
        if "kl" in e:
            recovered = e["recovered_fraction"]
            row += [format_loss(e["teacher_loss"]), format_loss(e["kl"]), f"{e['agreement']:.1%}"]
            row.append("—" if recovered is None else f"{recovered:.1%}")
        rows.append(row + ["—"] * (len(headings) - len(row)))
    return "<p class='muted'>On held-out text.</p>" + _table(headings, rows, "numbers")


def _event(event: dict[str, Any]) -> str:
    if event["event"] not in ("started", "resumed"):
        return ": ".join(event[key] for key in ("event", "why") if key in event)
    at = datetime.fromtimestamp(event["time"], UTC).strftime("%Y-%m-%d %H:%M UTC")
    text = f"{event['event']}, {at}, {event['processes']} process{'es' * (event['processes'] > 1)}"
    return "; ".join([text, *(f"not used: {problem}" for problem in event.get("rejected", ()))])


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f"<tr><th scope='row'>{escape(k)}</th><td>{escape(v)}</td></tr>\n" for k, v in rows)
    return f"<table><tbody>\n{body}</tbody></table>"


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> str:
    head = "".join(f"<th scope='col'>{escape(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    classes = f"<table class='{kind}'>" if kind else "<table>"
    return f"<div class='wide'>{classes}<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>"
