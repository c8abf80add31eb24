"""Write tiny checkpoints as torchtitan and OLMo-core do: names, folders, and what lies beside the model."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch_files import cast, in_pairs, meta_name
from transformers import PreTrainedModel

OLMO_NAMES = {
    "model.embed_tokens": "embeddings", "model.norm": "lm_head.norm", "lm_head": "lm_head.w_out",
    "self_attn.q_proj": "attention.w_q", "self_attn.k_proj": "attention.w_k", "self_attn.v_proj": "attention.w_v",
    "self_attn.o_proj": "attention.w_out", "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm", "post_attention_layernorm": "attention_norm",
    "post_feedforward_layernorm": "feed_forward_norm", "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
}  # fmt: skip


def titan_tensors(
    model: PreTrainedModel, dtype: str = "float32", new: bool = False, fused: bool = False
) -> dict[str, Tensor]:
    """Return a Llama's tensors as torchtitan has them; `new` is how it names them since version 0.5."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    tensors = {}
    for name, w in cast(model, dtype).items():
        part = name.split(".")[-2]
        own = meta_name(name)
        if new:
            own = own.replace("attention.w", "attention.qkv_linear.w").replace("qkv_linear.wo", "wo")
            own = own.replace("output.", "lm_head.")
        tensors[own] = in_pairs(w, heads[part]) if part in heads else w
    return fuse(tensors, model.config.num_key_value_heads) if fused else tensors


def fuse(tensors: dict[str, Tensor], n_kv_heads: int) -> dict[str, Tensor]:
    """Put Q, K and V together, group by group."""
    whole = {name: w for name, w in tensors.items() if ".qkv_linear." not in name}
    for name in [name for name in tensors if name.endswith(".qkv_linear.wq.weight")]:
        three = [tensors[name.replace(".wq.", f".w{x}.")].chunk(n_kv_heads) for x in "qkv"]
        whole[name.replace(".wq.", ".wqkv.")] = torch.cat([w for group in zip(*three, strict=True) for w in group])
    return whole


def olmo_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{OLMO_NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blocks.{layer}.{OLMO_NAMES[part]}.weight"


def olmo_tensors(model: PreTrainedModel, dtype: str = "float32") -> dict[str, Tensor]:
    return {olmo_name(name): tensor for name, tensor in cast(model, dtype).items()}


def adam(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return an optimizer's state as torch.distributed.checkpoint.state_dict gives it."""
    state = {
        n: {"step": torch.tensor(7.0), "exp_avg": torch.ones_like(t), "exp_avg_sq": t.clone()}
        for n, t in tensors.items()
    }
    return {"state": state, "param_groups": [{"params": list(tensors), "lr": torch.tensor(1e-3), "betas": (0.9, 0.95)}]}


def save_titan(folder: Path, tensors: dict[str, Tensor], nested: bool = False) -> Path:
    """Write a torchtitan checkpoint; `nested` as in its early versions, the model under `model`."""
    weights = {**tensors, "freqs_cis": torch.ones(8, 2, dtype=torch.complex64)}
    state = {
        **({"model": weights} if nested else weights),
        "optimizer": adam(tensors),
        "lr_scheduler": {"last_epoch": 7, "base_lrs": torch.ones(2)},
        "dataloader": {"dp_rank_0": b"where the data stands", "positions": torch.arange(3)},
        "train_state": {"step": torch.tensor(7, dtype=torch.int32), "ntokens_seen": torch.tensor(99)},
    }
    return _save(folder, state)


def save_olmo(step: Path, tensors: dict[str, Tensor], run: dict[str, Any] | None) -> Path:
    """Write an OLMo-core checkpoint: return its folder `model_and_optim`; `run` is the run's config.json."""
    folder = _save(step / "model_and_optim", {"model": tensors, "optim": adam(tensors)})
    (step / "train").mkdir()
    torch.save({"global_step": 7}, step / "train/rank0.pt")
    (step / ".metadata.json").write_text('{"version": "2.3.0"}')
    if run is not None:
        (step / "config.json").write_text(json.dumps(run))
    return folder


def _save(folder: Path, state: dict[str, Any]) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    return folder


def olmo_run(model: PreTrainedModel) -> dict[str, Any]:
    """Return the config.json that OLMo-core's config saver writes for a run with this OLMo 2."""
    config = model.config

    def norm() -> dict[str, Any]:
        return {
            "name": "rms", "eps": config.rms_norm_eps, "elementwise_affine": True, "bias": False,
            "full_precision": True, "dtype": "float32", "_CLASS_": "olmo_core.nn.layer_norm.LayerNormConfig",
        }  # fmt: skip

    attention = {
        "name": "default", "n_heads": config.num_attention_heads, "bias": False,
        "rope": {
            "name": "default", "theta": 500000, "full_precision": True, "_CLASS_": "olmo_core.nn.rope.RoPEConfig",
        },
        "qk_norm": norm(), "use_flash": True, "dtype": "float32", "_CLASS_": "olmo_core.nn.attention.AttentionConfig",
    }  # fmt: skip
    block = {
        "attention": attention, "layer_norm": norm(), "name": "reordered_norm",
        "feed_forward": {
            "hidden_size": config.intermediate_size, "name": "default", "bias": False, "dtype": "float32",
            "_CLASS_": "olmo_core.nn.feed_forward.FeedForwardConfig",
        },
        "_CLASS_": "olmo_core.nn.transformer.config.TransformerBlockConfig",
    }  # fmt: skip
    return {
        "run_name": "tiny",
        "model": {
            "d_model": config.hidden_size, "vocab_size": config.vocab_size, "n_layers": config.num_hidden_layers,
            "block": block, "name": "default", "dtype": "float32", "init_method": "normal", "init_seed": 0,
            "init_std": 0.02, "lm_head": {
                "name": "default", "layer_norm": norm(), "bias": False, "dtype": "float32",
                "loss_implementation": "default", "_CLASS_": "olmo_core.nn.lm_head.LMHeadConfig",
            },
            "_CLASS_": "olmo_core.nn.transformer.config.TransformerConfig",
        },
        "dataset": {
            "sequence_length": config.max_position_embeddings,
            "tokenizer": {
                "vocab_size": 60, "eos_token_id": 2, "pad_token_id": 3, "identifier": "allenai/dolma2-tokenizer",
                "_CLASS_": "olmo_core.data.tokenizer.TokenizerConfig",
            },
        },
        "train_module": {"rank_microbatch_size": 4096},
        "_CLASS_": "__main__.ExperimentConfig",
    }  # fmt: skip
