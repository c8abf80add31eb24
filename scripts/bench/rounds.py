"""Measure several ways in turns, so that a slow moment of the machine affects all of them."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1) -> list[dict[str, T]]:
    """Call each way once in each round; return by round what each way returned. Rounds of the warm-up are left out.

    The order is random, and reversed in every second round: in a fixed order, each way would always follow the same
    one.
    """
    results = []
    for turn in range(warm_up + rounds):
        order = list(ways)
        random.Random(turn // 2).shuffle(order)
        returned = {name: ways[name]() for name in (reversed(order) if turn % 2 else order)}
        if turn >= warm_up:
            results.append(returned)
    return results


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each way over rounds that have the same ways."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def median_ratio(rounds: list[dict[str, float]], way: str, base: str) -> float:
    """Return the median of the ratios within the rounds, of a way ÷ another."""
    return statistics.median(each[way] / each[base] for each in rounds)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
