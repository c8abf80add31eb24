"""Write the output's model card: the source's own card, and a section on the conversion.

The card contains no times and no paths, so the same conversion gives the same bytes.
"""

import re

from convert.latent.recipe import LatentRecipe
from convert.merging.methods import LAYER_METHODS, REPEAT
from convert.planning.latent_plan import LatentPlan
from convert.planning.merge_plan import MergePlan
from convert.planning.plan import Plan
from model.checkpoint import Checkpoint
from model.checkpoint.hub import Origin
from model.checkpoint.latent_norm import EPSILON
from model.common.file_names import CONVERSION_RECORD, MODEL_CARD, UPTRAINING_RECORD
from model.common.printable import markdown
from model.common.read_files import CONFIG_BYTES, read_content

CARD_BEGIN, CARD_END = "<!-- groupwise: begin -->", "<!-- groupwise: end -->"

_FRONT_MATTER = re.compile(rb"---[ \t]*\r?\n(.*?^)---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_ENTRY = {
    key: re.compile(rb"^%b:.*\n(?:[ \t-].*\n|\r?\n)*" % key.encode(), re.MULTILINE)
    for key in ("base_model", "model-index")
}
"""A key of the front matter, and the lines of its value: those that are indented, or of a list."""
_OF_THE_BASE_MODEL = (
    b"> The text below describes the base model. What was changed is [at the end](#conversion-by-groupwise).\n\n"
)

TRAINING_DETAILS = (
    f"Details are in `{UPTRAINING_RECORD}`.".encode(),
    f"Details are in `{UPTRAINING_RECORD}` of the model before its conversion.".encode(),
)
"""A sentence of an export's card (`uptrain.export.model_card`), and what it becomes in the card of a conversion."""


def model_card(checkpoint: Checkpoint, plan: Plan, origin: Origin) -> bytes:
    """Return `README.md`: the source's own card, followed by a section on the conversion.

    If the source was trained by Groupwise and heads change, its card no longer refers to a file beside it.
    """
    source = read_content(checkpoint.side_files.get(MODEL_CARD, b""), CONFIG_BYTES)
    if source and plan.computed:
        source = source.replace(*TRAINING_DETAILS)  # the record is then not copied
        source = _of_another_model(source, origin)
    card = source or _front_matter(origin, _tags(plan)).encode()
    return card.strip() + b"\n\n" + _section(checkpoint, plan, origin).encode()


def _of_another_model(card: bytes, origin: Origin) -> bytes:
    """Return a card that says that its text describes the base model, and names it, if the hub has it.

    Of the front matter, YAML between two lines `---`, the base model's measurements (`model-index`) are left out.
    """
    front, text = (match[1], card[match.end() :]) if (match := _FRONT_MATTER.match(card)) else (b"", card)
    name, revision = origin
    front = _ENTRY["model-index"].sub(b"", front)
    if revision:
        front = f"base_model: {name}\n".encode() + _ENTRY["base_model"].sub(b"", front)
    text = text.lstrip()
    if text and not text.startswith(_OF_THE_BASE_MODEL):
        text = _OF_THE_BASE_MODEL + text
    return b"---\n" + front + b"---\n\n" + text if front else text


def _tags(plan: Plan) -> list[str]:
    kind = ["mla"] if isinstance(plan, LatentPlan) else ["gqa"] * (plan.n_kv_heads < plan.geometry.n_heads)
    return ["groupwise", *kind]


def _front_matter(origin: Origin, tags: list[str]) -> str:
    name, revision = origin
    lines = [f"base_model: {name}"] if revision else []
    return "\n".join(["---", *lines, "library_name: transformers", f"tags: [{', '.join(tags)}]", "---"])


def _section(checkpoint: Checkpoint, plan: Plan, origin: Origin) -> str:
    name, revision = origin
    rows = [("Base model", f"{markdown(name)}{f' (revision {revision})' if revision else ''}"), *_facts(plan)]
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

{_what_was_done(plan)}{quantised} Details,
with the SHA-256 of every source file, are in `{CONVERSION_RECORD}`. The base model's licence applies.
{_how_to_open(plan)}{notes}{CARD_END}
"""


def _facts(plan: Plan) -> list[tuple[str, str]]:
    geometry = plan.geometry
    if isinstance(plan, LatentPlan):
        return _latent_facts(plan)
    if not plan.computed:
        return [("K/V heads", f"{geometry.n_kv_heads} (query heads: {geometry.n_heads})")]
    before, after = plan.kv_cache_bytes
    return [
        ("K/V heads", f"{geometry.n_kv_heads} → {plan.n_kv_heads} (query heads: {geometry.n_heads})"),
        ("Method", _method(plan)),
        ("KV cache per token, 16 bit", f"{before:,} → {after:,} bytes"),
    ]


def _latent_facts(plan: LatentPlan) -> list[tuple[str, str]]:
    before, after = plan.kv_cache_bytes
    sizes = plan.sizes
    return [
        ("Attention", f"{sizes.n_kv_heads} K/V heads → latent attention (MLA), for {sizes.n_heads} query heads"),
        ("Latent, rotated key", f"{sizes.latent} + {sizes.rope_dims} numbers for each token and layer"),
        ("Norm of the latent", f"undone by `{sizes.norm}`"),
        ("Method", _method(plan)),
        ("KV cache per token, 16 bit", f"{before:,} → {after:,} bytes"),
    ]


def _method(plan: Plan) -> str:
    recipe = plan.recipe
    parts = [f"`{recipe.latent_method if isinstance(recipe, LatentRecipe) else recipe.method}`"]
    if recipe.method in LAYER_METHODS:
        parts.append("queries scaled to the variance of the attention logits")
    if recipe.refit:
        parts.append("output projections refitted")
    if recipe.refine:
        parts.append(f"each layer refined on {recipe.refine:,} tokens")
    if recipe.text:
        parts.append(f"calibrated on {recipe.text.n_tokens:,} tokens ({markdown(recipe.text.label)})")
    return ", ".join(parts)


def _what_was_done(plan: Plan) -> str:
    exactly = "value for value" if plan.rewrites else "byte for byte"
    if isinstance(plan, LatentPlan):
        return _what_latent_did(plan, "rounded to bfloat16" if plan.recipe.dtype == "bfloat16" else exactly)
    if not plan.computed:
        return f"No heads were merged: the weights are the base model's, {exactly}."
    if plan.recipe.method == REPEAT:
        return (
            "Each K/V head stands here several times, so that tensor parallelism can divide them; the model computes\n"
            f"what the base model does. All other weights are the base model's, {exactly}."
        )
    if plan.recipe.by_layer:
        assert isinstance(plan, MergePlan)
        norms = any(merge.norm_tensors for merge in plan.layers)
        changed = "queries, the norms of queries and keys," if norms else "queries"
        return (
            f"The K/V heads of each group were merged, and {changed} and output projections changed so that the group\n"
            f"can share them; all other weights are the base model's, {exactly}. Merging costs quality, which\n"
            "*uptraining* restores: measure before you use it as it is."
        )
    return (
        "The K/V heads of each group were merged ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)); all other\n"
        f"weights are the base model's, {exactly}. Merging costs much quality, which *uptraining* restores: do\n"
        "not use this model before."
    )


def _what_latent_did(plan: LatentPlan, exactly: str) -> str:
    quality = (
        "The model computes what the base model does."
        if plan.is_exact
        else "This costs quality, which *uptraining* restores: measure before you use it as it is."
    )
    dtypes = "" if plan.sizes.norm == "bias" else "Open it in bfloat16 or float32: in float16 it computes NaN. "
    scaled = any(output.scaled and output.scaled.factor != 1 for output in plan.computed.values())
    residual = (
        "The embedding and the output projections of attention and MLP are scaled, so that\n"
        f"`rms_norm_eps` can be {EPSILON:g}; the head is not tied. "
        if scaled
        else ""
    )
    return (
        "Keys and values of all heads are computed from one latent vector and one rotated key, in the form of\n"
        f"DeepSeek-V3's class with dense layers. {residual}All other weights are the base\n"
        f"model's, {exactly}. {quality} {dtypes}Do not quantise the latent's\n"
        "projections, and train the model with Groupwise only: their norm is undone by numbers of extreme size."
    )


def _how_to_open(plan: Plan) -> str:
    if plan.code is None:
        return ""
    return (
        "\ntransformers has no class for this model with fewer K/V heads than query heads. One is in\n"
        f"{' and '.join(f'`{name}`' for name in plan.code.files)}; open the model with `trust_remote_code=True`.\n"
    )
