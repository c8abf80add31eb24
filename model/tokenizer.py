"""Open a folder's tokenizer with transformers, without running code from the folder."""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from model.common.checks import is_whole_number
from model.common.errors import CheckpointError, InputError
from model.files.paths import is_plain_name
from model.files.read import MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, check_size, read_json, refuse_bom

TOKENIZER_JSON = "tokenizer.json"
"""The file of a complete fast tokenizer. If it exists, the vocabularies of slow tokenizers are not read."""
VOCABULARIES = (
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
ADDED_TOKENS = "added_tokens.json"
OTHER_VOCABULARY_ENDINGS = ("tekken.json", ".model")
TOKENIZER_FILE_PREFIXES = ("tokenizer", "special_tokens_map", "added_tokens", "chat_template")
"""How the names of a tokenizer's files begin, besides those of vocabularies."""
_TIKTOKEN_LINE = 1000
"""More bytes than the first line of a file of tiktoken has."""
_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
"""The parts of tokenizer.json that determine the ids of a text, besides special tokens."""
CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")
_ARGUMENTS_OF_CLASSES = ("vocab", "merges", "tokenizer_object", "init_inputs", "gguf_file")
"""Arguments of transformers' classes that hold, or name, what the tokenizer's files hold."""
_ARGUMENTS_OF_SENTENCEPIECE = ("model_file", "model_proto", "enable_sampling")
"""Arguments of sentencepiece that name another vocabulary, or let it give other tokens of a text each time."""
_SENTENCEPIECE_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
"""What special tokens are called in the vocabularies of sentencepiece."""
_WITH_BOS = ("llama", "codellama", "mistral", "mixtral", "gemma")
"""How `tokenizer_class`, or else `model_type`, begins, in lower case, where texts begin with BOS if no file says
otherwise."""


def has_tokenizer(names: Iterable[str]) -> bool:
    """Return whether files with these names hold a vocabulary, also one that is not read here (tekken, tiktoken)."""
    return any(name in VOCABULARIES or "token" in name or name.endswith(OTHER_VOCABULARY_ENDINGS) for name in names)


def is_tiktoken(content: Path | bytes) -> bool:
    """Return whether a tokenizer.model begins with a token in base64 and its number, as tiktoken's files do."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            content = file.read(_TIKTOKEN_LINE)
    return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", content) is not None


def open_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder, from the folder's files only.

    Custom code named by the folder (`auto_map`) is not run. transformers' own class is used instead; if it has none,
    tokenizer.json is opened directly. Texts begin with BOS as `put_bos_first` says. Raises CheckpointError if that file
    is missing too, or if transformers cannot read the files.
    """
    check_files(folder)
    from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

    logging.getLogger("transformers.modeling_rope_utils").setLevel(logging.ERROR)  # a tokenizer rotates nothing
    code = _own_code(folder)
    settings, config = _read_config(folder / "tokenizer_config.json"), _read_config(folder / "config.json")
    has_json = (folder / TOKENIZER_JSON).is_file()
    # Folders of LLaMA 1 say "bos_token": "", which transformers 5 looks up without end.
    empty = {name: token for name, token in _SENTENCEPIECE_NAMES.items() if settings.get(name) == "" and not has_json}
    kind = str(settings.get("tokenizer_class") or config.get("model_type")).lower()
    # transformers 5 does not know LLaMA 1's name of the class, LLaMATokenizer, and its general class gives other ids.
    is_llama = kind.startswith("llama") and (folder / "tokenizer.model").is_file() and not has_json
    openers: list[Any] = [LlamaTokenizer if is_llama else AutoTokenizer]
    if code and has_json:
        openers.append(PreTrainedTokenizerFast)
    failure: BaseException | None = None
    for opener in openers:
        try:
            with refusing_tokenizer_errors(f"the tokenizer of {folder} cannot be loaded", CheckpointError):
                tokenizer = opener.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **empty)
                if has_json:
                    _restore_backend(tokenizer, folder / TOKENIZER_JSON)
                elif "add_bos_token" not in settings:
                    settings["add_bos_token"] = kind.startswith(_WITH_BOS)
                if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
                    without_dropout(backend)
                    put_bos_first(backend, {**settings, "bos_token": tokenizer.bos_token}, config)
                return tokenizer
        except CheckpointError as error:
            failure = error.__cause__
    raise _refusal(folder, code, failure) from failure


def _refusal(folder: Path, code: str, failure: BaseException | None) -> CheckpointError:
    """Return the error of a tokenizer that cannot be opened: what is missing, or else transformers' own message."""
    has_json, has_sentencepiece = ((folder / name).is_file() for name in (TOKENIZER_JSON, "tokenizer.model"))
    if code and not has_json:
        known = (
            'if its tokenizer.model is one of Llama\'s kind, set "tokenizer_class": "LlamaTokenizer" and remove '
            '"auto_map" in tokenizer_config.json'
            if has_sentencepiece
            else "save the tokenizer as a fast one with transformers"
        )
        return CheckpointError(
            f"the tokenizer of {folder} needs code of its own ({code}), which is never run; put a {TOKENIZER_JSON} "
            f"there, or {known}."
        )
    names = [path.name for path in folder.iterdir()]
    if not any(name in (TOKENIZER_JSON, *VOCABULARIES) or name.endswith(OTHER_VOCABULARY_ENDINGS) for name in names):
        return CheckpointError(
            f"{folder} holds no tokenizer ({TOKENIZER_JSON} or {VOCABULARIES[0]}); put the tokenizer's files there."
        )
    message = " ".join(str(failure).split())
    if has_sentencepiece and not has_json:
        # transformers takes what it cannot open for a file of tiktoken, and names that package.
        message = f"there is no {TOKENIZER_JSON}, and {_why_sentencepiece_fails()} ({message})"
    return CheckpointError(f"transformers cannot load the tokenizer of {folder}: {message}")


def _why_sentencepiece_fails() -> str:
    if find_spec("sentencepiece") and find_spec("google") and find_spec("google.protobuf"):
        return "tokenizer.model is damaged, or not a vocabulary of sentencepiece"
    return "tokenizer.model needs `pip install sentencepiece protobuf`"


def _restore_backend(tokenizer: Any, file: Path) -> None:
    """Let a fast tokenizer split and encode texts as its tokenizer.json says.

    transformers 5 keeps the vocabulary and the merges of that file, but some of its classes (those of GPT-2, Llama,
    Qwen 2 and others) bring a normaliser and a pre-tokenizer of their own. A model that was trained with others then
    gets other ids (huggingface/transformers issue 45920). The special tokens, and what puts them around a text, stay
    as transformers makes them (but see `put_bos_first`): `tokenizer_config.json` decides on these.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer written in Python
        return
    from tokenizers import Tokenizer

    loaded, stored = json.loads(backend.to_str()), json.loads(file.read_bytes())
    changed = {part: stored.get(part) for part in _PARTS if stored.get(part) != loaded.get(part)}
    if changed:
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(loaded | changed))


def without_dropout(backend: Any) -> None:
    """Let a tokenizer give the same tokens of a text each time: its file may say to leave out merges at random."""
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None


def put_bos_first(backend: Any, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Let a tokenizer put the beginning-of-text token before each text, if its settings ask for it.

    `settings`: tokenizer_config.json. `config`: config.json. transformers 4 and engines read `add_bos_token` of the
    former (DeepSeek-LLM, DeepSeek-Coder, R1-Distill-Qwen). transformers 5 does not if there is a tokenizer.json. A
    tokenizer that puts any special token around a text is left as it is.
    """
    if settings.get("add_bos_token") is not True or backend.num_special_tokens_to_add(False):
        return
    token = settings.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    bos = backend.token_to_id(token) if isinstance(token, str) else None
    if bos is None and is_whole_number(config.get("bos_token_id"), least=0):
        bos = config["bos_token_id"]
        token = backend.id_to_token(bos) if bos < backend.get_vocab_size() else None
    if bos is None or token is None:
        return
    from tokenizers import processors

    template = processors.TemplateProcessing(
        single=["bos", "$A"],
        pair=["bos", "$A", "bos:1", "$B:1"],
        special_tokens=[{"id": "bos", "ids": [bos], "tokens": [token]}],
    )
    own = backend.post_processor
    backend.post_processor = template if own is None else processors.Sequence([own, template])


def find_leading_ids(backend: Any) -> list[int]:
    """Return the special tokens that a tokenizer puts before a text, such as BOS; the list may be empty."""
    bare, whole = (backend.encode("a", add_special_tokens=adds).ids for adds in (False, True))
    starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return list(whole[: next(starts, 0)])


def _read_config(file: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one if the file holds none, or there is none."""
    config = read_json(file) if file.exists() else None
    return config if isinstance(config, dict) else {}


def check_files(folder: Path) -> None:
    """Raise CheckpointError if transformers cannot read one of the files, and its own message would not say so.

    These are files that are not regular or too large, JSON after a byte-order mark, and configs of another type.
    """
    limits = dict.fromkeys((TOKENIZER_JSON, ADDED_TOKENS, *VOCABULARIES), MAX_TOKENIZER_BYTES)
    limits |= dict.fromkeys((*CONFIGS, "config.json", "chat_template.jinja", "chat_template.json"), MAX_CONFIG_BYTES)
    for name, limit in limits.items():
        if (folder / name).exists():
            check_size(folder / name, limit)
            if name.endswith(".json"):
                refuse_bom(folder / name)
            if name in CONFIGS:
                _check_config(folder / name, read_json(folder / name))


def _check_config(file: Path, config: object) -> None:
    """Raise CheckpointError unless a config is an object, and names no tokenizer's files outside of its folder.

    transformers passes settings to the tokenizer's class as arguments, some of which are paths that it opens. Files
    that it saves have none of those that are refused here. (In tokenizer_config.json, published folders name their
    authors' own files, such as `tokenizer_file`; transformers does not use these.)
    """
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object; fetch the tokenizer again.")
    for key, value in config.items():
        names_file = key in _ARGUMENTS_OF_CLASSES or (key.endswith("_file") and file.name == CONFIGS[0])
        if names_file and value:
            raise CheckpointError(f"{file} has {key}, which could lead transformers to other files; remove it.")
    arguments = config.get("sp_model_kwargs")
    for key in _ARGUMENTS_OF_SENTENCEPIECE:
        if isinstance(arguments, dict) and arguments.get(key):
            raise CheckpointError(
                f"{file} has sp_model_kwargs with {key}, so that the tokenizer is not that of its files; remove it."
            )
    others = config.get("fast_tokenizer_files") or []
    if not isinstance(others, list) or not all(isinstance(name, str) and is_plain_name(name) for name in others):
        raise CheckpointError(f"{file}: fast_tokenizer_files must list names of files in its folder; remove it.")


def _own_code(folder: Path) -> str:
    """Return the custom tokenizer code that the folder's configs name, such as `tokenization_x.XTokenizer`, or ""."""
    for name in ("tokenizer_config.json", "config.json"):
        table = _read_config(folder / name).get("auto_map")
        code = table.get("AutoTokenizer") if isinstance(table, dict) else table
        if isinstance(code, list):  # of a slow and a fast tokenizer
            code = next((part for part in code if part), None)
        if code:
            return str(code)
    return ""


@contextmanager
def refusing_tokenizer_errors(message: str, kind: type[InputError] = InputError) -> Iterator[None]:
    """Raise an InputError, `message` and the reason, in place of what the library raises. Lack of memory passes.

    Its Rust code may panic, for instance if a regular expression takes too many steps on a text. That raises a
    `pyo3_runtime.PanicException`, which is no Exception, and cannot be pickled.
    """
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:  # the library raises no narrower class
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{message} ({' '.join(str(error).split())}).") from error
