"""Prepare the inputs of arms: texts, a tokenizer, token caches and parents. A step whose output exists is skipped.

The folder of a plan:

    texts/ or valid.jsonl      the speeches, or the held-out excerpts of novels
    init/ init-g2/             initial tokenizer and config of parents, and of models from scratch with 2 K/V heads
    init-qwen3/                the same of a parent of a family, in plans with several
    train/ valid/              token caches
    parent-0/ parent-0-hf/     the run that trained the parent of seed 0, and the parent
    parent-0-g2/ …             the same from scratch with 2 K/V heads
    parent-0-qwen3/ …          the same of a family
    text_kinds/                texts of many kinds, with chats in the parent's template
    smollm2/                   model/, train/, valid/, text_kinds/ and plan.json of an external parent
    arms/                      the models that are currently converted and trained
    plan.json                  the values of the plan that all of this depends on
    results.jsonl lock
"""

import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.installed import gguf_file
from scripts.study import programs
from scripts.study.plan import SHARED, ExternalParent, Plan, PlanError, Vocabulary

EXTERNAL_KEYS = ("model", "seq_len", "windows", "kv_heads", "text_kinds")
"""Fields of an external parent that its folder depends on."""
CONTENTS = "text_kinds.json"
"""File of --text-kinds with its kinds and their sources."""


@dataclass(frozen=True)
class Step:
    done: Path
    """The output, which exists once the step is done."""
    make: Callable[[], None]


@dataclass(frozen=True)
class Workspace:
    """The folders of a study."""

    plan: Plan
    work: Path
    texts: Path | None
    """The folder of --texts."""
    text_kinds: Path | None = None
    """The folder of --text-kinds."""

    @property
    def home(self) -> Path:
        """The folder of token caches and parents, which several plans may share."""
        return self.work / self.plan.home

    @property
    def results(self) -> Path:
        return self.work / self.plan.name / "results.jsonl"

    def init_folder(self, variant: str) -> Path:
        return self.home / (f"init-{variant}" if variant else "init")

    def run_folder(self, seed: int, variant: str) -> Path:
        return self.home / (f"parent-{seed}-{variant}" if variant else f"parent-{seed}")

    def parent_folder(self, seed: int, variant: str) -> Path:
        """Return the folder of the parent, or of a variant of it (`variants`)."""
        run = self.run_folder(seed, variant)
        return run.with_name(f"{run.name}-hf")

    @property
    def has_novels(self) -> bool:
        return self.plan.texts.kind == "novels"

    @property
    def train_texts(self) -> list[Path]:
        return self.find(self.plan.texts.train) if self.has_novels else [self.home / "texts/train"]

    @property
    def valid_texts(self) -> Path:
        return self.home / ("valid.jsonl" if self.has_novels else "texts/held-out")

    def find(self, patterns: tuple[str, ...]) -> list[Path]:
        """Return the files of --texts with these names."""
        if self.texts is None:
            raise PlanError(f"the plan {self.plan.name} is about novels; give their folder with --texts.")
        files = [file for pattern in patterns for file in sorted(self.texts.glob(pattern))]
        if not files:
            raise PlanError(f"{self.texts} has no {' or '.join(patterns)}.")
        return files


def check_home(workspace: Workspace) -> None:
    """Raise PlanError if the plan needs texts or a program that are missing, or its folders have other values of it."""
    plan = workspace.plan
    if plan.needs_text_kinds:
        _check_text_kinds(workspace)
    if plan.tasks and shutil.which("lm_eval") is None:
        raise PlanError(
            f"the plan {plan.name} needs the program lm_eval in PATH; install it with pip install lm_eval[hf]."
        )
    wanted = json.loads(json.dumps({key: value for key, value in asdict(workspace.plan).items() if key in SHARED}))
    del wanted["parent"]["seeds"]  # seeds may be added later
    for key in ("families", "compile"):  # earlier folders lack these keys
        if not wanted["parent"][key]:
            del wanted["parent"][key]
    _check_record(workspace.home, wanted)
    for external in plan.external:
        values = json.loads(json.dumps(asdict(external)))
        _check_record(workspace.home / external.name, {key: values[key] for key in EXTERNAL_KEYS})


def _check_record(folder: Path, wanted: dict[str, Any]) -> None:
    """Record what a folder is made with. Raises PlanError if it was made with something else."""
    record = folder / "plan.json"
    if not record.exists():
        # Runners of several plans may do this at once, and must not read a half-written file.
        folder.mkdir(parents=True, exist_ok=True)
        partial_file = record.with_suffix(f".{os.getpid()}")
        partial_file.write_text(json.dumps(wanted, indent=2) + "\n")
        partial_file.rename(record)
    recorded = json.loads(record.read_text())
    if other := [key for key in wanted if recorded.get(key) != wanted[key]]:
        raise PlanError(f"{folder} was made with another {other[0]}; choose another --work, or delete it.")


def _check_text_kinds(workspace: Workspace) -> None:
    """Raise PlanError unless --text-kinds is a finished folder, and the one that earlier texts were rendered from."""
    if workspace.text_kinds is None:
        raise PlanError(
            f"the plan {workspace.plan.name} needs texts of many kinds; give their folder with --text-kinds."
        )
    contents = workspace.text_kinds / CONTENTS
    if not contents.is_file():
        raise PlanError(
            f"{workspace.text_kinds} has no {CONTENTS}, which scripts/study/text_kinds.py writes at its end."
        )
    for folder in (workspace.home, *(workspace.home / external.name for external in workspace.plan.external)):
        rendered = folder / "text_kinds"
        if rendered.exists() and not same_content(rendered / CONTENTS, contents):
            raise PlanError(f"{rendered} was made from other texts; choose another --work, or delete it.")


def same_content(path: Path, other: Path) -> bool:
    return path.exists() and path.read_bytes() == other.read_bytes()


def shared_steps(workspace: Workspace) -> list[Step]:
    """Return the steps before the parents, in order. A plan without its own parents needs fewer."""
    plan, home = workspace.plan, workspace.home
    cache = partial(make_caches, partial(plan_sources, workspace), home / "init", home, plan.seq_len)
    steps = [Step(workspace.valid_texts, partial(write_excerpts if workspace.has_novels else copy_speeches, workspace))]
    if plan.parent.seeds:
        steps += [
            Step(home / "init", partial(make_init, workspace)),
            Step(home / "train", partial(cache, "train", None)),
            Step(home / "valid", partial(cache, "valid", plan.windows)),
            *(
                Step(workspace.init_folder(variant), partial(make_init_with, workspace, variant, changes))
                for variant, changes in variants(plan).items()
                if variant
            ),
        ]
        if plan.needs_text_kinds:
            steps.append(text_kinds_step(workspace, home / "init", home))
    return [*steps, *(step for external in plan.external for step in external_steps(workspace, external))]


def external_steps(workspace: Workspace, external: ExternalParent) -> list[Step]:
    folder = workspace.home / external.name
    model = folder / "model"
    sources = partial(sources_of_kinds, external, folder) if external.text_kinds else partial(plan_sources, workspace)
    cache = partial(make_caches, sources, model, folder, external.seq_len)
    steps = [Step(model, partial(fetch_model, external, model))]
    if workspace.plan.needs_text_kinds:
        steps.append(text_kinds_step(workspace, model, folder))
    steps.append(Step(folder / "valid", partial(cache, "valid", external.windows)))
    return [*steps, Step(folder / "train", partial(cache, "train", None))] if external.uptrain else steps


def text_kinds_step(workspace: Workspace, model: Path, folder: Path) -> Step:
    return Step(folder / "text_kinds", partial(render_text_kinds, workspace, model, folder / "text_kinds"))


def parent_steps(workspace: Workspace) -> list[Step]:
    """Return the trainings from scratch: the parents, then models with fewer K/V heads."""
    return [
        Step(workspace.parent_folder(seed, variant), partial(train_parent, workspace, seed, variant))
        for variant in variants(workspace.plan)
        for seed in workspace.plan.parent.seeds
    ]


def variants(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the models that are trained from scratch: name → keys of config.json beside those of the plan's model.

    They are the families; else the parent, called "", and models with fewer K/V heads, called g2 and so on.
    """
    fewer = sorted({groups for arm in plan.arms if arm.from_scratch for groups in arm.groups}, reverse=True)
    return plan.parent.families or {"": {}, **{f"g{groups}": {"num_key_value_heads": groups} for groups in fewer}}


def write_excerpts(workspace: Workspace) -> None:
    texts = workspace.plan.texts
    part = slice(*texts.excerpt) if texts.excerpt else slice(None)
    partial_file = workspace.valid_texts.with_suffix(".partial")
    with partial_file.open("w") as file:
        for text in _documents(workspace.find((texts.valid,))):
            file.write(json.dumps({"text": text[part]}) + "\n")
    partial_file.rename(workspace.valid_texts)


def copy_speeches(workspace: Workspace) -> None:
    from scripts.train_demo_model import split_speeches

    folder = _fresh(workspace.home / "texts.partial")
    split_speeches(folder)
    folder.rename(workspace.home / "texts")


def make_init(workspace: Workspace) -> None:
    from scripts.train_demo_model import CONFIG, byte_level_bpe, write_init

    wanted = workspace.plan.tokenizer
    tokenizer, trainer = byte_level_bpe(wanted.vocab)
    trainer.show_progress = False
    tokenizer.train_from_iterator(_tokenizer_texts(workspace, wanted), trainer)
    folder = _fresh(workspace.home / "init.partial")
    own = {"vocab_size": wanted.vocab, "torch_dtype": "float32"}
    write_init(folder, CONFIG | own | workspace.plan.parent.model, tokenizer)
    folder.rename(workspace.home / "init")


def make_init_with(workspace: Workspace, variant: str, changes: dict[str, Any]) -> None:
    """Write the initial config and tokenizer of a variant."""
    folder = _fresh(workspace.home / f"init-{variant}.partial")
    shutil.copytree(workspace.init_folder(""), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes, indent=2) + "\n")
    folder.rename(workspace.init_folder(variant))


def _tokenizer_texts(workspace: Workspace, wanted: Vocabulary) -> Iterator[str]:
    if workspace.has_novels:
        return _documents(workspace.find(wanted.texts or workspace.plan.texts.train))
    return (file.read_text() for folder in workspace.train_texts for file in sorted(folder.glob("*.txt")))


def _documents(files: list[Path]) -> Iterator[str]:
    for path in files:
        with lzma.open(path, "rt") as file:
            yield from (json.loads(line)["text"] for line in file)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def plan_sources(workspace: Workspace, name: str) -> list[str]:
    """Return the texts of the plan: those to train on, or to evaluate on (`valid`)."""
    return [str(path) for path in (workspace.train_texts if name == "train" else [workspace.valid_texts])]


def sources_of_kinds(external: ExternalParent, folder: Path, name: str) -> list[str]:
    """Return texts of several kinds: all to train on, or as many tokens of each to evaluate on (`valid`)."""
    kinds, share = folder / "text_kinds" / ("own" if name == "train" else "held-out"), "" if name == "train" else "=1"
    return [f"{kinds / kind}.jsonl{share}" for kind in external.text_kinds]


def make_caches(
    sources_of: Callable[[str], list[str]], tokenizer: Path, folder: Path, seq_len: int, name: str, windows: int | None
) -> None:
    sources = [word for source in sources_of(name) for word in ("--data", source)]
    limit = ("--tokens", windows * seq_len) if windows else ()
    options = ("--tokenizer", tokenizer, "--seq-len", seq_len, "--workers", "1", *limit)
    programs.run("uptrain", "prepare", *sources, *options, "--out", folder / name, "--json")


def fetch_model(external: ExternalParent, out: Path) -> None:
    """Write the parent as a Hugging Face folder."""
    source = external.model
    if source.startswith("package:"):
        source = str(gguf_file(source.removeprefix("package:")))
    if external.kv_heads is None:
        programs.run("convert", "to-hf", source, out, "--json")
        return
    from scripts.study.repeat_heads import repeat_heads  # needs torch

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        programs.run("convert", "to-hf", source, Path(temporary) / "model", "--json")
        repeat_heads(Path(temporary) / "model", Path(temporary) / "repeated", external.kv_heads)
        (Path(temporary) / "repeated").rename(out)


def render_text_kinds(workspace: Workspace, model: Path, out: Path) -> None:
    """Copy the texts of all kinds, with chats rendered in the model's template."""
    from model.tokenizer import open_tokenizer

    assert workspace.text_kinds is not None  # check_home
    tokenizer, folder = open_tokenizer(model), _fresh(out.with_suffix(".partial"))
    for part in ("held-out", "own"):
        (folder / part).mkdir()
        for source in sorted((workspace.text_kinds / part).glob("*.jsonl")):
            with source.open() as documents, (folder / part / source.name).open("w") as file:
                for line in documents:
                    file.write(json.dumps({"text": _as_text(json.loads(line), tokenizer)}, ensure_ascii=False) + "\n")
    shutil.copyfile(workspace.text_kinds / CONTENTS, folder / CONTENTS)
    folder.rename(out)


def _as_text(document: dict[str, Any], tokenizer: Any) -> str:
    if "text" in document:
        return str(document["text"])
    if tokenizer.chat_template:
        return str(tokenizer.apply_chat_template(document["messages"], tokenize=False))
    return "".join(f"{turn['role'].title()}: {turn['content']}\n\n" for turn in document["messages"])


def train_parent(workspace: Workspace, seed: int, variant: str) -> None:
    parent, home, run = workspace.plan.parent, workspace.home, workspace.run_folder(seed, variant)
    if (run / "run.json").is_file():
        programs.train(run, "resume", run)
    else:
        options = (
            "--tokens", parent.tokens, "--global-batch-tokens", parent.global_batch_tokens,
            "--micro-batch", parent.micro_batch, "--lr", parent.lr, "--weight-decay", parent.weight_decay,
            "--precision", parent.precision, "--seed", seed, *(["--compile"] if parent.compile else []),
        )  # fmt: skip
        data = ("--data", home / "train", "--eval-data", home / "valid")
        programs.train(run, "run", "--init", workspace.init_folder(variant), *data, *options, "--out", run)
    programs.run("uptrain", "export", run, workspace.parent_folder(seed, variant))
