"""Train a tokenizer of Llama's kind: SentencePiece, with bytes for what it does not know."""

import json
import sys
from pathlib import Path

import numpy as np
import sentencepiece

here = Path(sys.argv[1])
request = json.loads((here / "request.json").read_text())
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(request["sentences"]), model_prefix=str(here / "tokenizer"), model_type="bpe",
    vocab_size=request["vocab_size"], byte_fallback=True, minloglevel=2,
)  # fmt: skip
processor = sentencepiece.SentencePieceProcessor(model_file=str(here / "tokenizer.model"))
(here / "answer.json").write_text(json.dumps({"n_pieces": processor.get_piece_size()}))
np.savez(here / "answer.npz")
