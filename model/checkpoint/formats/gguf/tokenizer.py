"""Convert the tokenizer in a GGUF file into Hugging Face's `tokenizer.json` and `tokenizer_config.json`.

GGUF stores the vocabulary, merges or scores, and token types (1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte),
but of the pre-tokenizer only the name. The ones below are supported. Any other name is refused, because a wrong
pre-tokenizer would tokenise text wrongly without an error (llama.cpp, `llama-vocab.cpp`, has the list).
"""

from math import isfinite
from pathlib import Path
from typing import Any

from model.common.checks import is_whole_number, short_repr
from model.common.errors import CheckpointError
from model.common.typed_json import json_bytes

MAX_TOKEN = 1024
"""Limit of the characters of a token. The time to find merges grows with the square of a token's length."""
MERGES_PER_TOKEN = 32
"""Limit, on average. Llama 2's tokenizer has two merges a token."""
KINDS: dict[str, type] = {
    "tokenizer.ggml.add_bos_token": bool, "tokenizer.ggml.add_eos_token": bool,
    "tokenizer.ggml.add_space_prefix": bool, "tokenizer.ggml.pre": str, "tokenizer.chat_template": str,
    "general.name": str, "general.license": str,
}  # fmt: skip

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        _byte_level(use_regex=False),
    ]


_PRE_TOKENIZERS = {
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}


def tokenizer_files(path: Path, fields: dict[str, Any]) -> dict[str, Path | bytes]:
    """Return `tokenizer.json` and `tokenizer_config.json` from a GGUF file's metadata.

    Raises CheckpointError if the tokenizer's kind is not supported or its metadata is incomplete.
    """
    model = fields.get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}.get(str(model))
    if build is None:
        raise CheckpointError(f"{path} has a tokenizer of kind {short_repr(model)}; 'gpt2' and 'llama' are supported.")
    # transformers uses Qwen 2's pre-tokenizer for every Qwen 2, whatever tokenizer.json says.
    if fields.get("general.architecture") == "qwen2" and fields.get("tokenizer.ggml.pre") != "qwen2":
        raise CheckpointError(
            f"{path} is a Qwen 2 with the pre-tokenizer {short_repr(fields.get('tokenizer.ggml.pre'))}; only 'qwen2' "
            "is supported. Convert from the original Hugging Face folder instead."
        )
    for key in ("tokens", "token_type", "merges" if model == "gpt2" else "scores"):
        if not isinstance(fields.get(f"tokenizer.ggml.{key}"), list):
            raise CheckpointError(f"{path} lacks tokenizer.ggml.{key}; without it the tokenizer cannot be rebuilt.")
    vocabulary: list[str] = fields["tokenizer.ggml.tokens"]
    problem = _tokens_problem(fields, vocabulary) or _settings_problem(fields, len(vocabulary))
    if problem:
        raise CheckpointError(f"{path} has {problem}; the tokenizer cannot be rebuilt.")
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, **build(path, fields, vocabulary)}
    config = _tokenizer_config(fields, vocabulary)
    return {"tokenizer.json": json_bytes(tokenizer), "tokenizer_config.json": json_bytes(config)}


def _tokens_problem(fields: dict[str, Any], vocabulary: list[Any]) -> str:
    """Return the problem of a vocabulary that would give a wrong tokenizer; "" if there is none."""
    size, types = len(vocabulary), fields["tokenizer.ggml.token_type"]
    if not size or len({token for token in vocabulary if isinstance(token, str)}) != size:
        return "no tokens, or tokens that are not text or occur twice"
    if max(map(len, vocabulary)) > MAX_TOKEN:
        return f"a token of {max(map(len, vocabulary)):,} characters, where {MAX_TOKEN:,} are possible"
    if len(types) != size or not all(type(kind) is int for kind in types):
        return "token types that do not fit its tokens"
    if fields["tokenizer.ggml.model"] == "llama":
        scores = fields["tokenizer.ggml.scores"]
        fit = len(scores) == size and all(type(score) is float and isfinite(score) for score in scores)
        return "" if fit else "scores that do not fit its tokens"
    pairs = all(isinstance(merge, str) and " " in merge for merge in fields["tokenizer.ggml.merges"])
    return "" if pairs else "merges that are not pairs"


def _settings_problem(fields: dict[str, Any], size: int) -> str:
    """Return the problem of a setting of a wrong type or an impossible token id; "" if there is none."""
    for key, value in fields.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            if not is_whole_number(value, least=0) or value >= size:
                return f"{key} = {short_repr(value)}, outside its vocabulary"
        elif type(value) is not KINDS.get(key, type(value)):
            return f"{key} = {short_repr(value)}, which is not of type {KINDS[key].__name__}"
    return ""


def _byte_level_bpe(path: Path, fields: dict[str, Any], vocabulary: list[str]) -> dict[str, Any]:
    name = fields.get("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{path} names the pre-tokenizer {short_repr(name)}; supported are {', '.join(_PRE_TOKENIZERS)}. "
            "Convert from the original Hugging Face folder instead."
        )
    return {
        "added_tokens": _added_tokens(fields, vocabulary),
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[name]},
        "post_processor": _template(fields, vocabulary),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(vocabulary)},
            "merges": [merge.split(" ", 1) for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _sentencepiece_bpe(path: Path, fields: dict[str, Any], vocabulary: list[str]) -> dict[str, Any]:
    """Return SentencePiece BPE with byte fallback, the tokenizer of Llama 1 and 2; a space is U+2581."""
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, space] if prefix else [space]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    types, unknown = fields["tokenizer.ggml.token_type"], fields.get("tokenizer.ggml.unknown_token_id", 0)
    return {
        "added_tokens": _added_tokens(fields, vocabulary),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _template(fields, vocabulary),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": vocabulary[unknown],
            "fuse_unk": True,
            "byte_fallback": BYTE in types,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(vocabulary)},
            "merges": _merges_from_scores(path, vocabulary, fields["tokenizer.ggml.scores"], types),
        },
    }


def _merges_from_scores(
    path: Path, vocabulary: list[str], scores: list[float], types: list[int]
) -> list[list[str]]:  # fmt: skip
    """Return the merge list that is equivalent to SentencePiece's scores.

    SentencePiece joins the adjacent pair whose union has the highest score. So every split of a piece into two pieces
    is a merge, ranked by the piece's score (ties: by the order in the vocabulary).
    """
    pieces = {token: i for i, token in enumerate(vocabulary) if types[i] not in (UNKNOWN, CONTROL, BYTE)}
    ranked = []
    for token, i in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[i], i, pieces[left], pieces[right]))
        if len(ranked) > MERGES_PER_TOKEN * len(vocabulary):
            raise CheckpointError(
                f"{path}: the tokens of a SentencePiece vocabulary of {len(vocabulary):,} can be cut in more than "
                f"{len(ranked):,} ways into other tokens; the file is damaged."
            )
    return [[vocabulary[left], vocabulary[right]] for *_, left, right in sorted(ranked)]


def _added_tokens(fields: dict[str, Any], vocabulary: list[str]) -> list[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = (UNKNOWN, CONTROL)
    # Early files call the tokens that only fill the vocabulary user-defined.
    return [
        {"id": i, "content": vocabulary[i], **plain, "special": kind in special}
        for i, kind in enumerate(fields["tokenizer.ggml.token_type"])
        if kind in (*special, USER_DEFINED) and vocabulary[i] != f"[PAD{i}]"
    ]


def _bos_eos(fields: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return the tokens that the tokenizer adds before and after every text; None if it adds none."""
    # llama.cpp's default for an absent flag: SentencePiece's and Llama 3's texts begin with BOS, others do not.
    by_default = fields["tokenizer.ggml.model"] == "llama" or fields.get("tokenizer.ggml.pre") == "llama-bpe"
    begins = fields.get("tokenizer.ggml.add_bos_token", by_default)
    bos = fields.get("tokenizer.ggml.bos_token_id") if begins else None
    eos = fields.get("tokenizer.ggml.eos_token_id") if fields.get("tokenizer.ggml.add_eos_token") else None
    return bos, eos


def _template(fields: dict[str, Any], vocabulary: list[str]) -> dict[str, Any]:
    bos, eos = _bos_eos(fields)

    def special(i: int | None, type_id: int) -> list[dict[str, Any]]:
        return [] if i is None else [{"SpecialToken": {"id": vocabulary[i], "type_id": type_id}}]

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        return [*special(bos, type_id), {"Sequence": {"id": name, "type_id": type_id}}, *special(eos, type_id)]

    used = {vocabulary[i]: i for i in (bos, eos) if i is not None}
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in used.items()},
    }


def _tokenizer_config(fields: dict[str, Any], vocabulary: list[str]) -> dict[str, Any]:
    bos, eos = _bos_eos(fields)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bos is not None,
        "add_eos_token": eos is not None,
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for key, name in names.items():
        if (i := fields.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[key] = vocabulary[i]
    context = fields.get(f"{fields.get('general.architecture')}.context_length")
    if is_whole_number(context, least=1):
        config["model_max_length"] = context
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config
