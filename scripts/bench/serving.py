r"""Measure what fewer K/V heads bring in the engines that serve models: vLLM and llama.cpp, on the CPU.

Each model is served once for each number of K/V heads, by a process for each. For each cell (batch and context) all of
them work in turns: prefill computes the whole prompts, decode is one token for every sequence of a batch whose KV cache
is full. Medians are compared. The engines tell how many tokens a KV cache of --cache-gib holds. A cell whose KV caches
do not fit is left out, and the table says so.

OUT.json grows with every cell; the same command goes on after a stop. At the end: OUT.md with tables, OUT.png.

\b
    python -m scripts.bench.serving --out docs/bench/serving
    python -m scripts.bench.serving --models smollm2 --batches 1,8 --contexts 512 --rounds 1 --out /tmp/short
"""

import itertools
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from model.common.errors import InputError, RunError
from model.common.files import replace_file
from model.common.plot_style import PLOT_STYLE
from scripts.bench.engines.client import ENGINES, GIB, Worker
from scripts.bench.engines.models import FAMILIES, make_gguf, make_models
from scripts.bench.machine import facts

TASKS = ("prefill", "decode")
CLOCKS = ("wall", "processor")
"""Processor time is for one thread on a busy machine: other processes do not lengthen it."""
DTYPE, BYTES = "bfloat16", 2
"""Of weights; and of a number in the KV cache, which is float16 in llama.cpp."""
SPARE = 256
"""Tokens that a sequence may grow by while its cell is measured."""
KEY = ("engine", "model", "task", "batch", "context")
Row = dict[str, Any]


class Several(click.ParamType[tuple[Any, ...]]):
    """Numbers, or some of the given names, with commas between them."""

    name = "several"

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self.names = names and tuple(names)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return ",".join(self.names or ("N", "…"))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        words = value.split(",")
        if self.names:
            if wrong := [word for word in words if word not in self.names]:
                self.fail(f"there is no {wrong[0]}; choose from {', '.join(self.names)}.", param, ctx)
            return tuple(words)
        if wrong := [word for word in words if not word.isdigit() or not int(word)]:
            self.fail(f"{wrong[0]!r} is not a positive number.", param, ctx)
        return tuple(map(int, words))


@dataclass(frozen=True)
class Cell:
    """What is measured on all numbers of K/V heads in turns."""

    engine: str
    model: str
    task: str
    batch: int
    context: int

    @property
    def tokens(self) -> int:
        return self.batch * (self.context + SPARE)


@dataclass
class Results:
    """The content of OUT.json. Rows and caches are added as they are measured."""

    setup: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    caches: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None, setup: dict[str, Any]) -> "Results":
        """Read an earlier command's results. Raises InputError if it measured with other settings."""
        if path is None or not path.exists():
            return cls(setup)
        found = cls(**json.loads(path.read_text()))
        for name, value in setup.items():
            if (earlier := found.setup.get(name)) != value:
                raise InputError(f"{path} was measured with {name} {earlier}, not {value}; choose another --out.")
        return found

    def done(self) -> set[tuple[Any, ...]]:
        return {key(row) for row in self.rows if "left_out" not in row}

    def leave_out(self, cell: "Cell", reason: str) -> None:
        """Record why a cell is not measured. A later command with more memory tries again."""
        self.rows = [row for row in self.rows if key(row) != key(vars(cell))] + [{**vars(cell), "left_out": reason}]

    def add_cache(self, **row: Any) -> None:
        same = ("engine", "model", "n_kv_heads")
        self.caches = [old for old in self.caches if any(old[name] != row[name] for name in same)] + [row]

    def save(self, path: Path | None) -> None:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, (json.dumps(vars(self), indent=1) + "\n").encode())


@dataclass(frozen=True)
class Plan:
    """How much is measured, and with what."""

    rounds: int
    steps: int
    seconds: float
    threads: int
    clock: str
    eager: bool
    cache_bytes: int
    memory_bytes: int
    work: Path


@click.command(help=__doc__)
@click.option("--models", type=Several(FAMILIES), default=",".join(FAMILIES), show_default=True)
@click.option("--engines", type=Several(ENGINES), default=",".join(ENGINES), show_default=True)
@click.option("--tasks", type=Several(TASKS), default=",".join(TASKS), show_default=True)
@click.option("--batches", type=Several(), default="1,8,32", show_default=True)
@click.option("--contexts", type=Several(), default="512,4096,16384", show_default=True)
@click.option("--prefill-tokens", type=int, default=4096, show_default=True, help="Leave out larger prefills.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each candidate.")
@click.option("--steps", type=click.IntRange(1, 20), default=5, show_default=True, help="Decoding steps of a turn.")
@click.option("--seconds", type=float, default=60, show_default=True, help="Start no further round of a cell after it.")
@click.option("--threads", type=int, default=lambda: len(os.sched_getaffinity(0)), help="Default: all cores.")
@click.option("--clock", type=click.Choice(CLOCKS), default="wall", show_default=True, help="What seconds are.")
@click.option("--eager", is_flag=True, help="Let vLLM compile nothing, which takes its start minutes less.")
@click.option("--cache-gib", type=int, default=10, show_default=True, help="KV cache of a server.")
@click.option("--memory-gib", type=float, default=16, show_default=True, help="For all candidates of a cell.")
@click.option("--work", type=click.Path(path_type=Path), default=Path(".serving"), help="Where models are made.")
@click.option("--out", type=click.Path(path_type=Path), help="Write OUT.json, OUT.md and OUT.png.")
def command(
    models: tuple[str, ...], engines: tuple[str, ...], tasks: tuple[str, ...], batches: tuple[int, ...],
    contexts: tuple[int, ...], prefill_tokens: int, cache_gib: int, memory_gib: float, out: Path | None, **given: Any,
) -> None:  # fmt: skip
    plan = Plan(**given, cache_bytes=cache_gib * GIB, memory_bytes=int(memory_gib * GIB))
    if plan.clock == "processor" and plan.threads > 1:
        raise click.UsageError("Processor time of several threads counts their waiting; give --threads 1.")
    setup = {
        "cpu": facts()["cpu"], "threads": plan.threads, "clock": plan.clock, "dtype": DTYPE, "vllm_eager": plan.eager,
        "cache_gib": cache_gib,
    }  # fmt: skip
    path = out and out.with_suffix(".json")
    cells = [
        Cell(*names)
        for names in itertools.product(engines, models, tasks, batches, contexts)
        if names[2] == "decode" or names[3] * names[4] <= prefill_tokens
    ]
    try:
        results = Results.open(path, setup)
        for name in engines:
            check_installed(name)
        for (engine, model), group in itertools.groupby(cells, lambda cell: (cell.engine, cell.model)):
            wanted = [cell for cell in group if key(vars(cell)) not in results.done()]
            if wanted:
                measure(engine, model, wanted, plan, results, partial(results.save, path))
    except InputError as error:
        raise click.UsageError(str(error)) from error
    except RunError as error:
        raise click.ClickException(str(error)) from error
    text = "\n\n".join([*tables(results), cache_table(results)])
    click.echo(text)
    if out:
        out.with_suffix(".md").write_text(text + "\n")
        draw(results.rows, out.with_suffix(".png"))


def main() -> None:
    command(standalone_mode=True)


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def check_installed(name: str) -> None:
    engine = ENGINES[name]
    if missing := engine.missing():
        raise InputError(f"{engine.title} is not installed ({missing} is missing); run {engine.install}.")


def measure(engine: str, model: str, cells: list[Cell], plan: Plan, results: Results, save: Any) -> None:
    """Start a server for each number of K/V heads, and measure the cells on all of them in turns."""
    commit = str(facts()["commit"])
    folders = make_models(plan.work, model)
    sizes = {n: bytes_per_token(folder) for n, folder in folders.items()}
    weights = sum(file.stat().st_size for folder in folders.values() for file in folder.glob("*.safetensors"))
    fitting = [c for c in cells if not (reason := too_large(c, sizes, weights, plan)) or leave_out(c, reason, results)]
    save()
    if not fitting:
        return
    settings = {
        "threads": plan.threads, "clock": plan.clock, "eager": plan.eager, "dtype": DTYPE,
        "cache_gib": plan.cache_bytes // GIB, "batch": max(cell.batch for cell in fitting),
        "context": max(cell.context for cell in fitting) + SPARE,
    }  # fmt: skip
    with ExitStack() as stack:
        workers = {}
        for n, folder in folders.items():
            file = make_gguf(folder) if ENGINES[engine].suffix else folder
            log = plan.work / f"{engine}-{folder.name}.log"
            workers[n] = Worker(ENGINES[engine], file, log, **settings)
            stack.callback(workers[n].stop)
        for n, worker in workers.items():
            results.versions[engine] = worker.ask("facts")["version"]
            tokens = worker.tokens_in_cache(plan.cache_bytes)
            results.add_cache(engine=engine, model=model, n_kv_heads=n, bytes_per_token=sizes[n], tokens=tokens)
        save()
        for cell in fitting:
            found = measure_cell(cell, workers, plan, commit)
            results.rows = [row for row in results.rows if key(row) != key(vars(cell))] + found
            save()


def bytes_per_token(folder: Path) -> int:
    """Return the bytes of K and V of one token in all layers."""
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * BYTES)


def too_large(cell: Cell, sizes: dict[int, int], weights: int, plan: Plan) -> str:
    """Return why a cell does not fit, or nothing."""
    largest, together = cell.tokens * max(sizes.values()), cell.tokens * sum(sizes.values()) + weights
    if largest > plan.cache_bytes:
        return f"needs a KV cache of {largest / GIB:.1f} GiB"
    if together > plan.memory_bytes:
        return f"needs {together / GIB:.1f} GiB for all candidates"
    return ""


def leave_out(cell: Cell, reason: str, results: Results) -> bool:
    click.echo(f"{describe(cell)}: left out, {reason}")
    results.leave_out(cell, reason)
    return False


def describe(cell: Cell) -> str:
    return f"{cell.engine} {cell.model} {cell.task} {cell.batch} x {cell.context}"


def measure_cell(cell: Cell, workers: dict[int, Worker], plan: Plan, commit: str) -> list[Row]:
    """Return a row for each number of K/V heads, with the median, the least and the longest time."""
    place = {"batch": cell.batch, "context": cell.context}
    times: dict[int, list[float]] = {n: [] for n in workers}
    if cell.task == "decode":
        for worker in workers.values():
            worker.ask("open", **place)
    for n in turns(workers, plan):
        if cell.task == "prefill":
            times[n].append(workers[n].ask("prefill", **place))
        else:  # the first step after another model's is not counted
            times[n] += workers[n].ask("decode", steps=plan.steps + 1)[1:]
    if cell.task == "decode":
        for worker in workers.values():
            worker.ask("close")
    tokens = cell.batch * (cell.context if cell.task == "prefill" else 1)
    rows = []
    for n, found in times.items():
        median = statistics.median(found)
        rows.append({
            **vars(cell), "n_kv_heads": n, "tokens_per_s": tokens / median, "seconds": median, "least": min(found),
            "longest": max(found), "times": len(found), "commit": commit,
        })  # fmt: skip
    click.echo(f"{describe(cell)}: " + ", ".join(f"{row['n_kv_heads']}: {row['tokens_per_s']:.1f}/s" for row in rows))
    return rows


def turns(workers: dict[int, Worker], plan: Plan) -> Iterator[int]:
    """Yield each candidate in turn, every second time in reverse order, until the rounds or the seconds are over."""
    started = time.monotonic()
    for number in range(plan.rounds):
        if number and time.monotonic() - started > plan.seconds:
            return
        yield from workers if number % 2 == 0 else reversed(list(workers))


def groups_of(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    for engine, model in itertools.product(ENGINES, FAMILIES):
        if found := [row for row in rows if (row["engine"], row["model"]) == (engine, model)]:
            yield engine, model, found


def tables(results: Results) -> list[str]:
    """Return a table for each engine and model: tokens/s with MHA, and the others' as ratios."""
    return [_table(engine, model, rows, results) for engine, model, rows in groups_of(results.rows)]


def _table(engine: str, model: str, rows: list[Row], results: Results) -> str:
    first, *others = FAMILIES[model].n_kv_heads
    titles = [f"{first} K/V heads, tokens/s", *(f"{n} ÷ {first}" for n in others)]
    lines = [f"{ENGINES[engine].title} {results.versions.get(engine, '')}, {FAMILIES[model].title}", ""]
    lines += [f"| | batch | context | {' | '.join(titles)} |", "|---" * (3 + len(titles)) + "|"]
    for task, batch, context in sorted({(r["task"], r["batch"], r["context"]) for r in rows}):
        cell = [r for r in rows if (r["task"], r["batch"], r["context"]) == (task, batch, context)]
        speed = {r["n_kv_heads"]: r["tokens_per_s"] for r in cell if "left_out" not in r}
        shown = [f"{speed[first]:,.1f}", *(f"{speed[n] / speed[first]:.2f}" for n in others)] if speed else []
        shown = shown or [cell[0]["left_out"], *[""] * len(others)]
        lines.append(f"| {task} | {batch} | {context:,} | {' | '.join(shown)} |")
    return "\n".join(lines)


def cache_table(results: Results) -> str:
    """Return the table of what a KV cache of a fixed size holds, as the engines report it."""
    size, contexts = results.setup["cache_gib"], (512, 4096, 16384)
    titles = [f"sequences of {context:,}" for context in contexts]
    lines = [
        f"A KV cache of {size} GiB", "",
        f"| engine | model | K/V heads | kB per token | tokens | {' | '.join(titles)} |", "|---" * 8 + "|",
    ]  # fmt: skip
    for engine, model, rows in groups_of(results.caches):
        for r in sorted(rows, key=lambda r: -r["n_kv_heads"]):
            held = " | ".join(f"{r['tokens'] // context:,}" for context in contexts)
            lines.append(
                f"| {ENGINES[engine].title} | {FAMILIES[model].title} | {r['n_kv_heads']} "
                f"| {r['bytes_per_token'] / 1e3:.1f} | {r['tokens']:,} | {held} |"
            )
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draw decoding speed ÷ that of MHA against K/V heads: a panel for each engine and model, a line for each cell."""
    import matplotlib
    from matplotlib.figure import Figure

    found = [row for row in rows if row["task"] == "decode" and "left_out" not in row]
    panels = list(groups_of(found))
    if not panels:
        return
    columns = len({model for _, model, _ in panels})
    with matplotlib.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(3.8 * columns, 2.9 * -(-len(panels) // columns)), layout="constrained")
        grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False, sharey="row")
        for axes, (engine, model, cells) in zip(grid.flat, panels, strict=False):
            _draw_panel(axes, cells, FAMILIES[model].n_kv_heads)
            axes.set_title(f"{ENGINES[engine].title}, {FAMILIES[model].title}")
        for axes in grid[-1]:
            axes.set_xlabel("K/V heads")
        for axes in grid[:, 0]:
            axes.set_ylabel("decoding speed ÷ MHA's")
        figure.savefig(path)


def _draw_panel(axes: Any, rows: list[Row], heads: tuple[int, ...]) -> None:
    markers = {1: "o", 8: "s", 32: "^"}
    colours = {context: f"C{i}" for i, context in enumerate(sorted({row["context"] for row in rows}))}
    for context, batch in sorted({(row["context"], row["batch"]) for row in rows}):
        speed = {r["n_kv_heads"]: r["tokens_per_s"] for r in rows if (r["context"], r["batch"]) == (context, batch)}
        shown = [speed[n] / speed[heads[0]] for n in heads]
        axes.plot(
            range(len(heads)), shown, color=colours[context], marker=markers.get(batch, "d"),
            label=f"{batch} x {context:,}",
        )  # fmt: skip
    names = {heads[0]: f"{heads[0]}\nMHA", 1: "1\nMQA"}
    axes.set_xticks(range(len(heads)), [names.get(n, str(n)) for n in heads])
    axes.set_ylim(bottom=0)
    axes.legend(title="batch x context", title_fontsize=7, fontsize=7)


if __name__ == "__main__":
    main()
