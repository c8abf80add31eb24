"""Write the output's model card: the source's own card, and a section on the conversion.

The card contains no times and no paths, so the same conversion gives the same bytes.
"""

from convert.merging.methods import LAYER_METHODS
from convert.merging.recipe import Recipe
from convert.planning.plan import Plan
from model.checkpoint import Checkpoint
from model.checkpoint.hub import Origin
from model.common.file_names import CONVERSION_RECORD, MODEL_CARD, UPTRAINING_DETAILS, UPTRAINING_RECORD
from model.common.front_matter import of_derived_model
from model.common.printable import markdown
from model.common.read_files import CONFIG_BYTES, read_content

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
    source = read_content(checkpoint.side_files.get(MODEL_CARD, b""), CONFIG_BYTES)
    if source and plan.computed:
        source = source.replace(*TRAINING_DETAILS)  # the record is then not copied
        source = _of_another_model(source, origin)
    card = source or _front_matter(origin, ["groupwise", *plan.tags]).encode()
    return card.strip() + b"\n\n" + _section(checkpoint, plan, origin).encode()


def _of_another_model(card: bytes, origin: Origin) -> bytes:
    """Return a card that says that its text describes the base model, and names it, if the hub has it."""
    name, revision = origin
    front, text = of_derived_model(card, name if revision else None)
    if text and not text.startswith(_OF_THE_BASE_MODEL):
        text = _OF_THE_BASE_MODEL + text
    return front + text


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

{plan.what_was_done}{quantised} Details,
with the SHA-256 of every source file, are in `{CONVERSION_RECORD}`. The base model's licence applies.
{_how_to_open(plan)}{notes}{CARD_END}
"""


def _facts(plan: Plan) -> list[tuple[str, str]]:
    if not plan.computed:
        return plan.card_facts
    before, after = plan.kv_cache_bytes
    return [
        *plan.card_facts,
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
    return ", ".join(parts)


def _how_to_open(plan: Plan) -> str:
    if plan.code is None:
        return ""
    return (
        "\ntransformers has no class for this model with fewer K/V heads than query heads. One is in\n"
        f"{' and '.join(f'`{name}`' for name in plan.code.files)}; open the model with `trust_remote_code=True`.\n"
    )
