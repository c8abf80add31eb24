"""Say what to expect of a model by the method of its conversion: the first loss, and the default learning rate."""

from collections.abc import Mapping
from dataclasses import dataclass

from uptrain.models.trainable_choices import TRAINABLE

PEAK_DIVISOR = 3
"""Divisor of the original's peak learning rate for the default peak, as in MHA2MLA and Sheared-LLaMA for Llama 2."""
_THIRD = dict.fromkeys(TRAINABLE, PEAK_DIVISOR)


@dataclass(frozen=True)
class MethodFacts:
    """What the training of a model depends on, by the method of its conversion."""

    first_loss: str
    """What to expect of the loss before training."""
    peak_divisors: Mapping[str, int]
    """The divisor of the original's peak learning rate, by choice of `--trainable`."""


_BY_WEIGHTS = MethodFacts(
    "above the parent's; in docs/study.md, it is below that of the mean, except by the weights alone on SmolLM2", _THIRD
)
# A model fitted to its parent is so close to it that a third can do harm (docs/study.md, "Which parameters to train";
# docs/study/latent.md, "Results"). For latent attention only `attention` was measured.
METHODS: dict[str, MethodFacts] = {
    "mean": MethodFacts(
        "far above the parent's, since heads were averaged that do not point in the same directions", _THIRD
    ),
    "first": MethodFacts("far above the parent's, since most heads were left out", _THIRD),
    "random": MethodFacts("far above the parent's, since the K/V heads are random", _THIRD),
    "aligned": _BY_WEIGHTS,
    "pca": _BY_WEIGHTS,
    "fit": MethodFacts(
        "above the parent's; in docs/study.md, the default merge adds 1 to 15 % of the loss that the mean adds",
        {"all": 15, "attention": 6, "kv": 3, "lora": 3},
    ),
    "latent": MethodFacts(
        "above the parent's; docs/latent.md has figures of other models", dict.fromkeys(TRAINABLE, 15)
    ),
}
"""By the name in `groupwise.json`, every method that changes the attention. Repeated heads do not change it."""


def find_facts(method: str | None) -> MethodFacts | None:
    """Return the facts of a method; None for a model that was not converted, or by a method of a later version."""
    return None if method is None else METHODS.get(method)


def peak_divisor(method: str | None, trainable: str) -> int:
    """Return the divisor of the original's peak learning rate that gives the default peak."""
    facts = find_facts(method)
    return facts.peak_divisors[trainable] if facts else PEAK_DIVISOR
