"""Write JSON as Hugging Face formats it. Read back what the program wrote itself, and check every key and every type.

Types are Python's: str, int, float (a finite one, or a whole number), bool, None, tuple[…, ...] for a list,
dict[str, …], dataclasses, and unions of these. A boolean is not a number.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from model.common.checks import MAX_COUNT, is_finite, short_repr
from model.common.errors import InputError
from model.files.read import parse_json

T = TypeVar("T")


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON in the formatting of Hugging Face's files."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Raises InputError if the text is not one."""
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise InputError(f"not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InputError(f"{short_repr(parsed)} where a JSON object is expected")
    return parsed


def make(kind: type[T], values: Mapping[str, Any], name: str = "") -> T:
    """Build a dataclass from an object, which messages call `name`. Raises InputError for a missing or wrong key."""
    by_name = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := values.keys() - by_name.keys():
        raise InputError(f"the unknown key {short_repr(_join(name, min(unknown)))}")
    required = [n for n, f in by_name.items() if f.default is MISSING and f.default_factory is MISSING]
    types = {key: hint for key, hint in get_type_hints(kind).items() if key in values or key in required}
    return kind(**check_types(values, types, name))


def check_types(values: Mapping[str, Any], types: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Return the values of the keys in `types`. Raises InputError if one is missing or of another type."""
    checked = {}
    for key, wanted in types.items():
        if key not in values:
            raise InputError(f"no {_join(name, key)}")
        checked[key] = _fit(values[key], wanted, _join(name, key))
    return checked


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _fit(value: Any, wanted: Any, name: str) -> Any:
    """Return a value converted to a type. Raises InputError if it does not fit."""
    origin, inner = get_origin(wanted), get_args(wanted)
    for option in inner if origin in (Union, UnionType) else (wanted,):
        if _is(value, option):
            return _convert(value, option, name)
    raise InputError(f"{name} = {short_repr(value)}, which is not {_in_words(wanted)}")


def _is(value: Any, wanted: Any) -> bool:
    """Return whether a value is of a type, regardless of its elements."""
    if wanted is float:
        return is_finite(value)
    if wanted is int:
        return type(value) is int and abs(value) <= MAX_COUNT
    if is_dataclass(wanted):
        return isinstance(value, dict)
    kind = get_origin(wanted) or wanted
    return kind is Any or type(value) is (list if kind is tuple else kind)


def _convert(value: Any, wanted: Any, name: str) -> Any:
    inner = get_args(wanted)
    if wanted is float:
        return float(value)
    if is_dataclass(wanted):
        return make(wanted, value, name)  # type: ignore[arg-type]
    if get_origin(wanted) is tuple:
        return tuple(_fit(part, inner[0], f"{name}[{i}]") for i, part in enumerate(value))
    if get_origin(wanted) is dict:
        return {key: _fit(part, inner[1], _join(name, key)) for key, part in value.items()}
    return value


_WORDS = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false", NoneType: "null"}


def _in_words(wanted: Any) -> str:
    origin = get_origin(wanted)
    if origin in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(wanted)))
    return "a list" if origin is tuple else _WORDS.get(wanted, "an object")
