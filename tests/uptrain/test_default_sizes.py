"""Default lengths of windows and sizes of micro-batches."""

import pytest

from model.common.errors import InputError
from uptrain.data.default_sizes import context_warning, default_micro_batch, default_seq_len


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 131_072}, 4096),
        ({"model_type": "mpt", "max_seq_len": 1024, "max_position_embeddings": 2048}, 1024),
        ({"text_config": {"max_position_embeddings": 512}}, 512),  # LLaVA
        ({"model_type": "gemma2", "max_position_embeddings": 2048, "sliding_window": 512}, 2048),
        ({"model_type": "other", "max_position_embeddings": 2048, "sliding_window": 512,
          "layer_types": ["sliding_attention", "full_attention"]}, 512),
        ({"model_type": "other", "max_position_embeddings": 2048, "sliding_window": 512,
          "layer_types": ["full_attention"]}, 2048),
        ({"model_type": "other", "max_position_embeddings": 2048, "sliding_window": 512,
          "use_sliding_window": False}, 2048),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 512}}, 512),
        # What transformers' classes take if config.json leaves it out, as the first Llamas' and Gemma 3's do.
        ({"model_type": "llama", "max_sequence_length": 1024}, 2048),
        ({"model_type": "gemma3_text"}, 4096),
        ({"model_type": "mpt"}, 2048),
        ({"model_type": "falcon"}, 2048),
    ],
)  # fmt: skip
def test_windows_are_as_long_as_the_context_up_to_a_limit(config, expected):
    assert default_seq_len(config) == expected


@pytest.mark.parametrize("config", [{}, {"text_config": None}, {"text_config": "x"}, {"text_config": {}}])
def test_an_unknown_context_asks_for_the_length(config):
    with pytest.raises(InputError, match=r"does not say the model's context; give --seq-len\."):
        default_seq_len(config)


@pytest.mark.parametrize("context", [1, 2.5, "2048", True])
def test_an_impossible_context_is_refused(context):
    with pytest.raises(InputError, match="max_position_embeddings"):
        default_seq_len({"max_position_embeddings": context})


def test_the_warning_of_a_longer_window_says_who_gives_the_context():
    assert "context of 2,048 (its class's default)" in context_warning({"model_type": "llama"}, 4096)
    assert "context of 512 (config.json)" in context_warning({"max_position_embeddings": 512}, 4096)
    assert context_warning({"model_type": "llama"}, 2048) is None


def test_a_micro_batch_has_8192_tokens_and_at_least_one_window():
    assert [default_micro_batch(n) for n in (512, 4096, 8192, 10_000)] == [16, 2, 1, 1]


def test_a_micro_batch_is_not_larger_than_a_step():
    assert [default_micro_batch(512, n) for n in (0, 1, 4, 16, 99)] == [1, 1, 4, 16, 16]
