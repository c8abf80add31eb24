"""Share frozen parameters of the student with a teacher that has the same: both then hold them once."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model.checkpoint.same_bytes import same_bytes
from model.decoder.llama import RMSNorm
from model.decoder.loading import LanguageModel
from model.decoder.transformers_model import HF_PREFIX
from model.language_model import open_language_model
from uptrain.models.casting_layers import AutocastExperts, FrozenEmbedding, FrozenLinear, make_cast_at_use
from uptrain.models.stored_names import frozen_names, stored_names

ParameterOwners = dict[str, tuple[nn.Module, str]]
"""Places of parameters: name → module, and its attribute."""


def equal_tensors(model: Path, trainable: str, teacher: Path) -> list[str]:
    """Return the names of the frozen parameters of `model` whose tensors have the same bytes in both folders."""
    ours, theirs = frozen_names(model, trainable), stored_names(teacher)
    with open_language_model(model) as first, open_language_model(teacher) as second:
        return [
            name
            for name in ours
            if ours[name]
            and len(ours[name]) == len(theirs.get(name, ()))
            and all(same_bytes(first, a, second, b) for a, b in zip(ours[name], theirs[name], strict=True))
        ]


def shareable(student: LanguageModel, names: Iterable[str], teacher_dtype: torch.dtype) -> ParameterOwners:
    """Return where the student has those of its frozen parameters that a teacher can use with the same result.

    Linear layers, experts and embeddings qualify, because they cast their weights where they use them. A norm qualifies
    only if the teacher's own dtype, `teacher_dtype`, is at least as wide.
    """
    wanted, chosen = set(names), {}
    for module_name, module in student.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            name = f"{module_name}.{key}".removeprefix(HF_PREFIX)
            widened = torch.promote_types(parameter.dtype, teacher_dtype) == teacher_dtype
            rounds = isinstance(module, FrozenLinear | FrozenEmbedding | AutocastExperts)
            if name in wanted and (rounds or (isinstance(module, RMSNorm) and widened)):
                chosen[name] = (module, key)
    return chosen


def share(owners: ParameterOwners, teacher: LanguageModel, teacher_dtype: torch.dtype) -> int:
    """Replace a teacher's parameters by the student's of the same names; return the bytes that both then share."""
    names = {id(parameter): name.removeprefix(HF_PREFIX) for name, parameter in teacher.named_parameters()}
    shared: dict[str, int] = {}
    for module in teacher.modules():
        own = {key: names[id(parameter)] for key, parameter in module.named_parameters(recurse=False)}
        own = {key: name for key, name in own.items() if name in owners}
        if own and make_cast_at_use(module, teacher_dtype):
            _use_parameters_of(module, {key: owners[name] for key, name in own.items()})
            shared |= {name: getattr(*owners[name]).nbytes for name in own.values()}
    return sum(shared.values())


class _UsesParametersOf(nn.Module):
    """A module of the teacher that uses parameters of the student's modules.

    FSDP2 replaces a module's parameters whenever it gathers or shards them, so they are looked up at each use.
    """

    owners: ParameterOwners
    """Module and attribute of each shared parameter."""

    def __getattr__(self, name: str) -> Any:
        owner = self.__dict__["owners"].get(name)
        return getattr(*owner) if owner else super().__getattr__(name)


class _SharedLinear(_UsesParametersOf, FrozenLinear):
    pass


class _SharedEmbedding(_UsesParametersOf, FrozenEmbedding):
    pass


class _SharedNorm(_UsesParametersOf, RMSNorm):
    pass


@cache
def _sharing_experts(experts: type[AutocastExperts]) -> Any:
    return type(f"Shared{experts.__name__}", (_UsesParametersOf, experts), {})


def _use_parameters_of(module: nn.Module, owners: ParameterOwners) -> None:
    """Remove parameters of a module, and let it use those of others."""
    for key in owners:
        delattr(module, key)
    classes = {FrozenLinear: _SharedLinear, FrozenEmbedding: _SharedEmbedding, RMSNorm: _SharedNorm}
    own: Any = type(module)
    module.__class__ = _sharing_experts(own) if isinstance(module, AutocastExperts) else classes[own]
    assert isinstance(module, _UsesParametersOf)
    module.owners = owners


def owner_layers(layer: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of the student's `layers` whose parameters a layer of the teacher uses."""
    users = (module for module in layer.modules() if isinstance(module, _UsesParametersOf))
    owners = {owner for user in users for owner, _ in user.owners.values()}
    return [each for each in layers if not owners.isdisjoint(each.modules())]
