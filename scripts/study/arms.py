"""Convert parents, evaluate and uptrain the results, and record each figure as soon as it is measured."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from model.common.machine import n_cores
from scripts.bench.machine import commit, cpu_model
from scripts.study import programs
from scripts.study.plan import TEXT_KINDS, Arm, Plan, Stage, arms_of
from scripts.study.prepare import Workspace
from scripts.study.results import Result, is_parent, read_results

NEVER = 10**9
"""Steps between evaluations: more than any uptraining has, so that only its end is measured."""


@dataclass(frozen=True)
class Subject:
    """A parent with its data and its training settings."""

    name: str
    """`parent` for the plan's own parent, else the name of its family or of the external parent."""
    folder: Path
    seed: int
    caches: Path
    """The folder that contains train/ and valid/."""
    tokens: str
    global_batch_tokens: int
    precision: str
    seq_len: int

    @property
    def text_kinds(self) -> Path:
        """The folder of texts of many kinds: held-out/ for evaluation, own/ for calibration."""
        return self.caches / "text_kinds"


@dataclass(frozen=True)
class Case:
    """A merge of a parent, and the stages whose figures are missing."""

    subject: Subject
    arm: Arm
    groups: int | None
    """None for the parent itself."""
    stages: tuple[Stage | None, ...]
    """None is the evaluation right after conversion."""

    @property
    def latent(self) -> tuple[int, int] | None:
        return self.arm.sizes(self.groups)

    @property
    def name(self) -> str:
        groups = "" if self.groups is None else f"-g{self.groups}"
        return f"{self.subject.name}-s{self.subject.seed}-{self.arm.name}{groups}"


def subjects(workspace: Workspace) -> Iterator[tuple[Subject, tuple[Arm, ...]]]:
    plan, parent = workspace.plan, workspace.plan.parent
    for family, seed in product(parent.families or ("",), parent.seeds):
        values = (parent.tokens, parent.global_batch_tokens, parent.precision, plan.seq_len)
        subject = Subject(family or "parent", workspace.parent_folder(seed, family), seed, workspace.home, *values)
        yield subject, arms_of(plan, None)
    for external in plan.external:
        folder = workspace.home / external.name
        values = (external.original_tokens, external.global_batch_tokens, parent.precision, external.seq_len)
        for seed in external.seeds:
            yield Subject(external.name, folder / "model", seed, folder, *values), arms_of(plan, external)


def missing_cases(workspace: Workspace) -> list[Case]:
    """Return the cases without a line in the results, or with one that lacks a measure, in the plan's order."""
    measures = measures_of(workspace.plan)
    measured = {key_of_line(line) for line in read_results(workspace.results) if measures <= line.keys()}
    cases = []
    for case in all_cases(workspace):
        if stages := tuple(stage for stage in case.stages if key(case, stage) not in measured):
            cases.append(replace(case, stages=stages))
    return cases


def all_cases(workspace: Workspace) -> Iterator[Case]:
    """Yield every case of a plan with all its stages, in the plan's order."""
    for subject, arms in subjects(workspace):
        for arm in arms:
            for groups in (None,) if arm.is_parent else arm.groups:
                yield Case(subject, arm, groups, (None, *arm.uptrain))


def measures_of(plan: Plan) -> set[str]:
    """Return the keys of the measures that a plan asks for in every line, beside the losses."""
    wanted = {"behaviour": plan.behaviour, "text_kinds": plan.text_kind_windows > 0, "tasks": plan.tasks}
    return {name for name, is_wanted in wanted.items() if is_wanted}


def key(case: Case, stage: Stage | None) -> tuple[object, ...]:
    """Return the identity of a figure. An arm whose arguments have changed is another arm."""
    convert = None if case.arm.convert is None else tuple(case.arm.convert)
    identity = (case.subject.name, case.subject.seed, case.arm.name, convert, case.groups, case.latent)
    return (*identity, *stage_values(case, stage).values())


def key_of_line(line: Result) -> tuple[object, ...]:
    convert = None if line["convert"] is None else tuple(line["convert"])
    groups = None if is_parent(line) else line["groups"]
    names = ("alpha", "loss", "lr", "schedule", "global_batch_tokens", "trainable")
    latent = line["latent"] and tuple(line["latent"])
    return (line["parent"], line["seed"], line["arm"], convert, groups, latent, *(line[name] for name in names))


def stage_values(case: Case, stage: Stage | None) -> Result:
    if stage is None:
        return dict.fromkeys(Stage.__dataclass_fields__) | {"alpha": 0}
    return asdict(stage) | {"global_batch_tokens": stage.global_batch_tokens or case.subject.global_batch_tokens}


def work_on(workspace: Workspace, case: Case, tell: Callable[[str], None]) -> None:
    """Convert, and measure each missing figure. The models are deleted; only the figures are kept."""
    folder = workspace.work / workspace.plan.name / "arms" / case.name
    # Leftovers of a killed study may be from other arguments or other code. The uptrainings of arms are short.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = begin(workspace, case, folder / "model")
    for stage in case.stages:
        started = time.perf_counter()
        measures = evaluate(case, model) if stage is None else uptrain(workspace, case, model, stage, folder / "run")
        line = describe(workspace, case, stage, measures) | {"seconds": round(time.perf_counter() - started, 1)}
        if workspace.plan.measures_exports:
            final = model if stage is None else export(folder / "run")
        if workspace.plan.behaviour:
            line["behaviour"] = behave(workspace, case, final)
        if workspace.plan.text_kind_windows:
            line["text_kinds"] = on_text_kinds(workspace, case, final)
        if workspace.plan.tasks:
            line["tasks"] = json.loads(programs.run("scripts.study.on_tasks", final, "--texts", workspace.valid_texts))
        append(workspace.results, line)
        stage_name = "after conversion" if stage is None else f"{stage.loss}, α {stage.alpha}, lr {stage.lr}"
        tell(f"{case.name}, {stage_name}: {measures['loss']:.4f}, {line['seconds']} s")
        shutil.rmtree(folder / "run", ignore_errors=True)
    shutil.rmtree(folder)


def begin(workspace: Workspace, case: Case, out: Path) -> Path:
    """Return the model that an arm starts from. If it is a merge, convert it."""
    if case.arm.convert is None:
        return (
            workspace.parent_folder(case.subject.seed, f"g{case.groups}")
            if case.arm.from_scratch
            else case.subject.folder
        )
    convert = (word.replace(TEXT_KINDS, f"{case.subject.text_kinds}/own") for word in case.arm.convert)
    command: str = "mha-to-gqa"
    size: tuple[object, ...] = ("--groups", case.groups)
    if case.latent is not None:
        command, size = "mha-to-mla", ("--latent", case.latent[0], "--rope", case.latent[1])
    programs.run("convert", command, case.subject.folder, out, *size, *convert, "--overwrite", "--json")
    return out


def evaluate(case: Case, model: Path) -> Result:
    subject = case.subject
    options = ("--data", subject.caches / "valid", "--teacher", subject.folder, "--precision", subject.precision)
    return {"tokens": 0, **json.loads(programs.run("uptrain", "evaluate", model, *options, "--json"))}


def uptrain(workspace: Workspace, case: Case, model: Path, stage: Stage, run: Path) -> Result:
    subject, values = case.subject, stage_values(case, stage)
    data = ("--data", subject.caches / "train", "--eval-data", subject.caches / "valid", "--teacher", subject.folder)
    options = (
        "--loss", stage.loss, "--alpha", stage.alpha, "--original-tokens", subject.tokens, "--lr", stage.lr,
        "--schedule", stage.schedule, "--trainable", stage.trainable,
        "--global-batch-tokens", values["global_batch_tokens"], "--seed", subject.seed,
        "--precision", subject.precision, "--eval-every", workspace.plan.eval_every_steps or NEVER,
        "--save-every", NEVER,
    )  # fmt: skip
    programs.train(run, "run", model, *data, *options, "--out", run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "evaluation" in line]
    measures = {
        "tokens": json.loads((run / "run.json").read_text())["budget"]["tokens"],
        **evaluations[-1]["evaluation"],
    }
    if workspace.plan.eval_every_steps:
        measures["curve"] = [{"step": line["step"], **line["evaluation"]} for line in evaluations]
    return measures


def export(run: Path) -> Path:
    programs.run("uptrain", "export", run, run / "exported", "--json")
    return run / "exported"


def behave(workspace: Workspace, case: Case, model: Path) -> Result:
    words = (model, "--parent", case.subject.folder, "--texts", workspace.valid_texts)
    behaviour: Result = json.loads(programs.run("scripts.study.behaviour", *words))
    return behaviour


def on_text_kinds(workspace: Workspace, case: Case, model: Path) -> dict[str, float]:
    """Return the loss on the held-out texts of each kind; after calibration on one kind, only on that one."""
    texts = case.subject.text_kinds / "held-out"
    if case.arm.text_kind and (texts / f"{case.arm.text_kind}.jsonl").exists():
        texts /= f"{case.arm.text_kind}.jsonl"
    windows = ("--windows", workspace.plan.text_kind_windows, "--length", case.subject.seq_len)
    losses: dict[str, float] = json.loads(
        programs.run("scripts.study.on_text_kinds", model, "--text-kinds", texts, *windows)
    )
    return losses


def describe(workspace: Workspace, case: Case, stage: Stage | None, measures: Result) -> Result:
    subject = case.subject
    config = json.loads((subject.folder / "config.json").read_text())
    return {
        "plan": workspace.plan.name, "parent": subject.name, "arm": case.arm.name,
        "groups": case.groups or config["num_key_value_heads"], "seed": subject.seed, **stage_values(case, stage),
        "tokens": measures["tokens"], "held_out_loss": measures["loss"], "parent_loss": measures["teacher_loss"],
        "kl": measures["kl"], "agreement": measures["agreement"], "targets": measures["targets"],
        **({"curve": measures["curve"]} if "curve" in measures else {}),
        "convert": case.arm.convert, "latent": case.latent, "from_scratch": case.arm.from_scratch,
        "original_tokens": subject.tokens, "precision": subject.precision,
        "parent_sha256": weights_hash(subject.folder),
        "caches": cache_hashes(subject.caches), "commit": commit(),
        "hardware": {"cpu": cpu_model(), "cores": n_cores(), "threads": programs.threads()},
    }  # fmt: skip


def append(path: Path, line: Result) -> None:
    """Append a line in one write, so that a kill or a full disk leaves the whole line or nothing."""
    content = (json.dumps(line, ensure_ascii=False) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if file.write(content) != len(content):
            file.truncate(size)
            raise OSError(f"the disk of {path} is full")


def cache_hashes(folder: Path) -> dict[str, str]:
    manifests = sorted(folder.glob("*/manifest.json"))
    return {path.parent.name: json.loads(path.read_text())["sha256"] for path in manifests}


@cache
def weights_hash(folder: Path) -> str:
    """Return the SHA-256 of a model's weights, which identifies the model of a figure."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
