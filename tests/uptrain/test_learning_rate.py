"""Every schedule at every step, against its closed form written a second time."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.common.errors import InputError
from uptrain.training.learning_rate import SCHEDULES, Schedule, decay_start, default_warmup, learning_rate

PEAK, STEPS, WARMUP, ORIGINAL = 3e-4, 1000, 50, 1_000_000


def expected(kind: str, step: int) -> float:
    """The closed forms for 1,000 steps with 50 of warm-up: decay from 800 for wsd."""
    if step < 50:
        ramp = PEAK * (step + 1) / 50
        return ramp * (1e6 / (1e6 + step)) ** 0.5 if kind == "inverse-sqrt" else ramp
    if kind == "wsd":
        return PEAK if step < 800 else PEAK * (1 - ((step - 800) / 200) ** 0.5)
    if kind == "cosine":
        return PEAK * (0.55 + 0.45 * math.cos(math.pi * (step - 50) / 950))
    if kind == "inverse-sqrt":
        return PEAK * (1e6 / (1e6 + step)) ** 0.5
    return PEAK


@pytest.mark.parametrize("kind", SCHEDULES)
def test_closed_form_at_every_step(kind):
    schedule = Schedule(kind, PEAK, STEPS, WARMUP, original_steps=ORIGINAL)
    rates = [learning_rate(schedule, step) for step in range(STEPS)]
    assert rates == pytest.approx([expected(kind, step) for step in range(STEPS)], rel=1e-12)


def test_inverse_sqrt_is_the_t5_schedule():
    """Raffel et al.: 1/sqrt(max(n, 10^4)); GQA continues from n = 10^6, where it falls to 97.6 % in 50,000 steps."""
    afresh = Schedule("inverse-sqrt", 0.01, 60_000, 0)
    for n in (0, 9_999, 10_000, 10_001, 40_000, 59_999):
        assert learning_rate(afresh, n) == pytest.approx(1 / math.sqrt(max(n, 10_000)), rel=1e-12)
    continued = Schedule("inverse-sqrt", 1e-3, 50_001, 0, original_steps=1_000_000)
    for step in (0, 1, 25_000, 50_000):
        assert learning_rate(continued, step) == pytest.approx(1 / math.sqrt(1_000_000 + step), rel=1e-12)
    assert learning_rate(continued, 50_000) == pytest.approx(0.976e-3, abs=5e-7)


@st.composite
def schedules(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(SCHEDULES)) -> Schedule:
    kind = draw(st.sampled_from(kinds))
    steps = draw(st.integers(1, 3000))
    fraction = draw(st.sampled_from((0.0, 0.1, 0.2, 0.5, 1.0)))
    room = steps - round(fraction * steps) if kind == "wsd" else steps
    warmup = draw(st.integers(0, room))
    original = draw(st.sampled_from((0, 500, 10**6)))
    return Schedule(kind, draw(st.floats(1e-8, 1)), steps, warmup, fraction, original)


@given(schedules())
def test_properties(schedule):
    rates = [learning_rate(schedule, step) for step in range(schedule.total_steps)]
    assert all(0 < rate <= schedule.peak_lr for rate in rates)
    up, down = rates[: schedule.warmup_steps], rates[schedule.warmup_steps :]
    if schedule.kind != "inverse-sqrt":
        assert up == sorted(up)
        assert not up or up[-1] == schedule.peak_lr
    assert down == sorted(down, reverse=True)


@given(schedules().filter(lambda schedule: schedule.kind != "wsd"))
def test_only_wsd_has_a_decay_that_begins(schedule):
    assert decay_start(schedule) is None


@given(schedules(("wsd",)), st.integers(1, 2000))
def test_a_longer_wsd_run_passes_through_the_point_where_decay_begins(schedule, more):
    begin = decay_start(schedule)
    longer = replace(schedule, total_steps=schedule.total_steps + more)
    assert begin <= decay_start(longer)
    assert [learning_rate(schedule, s) for s in range(begin)] == [learning_rate(longer, s) for s in range(begin)]


def test_wsd_decays_from_its_start_to_almost_nothing():
    schedule = Schedule("wsd", PEAK, STEPS, WARMUP)
    assert decay_start(schedule) == 800
    assert learning_rate(schedule, 799) == learning_rate(schedule, 800) == PEAK > learning_rate(schedule, 801)
    assert learning_rate(schedule, 999) == pytest.approx(PEAK * (1 - math.sqrt(199 / 200)))


@pytest.mark.parametrize(("total", "start"), [(1, 1), (12, 10), (13, 10), (14, 11)])
def test_the_decay_is_the_nearest_to_a_fifth(total, start):
    assert decay_start(Schedule("wsd", PEAK, total, 0)) == start


def test_default_warmup():
    """5 %, at least 100, or a quarter of the steps where that is less."""
    wanted = {
        1: 0,
        3: 0,
        4: 1,
        100: 25,
        400: 100,
        1000: 100,
        2000: 100,
        2400: 120,
        11_921: 596,
        23_842: 1192,
        100_000: 5000,
    }
    assert {steps: default_warmup(steps) for steps in wanted} == wanted
    for steps in range(1, 500):
        for kind in SCHEDULES:
            Schedule(kind, PEAK, steps, default_warmup(steps))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("linear", 1e-4, 10, 0), "the schedule 'linear' is unknown; choose one of wsd, cosine, constant, inverse-sq"),
        (("wsd", 0.0, 10, 0), "the peak learning rate is 0.0; it must be above 0."),
        (("wsd", math.nan, 10, 0), "the peak learning rate is nan; it must be above 0."),
        (("wsd", 1e-4, 0, 0), "a run of 0 steps trains nothing; give it 1 or more."),
        (("wsd", 1e-4, 10, 0, 1.5), "the decay fraction is 1.5; it is a share of the steps, 0 to 1."),
        (("wsd", 1e-4, 10, 9), "9 warm-up steps do not fit: the schedule wsd of 10 steps has room for 0 to 8."),
        (("cosine", 1e-4, 10, 11), "11 warm-up steps do not fit: the schedule cosine of 10 steps has room for 0 to"),
        (("constant", 1e-4, 10, -1), "-1 warm-up steps do not fit"),
    ],
)  # fmt: skip
def test_refusals(arguments, message):
    with pytest.raises(InputError) as refusal:
        Schedule(*arguments)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("step", [-1, 10])
def test_there_is_no_learning_rate_outside_the_run(step):
    with pytest.raises(AssertionError):
        learning_rate(Schedule("wsd", 1e-4, 10, 0), step)


def test_planning_needs_no_torch():
    code = "import uptrain.commands.plan, uptrain.estimates.plan, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "accelerate", "datasets"} & set(modules)
