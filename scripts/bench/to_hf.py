"""Measure `convert to-hf` of each format that it reads ÷ tools that do its work, in turns.

The tools are `cp -r` and `sync`; and the same, then the SHA-256 of the source's files, which `to-hf` computes too.

    python -m scripts.bench.to_hf --gb 4 --json docs/bench/to_hf.json

The source is the synthetic Llama of `scripts/bench/convert.py`, written as PyTorch's .bin shards, as Meta's single .pth
file, by torch.distributed.checkpoint, and as GGUF in bfloat16. Medians are compared.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict_saver import save

from scripts.bench import convert as convert_bench
from scripts.bench.llama_checkpoint import write_random
from scripts.bench.machine import Row, write_rows
from scripts.bench.rounds import in_turns, medians

META = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
"""Hugging Face's names of modules → Meta's."""
GGUF = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down",
    "mlp.up_proj": "ffn_up", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
"""Hugging Face's names of modules → GGUF's."""


def renamed(name: str, modules: dict[str, str], layers: str) -> str:
    """Return a weight's name in another format; `layers`: what it has in place of `model.layers`."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{modules[stem]}.weight"
    index, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"{layers}.{index}.{modules[part]}.weight"


def shards(source: Path) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            yield path, {name: file.get_tensor(name) for name in sorted(file.keys())}


def tensors(source: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for _, shard in shards(source) for name, tensor in shard.items()}


def write_bin(source: Path, folder: Path) -> None:
    weight_map: dict[str, str] = {}
    for path, shard in shards(source):
        name = f"pytorch_{path.with_suffix('.bin').name}"
        torch.save(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    shutil.copy(source / "config.json", folder)


def write_meta(source: Path, folder: Path) -> None:
    """The rows of queries and keys keep Hugging Face's order: for the time it does not matter."""
    torch.save({renamed(n, META, "layers"): t for n, t in tensors(source).items()}, folder / "consolidated.00.pth")
    config = json.loads((source / "config.json").read_text())
    params = {"dim": config["hidden_size"], "n_layers": config["num_hidden_layers"],
              "n_heads": config["num_attention_heads"], "norm_eps": 1e-5, "vocab_size": -1,
              "max_seq_len": 2048}  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))


def write_dcp(source: Path, folder: Path) -> None:
    save(tensors(source), checkpoint_id=folder)
    shutil.copy(source / "config.json", folder)


def write_gguf(source: Path, folder: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(2048)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, config["vocab_size"]))])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["a b"])
    for name, tensor in tensors(source).items():
        if tensor.ndim == 1:
            writer.add_tensor(renamed(name, GGUF, "blk"), tensor.float().numpy())
        else:
            values = np.ascontiguousarray(tensor.view(torch.uint16).numpy()).view(np.uint8)
            writer.add_tensor(renamed(name, GGUF, "blk"), values, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    ".bin": write_bin,
    "Meta": write_meta,
    "torch.distributed.checkpoint": write_dcp,
    "GGUF": write_gguf,
}


def measure(name: str, source: Path, out: Path, rounds: int) -> Row:
    """Convert and copy in turns; return the medians and the conversion's memory. The first round is not counted."""
    given = source / "model.gguf" if name == "GGUF" else source
    checksums = convert_bench.checksums(source)
    commands = {
        "ours": [sys.executable, "-m", "convert", "to-hf", str(given), str(out)],
        "cp+sync": ["sh", "-c", convert_bench.synced_copy(source, out)],
        "cp+sync+sha256": ["sh", "-c", f"{convert_bench.synced_copy(source, out)} && {checksums}"],
    }

    def run(who: str) -> dict[str, float]:
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        return convert_bench.measure(commands[who])

    runs = in_turns({who: partial(run, who) for who in commands}, rounds)
    shutil.rmtree(out)
    seconds = medians([{who: each[who]["seconds"] for who in commands} for each in runs])
    return {
        "format": name, "bytes": sum(path.stat().st_size for path in source.iterdir()), "seconds": seconds,
        "ours_to_it": {who: seconds["ours"] / its for who, its in seconds.items()},
        "anon_mb": max(each["ours"]["anon_mb"] for each in runs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--work", type=Path, help="where to work; needs four times the size")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        work = Path(name)
        write_random(convert_bench.SHAPE.of_size(options.gb * 1e9), work / "model")
        for kind, write in WRITERS.items():
            source = work / "source"
            source.mkdir()
            write(work / "model", source)
            rows.append(measure(kind, source, work / "out", options.rounds))
            print(json.dumps(rows[-1]), flush=True)
            shutil.rmtree(source)
    if options.json:
        write_rows(options.json, rows)


if __name__ == "__main__":
    main()
