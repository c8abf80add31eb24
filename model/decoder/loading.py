"""Load a checkpoint folder into a model in memory, with one copy of the weights.

The model is built on the meta device, without memory, and every parameter is then read from the file.
"""

import functools
import re
import shlex
from collections.abc import Container, Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model.checkpoint import FLOAT_DTYPES, Checkpoint, TensorInfo
from model.checkpoint.latent_norm import read_latent_norm, without_latent_norm
from model.checkpoint.tensor import is_rope_buffer
from model.checkpoint.tied import EMBEDDING, LM_HEAD
from model.common import checks
from model.common.errors import CheckpointError, InputError
from model.common.typed_json import parse_object
from model.decoder.config import LlamaConfig, is_native, read_llama_config
from model.decoder.llama import Block, LlamaForCausalLM
from model.decoder.transformers_classes import build_hf_model, load_state
from model.decoder.transformers_model import TransformersModel, load_hf_model
from model.files.read import MAX_CONFIG_BYTES, read_content
from model.geometry import read_geometry
from model.language_model import InsideWrapper, open_language_model

LanguageModel = LlamaForCausalLM | TransformersModel
"""A model in memory: native code, or a class of transformers with the same interface."""


def load_model(
    folder: Path | str, dtype: torch.dtype | None = None, device: str = "cpu", skip: Container[str] = ()
) -> LanguageModel:
    """Load a checkpoint in evaluation mode; call `.train()` to train it.

    Families with native code are loaded from any format that `open_checkpoint` reads. `dtype` None keeps the tensors'
    dtype, or widens all to the widest if the matrices differ. Other families are opened by transformers, with the same
    interface. It reads Hugging Face folders only, and `dtype` None is the dtype of config.json. Native models are
    loaded without the parameters of `skip`, which stay on the meta device until the caller replaces them. Of a model
    with images or sound, only the language model inside is loaded; if it is not native, `dtype` None is the widest of
    its matrices. Raises CheckpointError for a config that is not implemented, and for a tensor that is missing,
    unexpected or of the wrong shape; the message names it.
    """
    with open_language_model(Path(folder)) as checkpoint:
        if is_native(checkpoint.config):
            model = load_llama(checkpoint, dtype, device, skip)
            model.stop_ids = stop_ids(checkpoint)
            return model
        if checkpoint.format not in ("safetensors", "bin"):
            path, model_type = checkpoint.path, checkpoint.config.get("model_type")
            raise CheckpointError(
                f"{path}: transformers opens models of model_type {model_type!r} as Hugging Face folders only; write "
                f"one first: convert to-hf {shlex.quote(str(path))} OUT"
            )
        if isinstance(checkpoint, InsideWrapper):
            return _load_inside_wrapper(checkpoint, dtype, device)
        n_stored = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())
    return load_hf_model(checkpoint.config_folder, n_stored, dtype, device)


def _load_inside_wrapper(checkpoint: InsideWrapper, dtype: torch.dtype | None, device: str) -> TransformersModel:
    """Load the language model of a wrapper into its class in transformers, which knows no such files."""
    from accelerate import init_empty_weights

    read_geometry(checkpoint)  # refuses what is quantised or incomplete
    names = [name for name in checkpoint.tensors if not is_rope_buffer(name)]
    dtype = dtype or functools.reduce(torch.promote_types, matrix_dtypes(checkpoint, names))
    folder = checkpoint.config_folder
    with init_empty_weights(include_buffers=False):
        hf_model: Any = build_hf_model(folder, dtype)
    tied = hf_model.config.tie_word_embeddings
    if tied and LM_HEAD in names:
        _check_tied(checkpoint, EMBEDDING)
        names.remove(LM_HEAD)
    state = {name: read_tensor(checkpoint, name, dtype, scalar=True) for name in names}
    prefix = f"{hf_model.base_model_prefix}." if tied else ""
    load_state(hf_model, state, prefix, str(folder), dtype, checkpoint.name_in_files)
    hf_model.tie_weights()
    return TransformersModel(hf_model.to(device)).eval()


def stop_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the end-of-text tokens of `generation_config.json`, or else of `config.json`, as transformers does.

    Raises CheckpointError if the value is neither a token's id nor a list of ids.
    """
    config, path = checkpoint.config, checkpoint.config_folder / "config.json"
    content = checkpoint.side_files.get("generation_config.json")
    if content is not None:
        name = checkpoint.config_folder / "generation_config.json"
        try:
            generation = parse_object(read_content(content, MAX_CONFIG_BYTES))
        except InputError as error:
            raise CheckpointError(f"{name} cannot be read: {error}; download it again.") from error
        if generation.get("eos_token_id") is not None:
            config, path = generation, name
    ids = config.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(checks.whole_number(token, f"{path} has an eos_token_id", least=0) for token in ids)


def load_llama(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: str, skip: Container[str] = ()
) -> LlamaForCausalLM:
    """Load an open checkpoint into the native model, except the parameters of `skip`."""
    checkpoint = without_latent_norm(checkpoint)
    model, names = build_meta(checkpoint)
    dtypes = set() if dtype else matrix_dtypes(checkpoint, names.values())
    if len(dtypes) > 1:  # matrices are multiplied with each other
        dtype = functools.reduce(torch.promote_types, dtypes)
    for name, parameter in [(n, p) for n, p in model.named_parameters() if n not in skip]:
        tensor = _read_checked(checkpoint, names[name], parameter, dtype, device)
        if name.endswith(".bias") and dtype is None:  # a GGUF's is float32; torch adds one of the matrix's dtype only
            tensor = tensor.to(next(iter(dtypes)))
        _put(model, name, tensor)
    return model.eval()


def build_meta(checkpoint: Checkpoint) -> tuple[LlamaForCausalLM, dict[str, str]]:
    """Return the native model on the meta device, and a table: parameter name → tensor name.

    Raises CheckpointError as `load_model` does, except for shapes, which `check_shapes` checks.
    """
    checkpoint = without_latent_norm(checkpoint)
    if read_latent_norm(checkpoint.config) is None:
        read_geometry(checkpoint)
    with torch.device("meta"):
        model = LlamaForCausalLM(read_llama_config(checkpoint.config))
    return model, _match_names(checkpoint, model)


def check_shapes(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError unless the native model that config.json describes has the checkpoint's tensors."""
    checkpoint = without_latent_norm(checkpoint)
    model, names = build_meta(checkpoint)
    for name, parameter in model.named_parameters():
        _check_shape(checkpoint, names[name], checkpoint.tensors[names[name]].shape, parameter)


def check_runnable(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a tensor, buffers aside, has a dtype in which the model cannot run."""
    for name in checkpoint.tensors:
        if not is_rope_buffer(name):
            check_readable(checkpoint, name)


def check_readable(checkpoint: Checkpoint, name: str, scalar: bool = False) -> TensorInfo:
    """Return a tensor's description. Raises CheckpointError if it is missing, or not of floats.

    A scalar is refused too, unless one is expected.
    """
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{checkpoint.path} lacks the tensor {checkpoint.name_in_files(name)}.")
    if tensor.dtype not in FLOAT_DTYPES or not (tensor.shape or scalar):
        raise CheckpointError(
            f"{checkpoint.path} holds {checkpoint.name_in_files(name)} as {tensor.dtype} of shape {tensor.shape}, "
            f"which the model cannot be run with; start from the original model in {', '.join(FLOAT_DTYPES)}."
        )
    return tensor


def matrix_dtypes(checkpoint: Checkpoint, names: Iterable[str]) -> set[torch.dtype]:
    """Return the dtypes of the matrices among some tensors."""
    matrices = [name for name in names if len(checkpoint.tensors[name].shape) == 2]
    one_of_each = {checkpoint.tensors[name].dtype: name for name in matrices}
    return {read_tensor(checkpoint, name, None, "cpu").dtype for name in one_of_each.values()}


def load_block(checkpoint: Checkpoint, config: LlamaConfig, index: int, device: str) -> Block:
    """Load one layer of an open checkpoint, in float32."""
    with torch.device("meta"):
        block = Block(config)
    prefix = f"{_prefix(checkpoint)}layers.{index}."
    check_no_others(checkpoint, prefix, {f"{prefix}{name}" for name, _ in block.named_parameters()})
    for name, parameter in list(block.named_parameters()):
        _put(block, name, _read_checked(checkpoint, prefix + name, parameter, torch.float32, device))
    return block.eval()


def check_no_others(checkpoint: Checkpoint, prefix: str, known: Container[str]) -> None:
    """Raise CheckpointError if a layer has a tensor that is not `known` from its config.json, such as a bias."""
    for name in checkpoint.tensors:
        if name.startswith(prefix) and name not in known and not is_rope_buffer(name):
            raise CheckpointError(
                f"{checkpoint.path} holds the tensor {name}, unknown to its config.json{advice_on(name)}."
            )


def advice_on(name: str) -> str:
    """Return what to correct if `config.json` does not know a tensor: a bias of a layer, or one of no layer."""
    if ".layers." in f".{name}":
        is_bias = name.endswith("bias")
        return "; correct model_type, or the setting of its biases (attention_bias, mlp_bias)" if is_bias else ""
    if re.search(r"\b(embed_tokens|norm|lm_head)\.", name):
        return ""
    return "; remove it if it is no part of the language model, as the head of a reward is not"


def embedding_name(checkpoint: Checkpoint) -> str:
    """Return the name of the embedding's tensor. The tensor itself may be missing."""
    return f"{_prefix(checkpoint)}embed_tokens.weight"


def _prefix(checkpoint: Checkpoint) -> str:
    """Return the prefix of the decoder's tensor names: "model.", or "" for a saved base model."""
    return "model." if any(name.startswith("model.") for name in checkpoint.tensors) else ""


def _match_names(checkpoint: Checkpoint, model: LlamaForCausalLM) -> dict[str, str]:
    """Return a table, parameter name → tensor name.

    Raises CheckpointError if a tensor is missing or left over, rotary buffers aside.
    """
    stored = {name for name in checkpoint.tensors if not is_rope_buffer(name)}
    bare = not _prefix(checkpoint)
    names = {name: name.removeprefix("model.") if bare else name for name, _ in model.named_parameters()}
    embedding = names[EMBEDDING]
    if model.lm_head is None and LM_HEAD in stored:
        if embedding in stored:
            _check_tied(checkpoint, embedding)
            stored.remove(LM_HEAD)
        else:
            names[EMBEDDING] = LM_HEAD
    missing, unexpected = (
        sorted(map(checkpoint.name_in_files, some))
        for some in (set(names.values()) - stored, stored - set(names.values()))
    )
    if missing:
        raise CheckpointError(f"{checkpoint.path} lacks the tensor {missing[0]}{_and_more(missing)}.")
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.path} holds the tensor {unexpected[0]}{_and_more(unexpected)}, unknown to its config.json"
            f"{advice_on(unexpected[0])}."
        )
    return names


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _check_tied(checkpoint: Checkpoint, embedding: str) -> None:
    """Raise CheckpointError unless a tied LM head, which old files hold, equals the embedding."""
    lm_head, embedded = (check_readable(checkpoint, name) for name in (LM_HEAD, embedding))
    rows = embedded.shape[0]
    if lm_head.shape != embedded.shape or not np.array_equal(
        checkpoint.rows(LM_HEAD, 0, rows), checkpoint.rows(embedding, 0, rows)
    ):
        raise CheckpointError(
            f"{checkpoint.path}: config.json ties head and embedding, but {checkpoint.name_in_files(LM_HEAD)} differs "
            f"from it; if the head was trained, set {checkpoint.config_prefix}tie_word_embeddings to false."
        )


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor))


def _read_checked(
    checkpoint: Checkpoint, name: str, parameter: Tensor, dtype: torch.dtype | None, device: str
) -> Tensor:
    """Read a parameter's tensor. Raises CheckpointError if it is missing or of another shape."""
    tensor = read_tensor(checkpoint, name, dtype, device)
    _check_shape(checkpoint, name, tensor.shape, parameter)
    return tensor


def _check_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], parameter: Tensor) -> None:
    if tuple(shape) != tuple(parameter.shape):
        raise CheckpointError(
            f"{checkpoint.path}: the tensor {checkpoint.name_in_files(name)} has shape {tuple(shape)}, but config.json "
            f"implies {tuple(parameter.shape)}; they do not match."
        )


def read_tensor(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype | None, device: str = "cpu", scalar: bool = False
) -> Tensor:
    """Read a whole tensor. Raises CheckpointError as `check_readable` does."""
    shape = check_readable(checkpoint, name, scalar).shape
    n_rows = shape[0] if shape else 1
    # A view of a mapped file would not be writable, so it could not be trained.
    rows = np.require(checkpoint.rows(name, 0, n_rows), requirements=["C", "W"])
    if rows.dtype.name == "bfloat16":  # numpy and torch have separate bfloat16 types with the same bits
        tensor = torch.from_numpy(rows.view(np.uint16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(rows)
    return tensor.view(shape).to(device=device, dtype=dtype)
