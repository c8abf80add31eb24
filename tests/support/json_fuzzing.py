"""JSON values thrown at what reads JSON files."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 8, -1, 10**4, 10**9, 10**12, 10**30, -(10**30), 10**400, -0.0, 0.5, 1.0, -1.5,
    1e30, 1e308, float("nan"), float("inf"), float("-inf"), "", "x", "8", "default", "yarn", "\n", "\0", "../x",
    "x" * 3000,
    [], [1], [0, 1], ["x"], [None], [[]], [True] * 4, {}, {"x": 1}, {"": {"": []}}, {"rope_type": "yarn", "factor": 2},
    {"rope_type": "linear", "factor": 0}, {"type": "dynamic", "factor": 1e300}, {"rope_theta": [], "x": None},
]  # fmt: skip
REMOVED = "removed"
RANDOM_PER_KEY = 5
"""With all values, 53 edits of each key. No number of readers divides a prime, so readers and values vary together."""
Edit = Callable[[Any], None]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    """Return a value of any JSON type, nested up to three deep."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 3:
        return rng.choice(VALUES)
    if kind < 6:
        scale = 10.0 ** rng.randint(-8, 40)
        return rng.choice([rng.randint(-3, 70), int(rng.uniform(-1, 1) * scale), rng.uniform(-1, 1) * scale])
    inside = [random_value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return inside if kind == 6 else {rng.choice(["x", "factor", "rope_type", "0"]): value for value in inside}


def edits(keys: list[tuple[str, ...]], n: int | None, seed: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield places in a JSON file and what to put there: `n` at random, or all values and some random ones."""
    rng = random.Random(seed)
    if n is not None:
        for _ in range(n):
            yield rng.choice(keys), rng.choice([REMOVED, random_value(rng), rng.choice(VALUES)])
        return
    for key in keys:
        for value in (REMOVED, *VALUES):
            yield key, value
        for _ in range(RANDOM_PER_KEY):
            yield key, random_value(rng)


def put(parsed: Any, place: tuple[str, ...], value: Any) -> Any:
    """Return a JSON value with another one put at a place; the empty place is all of it."""
    if not place:
        return None if value is REMOVED else value
    *path, last = place
    inside = parsed
    for name in path:
        if not isinstance(inside.get(name), dict):
            inside[name] = {}
        inside = inside[name]
    inside.pop(last, None) if value is REMOVED else inside.update({last: value})
    return parsed


def throw(
    path: Path,
    places: list[tuple[str, ...]],
    n: int | None,
    seed: int,
    checks: list[Callable[[], object]],
    turn: int = 0,
) -> int:
    """Write each edit of a JSON file, and let one of the checks read it, in turn.

    `turn` is whose it is first. Then put the file back. Return how many edits there were.
    """
    before, count = path.read_bytes(), 0
    try:
        for place, value in edits(places, n, seed):
            path.write_text(json.dumps(put(json.loads(before), place, value)))
            try:
                checks[(turn + count) % len(checks)]()
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{path.name} with {place} = {value!r:.200}") from error
            count += 1
    finally:
        path.write_bytes(before)
    return count


def accepted(result: Any, codes: tuple[int, ...] = (0, 2)) -> bool:
    """Check that a command ended as it should; say whether it did its work."""
    assert result.code in codes, (result.code, result.err)
    if result.code:
        assert result.err.startswith("Error: "), result.err
        assert result.err.count("\n") == 1, result.err
        assert not result.out
    return not result.code


def amounts(quick: int) -> pytest.MarkDecorator:
    """Run a test with `n` edits of each file, and a slow one with all values at all keys: up to 3 minutes."""
    everything = pytest.param(None, marks=[pytest.mark.slow, pytest.mark.timeout(900)], id="all")
    return pytest.mark.parametrize("n", [quick, everything])
