"""Plan a merge of K/V heads completely, before anything is written."""

from dataclasses import dataclass
from math import prod
from typing import Any

from convert.merging.layer_merge import LayerMerge
from convert.merging.merge_recipe import MergeRecipe
from convert.merging.methods import REPEAT
from convert.planning.merged_config import merged_config
from convert.planning.notes import note_on_card, notes_of_checkpoint, notes_of_merge
from convert.planning.plan import CALIBRATION_PROGRAM_BYTES, Plan, lay_out
from convert.planning.remote_code import find_code
from convert.planning.tensors import OutputTensor, layer_merges, regroup, tensors_of_merges
from model.checkpoint import Checkpoint
from model.common import checks
from model.common.counts import counted
from model.common.errors import CheckpointError
from model.decoder.config import is_native
from model.geometry import Geometry, read_geometry

_TRANSFORMERS_BYTES = 200_000_000


@dataclass(frozen=True)
class MergePlan(Plan):
    """One merge of K/V heads, or their repetition, or a copy if their number stays."""

    recipe: MergeRecipe
    conversions: tuple[LayerMerge, ...]
    native: bool
    """Whether the native decoder runs the source in calibration. Otherwise transformers' class does."""

    @property
    def model_type(self) -> str:
        return str(self.code.settings["model_type"]) if self.code else self.geometry.model_type

    @property
    def is_exact(self) -> bool:
        return not self.computed or self.recipe.method == REPEAT

    @property
    def kv_cache_bytes(self) -> tuple[int, int]:
        cache = self.geometry.kv_cache_bytes_per_token
        return cache(self.geometry.n_kv_heads), cache(self.n_kv_heads)

    def _calibration_memory(self) -> int:
        """Estimate the bytes to run one layer: its weights in float32, its attention and its moments in float64."""
        layer = self.mean_layer_bytes
        width = self.geometry.n_kv_heads // self.n_kv_heads * self.geometry.head_dim
        moments = 8 * self.n_kv_heads * width**2
        # Of attention and moments: original and merged candidates, or sums for least squares. Refining holds the merged
        # layer, and in float32 its gradients, Adam's moments and temporaries, and two versions of the weights.
        copies = 8 if self.recipe.refine else 5
        running = 2 * layer + copies * (self.largest_layer_bytes + moments)
        program = CALIBRATION_PROGRAM_BYTES
        if not self.native:
            program += _TRANSFORMERS_BYTES
            running = max(running, 4 * layer)  # transformers joins the experts' matrices, from copies in float32
        if self.geometry.alibi and self.recipe.text is not None:
            masks_and_weights = 2 * 4 * self.geometry.n_heads * self.recipe.text.window_tokens**2  # of all heads
            running += masks_and_weights
        if self.geometry.family.is_encoder_decoder:  # the encoder, in float32, reads the text as a whole
            encoder = sum(4 * prod(t.shape) for name, t in self.tensors.items() if name.startswith("encoder."))
            running = max(running, encoder)
        return program + self.reader_bytes + max(running, self._embedding_memory())

    def summary(self, requested_workers: int) -> dict[str, Any]:
        return {**super().summary(requested_workers), "groups": self.n_kv_heads}


def make_merge_plan(
    checkpoint: Checkpoint, n_kv_heads: int | None, recipe: MergeRecipe, max_shard_size: int | None
) -> MergePlan:
    """Plan a merge of `checkpoint` to `n_kv_heads` K/V heads; None keeps their number.

    Raises CheckpointError if that is impossible.
    """
    geometry = read_geometry(checkpoint)
    family = geometry.family
    n_kv_heads = geometry.n_kv_heads if n_kv_heads is None else n_kv_heads
    check_n_kv_heads(geometry, n_kv_heads, recipe.method)
    _check_pretraining_tp(checkpoint, geometry, n_kv_heads)
    changes = n_kv_heads != geometry.n_kv_heads
    merges: tuple[LayerMerge, ...] = ()
    computed: dict[str, OutputTensor] = {}
    if changes and recipe.by_layer:
        merges = layer_merges(geometry, checkpoint.tensors, n_kv_heads, recipe)
        computed = tensors_of_merges(merges, checkpoint.tensors)
    elif changes:
        computed = regroup(geometry, checkpoint.tensors, n_kv_heads)
    replaced = _replaced(checkpoint, geometry, computed)
    tensors, shards, rewrites = lay_out(checkpoint, replaced, computed, max_shard_size)
    code = find_code(checkpoint, family) if computed else None
    return MergePlan(
        native=is_native(checkpoint.config),
        geometry=geometry,
        n_kv_heads=n_kv_heads,
        recipe=recipe,
        max_shard_size=max_shard_size,
        tensors=tensors,
        shards=shards,
        computed=computed,
        conversions=merges,
        config_json=merged_config(checkpoint, geometry, n_kv_heads, bool(computed), code),
        code=code,
        notes=(
            *notes_of_checkpoint(checkpoint, family),
            *note_on_card(checkpoint),
            *(notes_of_merge(recipe, family) if computed else ()),
        ),
        rewrites=rewrites,
        reader_bytes=checkpoint.reader_bytes,
    )


def check_n_kv_heads(geometry: Geometry, n_kv_heads: int, method: str | None) -> None:
    """Raise CheckpointError if the model cannot have this number of K/V heads. REPEAT makes more, all others fewer."""
    n = geometry.n_kv_heads
    if method == REPEAT:
        _check_repeats(geometry, n_kv_heads)
    elif n_kv_heads not in geometry.legal_n_kv_heads:
        if n_kv_heads > 0 and n % n_kv_heads == 0:
            reason = f"the class of {geometry.model_type} holds a K/V head for each query head, or one"
        else:
            reason = f"the model has {counted(n, 'K/V head')}, and groups (the K/V heads to keep) must divide them"
        raise CheckpointError(
            f"--groups {n_kv_heads} is not possible: {reason}; choose {_one_of(geometry.legal_n_kv_heads)}."
        )


def _one_of(numbers: tuple[int, ...]) -> str:
    return f"one of {', '.join(map(str, numbers))}" if len(numbers) > 1 else str(numbers[0])


def _check_repeats(geometry: Geometry, n_kv_heads: int) -> None:
    legal = geometry.legal_repeats
    if n_kv_heads in legal:
        return
    problem = f"--groups {n_kv_heads} is not possible: the model has {counted(geometry.n_kv_heads, 'K/V head')}"
    if legal:
        raise CheckpointError(
            f"{problem}, and repeating makes a multiple of {geometry.n_kv_heads} that divides the {geometry.n_heads} "
            f"query heads; choose {_one_of(legal)}."
        )
    if geometry.n_kv_heads == geometry.n_heads:
        raise CheckpointError(f"{problem}, one for each query head already; there is nothing to repeat.")
    raise CheckpointError(
        f"{problem}, and the class of {geometry.model_type} supports one K/V head, or one for each query head; use the "
        "model as it is."
    )


def _check_pretraining_tp(checkpoint: Checkpoint, geometry: Geometry, n_kv_heads: int) -> None:
    config = checkpoint.config if geometry.text_config is None else checkpoint.config[geometry.text_config]
    slices = checks.whole_number(config.get("pretraining_tp") or 1, "config.json has pretraining_tp")
    if n_kv_heads * geometry.head_dim % slices:
        raise CheckpointError(
            f"config.json has pretraining_tp = {slices!r}, which does not divide {n_kv_heads} x {geometry.head_dim} "
            "rows; set it to 1 (it only changes how products are split)."
        )


def _replaced(
    checkpoint: Checkpoint, geometry: Geometry, computed: dict[str, OutputTensor]
) -> dict[str, tuple[str, ...]]:  # fmt: skip
    """Return the tensors that take the place of others: where each head has its own, some are dropped or added."""
    if not computed:
        return {}
    with_heads = {name for heads in geometry.attention.heads(geometry.n_kv_heads) for name in heads.tensor_names}
    replaced: dict[str, tuple[str, ...]] = dict.fromkeys(with_heads - computed.keys(), ())
    for name, output in computed.items():
        if name not in checkpoint.tensors:
            source = output.copies[0].source
            replaced[source] = (*replaced.get(source, (source,)), name)
    return replaced
