"""The file of metrics: what going back cuts away, and what damage says."""

import json

import pytest
import written_runs

from model.common.errors import InputError
from uptrain.training.loss_rise import rise_warning
from uptrain.training.metrics_log import Metrics, read_metrics, write_metrics


def records(n_steps):
    """Return what a run writes that evaluates every third step, and could not save the fourth."""
    lines = [written_runs.event(0, "started")]
    for step in range(n_steps):
        lines += [written_runs.evaluation(step, 1.0)] if step % 3 == 0 else []
        lines += [written_runs.step(step + 1, 2.0)]
        lines += [written_runs.event(step + 1, "not saved", why="the disk is full")] if step == 4 else []
    return lines


@pytest.mark.parametrize("step", range(11))
def test_going_back_keeps_steps_up_to_there_and_all_events(tmp_path, step):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, records(10))
    with path.open("a") as file:
        file.write('{"step": 11, "lo')  # what a kill leaves
    Metrics(path).rewind(step)
    expected = [
        r for r in records(10)
        if "event" in r or ("loss" in r and r["step"] <= step) or ("evaluation" in r and r["step"] < step)
    ]  # fmt: skip
    assert read_metrics(path) == expected


def test_going_back_to_a_late_step_reads_only_the_end(tmp_path):
    """A line that is never read may be anything: resuming a long run costs what resuming a short one does."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("long ago\n" + "".join(json.dumps(r) + "\n" for r in records(10)))
    Metrics(path).rewind(9)
    assert path.read_text().startswith("long ago\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl:1 is damaged .* remove the line"):
        Metrics(path).rewind(0)
    with pytest.raises(InputError, match=r"metrics\.jsonl:1 is damaged"):
        read_metrics(path)


def test_the_checksum_of_windows_under_its_earlier_name(tmp_path):
    """Runs of earlier versions are read, resumed and extended."""
    path, steps = tmp_path / "metrics.jsonl", [written_runs.step(n) for n in (1, 2)]
    earlier = [{"windows" if key == "windows_crc32" else key: value for key, value in r.items()} for r in steps]
    path.write_text("".join(json.dumps(r) + "\n" for r in earlier))
    assert read_metrics(path) == steps
    Metrics(path).rewind(1)
    assert read_metrics(path) == steps[:1]


def test_what_was_rejected_is_a_list_of_texts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for wrong in (10**9, "step 4", [4], None):
        write_metrics(path, [written_runs.event(0, "resumed", rejected=wrong)])
        with pytest.raises(InputError, match=r"metrics\.jsonl:1 is damaged \(rejected"):
            read_metrics(path)


@pytest.mark.parametrize(
    "line",
    ['{"step": 1, "evaluation": {"targets": 8, "loss": -1e308}}',
     json.dumps(written_runs.step(1) | {"tokens_per_s": 1e308})],
)  # fmt: skip
def test_a_number_too_large_to_draw(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=r"jsonl:1 is damaged \(\w+ = .*; it must be at most 1e\+300\)"):
        read_metrics(path)


def test_numbers_that_are_not_finite_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.touch()
    Metrics(path).write({"step": 1, "loss": float("nan"), "evaluation": {"kl": float("inf")}})
    assert json.loads(path.read_text()) == {"step": 1, "loss": None, "evaluation": {"kl": None}}


def losses(*values):
    return [{"step": n, "loss": value} for n, value in enumerate(values, 1)]


def taught(*pairs):
    return [{"step": n, "evaluation": {"loss": loss, "kl": kl}} for n, (loss, kl) in enumerate(pairs)]


def held_out(*values):
    return [{"step": n, "evaluation": {"targets": 9, "loss": value}} for n, value in enumerate(values)]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (held_out(3.0, 4.0, 2.9), None),
        (held_out(3.0, 2.0, 3.1), "held-out loss rose from 3.0000 to 3.1000"),
        (held_out(3.0, 3.009), None),
        (held_out(3.0, 3.011), "held-out loss rose from 3.0000 to 3.0110"),
        (taught((3.0, 0.5), (3.1, 0.2)), None),
        (taught((3.0, 0.5), (3.1, 0.6)), "held-out loss rose from 3.0000 to 3.1000"),
        (held_out(3.0, None), "to a number that is not finite"),
        (held_out(None, None), None),
        (held_out(3.0) + losses(*[3.0] * 4, *[9.0] * 4), None),
        (losses(3.0, 9.0), None),
        (losses(3.0, 3.4, 3.2, 3.1, 3.6, 3.0, 3.2, 3.1), None),
        (losses(3.0, 3.4, 3.2, None, 3.1, 3.6, 3.0, 5.2, 4.1), "training loss rose from 3.0000 to 3.9750"),
        (losses(1.6, 1.7, 900.0, 500.0, *[420.0, 400.0, 410.0, 404.0] * 2), "rose from 1.6000 to 408.5000"),
        (losses(1.6, 1.5, 3.9, 3.3, *[3.0, 2.9, 2.8, 3.0] * 2), "training loss rose from 1.6000 to 2.9250"),
        (losses(1.6, 1.5, 3.9, 3.3, *[3.0, 2.0, 1.6, 1.5, 1.7, 1.6]), None),
        (losses(1.6, 2.0, 1.8, 2.2, 1.7, 2.1, 1.6, 2.2, 1.7, 2.2), None),
        (losses(*[3.0] * 10, *[9.0] * 80, *[3.0] * 10), None),
        ([], None),
    ],
)
def test_a_loss_that_rose(records, words):
    warning = rise_warning(records, 1e-3, has_stored_teacher=False)
    assert (warning is None) == (words is None)
    assert (words or "") in (warning or "")


def test_a_stored_teacher_is_judged_by_the_training_loss():
    """The divergence on held-out text is not measured, so a held-out loss that rose is no proof."""
    fell = held_out(2.0, 4.0) + losses(*[3.0] * 4, *[1.0] * 4)
    assert rise_warning(fell, 1e-3, has_stored_teacher=True) is None
    rose = held_out(2.0, 1.0) + losses(*[3.0] * 4, *[9.0] * 4)
    assert "training loss rose from 3.0000 to 9.0000" in rise_warning(rose, 1e-3, has_stored_teacher=True)


def test_metrics_that_are_removed_meanwhile(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.path.touch()
    metrics.path.unlink()
    assert metrics.write({"step": 1, "event": "e"}) == ""
    assert json.loads(metrics.path.read_text()) == {"step": 1, "event": "e"}
