"""Model types that cannot be converted are refused by name, with a reason that holds."""

import pytest
import tiny
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model.common.errors import CheckpointError
from model.families import FAMILIES, find_family
from model.families.unsupported import REFUSED, unsupported_reason

TYPES = [(model_type, why) for why, types in REFUSED.items() for model_type in types]
KNOWN = [(model_type, why) for model_type, why in TYPES if model_type in CONFIG_MAPPING]


@pytest.mark.parametrize(("model_type", "why"), TYPES)
def test_refused_by_name(model_type, why):
    with pytest.raises(CheckpointError) as error:
        find_family({"model_type": model_type})
    assert str(error.value) == f"model_type {model_type!r} cannot be converted: {why}"
    with pytest.raises(CheckpointError, match=f"'llava' around model_type {model_type!r} cannot be converted"):
        find_family({"model_type": "llava", "text_config": {"model_type": model_type}})


@pytest.mark.parametrize("why", REFUSED)
def test_on_the_command_line(convert, source, tmp_path, why):
    tiny.edit_config(source, model_type=REFUSED[why][0])
    for command in (("inspect", source), ("mha-to-mqa", "--method", "mean", source, tmp_path / "out")):
        convert(*command).refused(REFUSED[why][0], why)
    assert not (tmp_path / "out").exists()


def test_no_type_is_both_supported_and_unsupported():
    types = [model_type for model_type, _ in TYPES]
    assert len(set(types)) == len(types)
    assert not set(types) & set(FAMILIES)


IN_CONFIGS = {
    "no number of K/V heads": ("num_key_value_heads", False),
    "(MLA)": ("kv_lora_rank", True),
    "other layers": ("num_kv_shared_layers", True),
    "attend to an image": ("cross_attention_layers", True),
}
"""Reasons that a config shows, by their words: a key, and whether it is there."""
SHOWN = [(model_type, words) for model_type, why in KNOWN for words in IN_CONFIGS if words in why]


@pytest.mark.parametrize(("model_type", "words"), SHOWN)
def test_the_reason_holds_in_transformers(model_type, words):
    key, is_there = IN_CONFIGS[words]
    assert (key in AutoConfig.for_model(model_type).get_text_config().to_dict()) == is_there


def test_each_reason_that_a_config_shows_has_a_type():
    assert {words for _, words in SHOWN} == set(IN_CONFIGS)


@pytest.mark.parametrize("model_type", sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(FAMILIES)))
def test_every_other_language_model_of_transformers_is_refused_in_one_line(model_type):
    """It is refused with a reason, or said to be unknown; nothing else happens, whatever the type."""
    with pytest.raises(CheckpointError) as error:
        find_family({"model_type": model_type})
    refused, unknown = " cannot be converted: ", f" is not supported; supported are: {', '.join(FAMILIES)}."
    assert str(error.value).startswith(
        f"model_type {model_type!r}{refused if unsupported_reason(model_type) else unknown}"
    )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", ["gpt_neo_y", "bitnet", "llama4", "gpt-neox\nllama"])
def test_unknown_type_on_the_command_line(convert, source, tmp_path, model_type):
    tiny.edit_config(source, model_type=model_type)
    for command in (
        ("inspect", source),
        ("mha-to-mqa", "--method", "mean", source, tmp_path / "out"),
        ("to-hf", source, tmp_path / "out"),
    ):
        convert(*command).refused("is not supported; supported are: apertus, ")
    assert not (tmp_path / "out").exists()


def test_a_model_with_code_of_its_own_gets_the_reason():
    config = {"model_type": "aquila", "auto_map": {"AutoModelForCausalLM": "modeling_aquila.AquilaForCausalLM"}}
    words = r"'aquila' is not supported: it runs its own code \(auto_map\), .*; supported are: apertus, "
    with pytest.raises(CheckpointError, match=words):
        find_family(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"text_config": None}, "text_config = None"),
        ({"text_config": "llama"}, "text_config = 'llama'"),
        ({"text_config": {"model_type": "new"}}, "'llava' around model_type 'new' is not supported"),
        ({"text_config": {"model_type": "llava"}}, "itself a wrapper"),
        ({"text_config": {"model_type": ["llama"]}}, "is not supported"),
    ],
)
def test_unknown_wrapped_models(config, words):
    with pytest.raises(CheckpointError, match=words):
        find_family({"model_type": "llava", **config})


def test_the_former_name_of_longrope(convert, tmp_path):
    """A KeyError of transformers 5 would not say so."""
    factors = {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "original_max_position_embeddings": 32}
    source = tiny.save(tiny.build("phi3", rope_parameters={"rope_type": "longrope", **factors}), tmp_path / "source")
    out = tmp_path / "out"
    assert convert("mha-to-mqa", "--method", "mean", source, out, "--dry-run").code == 0
    tiny.edit_config(source, rope_parameters=None, rope_scaling={"type": "su", **factors})
    convert("mha-to-mqa", "--method", "mean", source, out).refused('rope_scaling.type = "su"', "set it to longrope")
