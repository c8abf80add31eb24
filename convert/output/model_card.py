"""Write the output's model card: the source's own card, and a section on the conversion.

The card contains no times and no paths, so the same conversion gives the same bytes.
"""

from dataclasses import dataclass

from convert.merging.methods import LAYER_METHODS, REPEAT
from convert.planning.latent_plan import LatentPlan
from convert.planning.merge_plan import MergePlan
from convert.planning.plan import Plan
from convert.recipe import Recipe
from model.checkpoint import Checkpoint
from model.checkpoint.hub import Origin
from model.checkpoint.latent_norm import LATENT_NORM_EPSILON
from model.common.model_card import UPTRAINING_DETAILS, front_matter, is_utf8, of_derived_model
from model.common.printable import markdown
from model.files.names import CONVERSION_RECORD, MODEL_CARD, UPTRAINING_RECORD
from model.files.read import MAX_CONFIG_BYTES, read_content

CARD_BEGIN, CARD_END = "<!-- groupwise: begin -->", "<!-- groupwise: end -->"

_OF_THE_BASE_MODEL = (
    b"> The text below describes the base model. What was changed is [at the end](#conversion-by-groupwise).\n\n"
)

TRAINING_DETAILS = (
    UPTRAINING_DETAILS.encode(),
    f"Details are in `{UPTRAINING_RECORD}` of the model before its conversion.".encode(),
)
"""A sentence of an export's card (`uptrain.export.model_card`), and what it becomes in the card of a conversion."""


def model_card(checkpoint: Checkpoint, plan: Plan, origin: Origin) -> bytes:
    """Return `README.md`: the source's own card, followed by a section on the conversion.

    If the source was trained by Groupwise and heads change, its card no longer refers to a file beside it.
    """
    source = read_content(checkpoint.side_files.get(MODEL_CARD, b""), MAX_CONFIG_BYTES)
    source = source if is_utf8(source) else b""  # `note_on_card` says so
    if source and plan.computed:
        source = source.replace(*TRAINING_DETAILS)  # the record is then not copied
        source = _of_another_model(source, origin)
    card = source or front_matter(_name_on_hub(origin), ["groupwise", *_describe(plan).tags])
    return card.strip() + b"\n\n" + _section(checkpoint, plan, origin).encode()


def _of_another_model(card: bytes, origin: Origin) -> bytes:
    """Return a card that says that its text describes the base model, and names it, if the hub has it."""
    front, text = of_derived_model(card, _name_on_hub(origin))
    if text and not text.startswith(_OF_THE_BASE_MODEL):
        text = _OF_THE_BASE_MODEL + text
    return front + text


def _name_on_hub(origin: Origin) -> str | None:
    name, revision = origin
    return name if revision else None


def _section(checkpoint: Checkpoint, plan: Plan, origin: Origin) -> str:
    name, revision = origin
    description = _describe(plan)
    base_model = f"{markdown(name)}{f' (revision {revision})' if revision else ''}"
    rows = [("Base model", base_model), *description.facts, *_facts(plan)]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    quantised = " The source is a GGUF file; where its weights were quantised, so are the values here." * (
        checkpoint.format == "gguf"
    )
    notes = "".join(f"- {markdown(note)}\n" for note in plan.notes)
    return f"""{CARD_BEGIN}
## Conversion by Groupwise

| | |
|---|---|
{table}

{description.what_was_done}{quantised} Details,
with the SHA-256 of every source file, are in `{CONVERSION_RECORD}`. The base model's licence applies.
{_how_to_open(plan)}{notes}{CARD_END}
"""


@dataclass(frozen=True)
class _Description:
    """What a card says of the output's attention."""

    tags: list[str]
    facts: list[tuple[str, str]]
    """Rows of the table."""
    what_was_done: str
    """Sentences on the weights, and on the quality."""


def _describe(plan: Plan) -> _Description:
    if isinstance(plan, LatentPlan):
        return _describe_latent(plan)
    assert isinstance(plan, MergePlan)
    before = f"{plan.geometry.n_kv_heads} → " if plan.computed else ""
    return _Description(
        tags=["gqa"] if plan.n_kv_heads < plan.geometry.n_heads else [],
        facts=[("K/V heads", f"{before}{plan.n_kv_heads} (query heads: {plan.geometry.n_heads})")],
        what_was_done=_what_was_merged(plan),
    )


def _what_was_merged(plan: MergePlan) -> str:
    others = f"weights are the base model's, {_how_copied(plan)}."
    if not plan.computed:
        return f"No heads were merged: the {others}"
    if plan.recipe.method == REPEAT:
        return (
            "Each K/V head stands here several times, so that tensor parallelism can divide them; the model "
            f"computes\nwhat the base model does. All other {others}"
        )
    if plan.recipe.by_layer:
        norms = any(merge.norm_tensors for merge in plan.conversions)
        changed = "queries, the norms of queries and keys," if norms else "queries"
        return (
            f"The K/V heads of each group were merged, and {changed} and output projections changed so that the "
            f"group\ncan share them; all other {others} Merging costs quality, which\n*uptraining* restores: "
            "measure before you use it as it is."
        )
    return (
        "The K/V heads of each group were merged ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)); all "
        f"other\n{others} Merging costs much quality, which *uptraining* restores: do\nnot use this model before."
    )


def _describe_latent(plan: LatentPlan) -> _Description:
    sizes = plan.sizes
    quality = (
        "The model computes what the base model does."
        if plan.is_exact
        else "This costs quality, which *uptraining* restores: measure before you use it as it is."
    )
    dtypes = "" if sizes.norm == "bias" else "Open it in bfloat16 or float32: in float16 it computes NaN. "
    cached = f"{sizes.kv_lora_rank} + {sizes.qk_rope_head_dim}"
    copied = "rounded to bfloat16" if plan.recipe.dtype == "bfloat16" else _how_copied(plan)
    return _Description(
        tags=["mla"],
        facts=[
            ("Attention", f"{sizes.n_kv_heads} K/V heads → latent attention (MLA), for {sizes.n_heads} query heads"),
            ("Latent, rotated key", f"{cached} elements for each token and layer"),
            ("Norm of the latent", f"undone by `{sizes.norm}`"),
        ],
        what_was_done=(
            "Queries, keys and values were converted to DeepSeek-V3's class with dense layers: keys and values of all\n"
            f"heads are computed from one latent vector and one rotated key. {_other_changes(plan)}All other weights\n"
            f"are the base model's, {copied}. {quality} {dtypes}Do not quantise the latent's\n"
            "projections, and train the model with Groupwise only: their norm is undone by numbers of extreme size."
        ),
    )


def _other_changes(plan: LatentPlan) -> str:
    """Return sentences on the weights that differ from the base model's, besides queries, keys and values."""
    changes = []
    if plan.recipe.refit or plan.recipe.refine:
        changes.append("The output projections of\nattention were fitted to them.")
    if any(output.scaled and output.scaled.factor != 1 for output in plan.computed.values()):
        changes.append(
            "The embedding and the output projections of attention and MLP are scaled, so that\n"
            f"`rms_norm_eps` can be {LATENT_NORM_EPSILON:g}."
        )
    if plan.has_new_lm_head:
        changes.append("The LM head, which the base model shares with the\nembedding, is a tensor of its own.")
    return "".join(f"{change} " for change in changes)


def _how_copied(plan: Plan) -> str:
    return "value for value" if plan.rewrites else "byte for byte"


def _facts(plan: Plan) -> list[tuple[str, str]]:
    """Return the rows of the table on how the computed tensors were made."""
    if not plan.computed:
        return []
    before, after = plan.kv_cache_bytes
    return [
        ("Method", _method(plan.recipe)),
        ("KV cache per token, 16 bit", f"{before:,} → {after:,} bytes"),
    ]


def _method(recipe: Recipe) -> str:
    parts = [f"`{recipe.method_name}`"]
    if recipe.method in LAYER_METHODS:
        parts.append("queries scaled to the variance of the attention logits")
    if recipe.refit:
        parts.append("output projections refitted")
    if recipe.refine:
        parts.append(f"each layer refined on {recipe.refine:,} tokens")
    if recipe.text:
        parts.append(f"calibrated on {recipe.text.n_tokens:,} tokens ({markdown(recipe.text.label)})")
    if recipe.uses_seed:
        parts.append(f"seed {recipe.seed}")
    return ", ".join(parts)


def _how_to_open(plan: Plan) -> str:
    if plan.code is None:
        return ""
    return (
        "\ntransformers has no class for this model with fewer K/V heads than query heads. One is in\n"
        f"{' and '.join(f'`{name}`' for name in plan.code.files)}; open the model with `trust_remote_code=True`.\n"
    )
