"""The default merge on briefly trained models of every family that it merges: at most half of what the mean costs."""

import json
import lzma
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from equivalent_heads import for_stock_class
from families_without_gqa import t5
from tiny_tokenizers import make_tokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from model.remote_code.modeling_t5_gqa import T5GQAForConditionalGeneration

TEXT = Path(__file__).parents[2] / "convert/calibration_text/sample_texts/mixture.jsonl.xz"
LENGTH, BATCH, STEPS = 64, 16, 250
CHANGES = {
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
}
REFINED = ("gemma3_text", "olmo2", "qwen3")
"""Families whose norms are trained too by `--refine`."""


def read_ids(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with lzma.open(TEXT, "rt") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(400), strict=False)]
    ids = torch.tensor([token for text in texts for token in tokenizer.encode(text, add_special_tokens=False).ids])
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def loss_of(model, ids_BT):
    if model.config.is_encoder_decoder:  # the encoder reads the first half, the decoder writes the second
        encoded_BT, decoded_BT = ids_BT.chunk(2, dim=1)
        return model(input_ids=encoded_BT, labels=decoded_BT.contiguous()).loss
    logits_BTV = model(ids_BT, use_cache=False).logits
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())


def train(model, ids_NT):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (STEPS - step) / 100)
        loss = loss_of(model, ids_NT[torch.randint(0, len(ids_NT), (BATCH,), generator=generator)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def make(family):
    size = {} if family in tiny.IMPLIED_HEAD_DIM else {"head_dim": 16}
    return tiny.build(
        family, vocab_size=300, hidden_size=128, intermediate_size=256, max_position_embeddings=LENGTH, **size,
        **CHANGES.get(family, {}),
    )  # fmt: skip


def opened(folder, family):
    if family == "t5":
        return T5GQAForConditionalGeneration.from_pretrained(folder).eval()
    trust = {"trust_remote_code": True} if family == "gpt_neox" else {}
    return AutoModelForCausalLM.from_pretrained(for_stock_class(folder), dtype=torch.float32, **trust).eval()


@pytest.mark.slow
@pytest.mark.parametrize("family", [*tiny.FITTED, "t5"])
def test_fit_costs_at_most_half_of_what_the_mean_costs(convert, tmp_path, family):
    source = tmp_path / "source"
    model = t5(vocab_size=300, max_position_embeddings=LENGTH) if family == "t5" else make(family)
    make_tokenizer(source, 300, bos=False)
    ids_NT = read_ids(source)
    tiny.save(train(model.train(), ids_NT[:-64]), source)
    make_tokenizer(source, 300, bos=False)
    losses = {}
    fit = ("--method", "fit", "--refit", "--calibration-tokens", 16384)
    ways = {"mean": ("--method", "mean"), "fit": fit}
    if family in REFINED:
        ways["refined"] = (*fit, "--refine", 131072)
    for method, options in ways.items():
        out = tmp_path / method
        convert("mha-to-gqa", source, out, "--groups", tiny.few(family), *options).succeeded()
        merged = opened(out, family)
        with torch.no_grad():
            losses[method] = float(loss_of(merged, ids_NT[-64:]))
    with torch.no_grad():
        parent = float(loss_of(model.eval(), ids_NT[-64:]))
    print(f"{family}: parent {parent:.3f}", *(f"{method} {loss:.3f}" for method, loss in losses.items()), sep=", ")
    assert losses["mean"] > parent + 0.02
    assert losses["fit"] - parent <= 0.5 * (losses["mean"] - parent)
    if family in REFINED:
        assert losses["refined"] < losses["fit"]
