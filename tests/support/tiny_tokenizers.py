"""Small real tokenizers: byte-level BPE trained on a few sentences, saved as a Hugging Face folder."""

from pathlib import Path

from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = (
    "The checkpoint folder is the interface, and the interface is a folder.",
    "Heads are merged into groups; the model is then trained for a small share of its original steps.",
    "Ein Dokument endet, ein anderes beginnt: die Aufmerksamkeit überschreitet die Grenze nicht.",
    "def window(index: int) -> list[int]:\n    return tokens[index * seq_len : (index + 1) * seq_len]\n",
    "日本語の文も、🙂 も、すべてバイトになる。",
)
BYTES = 256
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def make_tokenizer(folder: Path, vocab_size: int = 300, *, bos: bool = True, eos: bool = True) -> Path:
    """Save a tokenizer with at most `vocab_size` ids, which puts `<s>` first if `bos`, and knows `</s>` if `eos`.

    The smallest is 256 bytes and the special tokens.
    """
    special = {name: token for name, token in SPECIAL.items() if {"bos_token": bos, "eos_token": eos}[name]}
    assert vocab_size >= BYTES + len(special)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special.values()), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(SENTENCES, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def make_sentencepiece(folder):
    """Write a tokenizer.model of sentencepiece."""
    text = ["the quick brown fox jumps over the lazy dog 0123456789"] * 20
    with (folder / "tokenizer.model").open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=file, vocab_size=300, model_type="bpe", byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        )  # fmt: skip
