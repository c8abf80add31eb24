"""Check a pickle before it is read: that the memory and time it takes are in proportion to its length.

A restricted unpickler runs no code, but obeys numbers: an index of the memo, the size of a bytearray, and tuples of
tuples that are named twice at each level, whose hash takes time that is exponential in their depth.
"""

import pickletools

MAX_PARTS = 10_000
"""Maximum number of parts of a tuple, those of its own tuples included. torch's have some thirty."""
_STORES, _FETCHES = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
_HASHABLE = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
_UNHASHABLE = (
    "LIST", "EMPTY_LIST", "APPEND", "APPENDS", "DICT", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS",
)  # fmt: skip
"""Operations whose object counts as one part: a hash does not look into it."""


def check_pickle(content: bytes) -> None:
    """Raise ValueError for a pickle that is cut off before its end, or takes more than its length justifies.

    Bytearrays are refused: no file that is read here needs one.
    """
    # The unpickler's stack, with the number of parts of each object in place of the object.
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    for code, argument, _ in pickletools.genops(content):
        name = code.name
        if not code.stack_before and code.stack_after and name not in _FETCHES:  # a plain value, as most are
            if name == "MARK":
                marks.append(len(stack))
                continue
            if name == "BYTEARRAY8" or (name == "GLOBAL" and str(argument).endswith(" bytearray")):
                raise ValueError("it holds a bytearray")
            stack.append(1)
        elif name in _FETCHES:
            stack.append(memo.get(int(str(argument)), 1))
        elif name in _STORES or name == "MEMOIZE":
            index = len(memo) if name == "MEMOIZE" else int(str(argument))
            if index > len(content) or not stack:
                raise ValueError(f"it stores an object at {index} after {len(memo)} in {len(content):,} bytes")
            memo[index] = stack[-1]
        else:
            _make(code, stack, marks)


def _make(code: pickletools.OpcodeInfo, stack: list[int], marks: list[int]) -> None:
    """Replace what an operation takes from the stack by what it makes."""
    n = len(code.stack_before)
    if pickletools.markobject in code.stack_before:
        if not marks:
            raise ValueError("it ends a list that has not begun")
        n = len(stack) - marks.pop() + code.stack_before.index(pickletools.markobject)
    if n > len(stack):
        raise ValueError("it takes more objects than there are")
    first = len(stack) - n
    n_parts = 1 if code.name in _UNHASHABLE else 1 + sum(stack[first:])
    if code.name in _HASHABLE and n_parts > MAX_PARTS:
        raise ValueError(f"it holds a tuple of more than {MAX_PARTS:,} parts")
    stack[first:] = [min(n_parts, MAX_PARTS)] * len(code.stack_after)
