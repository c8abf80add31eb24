"""Random models of the families whose stock class cannot hold any number of K/V heads."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    FalconConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

N_HEADS, HEAD_DIM = 8, 16
HIDDEN = N_HEADS * HEAD_DIM


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Let biases be random too, which classes begin with zeros."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def falcon(multi_query: bool = False, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=67, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=N_HEADS, multi_query=multi_query,
        new_decoder_architecture=False, **{"alibi": True, "bias": True, "parallel_attn": False, **changes},
    )  # fmt: skip
    return randomised(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def gpt_neox(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=67, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=N_HEADS, intermediate_size=192,
        max_position_embeddings=64, **{"tie_word_embeddings": False, **changes},
    )  # fmt: skip
    return randomised(AutoModelForCausalLM.from_config(config))


def t5(config_class: type[PretrainedConfig] = T5Config, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config_class(
        d_model=HIDDEN, d_ff=192, num_heads=N_HEADS, decoder_start_token_id=0, dropout_rate=0.0,
        **{"vocab_size": 67, "d_kv": HEAD_DIM, "num_layers": 2, **changes},
    )  # fmt: skip
    return randomised(AutoModelForSeq2SeqLM.from_config(config))


def mt5(**changes: Any) -> PreTrainedModel:
    return t5(MT5Config, **changes)


STOCK_CLASSES = {gpt_neox: GPTNeoXForCausalLM, t5: T5ForConditionalGeneration, mt5: MT5ForConditionalGeneration}

MPT = {
    "model_type": "mpt", "architectures": ["MPTForCausalLM"], "d_model": HIDDEN, "n_heads": N_HEADS, "n_layers": 2,
    "attn_config": {"attn_type": "multihead_attention", "alibi": True},
    "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig", "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
}  # fmt: skip


def mpt(folder: Path, code: str = "kv_n_heads = 1", norms: bool = False) -> Path:
    """Write attention of MPT alone, with a file of `code` as that of the checkpoint."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {"transformer.wte.weight": torch.randn(67, HIDDEN, generator=generator)}
    for layer in (0, 1):
        stem = f"transformer.blocks.{layer}.attn"
        tensors[f"{stem}.Wqkv.weight"] = torch.randn(3 * HIDDEN, HIDDEN, generator=generator)
        tensors[f"{stem}.out_proj.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator)
        for name in ("q_ln", "k_ln") if norms else ():
            tensors[f"{stem}.{name}.weight"] = torch.randn(HIDDEN, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(MPT))
    (folder / "modeling_mpt.py").write_text(code)
    return folder
