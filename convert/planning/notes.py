"""Find notes for the user: facts about a source or a recipe that may make the output unusable or misleading."""

from collections.abc import Iterator, Mapping
from typing import Any

from convert.calibration_text.tokenizer import cached_without_tokenizer, unfollowed_tokenizer_links
from convert.merging.merge_recipe import MergeRecipe
from convert.planning.vocabulary import vocabulary_problems
from model.checkpoint import Checkpoint
from model.checkpoint.tensor import is_rope_buffer
from model.common.model_card import is_utf8
from model.completeness import has_lm_head
from model.decoder.config import is_native
from model.families import Family
from model.files.names import MODEL_CARD
from model.files.read import MAX_CONFIG_BYTES, read_content

_OF_A_LLAMA = ("model.", "lm_head.", "layers.", "embed_tokens.", "norm.")
"""Beginnings of the names of a native family's tensors. A saved base model has no `model.` before them."""
# Names of the number of K/V heads in other programs: Falcon's and MPT's classes, Megatron, Meta.
OTHER_NAMES = ("num_kv_heads", "n_head_kv", "n_kv_heads", "kv_n_heads", "num_query_groups")


def notes_of_merge(recipe: MergeRecipe, family: Family) -> Iterator[str]:
    """Yield notes on merged heads."""
    if recipe.by_layer and not recipe.text:
        yield (
            f"--method {recipe.method} uses the weights alone, without any text. The result may be better or worse "
            "than with mean, so compare their losses before you train."
        )
    yield from notes_on_opening(family)


def notes_on_opening(family: Family) -> Iterator[str]:
    """Yield notes on programs that cannot open merged heads as they open the source."""
    if family.engines_without_gqa:
        *others, last = family.engines_without_gqa
        yield (
            f"the classes of {family.model_type} in {', '.join(others)} and {last} have a K/V head for each query "
            "head, and cannot load merged heads (read in their source, not tried). vLLM and SGLang can use "
            "transformers' class: --model-impl transformers."
        )
    if family.custom_code is not None and family.custom_code.model_type != family.model_type:
        yield (
            f"merged heads of {family.model_type} need model code, which is written beside them: transformers opens "
            "the result with trust_remote_code=True. vLLM, SGLang and llama.cpp do not."
        )
    if family.own_code_key is not None:
        yield (
            f"transformers' class of {family.model_type} cannot open merged heads; open the result with the "
            "checkpoint's own code: trust_remote_code=True."
        )


def notes_of_checkpoint(checkpoint: Checkpoint, family: Family) -> tuple[str, ...]:
    """Return the notes of the checkpoint's reader, and notes on misleading keys of config.json."""
    config = checkpoint.config
    return (
        *checkpoint.notes, *_code(config, family), *_other_names(config, family), *_rope_of_version_5(config, family),
        *_foreign_tensors(checkpoint), *_linked_tokenizer(checkpoint), *vocabulary_problems(checkpoint),
        *note_on_uncached_tokenizer(checkpoint),
    )  # fmt: skip


def _code(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield a note on model code that config.json names and the family does not need.

    The values of `auto_map` are `module.Class` for a file beside config.json, or `org/repo--module.Class` for one in
    another repository (transformers, `dynamic_module_utils.get_class_from_dynamic_module`).
    """
    table = config.get("auto_map")
    if not isinstance(table, dict) or family.custom_code is not None or family.own_code_key is not None:
        return
    models = ("AutoConfig", "AutoModel")  # prefixes of model keys; others are for tokenizers and processors
    names = [value for key, value in table.items() if key.startswith(models) and isinstance(value, str)]
    places = dict.fromkeys(
        name.partition("--")[0] if "--" in name else f"{name.rpartition('.')[0]}.py beside it" for name in names
    )
    if places:
        yield (
            f"config.json has auto_map: with trust_remote_code=True, transformers runs code from "
            f"{' and '.join(places)}, which may ignore {family.keys.n_kv_heads}; open the result without it."
        )


def _other_names(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    for key in OTHER_NAMES:
        if key in config and key != family.keys.n_kv_heads:
            yield (
                f"config.json has {key} = {config[key]}, which the class of {family.model_type} does not read and "
                f"which stays as it is; the number of K/V heads is {family.keys.n_kv_heads}."
            )


def _rope_of_version_5(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    rope = config.get("rope_parameters")
    kinds = [kind for kind, value in rope.items() if isinstance(value, dict)] if isinstance(rope, dict) else []
    if isinstance(rope, dict) and (lost := family.rope_keys_without_place(rope)):
        yield (
            "config.json scales the rotary embedding as transformers 5 writes it; version 4 has no keys for "
            f"{' and '.join(lost)}, and would use its own defaults."
        )
    if kinds and "rope_theta" not in config:
        yield (
            f"config.json gives the rotary embeddings of {' and '.join(kinds)} only as transformers 5 writes them; "
            "version 4 would use its own defaults, which may differ."
        )


def _foreign_tensors(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note on tensors that are no part of a language model, such as the head of a reward or Medusa's heads."""
    if not is_native(checkpoint.config) or not has_lm_head(checkpoint):
        return
    names = sorted(n for n in checkpoint.tensors if not n.startswith(_OF_A_LLAMA) and not is_rope_buffer(n))
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"the source holds {names[0]}{more}, no part of a language model of model_type "
            f"{checkpoint.config['model_type']!r}. Such tensors are copied, and `uptrain` refuses a model that has "
            "them; remove them before you convert it."
        )


def note_on_uncached_tokenizer(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note on a model in the Hugging Face cache of which programs have fetched the config and weights only."""
    name = cached_without_tokenizer(checkpoint)
    if name is not None:
        yield f"the cache holds no tokenizer of {name}, so the output has none; fetch all files: hf download {name}."


def note_on_card(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note if the source's model card is left out of the output's."""
    if not is_utf8(read_content(checkpoint.side_files.get(MODEL_CARD, b""), MAX_CONFIG_BYTES)):
        yield f"{MODEL_CARD} is not UTF-8, so that of the output does not contain it; convert it with iconv."


def _linked_tokenizer(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note if OUT will lack the tokenizer, because it is a link that is not followed."""
    for name in unfollowed_tokenizer_links(checkpoint):
        yield f"{name} is a link out of SOURCE and is not copied; put the file itself there, or into OUT."
