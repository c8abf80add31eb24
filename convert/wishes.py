"""What a user asks for, and how a checkpoint is merged then."""

from dataclasses import dataclass, replace

from convert.methods import AUTO, CALIBRATED, LAYER_METHODS, REPEAT
from convert.plan import make_plan
from convert.recipe import GROUPINGS, NONE, NotFeasible, Recipe
from convert.sample import DEFAULT_TOKENS, NO_TORCH, SHIPPED, read_sample
from model.checkpoint import Checkpoint
from model.errors import CheckpointError


@dataclass(frozen=True)
class Wishes:
    """What a user chooses about how heads are merged; None where they leave it to us."""

    method: str | None = None
    seed: int = 0
    renorm: str | None = None
    refit: bool = False
    refine: int = 0
    grouping: str = GROUPINGS[0]
    calibration: str | None = None
    """`none`, `shipped`, `self`, the path of a text, `hub:NAME…`, or several joined by +."""
    calibration_tokens: int | None = None

    @property
    def a_text(self) -> bool:
        """Whether they ask for calibration in so many words."""
        return self.calibration not in (None, NONE) or self.calibration_tokens is not None


BEST = (("fit", True), ("mean", False))
"""Method and refit where no method is asked for: the first that the model allows. Best first, by docs/study.md.

Not `pca` by the weights alone: it begins better than mean on small models and worse on SmolLM2.
"""


def decide(checkpoint: Checkpoint, n_kv_heads: int | None, wishes: Wishes) -> tuple[Recipe, tuple[str, ...]]:
    """Return how to merge, and what to say of it.

    Raises CheckpointError where the model does not allow what is asked for, or choices do not go together.
    """
    if wishes.calibration == NONE and wishes.calibration_tokens is not None:
        raise CheckpointError("--calibration-tokens says how much of a text to take; --calibration none takes none.")
    if wishes.method == REPEAT:
        return _recipe(checkpoint, n_kv_heads, wishes), ()
    is_merged = bool(make_plan(checkpoint, n_kv_heads, Recipe("mean"), None).regrouped)
    if wishes.method is not None:
        recipe = _recipe(checkpoint, n_kv_heads, wishes)
        return (recipe if is_merged else Recipe("mean")), ()
    if not is_merged:
        return Recipe("mean"), ()
    refused: list[NotFeasible] = []
    for method, refit in BEST:
        if refit and wishes.calibration == NONE:
            continue
        try:
            recipe = _recipe(checkpoint, n_kv_heads, replace(wishes, method=method, refit=wishes.refit or refit))
        except NotFeasible as error:
            refused.append(error)
        else:
            return recipe, tuple(
                f"Merged by {recipe.method}; the default does not go: {error}" for error in refused[:1]
            )
    raise NotFeasible(
        f"The options ask for what the default method (fit) does, which does not go here: {refused[0]} "
        "Without them, heads are merged by their mean."
    )


def _recipe(checkpoint: Checkpoint, n_kv_heads: int | None, wishes: Wishes) -> Recipe:
    assert wishes.method is not None
    by_layer = wishes.method in (*LAYER_METHODS, AUTO)
    if not by_layer and wishes.a_text:
        given = "--calibration" if wishes.calibration else "--calibration-tokens"
        raise NotFeasible(f"{given} does not go with --method {wishes.method}, which needs no text.")
    renorm = wishes.renorm or ("spread" if by_layer else "none")
    recipe = Recipe(wishes.method, wishes.seed, renorm, wishes.refit, wishes.refine, wishes.grouping)
    make_plan(checkpoint, n_kv_heads, recipe, None)  # refuses what no text would help
    if by_layer and wishes.calibration != NONE:
        try:
            recipe = _calibrated(checkpoint, recipe, wishes)
        except NotFeasible as error:
            if wishes.refit or wishes.refine or wishes.method in (*CALIBRATED, AUTO):
                raise
            raise NotFeasible(f"{error} --calibration none merges by the weights alone.") from error
    recipe.check()
    return recipe


def _calibrated(checkpoint: Checkpoint, recipe: Recipe, wishes: Wishes) -> Recipe:
    """Return the recipe with its text. Raises NotFeasible where the model cannot be run on one."""
    try:
        from convert.layer_walk import check_can_walk, check_tokens
        from convert.own_text import OwnText
    except ImportError as error:
        raise NotFeasible(NO_TORCH) from error
    check_can_walk(checkpoint)
    text, n_tokens = wishes.calibration or SHIPPED, wishes.calibration_tokens or DEFAULT_TOKENS
    sample = read_sample(checkpoint, text, n_tokens)
    check_tokens(checkpoint, sample)
    if sample.own:
        own = OwnText(checkpoint, sample.first, len(sample.own), sample.window, wishes.seed)
        own.check_memory()
        sample = replace(sample, own_bytes=own.memory, own_steps=own.n_steps)
    return replace(recipe, sample=sample)
