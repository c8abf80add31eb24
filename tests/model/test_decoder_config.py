"""What config.json means to the Llama code, against transformers' config classes."""

import pytest
import tiny
import torch
from llama_pairs import ROPES
from transformers import AutoConfig, AutoModelForCausalLM

from model import load_model
from model.common.errors import CheckpointError
from model.decoder.config import read_llama_config

SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def said(family, **changes):
    """Return a config.json as users have it; a value of `...` removes a key."""
    settings = {
        "model_type": family, "vocab_size": 67, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64, **changes,
    }  # fmt: skip
    return {key: value for key, value in settings.items() if value is not ...}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"sliding_window": 7}),
        *(("mistral", {"sliding_window": window}) for window in (..., None, 7)),
        *(
            ("qwen2", {"sliding_window": window, "use_sliding_window": used, **layers})
            for window in (..., None, 7)
            for used in (..., False, True)
            for layers in ({}, {"max_window_layers": 1}, {"max_window_layers": 0}, {"max_window_layers": 9})
        ),
        *(
            ("qwen2", {"sliding_window": window, "use_sliding_window": True, "layer_types": kinds})
            for window in (..., 7)
            for kinds in (None, SLIDING, ["full_attention"] * 4)
        ),
        *(
            ("mistral", {"sliding_window": window, "layer_types": kinds})
            for window in (7, None)
            for kinds in (SLIDING, ["full_attention"] * 4)
            if window or kinds is not SLIDING
        ),
    ],
)
def test_windows_are_those_of_the_config_class(family, changes):
    config = said(family, **changes)
    # As AutoConfig.from_pretrained does.
    of_layers = family == "mistral" and "layer_types" in config
    hf_config = AutoConfig.for_model(**config | ({"model_type": "ministral"} if of_layers else {}))
    kinds = getattr(hf_config, "layer_types", None) or ["sliding_attention" if family == "mistral" else ""] * 4
    expected = tuple(hf_config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert read_llama_config(config).windows == expected


def test_an_absent_window_is_4096_tokens_and_null_is_none(tmp_path):
    """Logits equal transformers' beyond it."""
    hf_model = tiny.build("mistral", num_hidden_layers=1, num_key_value_heads=1, max_position_embeddings=8192)
    hf_model.set_attn_implementation("sdpa")
    for parameter in hf_model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 20
    folder = tiny.save(hf_model, tmp_path / "model")
    ids = torch.randint(0, 67, (1, 4200), generator=torch.Generator().manual_seed(0))
    logits = {}
    for window in (..., None):
        tiny.edit_config(folder, sliding_window=window)
        hf_model.config.sliding_window = 4096 if window is ... else None
        with torch.inference_mode():
            logits[window] = load_model(folder).hidden(ids)[0, -1]
            assert (logits[window] - hf_model.model(ids).last_hidden_state[0, -1]).abs().max() <= 1e-5
    assert (logits[...] - logits[None]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_absent_sizes_are_those_of_the_config_class(family):
    config = {"model_type": family, "vocab_size": 67, "intermediate_size": 40}
    hf_config, ours = AutoConfig.for_model(family), read_llama_config(config)
    expected = (
        hf_config.hidden_size,
        hf_config.num_hidden_layers,
        hf_config.num_attention_heads,
        hf_config.rms_norm_eps,
    )
    assert (ours.hidden_size, ours.n_layers, ours.n_heads, ours.rms_norm_eps) == expected
    assert ours.n_kv_heads == hf_config.num_key_value_heads
    assert (ours.rope.max_positions, ours.rope.theta) == (hf_config.max_position_embeddings, 10000.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(({key: value}, key) for key in ("rope_scaling", "rope_parameters") for value in ("x", 7, True, [1])),
        *(({"rope_theta": value}, "rope_theta") for value in ("a", 0, 1, -1.0, float("nan"), float("inf"), [1], True)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "a"}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "RoPE type"),
        *(
            ({"rope_scaling": {"type": kind, "factor": value}}, f"type {kind} with factor")
            for kind in ("linear", "dynamic", "yarn")
            for value in (0, -2, "2", [2], True, float("nan"), 10**400)
        ),
        *(
            ({"rope_scaling": {"type": "yarn", "factor": 2.0, key: value}}, key)
            for key in ("beta_fast", "beta_slow", "mscale", "original_max_position_embeddings", "attention_factor")
            for value in ("32", [32], -1, float("inf"))
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}}, "truncate"),
        *(
            ({"rope_scaling": {"type": "yarn", "factor": 2.0, key: value}}, f"{key} = .*from 1e-6 to 1e6")
            for key in ("beta_fast", "beta_slow")
            for value in (1e308, 1e-320)
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}}, "layer to layer"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 64}},
            "high_freq_factor = 4, which must be above",
        ),
        *(({"rms_norm_eps": value}, "rms_norm_eps") for value in ("1e-6", [], {}, -1e-6, float("nan"), True)),
        *(
            ({key: value}, key)
            for key in ("vocab_size", "intermediate_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
            for value in (0, -1, 1.5, "8", True, 10**12, 10**30, [8], None)
        ),
        *(({"head_dim": value}, "head_dim") for value in (0, "4", 4.0, 10**12)),
        ({"head_dim": 5}, "heads of 5 dimensions"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "heads of 2 dimensions"),
        *(({"num_key_value_heads": value}, "num_key_value_heads") for value in (0, 3, "8", 10**30)),
        *(({"max_position_embeddings": value}, "max_position_embeddings") for value in (None, 0, "64", 10**30)),
        *(
            ({key: value}, key)
            for key in ("attention_bias", "mlp_bias", "tie_word_embeddings")
            for value in (1, "no", [], {})
        ),
        ({"hidden_act": ["silu"]}, "activation"),
        *(
            ({"model_type": family, "use_sliding_window": True, "sliding_window": value}, "sliding_window")
            for family in ("mistral", "qwen2")
            for value in (0, -1, "7", 7.0, True)
        ),
        *(
            ({"model_type": "qwen2", "layer_types": value}, "layer_types")
            for value in ([], ["full_attention"], "full_attention", 4, ["chunked_attention"] * 4, [1, 2, 3, 4])
        ),
        ({"model_type": "qwen2", "use_sliding_window": 1}, "use_sliding_window"),
        *(({"model_type": "qwen2", "max_window_layers": value}, "max_window_layers") for value in (-1, "1", None)),
    ],
)  # fmt: skip
def test_wrong_types_and_values_are_refused_by_name(changes, words):
    with pytest.raises(CheckpointError, match=words) as error:
        read_llama_config(said(**{"family": "llama", **changes}) | changes)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("key", "outer", "inner"), [("rope_theta", 1e6, 1e4), ("original_max_position_embeddings", 32, 16)]
)
def test_a_key_beside_the_scaling_that_contradicts_it(spelling, key, outer, inner):
    """The message names the key of the scaling that config.json has; `rope_scaling` is transformers 4's."""
    config = said("llama", **{key: outer, spelling: {"rope_type": "yarn", "factor": 2.0, key: inner}})
    with pytest.raises(CheckpointError, match=rf"has {key} = {outer}, and another in its {spelling} \({inner}\)"):
        read_llama_config(config)


def test_a_window_that_nothing_uses_is_refused_as_by_the_class():
    """Qwen2's own forward pass stops there: its mask has no window."""
    config = said("qwen2", use_sliding_window=False, layer_types=SLIDING)
    with pytest.raises(CheckpointError, match="layer_types names sliding_attention, but there is no sliding window"):
        read_llama_config(config)


@pytest.mark.parametrize("scaling", [{"rope_type": "yarn", "factor": 4.0}, ROPES["llama3"]])
def test_the_length_of_pre_training_beside_the_scaling(tmp_path, scaling):
    """Transformers 5 prefers it to max_position_embeddings."""
    folder = tiny.save(tiny.build(max_position_embeddings=64), tmp_path / "model")
    inner = {
        key: value for key, value in scaling.items() if key not in ("original_max_position_embeddings", "rope_theta")
    }
    tiny.edit_config(folder, original_max_position_embeddings=16, rope_parameters={**inner, "rope_theta": 777.0})
    hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 67, (1, 48), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert (hf_model(ids, use_cache=False).logits - load_model(folder)(ids)).abs().max() <= 1e-5
    tiny.edit_config(folder, rope_parameters={**inner, "rope_theta": 777.0, "original_max_position_embeddings": 32})
    with pytest.raises(CheckpointError, match="original_max_position_embeddings = 16, and another in its rope_param"):
        load_model(folder)


def test_attention_to_later_tokens_is_refused():
    with pytest.raises(CheckpointError, match="is_causal = false"):
        read_llama_config(said("llama", is_causal=False))
