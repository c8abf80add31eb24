"""Classes of transformers, built from a checkpoint's config."""

import copy

import pytest
import tiny

from model.common.errors import CheckpointError
from model.decoder.transformers_classes import build_observable_model, read_hf_config


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_config_stays_as_it_was_read(key):
    """Its class writes the base of RoPE into the object inside."""
    config = {
        "model_type": "qwen3", "vocab_size": 67, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "rope_theta": 1e6,
        key: {"rope_type": "linear", "factor": 2.0},
    }  # fmt: skip
    before = copy.deepcopy(config)
    assert build_observable_model("qwen3", config, "the folder").config.rope_parameters["factor"] == 2.0
    assert config == before


def test_a_config_after_a_byte_order_mark(tmp_path):
    """Without our line, transformers only says that it is not valid JSON."""
    folder = tiny.save(tiny.build("olmo2"), tmp_path / "model")
    (folder / "config.json").write_text((folder / "config.json").read_text(), encoding="utf-8-sig")
    with pytest.raises(CheckpointError, match=r"config\.json begins with a byte-order mark.*save it as UTF-8 without"):
        read_hf_config(folder)
