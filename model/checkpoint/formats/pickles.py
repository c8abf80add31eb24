"""Refuse a pickle that would take far more memory or time to load than its size suggests.

A restricted unpickler runs no code, but obeys numbers: an index of the memo, the size of a bytearray, and tuples of
tuples that are named twice at each level, whose hash takes time that is exponential in their depth.
"""

import pickletools

MAX_PARTS = 10_000
"""Maximum number of parts of a tuple, those of its own tuples included. torch's have some thirty."""
_STORES, _FETCHES = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")
_HASHABLE = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
_UNHASHABLE = frozenset((
    "LIST", "EMPTY_LIST", "APPEND", "APPENDS", "DICT", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS",
))  # fmt: skip
"""Operations whose object counts as one part: a hash does not look into it."""


def _kind(code: pickletools.OpcodeInfo) -> str:
    """Return which branch of `check_pickle` an operation takes."""
    if code.name in ("MARK", "BYTEARRAY8", "GLOBAL"):
        return code.name
    if code.name in _STORES or code.name in _FETCHES:
        return "store" if code.name in _STORES else "fetch"
    return "make" if code.stack_before else "value"


_KINDS = {code.name: _kind(code) for code in pickletools.opcodes}
_EFFECTS = {
    code.name: (
        len(code.stack_before),
        code.stack_before.index(pickletools.markobject) if pickletools.markobject in code.stack_before else None,
        len(code.stack_after),
    )
    for code in pickletools.opcodes
}
"""For each operation, how many objects it takes, how many of them are below the mark (None: no mark), and how many it
makes."""


def check_pickle(content: bytes) -> None:
    """Raise ValueError for a pickle that is cut off before its end, or takes more than its length justifies.

    Bytearrays are refused, and `_codecs.encode`, whose time may be quadratic: no file that is read here needs them.
    """
    # The unpickler's stack, with the number of parts of each object in place of the object.
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for code, argument, _ in pickletools.genops(content):
        kind = _KINDS[code.name]
        if kind == "value":
            stack += [1] * len(code.stack_after)
        elif kind == "store":
            index = len(memo) if argument is None else int(str(argument))
            if index > len(content) or not stack:
                raise ValueError(f"it stores an object at {index} after {len(memo)} in {len(content):,} bytes")
            memo[index] = stack[-1]
        elif kind == "fetch":
            stack.append(memo.get(int(str(argument)), 1))
        elif kind == "make":
            _make(code.name, stack, marks)
        elif kind == "MARK":
            marks.append(len(stack))
        elif kind == "BYTEARRAY8" or str(argument).endswith(" bytearray"):
            raise ValueError("it holds a bytearray")
        elif argument == "_codecs encode":
            raise ValueError("it holds bytes or a numpy array, and not only tensors")
        else:
            stack.append(1)


def _make(name: str, stack: list[int], marks: list[int]) -> None:
    """Replace what an operation takes from the stack by what it makes."""
    n, below_mark, n_made = _EFFECTS[name]
    if below_mark is not None:
        if not marks:
            raise ValueError("it ends a list that has not begun")
        n = len(stack) - marks.pop() + below_mark
    if n > len(stack):
        raise ValueError("it takes more objects than there are")
    first = len(stack) - n
    n_parts = 1 if name in _UNHASHABLE else 1 + sum(stack[first:])
    if n_parts > MAX_PARTS:
        if name in _HASHABLE:
            raise ValueError(f"it holds a tuple of more than {MAX_PARTS:,} parts")
        n_parts = MAX_PARTS
    stack[first:] = [n_parts] * n_made
