"""Causal classes that are no family of Groupwise: packed documents are separate, or the model is refused."""

import signal

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from model.common.errors import CheckpointError
from model.decoder.loading import load_model
from model.families import FAMILIES

VOCAB, SECONDS = 67, 30
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None, "is_decoder": True,
}  # fmt: skip
OWN_SIZES = {
    "rwkv": {"context_length": 64, "attention_hidden_size": 32},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 64, "head_dim": 8},
    "xlstm": {"num_heads": 4},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}
REFUSED = ("rwkv", "recurrent_gemma", "xlstm", "lfm3", "cpmant", "trocr", "bloom")
SEPARATE = ("gpt2", "opt", "biogpt", "qwen3_moe")
NAMES = [name for name in CONFIG_MAPPING if CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING]
OTHERS = [name for name in NAMES if name not in {*FAMILIES, *REFUSED, *SEPARATE}]


def save(name, folder):
    """Save a tiny model, whose weights are large enough for documents to differ."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name].from_dict({**SIZES, **OWN_SIZES.get(name, {})})
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > 3e7:
        pytest.skip("its class is not made small by the usual settings")
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)
    return folder


def is_separate(model):
    """Compare a document behind two others, of the same lengths, and its beginning before two ends."""
    ids = torch.randint(3, VOCAB, (1, 16), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 7 + [1] * 9])
    before, later = ids.clone(), ids.clone()
    before[0, :7] = torch.randint(3, VOCAB, (7,))
    later[0, 14:] = torch.randint(3, VOCAB, (2,))
    with torch.inference_mode():
        logits, behind, ahead = (model(each, None, documents)[0] for each in (ids, before, later))
    close = {"atol": 1e-4 * float(logits.std()), "rtol": 0}
    return torch.allclose(logits[7:], behind[7:], **close) and torch.allclose(logits[:14], ahead[:14], **close)


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_separate_documents_are_refused(tmp_path, name):
    folder = save(name, tmp_path / "model")
    with pytest.raises(CheckpointError, match="cannot be trained or evaluated here"):
        load_model(folder, torch.float32).check_packing(16)


@pytest.mark.parametrize("name", SEPARATE)
def test_separate_documents(tmp_path, name):
    model = load_model(save(name, tmp_path / "model"), torch.float32)
    model.check_packing(16)
    assert is_separate(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_class(tmp_path, name):
    """A class that these settings do not build or run, or that is refused for any reason, is not measured."""

    def give_up(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    try:
        try:
            folder = save(name, tmp_path / "model")
        except Exception as error:
            pytest.skip(f"not built: {error!r}")
        model = load_model(folder, torch.float32)
        model.check_packing(16)
        assert is_separate(model)
    except (CheckpointError, TimeoutError) as error:
        pytest.skip(f"refused: {error}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
