"""Read Meta's own format: `consolidated.NN.pth`, one file per model-parallel process, and `params.json`.

Every tensor is read a few rows at a time from its parts (see `model_parallel`). Rows of Q and K are converted from
Meta's rotary order to Hugging Face's while they are read.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

from model.checkpoint.formats import rope_order
from model.checkpoint.formats.meta_llama.model_parallel import ParallelLayout
from model.checkpoint.formats.meta_llama.params import PARAMS, Params
from model.checkpoint.formats.tensor_blocks import whole_rows
from model.checkpoint.formats.torch_file import TORCH_READER_BYTES, read_tensors
from model.checkpoint.hf_config import dtype_settings, llama_config, rope_entries
from model.checkpoint.hf_folder import list_files
from model.checkpoint.interface import Checkpoint, Shard, file_versions
from model.checkpoint.tensor import Array, Span, TensorInfo
from model.common.errors import CheckpointError
from model.common.typed_json import json_bytes
from model.files.paths import leads_outside, refuse_dangling
from model.tokenizer import is_tiktoken

_SENTENCEPIECE_SETTINGS = {
    "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False,
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
}  # fmt: skip
"""tokenizer_config.json of Llama 1 and 2, without which transformers gives other ids and no beginning of text."""


class MetaFolder(Checkpoint):
    """A folder with `consolidated.NN.pth` and `params.json`."""

    format = "meta"
    reader_bytes = TORCH_READER_BYTES
    keep_source_shards = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._params = Params(path)
        self.weight_files = _files(path)
        self.opened = file_versions(self.weight_files)
        parts = [read_tensors(file) for file in self.weight_files]
        self._assembled = ParallelLayout(self.weight_files, parts, self._params).tensors()
        self.tensors = {name: TensorInfo(name, t.dtype, t.shape) for name, t in self._assembled.items()}
        self.shards = (Shard("model.safetensors", tuple(self.tensors)),)
        vocab_size = self.tensors["model.embed_tokens.weight"].shape[0]
        context_length, note = self._params.context_length()
        special_tokens = self._params.special_tokens(vocab_size)
        self.config = self._build_config(vocab_size, context_length) | special_tokens
        self.config_bytes = json_bytes(self.config)
        self.side_files, skipped_files = list_files(path)
        generation = json_bytes({"_from_model_config": True, **special_tokens})
        self.side_files.setdefault("generation_config.json", generation)
        unread = [name for name in skipped_files if name not in (*(file.name for file in self.weight_files), PARAMS)]
        self.skipped_files = (*unread, *(["config.json"] if (path / "config.json").exists() else []))
        end_of_turn = self._params.end_of_turn(vocab_size)
        self.notes = (*([note] if note else []), *end_of_turn, *self._find_tokenizer())

    def span(self, name: str) -> Span | None:
        return self._assembled[name].span

    def rows(self, name: str, start: int, stop: int) -> Array:
        if self._assembled[name].is_interleaved:
            return rope_order.half_split_rows(partial(self._stored_rows, name), self._params.head_dim, start, stop)
        return self._stored_rows(name, start, stop)

    def _stored_rows(self, name: str, start: int, stop: int) -> Array:
        tensor = self._assembled[name]
        rows = whole_rows(tensor.blocks, start, stop)
        for copy in tensor.copies:
            if whole_rows(copy, start, stop).tobytes() != rows.tobytes():
                raise CheckpointError(
                    f"{self.path}: the files hold the K/V heads of {name} more than once, with different values; "
                    "they do not match."
                )
        return rows

    def close(self) -> None:
        self._assembled.clear()

    def _build_config(self, vocab_size: int, context_length: int) -> dict[str, Any]:
        params = self._params
        return llama_config(
            hidden_size=params.dim,
            intermediate_size=self.tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
            num_hidden_layers=params.n_layers,
            num_attention_heads=params.n_heads,
            num_key_value_heads=params.n_kv_heads,
            head_dim=params.head_dim,
            max_position_embeddings=context_length,
            rms_norm_eps=params.norm_eps,
            vocab_size=vocab_size,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=False,
            **rope_entries(params.rope_theta, params.rope_scaling),
            **dtype_settings(self.tensors.values()),
        )

    def _find_tokenizer(self) -> list[str]:
        """Add the tokenizer, which Meta's downloads put beside the models' folders. Return notes on missing files."""
        name = "tokenizer.model"
        above = self.path.resolve().parent
        if name not in self.side_files and (above / name).is_file() and not leads_outside(above / name, above):
            self.side_files[name] = above / name
        if "tokenizer.json" in self.side_files:
            return []
        content = self.side_files.get(name)
        if content is not None and not is_tiktoken(content):
            self.side_files.setdefault("tokenizer_config.json", json_bytes(_SENTENCEPIECE_SETTINGS))
            return [f"there is no tokenizer.json; transformers reads Meta's {name} with the settings of Llama 2."]
        has = f"nor is there a {name}"
        if content is not None:
            has = f"and in Meta's {name}, which is copied, transformers finds no special tokens"
        return [
            f"there is no tokenizer.json, {has}: copy the tokenizer's files from a Hugging Face release of the model."
        ]


def _files(folder: Path) -> tuple[Path, ...]:
    """Return the processes' files in order. Raises CheckpointError unless their numbers are 0, 1, 2, …"""
    files: dict[int, Path] = {}
    for path in folder.glob("consolidated.*.pth"):
        match = re.fullmatch(r"consolidated\.([0-9]{1,4})\.pth", path.name)
        if not match:
            raise CheckpointError(f"{path} has no number in its name, where consolidated.00.pth and so on should be.")
        refuse_dangling(path)
        if other := files.get(int(match[1])):
            raise CheckpointError(f"{path} and {other.name} have the same number; remove the outdated one.")
        files[int(match[1])] = path
    for i in range(max(files) + 1):
        if i not in files:
            raise CheckpointError(f"{folder} lacks consolidated.{i:02d}.pth of {max(files) + 1} files; fetch it again.")
    return tuple(files[i] for i in sorted(files))


def matches(path: Path) -> bool:
    return path.is_dir() and any(path.glob("consolidated.*.pth"))


def read(path: Path) -> Checkpoint:
    return MetaFolder(path)
