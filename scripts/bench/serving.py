r"""Measure what fewer K/V heads bring in the engines that serve models: vLLM and llama.cpp, and our own decoder.

Each model is served for each number of K/V heads, by one process at a time. The numbers take turns; each has --turns of
them. In a turn a process measures every cell (batch and context): prefill computes whole prompts; decode is one token
for every sequence of a batch, with the KV cache of its context filled before. A ratio of two numbers of K/V heads is
the median of the ratios within a turn; the least and the largest of them follow in brackets. The engines tell how many
tokens a KV cache of --cache-gib holds. A cell that needs more is left out; the table says so.

OUT.json grows with every cell; the same command resumes after a stop. At the end: OUT.md with tables, OUT.png.

\b
    python -m scripts.bench.serving --out docs/bench/serving
    python -m scripts.bench.serving --engines vllm,groupwise --tasks decode --out ours
    python -m scripts.bench.serving --models smollm2 --batches 1,8 --contexts 512 --turns 1 --out /tmp/short
"""

import itertools
import json
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from model.common.errors import InputError, RunError
from model.common.machine import n_cores
from model.common.plot_style import PLOT_STYLE
from model.files.write import replace_file
from scripts.bench.engines.client import ENGINES, GIB, Worker
from scripts.bench.engines.models import FAMILIES, make_gguf, make_models
from scripts.bench.machine import Row, describe_machine

TASKS = ("prefill", "decode")
CLOCKS = ("wall", "processor")
"""Processor time is for one thread on a busy machine: it leaves out the time in which other processes run. They still
slow the thread down, because they use the same caches and memory."""
DTYPE, BYTES = "bfloat16", 2
"""Of weights; and of a number in the KV cache, which is float16 in llama.cpp."""
SPARE = 256
"""Tokens that a sequence may grow by while its cell is measured."""
WARM_UP = 128
"""Tokens of the first prefill, which is not counted: it reads the weights from the disk."""
KEY = ("engine", "model", "task", "batch", "context")


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
    """A measurement, which is made for all numbers of K/V heads in turns."""

    engine: str
    model: str
    task: str
    batch: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens that are computed in a prefill or a step."""
        return self.batch * (self.context if self.task == "prefill" else 1)

    @property
    def title(self) -> str:
        return f"{self.engine} {self.model}, {self.task} {self.batch} x {self.context:,}"


@dataclass
class Results:
    """The content of OUT.json. Rows and caches are added as they are measured."""

    setup: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    caches: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    left_out: list[Row] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None, setup: dict[str, Any]) -> "Results":
        """Read an earlier command's results. Raises InputError if it measured with other settings."""
        if path is None or not path.exists():
            return cls(setup)
        results = cls(**json.loads(path.read_text()))
        for name, value in setup.items():
            if (earlier := results.setup.get(name)) != value:
                raise InputError(f"{path} was measured with {name} {earlier}, not {value}; choose another --out.")
        return results

    def has(self, cell: Cell, n_kv_heads: int, turn: int) -> bool:
        wanted = {**vars(cell), "n_kv_heads": n_kv_heads, "turn": turn}
        return any(wanted.items() <= row.items() for row in self.rows)

    def fits_or_is_left_out(self, cell: Cell, bytes_per_token: int) -> bool:
        """Return whether the KV cache holds a cell; if not, record that it is left out."""
        needed = cell.batch * (cell.context + SPARE) * bytes_per_token / GIB
        if needed <= self.setup["cache_gib"]:
            return True
        row = {**vars(cell), "gib": round(needed, 1)}
        if row not in self.left_out:
            self.left_out.append(row)
        return False

    def medians(self) -> list[Row]:
        """Return a row for each cell and number of K/V heads: tokens/s over all turns, and the speedup in each turn.

        A speedup is over the most K/V heads, in the same turn, because the machine is faster in some turns than in
        others. A turn that has one side only has no speedup.
        """
        measured: dict[Cell, dict[int, dict[int, list[float]]]] = {}
        for row in self.rows:
            of_cell = measured.setdefault(Cell(*(row[name] for name in KEY)), {})
            of_cell.setdefault(row["n_kv_heads"], {})[row["turn"]] = row["seconds"]
        medians = []
        for cell, by_heads in measured.items():
            base = by_heads.get(FAMILIES[cell.model].n_kv_heads[0], {})
            for n_kv_heads, turns in by_heads.items():
                seconds = statistics.median(itertools.chain.from_iterable(turns.values()))
                speedups = [
                    statistics.median(base[turn]) / statistics.median(turns[turn]) for turn in turns if turn in base
                ]
                figures = {"tokens_per_s": cell.tokens / seconds, "speedups": speedups}
                medians.append({**vars(cell), "n_kv_heads": n_kv_heads, **figures})
        return medians

    def add_version(self, engine: str, version: str, path: Path | None) -> None:
        """Record an engine's version. Raises InputError if there are results of another."""
        earlier = self.versions.get(engine, version)
        if earlier != version and any(row["engine"] == engine for row in self.rows):
            raise InputError(f"{path} was measured with {engine} {earlier}, not {version}; choose another --out.")
        self.versions[engine] = version

    def add_cache(self, **row: Any) -> None:
        same = ("engine", "model", "n_kv_heads")
        self.caches = [old for old in self.caches if any(old[name] != row[name] for name in same)] + [row]

    def save(self, path: Path | None) -> None:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, (json.dumps(vars(self), indent=1) + "\n").encode())


@dataclass(frozen=True)
class Plan:
    """The extent and the settings of a measurement."""

    turns: int
    steps: int
    threads: int
    clock: str
    eager: bool
    cache_gib: int
    work: Path


@click.command(help=__doc__)
@click.option("--models", type=Several(FAMILIES), default=",".join(FAMILIES), show_default=True)
@click.option("--engines", type=Several(ENGINES), default="vllm,llama_cpp", show_default=True)
@click.option("--tasks", type=Several(TASKS), default=",".join(TASKS), show_default=True)
@click.option("--batches", type=Several(), default="1,8,32", show_default=True)
@click.option("--contexts", type=Several(), default="512,4096,16384", show_default=True)
@click.option("--prefill-tokens", type=int, default=4096, show_default=True, help="Leave out larger prefills.")
@click.option("--turns", type=click.IntRange(min=1), default=3, show_default=True, help="Turns of each model.")
@click.option("--steps", type=click.IntRange(1, 50), default=5, show_default=True, help="Decoding steps of a turn.")
@click.option("--threads", type=int, default=n_cores, help="Default: all cores.")
@click.option("--clock", type=click.Choice(CLOCKS), default="wall", show_default=True, help="What seconds are.")
@click.option("--eager", is_flag=True, help="Let vLLM compile nothing, which takes its start minutes less.")
@click.option("--cache-gib", type=int, default=9, show_default=True, help="KV cache of a server.")
@click.option("--work", type=click.Path(path_type=Path), default=Path(".serving"), help="Where models are made.")
@click.option("--out", type=click.Path(path_type=Path), help="Write OUT.json, OUT.md and OUT.png.")
def command(
    models: tuple[str, ...], engines: tuple[str, ...], tasks: tuple[str, ...], batches: tuple[int, ...],
    contexts: tuple[int, ...], prefill_tokens: int, out: Path | None, **given: Any,
) -> None:  # fmt: skip
    plan = Plan(**given)
    if plan.clock == "processor" and plan.threads > 1:
        raise click.UsageError("Processor time of several threads counts their waiting; give --threads 1.")
    path = out and out.with_suffix(".json")
    cells = [
        Cell(*names)
        for names in itertools.product(engines, models, tasks, batches, contexts)
        if names[2] == "decode" or names[3] * names[4] <= prefill_tokens
    ]
    try:
        results = Results.open(path, setup_of(plan))
        for name in engines:
            check_installed(name)
        for (engine, model), group in itertools.groupby(cells, lambda cell: (cell.engine, cell.model)):
            measure(engine, model, list(group), plan, results, path)
    except InputError as error:
        raise click.UsageError(str(error)) from error
    except RunError as error:
        raise click.ClickException(str(error)) from error
    text = "\n\n".join([*tables(results), cache_table(results)])
    click.echo(text)
    if out:
        out.with_suffix(".md").write_text(text + "\n")
        draw(results.medians(), out.with_suffix(".png"))


def setup_of(plan: Plan) -> dict[str, Any]:
    """Return the settings that the results depend on."""
    machine = describe_machine()
    return {
        "cpu": machine["cpu"], "threads": plan.threads, "clock": plan.clock, "dtype": DTYPE, "vllm_eager": plan.eager,
        "steps": plan.steps, "cache_gib": plan.cache_gib, "gpu": machine.get("gpu"),
    }  # fmt: skip


def main() -> None:
    command(standalone_mode=True)


def check_installed(name: str) -> None:
    engine = ENGINES[name]
    if missing := engine.missing():
        raise InputError(f"{engine.title} is not installed ({missing} is missing); run {engine.install}.")


def measure(engine: str, model: str, cells: list[Cell], plan: Plan, results: Results, path: Path | None) -> None:
    """Measure the cells on each number of K/V heads in turn, every second time in reverse order."""
    commit = str(describe_machine()["commit"])
    folders = make_models(plan.work, model)
    sizes = {n: bytes_per_token(folder) for n, folder in folders.items()}
    fitting = [cell for cell in cells if results.fits_or_is_left_out(cell, max(sizes.values()))]
    for turn in range(plan.turns):
        for n in list(folders) if turn % 2 == 0 else reversed(list(folders)):
            missing = [cell for cell in fitting if not results.has(cell, n, turn)]
            if not missing:
                continue
            with start(engine, folders[n], plan, fitting) as worker:
                results.add_version(engine, worker.ask("facts")["version"], path)
                tokens = worker.tokens_in_cache(plan.cache_gib * GIB)
                results.add_cache(engine=engine, model=model, n_kv_heads=n, bytes_per_token=sizes[n], tokens=tokens)
                worker.ask("prefill", batch=1, context=WARM_UP)
                for cell in missing:
                    seconds = measure_cell(cell, worker, plan)
                    row = {**vars(cell), "n_kv_heads": n, "turn": turn, "seconds": seconds, "commit": commit}
                    results.rows.append(row)
                    results.save(path)
                    click.echo(f"{cell.title}, {n} K/V heads: {cell.tokens / statistics.median(seconds):.1f} tokens/s")


@contextmanager
def start(engine: str, folder: Path, plan: Plan, cells: list[Cell]) -> Iterator[Worker]:
    """Start the engine's worker with room for the cells, and stop it at the end."""
    model = make_gguf(folder) if ENGINES[engine].suffix else folder
    worker = Worker(
        ENGINES[engine], model, plan.work / f"{engine}-{folder.name}.log", threads=plan.threads, clock=plan.clock,
        eager=plan.eager, dtype=DTYPE, cache_gib=plan.cache_gib, batch=max(cell.batch for cell in cells),
        context=max(cell.context for cell in cells) + SPARE,
    )  # fmt: skip
    try:
        yield worker
    finally:
        worker.stop()


def bytes_per_token(folder: Path) -> int:
    """Return the bytes of K and V of one token in all layers."""
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * BYTES)


def measure_cell(cell: Cell, worker: Worker, plan: Plan) -> list[float]:
    """Return the seconds of one prefill, or of each decoding step but the first."""
    place = {"batch": cell.batch, "context": cell.context}
    if cell.task == "prefill":
        return [worker.ask("prefill", **place)]
    worker.ask("open", **place)
    times = worker.ask("decode", steps=plan.steps + 1)
    worker.ask("close")
    return list(times[1:])


def groups_of(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    for engine, model in itertools.product(ENGINES, FAMILIES):
        if group := [row for row in rows if (row["engine"], row["model"]) == (engine, model)]:
            yield engine, model, group


def tables(results: Results) -> list[str]:
    """Return a table for each engine and model: tokens/s with the most K/V heads, and the others' speedups."""
    return [_table(engine, model, rows, results) for engine, model, rows in groups_of(results.medians())]


def _table(engine: str, model: str, rows: list[Row], results: Results) -> str:
    first, *others = FAMILIES[model].n_kv_heads
    titles = [f"{first} K/V heads, tokens/s", *(f"{n} ÷ {first}" for n in others)]
    lines = [f"{ENGINES[engine].title} ({results.versions[engine]}), {FAMILIES[model].title}", ""]
    lines += [f"| | batch | context | {' | '.join(titles)} |", "|---" * (3 + len(titles)) + "|"]
    for task, batch, context in sorted({(r["task"], r["batch"], r["context"]) for r in rows}):
        place = (task, batch, context)
        by_heads = {r["n_kv_heads"]: r for r in rows if (r["task"], r["batch"], r["context"]) == place}
        if first in by_heads:
            speedups = [show_speedups(by_heads[n]["speedups"]) if n in by_heads else "" for n in others]
            shown = [f"{by_heads[first]['tokens_per_s']:,.1f}", *speedups]
            lines.append(f"| {task} | {batch} | {context:,} | {' | '.join(shown)} |")
    size = results.setup["cache_gib"]
    for row in results.left_out:
        if (row["engine"], row["model"]) == (engine, model):
            cells = f"{row['task']} | {row['batch']} | {row['context']:,}"
            lines.append(
                f"| {cells} | needs {row['gib']} GiB of KV cache, above the {size:g} GiB given |{' |' * len(others)}"
            )
    return "\n".join(lines)


def show_speedups(speedups: list[float]) -> str:
    """Return the median over the turns, with the least and the largest if there are several turns."""
    median = f"{statistics.median(speedups):.2f}"
    return median if len(speedups) == 1 else f"{median} ({min(speedups):.2f} to {max(speedups):.2f})"


def cache_table(results: Results) -> str:
    """Return the table of what a KV cache of a fixed size holds, as the engines report it."""
    size, contexts = results.setup["cache_gib"], (512, 4096, 16384)
    titles = [f"sequences of {context:,}" for context in contexts]
    lines = [
        f"What a KV cache of {size} GiB holds:", "",
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

    panels = list(groups_of([row for row in rows if row["task"] == "decode"]))
    if not panels:
        return
    columns = len({model for _, model, _ in panels})
    n_rows = -(-len(panels) // columns)
    lines: dict[str, Any] = {}
    with matplotlib.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(3.4 * columns + 1.3, 2.7 * n_rows), layout="constrained")
        grid = figure.subplots(n_rows, columns, squeeze=False, sharey=True)
        for axes, (engine, model, cells) in zip(grid.flat, panels, strict=False):
            lines |= _draw_panel(axes, cells, FAMILIES[model].n_kv_heads)
            axes.set_title(f"{ENGINES[engine].title}, {FAMILIES[model].title}")
            axes.set_ylim(bottom=0)
        for axes in grid[-1]:
            axes.set_xlabel("K/V heads")
        for axes in grid[:, 0]:
            axes.set_ylabel("decoding speed ÷ MHA's")
        figure.legend(lines.values(), lines.keys(), loc="outside right center", title="batch x context")
        figure.savefig(path)


def _draw_panel(axes: Any, rows: list[Row], heads: tuple[int, ...]) -> dict[str, Any]:
    """Draw one engine and model; return the lines by their names. Only cells of all numbers of heads are drawn."""
    contexts, markers, lines = {512: ("C0", "-"), 4096: ("C1", "--"), 16384: ("C2", ":")}, {1: "o", 8: "s", 32: "^"}, {}
    for context, batch in sorted({(row["context"], row["batch"]) for row in rows}):
        speedups = {r["n_kv_heads"]: r["speedups"] for r in rows if (r["context"], r["batch"]) == (context, batch)}
        if not speedups.keys() >= set(heads):
            continue
        shown = [statistics.median(speedups[n]) for n in heads]
        colour, dashes = contexts.get(context, ("C3", "-."))
        style = {"color": colour, "linestyle": dashes, "marker": markers.get(batch, "d")}
        (lines[f"{batch} x {context:,}"],) = axes.plot(range(len(heads)), shown, **style)
    names = {heads[0]: f"{heads[0]}\nMHA", 1: "1\nMQA"}
    axes.set_xticks(range(len(heads)), [names.get(n, str(n)) for n in heads])
    return lines


if __name__ == "__main__":
    main()
