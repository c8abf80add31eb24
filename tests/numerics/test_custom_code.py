"""The modelling code that converted GPT-NeoX and T5 folders carry, against transformers' stock classes.

Every model is opened from a folder as users have it, with the names of tensors and config keys of the released ones.
Runs under transformers 4.57 too.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rounding import ROUNDING
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPTNeoXForCausalLM, GPTNeoXModel, T5ForConditionalGeneration, T5Model

import model.remote_code
from model.remote_code.configuration_gpt_neox_gqa import GPTNeoXGQAConfig
from model.remote_code.configuration_t5_gqa import T5GQAConfig
from model.remote_code.modeling_gpt_neox_gqa import CACHE, GPTNeoXGQAForCausalLM, GPTNeoXGQAModel
from model.remote_code.modeling_t5_gqa import T5GQAForConditionalGeneration, T5GQAModel

N_HEADS, HEAD_DIM, N_LAYERS = 8, 16, 2
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 67, "hidden_size": 128,
    "intermediate_size": 192, "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "rotary_pct": 0.25,
    "rotary_emb_base": 10000, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
    "tie_word_embeddings": False, "use_parallel_residual": True, "torch_dtype": "float32",
}  # fmt: skip
T5 = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 67, "d_model": 128,
    "d_kv": HEAD_DIM, "d_ff": 192, "num_layers": N_LAYERS, "num_decoder_layers": N_LAYERS, "num_heads": N_HEADS,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "is_encoder_decoder": True, "dropout_rate": 0.0,
    "feed_forward_proj": "relu", "torch_dtype": "float32",
}  # fmt: skip
T5_V1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
NEOX_VARIANTS = [{}, {"attention_bias": False}, {"rotary_pct": 1.0, "use_parallel_residual": False},
                 {"tie_word_embeddings": True}]  # fmt: skip
T5_VARIANTS = [{}, T5_V1_1, {"d_kv": 24, "num_decoder_layers": 3}]
GROUPS = (1, 2, 4, 8)
IDS = torch.randint(2, 67, (3, 17), generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(2, 67, (3, 6), generator=torch.Generator().manual_seed(1))
INPUTS = {"gpt_neox": {"input_ids": IDS}, "t5": {"input_ids": IDS, "decoder_input_ids": LABELS}}
CONFIGS = {"gpt_neox": GPTNeoXGQAConfig, "t5": T5GQAConfig}
CLASSES = {"gpt_neox": GPTNeoXGQAForCausalLM, "t5": T5GQAForConditionalGeneration}
STOCK = {"gpt_neox": GPTNeoXForCausalLM, "t5": T5ForConditionalGeneration}
AUTO_MAPS = {
    "gpt_neox": {
        "AutoConfig": "configuration_gpt_neox_gqa.GPTNeoXGQAConfig",
        "AutoModel": "modeling_gpt_neox_gqa.GPTNeoXGQAModel",
        "AutoModelForCausalLM": "modeling_gpt_neox_gqa.GPTNeoXGQAForCausalLM",
    },
    "t5": {
        "AutoConfig": "configuration_t5_gqa.T5GQAConfig",
        "AutoModel": "modeling_t5_gqa.T5GQAModel",
        "AutoModelForSeq2SeqLM": "modeling_t5_gqa.T5GQAForConditionalGeneration",
    },
}


def grouped(family: str, n_kv_heads: int, changes: dict) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return config.json and the tensors of a random model with grouped heads, biases included."""
    config = {**{"gpt_neox": NEOX, "t5": T5}[family], **changes}
    config |= {
        "architectures": [CLASSES[family].__name__],
        "model_type": f"{family}_gqa",
        "num_key_value_heads": n_kv_heads,
        "auto_map": AUTO_MAPS[family],
    }
    torch.manual_seed(0)
    tensors = {n: t.clone() for n, t in CLASSES[family](CONFIGS[family](**config)).state_dict().items()}
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor.normal_(std=0.1)
    lm_head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    tensors[lm_head] = torch.randn_like(tensors[lm_head]) * 0.1
    tied = config.get("tie_word_embeddings", family == "t5")
    unsaved = ("embed_tokens.weight", *([lm_head] if tied else []))
    return config, {name: tensor for name, tensor in tensors.items() if not name.endswith(unsaved)}


def with_a_kv_head_for_each(
    family: str, config: dict, tensors: dict[str, torch.Tensor]
) -> tuple[dict, dict[str, torch.Tensor]]:
    """Return the stock model in which each K/V head is repeated for the query heads that read it."""
    groups = config["num_key_value_heads"]
    per_group = N_HEADS // groups
    repeated = dict(tensors)
    for name, tensor in tensors.items():
        if "query_key_value" in name:
            q, k, v = tensor.unflatten(0, (groups, per_group + 2, HEAD_DIM)).split([per_group, 1, 1], dim=1)
            per_head = torch.stack([q, k.expand_as(q), v.expand_as(q)], dim=2)
            repeated[name] = per_head.flatten(0, 3).contiguous()
        elif name.startswith("decoder") and name.endswith(("Attention.k.weight", "Attention.v.weight")):
            repeated[name] = tensor.unflatten(0, (groups, -1)).repeat_interleave(per_group, dim=0).flatten(0, 1)
    stock = {k: v for k, v in config.items() if k not in ("num_key_value_heads", "auto_map")}
    return stock | {"architectures": [STOCK[family].__name__], "model_type": family}, repeated


def save(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def open_folder(model_class, folder: Path, attention: str = "eager"):
    """Open a folder and check that every tensor opened its place."""
    opened, loading = model_class.from_pretrained(folder, output_loading_info=True, attn_implementation=attention)
    wrong = {kind: loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert not any(wrong.values()), wrong
    return opened.eval()


def make(folder: Path, family: str, n_kv_heads: int = 2, attention: str = "eager", **changes):
    return open_folder(CLASSES[family], save(folder, *grouped(family, n_kv_heads, changes)), attention)


def attentions_of(family: str) -> tuple[str, ...]:
    """T5 of transformers 4 has only its own."""
    return ("eager", "sdpa") if STOCK[family]._supports_sdpa else ("eager",)


# What it computes


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("family", "changes"), [*(("gpt_neox", v) for v in NEOX_VARIANTS), *(("t5", v) for v in T5_VARIANTS)]
)
def test_the_stock_model_with_repeated_heads_gives_the_same_logits(tmp_path, family, changes, groups):
    """With as many K/V heads as query heads nothing is repeated: then the tensors are the stock model's own."""
    config, tensors = grouped(family, groups, changes)
    folder = save(tmp_path / "grouped", config, tensors)
    parent = save(tmp_path / "parent", *with_a_kv_head_for_each(family, config, tensors))
    if groups == N_HEADS:
        theirs = load_file(parent / "model.safetensors")
        assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())
    for attention in attentions_of(family):
        with torch.inference_mode():
            expected = open_folder(STOCK[family], parent, attention)(**INPUTS[family]).logits
            difference = (open_folder(CLASSES[family], folder, attention)(**INPUTS[family]).logits - expected).abs()
        assert expected.std() > 0.05
        assert difference.max() <= (ROUNDING if attention == "eager" else 1e-5)


@pytest.mark.parametrize("family", CLASSES)
def test_masks_weights_and_hidden_states_are_the_stock_models(tmp_path, family):
    config, tensors = grouped(family, 2, {})
    child = open_folder(CLASSES[family], save(tmp_path / "child", config, tensors))
    parent = open_folder(STOCK[family], save(tmp_path / "parent", *with_a_kv_head_for_each(family, config, tensors)))
    mask = torch.ones_like(IDS)
    mask[0, :5] = mask[1, -4:] = 0
    inputs = {**INPUTS[family], "attention_mask": mask, "output_attentions": True, "output_hidden_states": True}
    with torch.inference_mode():
        ours, theirs = child(**inputs), parent(**inputs)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=ROUNDING, rtol=0)
    names = ("attentions", "hidden_states")
    if family == "t5":
        names = ("encoder_attentions", "decoder_attentions", "cross_attentions", "decoder_hidden_states")
    for name in names:
        assert len(ours[name]) == len(theirs[name]) > 1
        for a, b in zip(ours[name], theirs[name], strict=True):
            torch.testing.assert_close(a, b, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(
    ("family", "model_class", "stock"), [("gpt_neox", GPTNeoXGQAModel, GPTNeoXModel), ("t5", T5GQAModel, T5Model)]
)
def test_models_without_an_lm_head(tmp_path, family, model_class, stock):
    config, tensors = grouped(family, 2, {"tie_word_embeddings": family == "t5"})
    tensors = {name.removeprefix("gpt_neox."): t for name, t in tensors.items() if "embed_out" not in name}
    config["architectures"] = [model_class.__name__]
    child = open_folder(model_class, save(tmp_path / "child", config, tensors))
    parent = open_folder(stock, save(tmp_path / "parent", *with_a_kv_head_for_each(family, config, tensors)))
    with torch.inference_mode():
        ours, theirs = (m(**INPUTS[family]).last_hidden_state for m in (child, parent))
    torch.testing.assert_close(ours, theirs, atol=ROUNDING, rtol=0)


def test_buffers_of_old_files_are_ignored(tmp_path):
    config, tensors = grouped("gpt_neox", 2, {})
    for i in range(N_LAYERS):
        tensors[f"gpt_neox.layers.{i}.attention.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
        tensors[f"gpt_neox.layers.{i}.attention.masked_bias"] = torch.tensor(-1e9)
        tensors[f"gpt_neox.layers.{i}.attention.rotary_emb.inv_freq"] = torch.ones(2)
    open_folder(GPTNeoXGQAForCausalLM, save(tmp_path / "old", config, tensors))


# Decoding


@pytest.mark.parametrize("n_beams", [1, 3])
@pytest.mark.parametrize("family", CLASSES)
def test_decoding_with_and_without_the_cache_agree(tmp_path, family, n_beams):
    for attention in attentions_of(family):
        theirs = make(tmp_path / attention, family, attention=attention)
        options = {"max_new_tokens": 8, "do_sample": False, "num_beams": n_beams, "eos_token_id": None}
        options |= {"pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        slow = theirs.generate(IDS, use_cache=False, **options)
        for cache in (None, "static")[: 2 if n_beams == 1 else 1]:
            fast = theirs.generate(IDS, cache_implementation=cache, **options)
            assert torch.equal(fast.sequences, slow.sequences)
            for ours, expected in zip(fast.logits, slow.logits, strict=True):
                assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", CLASSES)
def test_the_cache_holds_the_kv_heads_alone(tmp_path, family):
    output = make(tmp_path / "model", family).generate(
        IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, pad_token_id=0, eos_token_id=None,
        return_dict_in_generate=True,
    )  # fmt: skip
    cache = getattr(output, CACHE)
    caches = [(cache, 17 + 3)]
    if family == "t5":
        caches = [(cache.self_attention_cache, 4), (cache.cross_attention_cache, 17)]
    for kind, n_tokens in caches:
        assert len(kind.layers) == N_LAYERS
        for layer in kind.layers:
            assert layer.keys.shape == layer.values.shape == (3, 2, n_tokens, HEAD_DIM)


def test_left_padding_changes_nothing(tmp_path):
    for attention in ("eager", "sdpa"):
        theirs = make(tmp_path / attention, "gpt_neox", attention=attention)
        options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids, mask = IDS.clone(), torch.ones_like(IDS)
        for row, n_padded in enumerate((0, 4, 9)):
            ids[row, :n_padded] = mask[row, :n_padded] = 0
        together = theirs.generate(ids, attention_mask=mask, **options)
        for row, n_padded in enumerate((0, 4, 9)):
            alone = ids[row : row + 1, n_padded:]
            alone = theirs.generate(alone, attention_mask=torch.ones_like(alone), **options)
            assert torch.equal(together[row, 17:], alone[0, 17 - n_padded :])


# Training


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # version 4 has no other name
@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("family", CLASSES)
def test_one_training_step(tmp_path, family, checkpointing):
    """`checkpointing`: gradient checkpointing, re-entrant or not."""
    theirs = make(tmp_path / "model", family).train()
    inputs = {"input_ids": IDS, "labels": IDS if family == "gpt_neox" else LABELS}
    theirs(**inputs).loss.backward()
    gradients = {name: p.grad.clone() for name, p in theirs.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    if checkpointing is not None:
        theirs.zero_grad()
        theirs.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        theirs(**inputs).loss.backward()
        for name, parameter in theirs.named_parameters():
            assert torch.allclose(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6), name
    before = theirs(**inputs).loss
    torch.optim.SGD(theirs.parameters(), lr=1e-3).step()
    assert theirs(**inputs).loss < before


def test_new_weights_are_drawn_as_the_stock_models():
    torch.manual_seed(0)
    neox = GPTNeoXGQAForCausalLM(GPTNeoXGQAConfig(**{**NEOX, "num_key_value_heads": 2}))
    fused = neox.gpt_neox.layers[1].attention.query_key_value
    assert fused.weight.shape == (12 * HEAD_DIM, 128)
    assert fused.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not fused.bias.any()
    t5 = T5GQAForConditionalGeneration(T5GQAConfig(**{**T5, "num_key_value_heads": 2}))
    for part in (t5.decoder.block[1].layer[0].SelfAttention, t5.decoder.block[1].layer[1].EncDecAttention):
        for name, std in (("q", (128 * HEAD_DIM) ** -0.5), ("k", 128**-0.5), ("v", 128**-0.5), ("o", 128**-0.5)):
            assert getattr(part, name).weight.std().item() == pytest.approx(std, rel=0.1), name
    assert t5.encoder.block[0].layer[0].SelfAttention.k.weight.shape == (128, 128)


# Config


@pytest.mark.parametrize("wrong", [3, 16, 0, -2, "4", 4.0, True])
def test_bad_numbers_of_kv_heads_are_refused(wrong):
    for config, heads in ((GPTNeoXGQAConfig, "num_attention_heads"), (T5GQAConfig, "num_heads")):
        with pytest.raises(ValueError, match=f"num_key_value_heads is {wrong!r}; .* divides {heads}, which is 8"):
            config(num_key_value_heads=wrong, **{heads: 8})


@pytest.mark.parametrize("family", CLASSES)
def test_configs_are_read_as_they_were_written(tmp_path, family):
    for n_kv_heads in (None, 8, 2):
        sizes = {"num_attention_heads": 8, "hidden_size": 128} if family == "gpt_neox" else {"num_heads": 8}
        config = CONFIGS[family](**sizes, num_key_value_heads=n_kv_heads)
        config.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["num_key_value_heads"] == (n_kv_heads or 8)
        assert written["model_type"] == f"{family}_gqa"
        assert CONFIGS[family].from_pretrained(tmp_path).to_dict() == config.to_dict()


# As remote code

OPEN = """
import json, sys, torch, transformers
folder, again, auto_class, inputs = sys.argv[1:]
inputs = {name: torch.tensor(ids) for name, ids in json.loads(inputs).items()}
auto_class = getattr(transformers, auto_class)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
assert "Tokenizer" in type(tokenizer).__name__ and tokenizer.decode(tokenizer("ab").input_ids[:2]) == "ab", tokenizer
try:
    auto_class.from_pretrained(folder)
except ValueError as error:
    assert "trust_remote_code=True" in str(error), error
else:
    raise AssertionError("opened without leave")
for place in (folder, again):
    opened = auto_class.from_pretrained(place, trust_remote_code=True, attn_implementation="eager").eval()
    assert type(opened).__module__.startswith("transformers_modules."), type(opened)
    with torch.inference_mode():
        torch.save(opened(**inputs).logits, place + ".logits")
    if place == folder:
        opened.save_pretrained(again)
"""


def make_tokenizer(family: str) -> Tokenizer:
    """Return one of the kind that the family has."""
    if family == "gpt_neox":
        tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "<|endoftext|>": 2}, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        return tokenizer
    tokenizer = Tokenizer(models.Unigram([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁a", -1.0), ("b", -1.0)], 2))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


@pytest.mark.parametrize(("family", "changes"), [("gpt_neox", {}), ("t5", T5_V1_1)])
def test_opens_anywhere_from_the_files_beside_it(tmp_path, family, changes):
    """Where none of our packages is installed; and what transformers saves then opens the same way."""
    folder, again = save(tmp_path / "model", *grouped(family, 2, changes)), tmp_path / "again"
    for file in Path(model.remote_code.__file__).parent.glob(f"*_{family}_gqa.py"):
        shutil.copy(file, folder)
    make_tokenizer(family).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    auto_class = list(AUTO_MAPS[family])[-1]
    inputs = json.dumps({name: ids.tolist() for name, ids in INPUTS[family].items()})
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", OPEN, folder, again, auto_class, inputs],
        capture_output=True, text=True, check=False, cwd=tmp_path, stdin=subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    with torch.inference_mode():
        expected = open_folder(CLASSES[family], folder)(**INPUTS[family]).logits
    for place in (folder, again):
        assert torch.equal(torch.load(f"{place}.logits"), expected)
    assert json.loads((again / "config.json").read_text())["auto_map"].keys() >= {"AutoConfig", auto_class}
    names = load_file(folder / "model.safetensors").keys()
    assert load_file(again / "model.safetensors").keys() == names
