"""Map the names of a model in memory to those in its folder's files: whole tables, frozen and always-float32 ones."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from model.checkpoint.tensor import is_buffer, layer_number
from model.decoder import loading
from model.decoder.config import is_native
from model.decoder.transformers_classes import build_hf_model
from model.decoder.transformers_model import HF_PREFIX
from model.language_model import open_language_model, read_language_config
from uptrain.models.frozen_parameters import always_float32_names
from uptrain.models.load import build_meta_from_config
from uptrain.models.trainable_parts import part_pattern


def stored_names(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return a table, name in a training checkpoint → names in the folder's files, of parameters and stored buffers.

    Most have one name. transformers holds some tensors under other names, such as routers and GPT-NeoX's LM head, and
    joins the experts of a layer: a parameter of experts has the names of all tensors of its layer that no other has.
    """
    shapes, prefix = tensor_shapes(folder)
    with open_language_model(folder) as checkpoint:
        tensors = checkpoint.tensors
        if is_native(checkpoint.config):
            return {name: (stored,) for name, stored in loading.build_meta(checkpoint)[1].items()}
    alone = {name: stored for name in shapes for stored in (name, name.removeprefix(prefix)) if stored in tensors}
    others = sorted(name for name in tensors.keys() - alone.values() if not is_buffer(tensors[name]))
    renamed = {name: shape for name, shape in shapes.items() if name not in alone}
    alone |= _only_ones_of_their_shape(renamed, {name: tensors[name].shape for name in others})
    experts = [name for name in others if name not in alone.values()]
    return {name: (alone[name],) if name in alone else _in_same_layer(name, experts) for name in shapes}


def _only_ones_of_their_shape(
    wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Return a table, name → stored name, of those for which their layer stores exactly one tensor of their shape."""
    table = {}
    for name, shape in wanted.items():
        alike = [each for each in _in_same_layer(name, stored) if stored[each] == shape]
        if len(alike) == 1:
            table[name] = alike[0]
    return table


def _in_same_layer(name: str, others: Collection[str]) -> tuple[str, ...]:
    """Return those of the `others` that are in the layer of `name`, or outside all layers like it."""
    return tuple(each for each in others if layer_number(each) == layer_number(name))


def frozen_names(folder: Path, trainable: str) -> dict[str, tuple[str, ...]]:
    """Return the entries of `stored_names` that are not trained."""
    pattern = part_pattern(trainable, read_language_config(folder))
    return {name: stored for name, stored in stored_names(folder).items() if not pattern.search(name)}


def stored_always_float32_names(folder: Path) -> frozenset[str]:
    """Return the names in the files of a folder, not of a native model, of parameters that are always float32.

    Their modules in transformers cannot cast them, even if they are frozen: norms, scaled embeddings, and routers.
    """
    names, stored = always_float32_names(build_meta_from_config(folder)), stored_names(folder)
    return frozenset(file_name for name in names for file_name in stored[name.removeprefix(HF_PREFIX)])


def tensor_shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return a table, name in memory → shape, of parameters and stored buffers, and the prefix that files may omit.

    Both are empty for native models, whose names are those of the files.
    """
    config = read_language_config(folder)
    if is_native(config):
        return {}, ""
    with torch.device("meta"):
        model = build_hf_model(folder, torch.float32)
    stored = model.state_dict().keys()  # with both names of a tied tensor, of which the files hold one
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
    shapes = {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *buffers)}
    return shapes, f"{model.base_model_prefix}."
