"""Convert a share α of the original pre-training to optimizer steps and tokens (Ainslie et al. 2023, section 2.1).

    steps = ceil(α · original tokens / global batch tokens)

The result is exact. With the original's global batch it is α of the original steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from model.common.checks import MAX_COUNT
from model.common.counts import format_count
from model.common.errors import InputError
from uptrain.budget.conversion_record import conversion_method
from uptrain.budget.identify import check_shape, find_original, known_originals
from uptrain.budget.methods import peak_divisor
from uptrain.budget.pretraining import PretrainingRecord
from uptrain.training.learning_rate import Schedule, default_warmup

FEW_STEPS = 50
"""Fewer are mostly warm-up and decay."""
MAX_EPOCHS = 100
"""A run reads its data at most so often, unless --steps was given. Up to four times cost little (docs/training.md)."""
FIRST_RUN_TOKENS, FIRST_RUN_BATCH_TOKENS = 50 * 10**6, 2**17
"""Length and global batch of a first run (docs/training.md, "The budget: α"), about 400 steps."""


@dataclass(frozen=True)
class BudgetOptions:
    """Options of the budget as given; None means not given. Exactly one of `alpha`, `tokens` and `steps` is given."""

    alpha: float | None = None
    tokens: int | None = None
    steps: int | None = None
    original_tokens: int | None = None
    original: str | None = None
    global_batch_tokens: int | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("alpha", "tokens", "steps") if getattr(self, name) is not None]
        if len(given) != 1:
            listed = " and ".join(f"--{name}" for name in given) or "none"
            raise InputError(
                f"give exactly one of --alpha, --tokens and --steps, for example --alpha 0.0025; given: {listed}."
            )
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise InputError(f"--alpha {self.alpha}: it is a share of the original pre-training; 0.05 means 5 %.")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"--lr {self.lr}: the peak learning rate must be above 0.")


@dataclass(frozen=True)
class Budget:
    """Length and peak learning rate of a training, as run.json holds them."""

    steps: int
    """Optimizer steps."""
    global_batch_tokens: int
    """Tokens of one optimizer step, over all processes."""
    peak_lr: float
    alpha: float | None
    """Share of the original pre-training, as requested or computed from the tokens; None if unknown."""
    original_tokens: int | None
    original: str | None
    """Name of the known original that supplies the options not given."""
    tokens: int
    """Tokens of all steps."""

    @property
    def original_steps(self) -> int | None:
        """Length of the original pre-training in optimizer steps of this run's global batch, rounded."""
        return None if self.original_tokens is None else round(self.original_tokens / self.global_batch_tokens)

    def schedule(self, kind: str, warmup_steps: int | None, from_scratch: bool = False) -> Schedule:
        """Return the learning rate schedule, by default with the default warm-up.

        Raises InputError for a schedule that continues the original pre-training, if its length is unknown.
        """
        if kind == "inverse-sqrt" and self.original_tokens is None and not from_scratch:
            raise InputError(
                "--schedule inverse-sqrt continues the original pre-training, whose length is unknown; give "
                "--original-tokens, or choose another schedule."
            )
        warmup = default_warmup(self.steps) if warmup_steps is None else warmup_steps
        original_steps = 0 if from_scratch else self.original_steps or 0
        return Schedule(kind, self.peak_lr, self.steps, warmup, original_steps=original_steps)


def make_budget(
    options: BudgetOptions,
    config: Mapping[str, Any],
    source_names: Sequence[str],
    seq_len: int,
    method: str | None,
    trainable: str,
) -> Budget:
    """Return the budget for a model with this `config.json`, of which the part `trainable` is trained.

    `source_names`, and the `method` of its conversion: see `uptrain.budget.conversion_record`.

    Raises InputError with every option that would help if the original is unknown or ambiguous, and for an original of
    another shape.
    """
    name = options.original
    if name is not None:
        check_shape(config, name)
    candidates = known_originals(config, source_names) if name is None else (find_original(name),)
    original = candidates[0] if len(candidates) == 1 else None
    if original is None:
        divisor = peak_divisor(method, trainable)
        # a run from random weights has no config.json here, and no parent to stay close to
        first_run = _first_run(options, seq_len, divisor) if config else ""
        _check_complete(options, candidates, divisor, first_run)
    original_tokens = options.original_tokens or (original.tokens if original else None)
    batch = options.global_batch_tokens or (original.batch_tokens if original else 0)
    _check_batch(batch, seq_len)
    steps = steps_of(options, original_tokens, batch)
    alpha = options.alpha
    if alpha is None and original_tokens is not None:
        alpha = steps * batch / original_tokens
    peak = options.lr or default_peak_lr(original.peak_lr if original else math.nan, peak_divisor(method, trainable))
    return Budget(steps, batch, peak, alpha, original_tokens, original.name if original else None, steps * batch)


def steps_of(options: BudgetOptions, original_tokens: int | None, batch: int) -> int:
    """Return the optimizer steps of a training whose steps have `batch` tokens. α needs the original's tokens.

    Raises InputError if their tokens are out of range.
    """
    if options.steps is not None:
        steps = options.steps
    elif options.tokens is not None:
        steps = -(-options.tokens // batch)
    else:
        assert options.alpha is not None and original_tokens is not None
        # From its decimal digits: the binary 0.05 exceeds 1/20, and would add a step if α gives a whole number.
        steps = math.ceil(Fraction(str(options.alpha)) * original_tokens / batch)
    if steps * batch > MAX_COUNT:
        raise InputError(
            f"{steps:,} steps of {batch:,} tokens are more than {MAX_COUNT:,} tokens, which is out of range; give "
            "fewer --steps or --tokens, or a smaller --global-batch-tokens."
        )
    return steps


def default_trainable(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the default of `--trainable`: `attention` if Groupwise converted the attention, else `all`.

    `attention` for any language model inside a wrapper, and `all` if the names of the model's attention are not known.
    """
    # imports numpy, which the command line does not need to start
    from model.language_model import wrapper_of
    from uptrain.models.trainable_parts import knows_attention

    is_part = wrapper_of(config) is not None or conversion_method(folder) is not None
    return "attention" if knows_attention(config) and is_part else "all"


def check_repetition(
    options: BudgetOptions, steps: int, epochs: float, advice: str = "prepare more tokens, or train for less"
) -> None:
    """Raise InputError if the data are read more than MAX_EPOCHS times, unless the number of steps was chosen."""
    if epochs > MAX_EPOCHS and options.steps is None:
        raise InputError(
            f"the data would be read {math.ceil(epochs):,} times, and more than {MAX_EPOCHS} are refused; {advice}. If "
            f"this is meant, give --steps {steps} in place of --{'alpha' if options.tokens is None else 'tokens'}."
        )


def repetition_warning(epochs: float) -> str | None:
    """Return a warning if the data are read more than once."""
    if epochs <= 1:
        return None
    times = f"{epochs:.2f}" if epochs <= MAX_EPOCHS else f"{epochs:,.0f}"
    return f"the data are read {times} times; prepare more tokens to see each only once."


def evaluation_warning(evaluated: int, trained: int) -> str | None:
    """Return a warning if all evaluations of a run read more than a fifth of the tokens that it trains on."""
    if 5 * evaluated <= trained:
        return None
    return (
        f"the evaluations read {evaluated:,} held-out tokens in all, and the training {trained:,}; a larger "
        "--eval-every or less --eval-data reduces them."
    )


def few_steps_warning(options: BudgetOptions, budget: Budget) -> str | None:
    """Return a warning if the original's batch leaves few steps."""
    if options.global_batch_tokens is not None or options.steps is not None or budget.steps >= FEW_STEPS:
        return None
    return (
        f"the original's batch of {budget.global_batch_tokens:,} tokens leaves {budget.steps} steps; for a short run, "
        "give a smaller --global-batch-tokens."
    )


def check_default_lr(options: BudgetOptions, optimizer: str) -> None:
    """Raise InputError if no learning rate is given and the default one is not meant for the optimizer."""
    if optimizer == "adafactor" and options.lr is None:
        raise InputError(
            "--optimizer adafactor needs --lr: it multiplies the rate by the root mean square of each matrix, and the "
            "default rates are AdamW's."
        )


def default_peak_lr(original_peak: float, divisor: int) -> float:
    """Return the default peak learning rate, as a decimal fraction rounded once."""
    return float(Fraction(str(original_peak)) / divisor)


def _first_run(options: BudgetOptions, seq_len: int, divisor: int) -> str:
    """Return a sentence with values, for a first run, of the options that are not given."""
    replaces_alpha = options.alpha is not None and options.original_tokens is None
    batch = FIRST_RUN_BATCH_TOKENS
    if options.steps is None and not replaces_alpha:
        n_tokens = options.tokens or int((options.alpha or 0) * (options.original_tokens or 0))
        batch = min(batch, n_tokens // FEW_STEPS)
    # A power of two, so that the windows of a step can be divided among the GPUs of a machine.
    n_windows = 1 << max(0, (batch // seq_len).bit_length() - 1)
    words = [f"--tokens {FIRST_RUN_TOKENS // 10**6}M"] if replaces_alpha else []
    words += [f"--global-batch-tokens {n_windows * seq_len}"] if options.global_batch_tokens is None else []
    rate = "5e-5" if divisor <= 6 else "2e-5"  # a sixth and a fifteenth of 3e-4, a usual peak of pre-trainings
    words += [f"--lr {rate}"] if options.lr is None else []
    replaced = f"replace --alpha {options.alpha:g} by" if replaces_alpha else "add"
    return f" To begin without knowing them, {replaced} {' '.join(words)}."


def _check_complete(
    options: BudgetOptions, candidates: Sequence[PretrainingRecord], divisor: int, first_run: str
) -> None:
    """Raise InputError if options are missing that only a single original could supply.

    `first_run`: a sentence with options to begin with, if there is no original of the model's shape.
    """
    missing = []
    if options.alpha is not None and options.original_tokens is None:
        missing.append(
            "--original-tokens (how many tokens it was pre-trained on, e.g. 2T; not needed with --tokens N "
            "or --steps N in place of --alpha)"
        )
    if options.global_batch_tokens is None:
        missing.append("--global-batch-tokens (tokens of one optimizer step, e.g. 4194304)")
    if options.lr is None:
        missing.append(f"--lr (peak learning rate; 1/{divisor} of the pre-training's is usual)")
    if not missing:
        return
    if candidates:
        rows = ", ".join(f"{o.name} ({format_count(o.tokens)} tokens)" for o in candidates)
        raise InputError(
            f"the model's shape is that of {rows}; say which with --original NAME, or give {', '.join(missing)}."
        )
    raise InputError(
        f"the model's pre-training is not in the table of known originals; give {', '.join(missing)}, "
        f"or name a known one with --original NAME (an unknown NAME lists them).{first_run}"
    )


def _check_batch(batch: int, seq_len: int) -> None:
    if batch % seq_len:
        below = batch // seq_len * seq_len
        choices = f"{below} or {below + seq_len}" if below else str(seq_len)
        raise InputError(
            f"a global batch of {batch} tokens is not a whole number of windows of {seq_len} tokens; "
            f"choose --global-batch-tokens {choices}, or a shorter --seq-len."
        )
