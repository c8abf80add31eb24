"""What the tensors with K/V heads become when the number of heads changes: which rows are merged, which are copied."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from convert.merge import Merge
from model.checkpoint import Tensor
from model.config import Geometry
from model.layout import Heads


@dataclass(frozen=True)
class Rows:
    """Rows of an output's tensor that stand in the source as they are."""

    row: int
    """The first, in the output's tensor."""
    source: str
    source_row: int
    n: int


@dataclass(frozen=True)
class Regrouped:
    """A tensor of the output, whose heads are not the source's; each of its rows is copied or merged."""

    tensor: Tensor
    copies: tuple[Rows, ...]
    merges: tuple[Merge, ...]


def regroup(geometry: Geometry, tensors: Mapping[str, Tensor], n_kv_heads: int) -> dict[str, Regrouped]:
    """Return all tensors of the output that hold K/V heads, by name; `tensors` are the source's.

    With fewer heads than before, each group of neighbours is merged; with more, each head is repeated.
    """
    before, after = (geometry.attention.heads(n) for n in (geometry.n_kv_heads, n_kv_heads))
    found: dict[str, list[tuple[Heads, Heads]]] = defaultdict(list)
    for source, output in zip(before, after, strict=True):
        for name in output.tensors:
            found[name].append((source, output))
    return {name: _regrouped(name, pairs, tensors) for name, pairs in found.items()}


def _regrouped(name: str, pairs: list[tuple[Heads, Heads]], tensors: Mapping[str, Tensor]) -> Regrouped:
    copies: list[Rows] = []
    merges: list[Merge] = []
    n_rows = 0
    for source, output in pairs:
        heads = tuple(head for head in range(output.n) if output.place(head)[0] == name)
        n_rows += len(heads) * output.rows_per_head
        if output.n < source.n:
            merges.append(Merge(name, source, output, heads))
        else:
            copies += _copies(source, output, heads)
    like = tensors[pairs[0][0].tensors[0]]
    tensor = replace(like, name=name, shape=(n_rows, *like.shape[1:]))
    return Regrouped(tensor, tuple(_joined(copies)), tuple(merges))


def _copies(source: Heads, output: Heads, heads: Iterable[int]) -> Iterable[Rows]:
    times = output.n // source.n
    for head in heads:
        name, source_row = source.place(head // times)
        yield Rows(output.place(head)[1], name, source_row, output.rows_per_head)


def _joined(copies: list[Rows]) -> list[Rows]:
    """Return the same with neighbours as one, so that a fused projection's queries are few pieces."""
    joined: list[Rows] = []
    for rows in copies:
        last = joined[-1] if joined else None
        follows = last and (last.row + last.n, last.source, last.source_row + last.n)
        if last and follows == (rows.row, rows.source, rows.source_row):
            joined[-1] = replace(last, n=last.n + rows.n)
        else:
            joined.append(rows)
    return joined
