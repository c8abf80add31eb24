"""Open the language model inside a wrapper, a model that also reads images or sound. Needs no torch.

`uptrain` measures and trains the language model alone, on text. `InsideWrapper` presents it as a checkpoint of its own;
`WithLanguageModel` is the wrapper again, with another language model of the same tensors inside. A checkpoint without
a wrapper is its own language model.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.checkpoint import Checkpoint, open_checkpoint
from model.checkpoint.hf_folder import read_config, weights_in
from model.checkpoint.tensor import Array, Span, is_buffer
from model.checkpoint.tied import LM_HEAD
from model.checkpoint.view import CheckpointView
from model.common.errors import CheckpointError, prefix_path
from model.families import FAMILIES, NATIVE_FAMILIES, find_family
from model.families.family import Family, TensorNames, Wrapper

WRAPPER = "groupwise_wrapper"
"""The key of a language model's config that names its wrapper's `model_type`. It is never written to a file."""
_OF_WRAPPER = ("architectures", "quantization_config", "dtype", "torch_dtype")
"""Keys that say of the whole model what holds for its language model."""
_WRAPPED_LM_HEAD = re.compile(r"(?:language_model\.)?(lm_head\..+)")
_BODY = "model."
"""The prefix of the body's tensor names in a language model of its own."""


def language_config(config: Mapping[str, Any], has_lm_head: bool = False) -> dict[str, Any]:
    """Return the config of the language model that a `config.json` describes: itself, without a wrapper.

    `has_lm_head`: whether the files hold an LM head (`ties_lm_head`). Raises CheckpointError for a wrapper whose
    language model cannot be used alone.
    """
    wrapper = _wrapper(config)
    if wrapper is None:
        return dict(config)
    if not wrapper.is_causal:
        raise CheckpointError(
            f"model_type {wrapper.model_type!r} attends to later tokens of its prompts; only causal models can be "
            "trained or evaluated here."
        )
    match = find_family(config)
    family = FAMILIES[match.family.model_type]
    assert isinstance(family, Family)
    if family.names.prefix != TensorNames.prefix:
        raise CheckpointError(
            f"model_type {family.model_type!r} inside model_type {wrapper.model_type!r} cannot be trained or evaluated "
            "here: the names of its tensors are not known."
        )
    inner = {**family.default_sizes, **match.config, "model_type": family.model_type, WRAPPER: wrapper.model_type}
    if (tied := ties_lm_head(config, match.config, has_lm_head)) is not None:
        inner["tie_word_embeddings"] = tied
    inner.pop("architectures", None)
    if config.get("eos_token_id") is not None:
        inner["eos_token_id"] = config["eos_token_id"]
    return inner | {key: config[key] for key in _OF_WRAPPER if key in config}


def ties_lm_head(config: Mapping[str, Any], inner: Mapping[str, Any], has_lm_head: bool) -> Any:
    """Return `tie_word_embeddings` of the language model `inner` a wrapper; None if neither config has it.

    transformers 4 asked the language model's config, and version 5 asks the wrapper's. Version 5 writes configs of
    which one ties LM head and embedding and the other does not. Then an LM head that the files hold is used, as
    version 5 does; also where the language model's config leaves out what may be its class's default (Gemma ties).
    """
    given = [place["tie_word_embeddings"] for place in (config, inner) if "tie_word_embeddings" in place]
    may_tie = "tie_word_embeddings" not in inner and inner.get("model_type", "llama") not in NATIVE_FAMILIES
    if (True in given and False in given) or (given == [False] and may_tie):
        return not has_lm_head
    return given[0] if given else None


def has_language_model(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` has a language model that can be used alone."""
    try:
        language_config(config)
    except CheckpointError:
        return False
    return True


def read_language_config(folder: Path) -> dict[str, Any]:
    """Return the config of a folder's language model. The folder needs no weights."""
    config = read_config(folder)[1]
    with prefix_path(folder):
        untied, tied = language_config(config, has_lm_head=True), language_config(config)
    if untied == tied or not weights_in(folder):
        return tied
    with open_language_model(folder) as checkpoint:
        return checkpoint.config


def wrapper_of(config: Mapping[str, Any]) -> str | None:
    """Return the `model_type` of the wrapper that a language model's config comes from; None without one."""
    return config.get(WRAPPER)


def text_config_key(config: Mapping[str, Any]) -> str | None:
    """Return the key of the language model's config inside a wrapper's `config.json`; None without a wrapper."""
    wrapper = _wrapper(config)
    return None if wrapper is None else wrapper.text_config


def open_language_model(path: Path) -> Checkpoint:
    """Open the language model of a checkpoint. Raises CheckpointError as `open_checkpoint` and `language_config` do."""
    return language_model(open_checkpoint(path))


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return the language model of an open checkpoint."""
    wrapper = _wrapper(checkpoint.config)
    return checkpoint if wrapper is None else InsideWrapper(checkpoint, wrapper)


def _wrapper(config: Mapping[str, Any]) -> Wrapper | None:
    entry = FAMILIES.get(str(config.get("model_type")))
    return entry if isinstance(entry, Wrapper) else None


class InsideWrapper(CheckpointView):
    """The language model inside a wrapper, with the config and the tensor names that it has on its own."""

    def __init__(self, whole: Checkpoint, wrapper: Wrapper) -> None:
        super().__init__(whole)
        has_lm_head = any(_own_name(name, wrapper.prefix) == LM_HEAD for name in whole.tensors)
        with prefix_path(whole.config_folder):
            self.config = language_config(whole.config, has_lm_head)
        self.config_prefix = f"{wrapper.text_config}."
        self.names_in_wrapper: dict[str, str] = {}
        """The names of the language model's tensors → those in the wrapper's files."""
        for name in whole.tensors:
            own = _own_name(name, wrapper.prefix)
            if own in self.names_in_wrapper:
                raise CheckpointError(
                    f"{whole.path} holds both {self.names_in_wrapper[own]} and {name}, two names of one tensor; remove "
                    "one of them."
                )
            if own:
                self.names_in_wrapper[own] = name
        self.tensors = {own: replace(whole.tensors[name], name=own) for own, name in self.names_in_wrapper.items()}

    def name_in_files(self, name: str) -> str:
        if name in self.names_in_wrapper or not self.names_in_wrapper:
            return self.names_in_wrapper.get(name, name)
        # A missing tensor would be spelled like the others.
        own, known = min(self.names_in_wrapper.items(), key=lambda pair: not pair[0].startswith(_BODY))
        prefix = known.removesuffix(own.removeprefix(_BODY))
        if name.startswith(_BODY):
            return prefix + name.removeprefix(_BODY)
        return f"language_model.{name}" if prefix.startswith("language_model.") else name

    def rows(self, name: str, start: int, stop: int) -> Array:
        return super().rows(self.names_in_wrapper[name], start, stop)

    def span(self, name: str) -> Span | None:
        return super().span(self.names_in_wrapper[name])

    @property
    def whole(self) -> Checkpoint:
        """The wrapper itself."""
        return self._inner

    @property
    def others(self) -> list[str]:
        """The names of the wrapper's tensors that are not the language model's."""
        own = set(self.names_in_wrapper.values())
        return [name for name in self.whole.tensors if name not in own]


class WithLanguageModel(CheckpointView):
    """A wrapper with the tensors of `changed` in place of those of the language model `inside` it."""

    def __init__(self, changed: Checkpoint, inside: InsideWrapper) -> None:
        super().__init__(changed)
        self._whole = inside.whole
        names = inside.names_in_wrapper
        self._changed = {name: own for own, name in names.items() if own in changed.tensors}
        self.tensors = {
            name: replace(changed.tensors[self._changed[name]], name=name) if name in self._changed else tensor
            for name, tensor in self._whole.tensors.items()
        }
        buffers = (name for own, name in names.items() if is_buffer(inside.tensors[own]))
        self.outside = frozenset([*inside.others, *buffers])
        """The names of the tensors that are no parameters of the language model."""

    def rows(self, name: str, start: int, stop: int) -> Array:
        own = self._changed.get(name)
        return self._whole.rows(name, start, stop) if own is None else super().rows(own, start, stop)

    def span(self, name: str) -> Span | None:
        own = self._changed.get(name)
        return self._whole.span(name) if own is None else super().span(own)


def _own_name(name: str, prefix: str) -> str | None:
    """Return the name that a wrapper's tensor has in its language model; None if it is not part of that."""
    if lm_head := _WRAPPED_LM_HEAD.fullmatch(name):
        return lm_head[1]
    match = re.match(prefix, name)
    return None if match is None else _BODY + name[match.end() :]
