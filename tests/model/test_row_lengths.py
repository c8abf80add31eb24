"""Rows may be as long as transformers can compute, and no longer."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from model.checkpoint.context import read_context
from model.common.errors import CheckpointError
from model.decoder.transformers_model import TransformersModel

CONTEXT = 16
OF_GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": CONTEXT}
USUAL = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": CONTEXT,
}  # fmt: skip
SIZES = {
    "gpt2": OF_GPT2,
    "gptj": {**OF_GPT2, "rotary_dim": 8},
    "codegen": {**OF_GPT2, "n_head": 4, "rotary_dim": 8},
    "gpt_bigcode": {**OF_GPT2, "multi_query": False},
    "opt": {**USUAL, "word_embed_proj_dim": 32, "ffn_dim": 64},
    "biogpt": USUAL,
    "gpt_neox": USUAL,
    "phi": USUAL,
    "stablelm": USUAL,
}


def computes(model: TransformersModel, length: int) -> bool:
    try:
        model(torch.zeros(1, length, dtype=torch.long))
    except (IndexError, RuntimeError):
        return False
    return True


def allows(model: TransformersModel, length: int) -> bool:
    try:
        model.check_packing(length)
    except CheckpointError as error:
        assert f"positions for {CONTEXT} tokens only" in str(error)
        assert f"(--seq-len {CONTEXT})" in str(error)
        return False
    return True


@pytest.mark.parametrize("model_type", SIZES)
def test_rows_longer_than_a_table_of_positions_are_refused(model_type):
    tokens = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = AutoConfig.for_model(model_type, **SIZES[model_type], **tokens)
    assert read_context(config.to_dict()) == CONTEXT
    model = TransformersModel(AutoModelForCausalLM.from_config(config).eval())
    for length in (CONTEXT, CONTEXT + 1):
        assert allows(model, length) == computes(model, length), length


def test_bloom_counts_distances():
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=2, vocab_size=50)
    with pytest.raises(CheckpointError, match="counts distances"):
        TransformersModel(AutoModelForCausalLM.from_config(config)).check_packing(8)
