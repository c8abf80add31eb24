"""`uptrain report`: a page and a picture of what runs did."""

import errno
import json
import math
import os
import re
import xml.etree.ElementTree as ET
from html import escape

import matplotlib.image
import numpy as np
import pytest
import tiny
from matplotlib.figure import Figure
from written_runs import evaluation, event, step, with_teacher, write_run

from uptrain.report.curves import Curve, moving_mean, thin, tokens_at, window
from uptrain.report.figures import PANELS, _draw
from uptrain.report.history import History, recovered_fraction

TITLES = [panel.title for panel in PANELS]
NEXT_TOKEN, DISTILL, MIX, HELD_OUT, RECOVERED, KL, RATE, SPEED = TITLES


@pytest.fixture
def page_only(monkeypatch):
    """Leave the picture out, which shows the same panels, to be quick."""
    monkeypatch.setattr("uptrain.report.report.draw_png", lambda histories, names: b"")


@pytest.fixture
def text_only(page_only, monkeypatch):
    """Leave all drawings out."""
    monkeypatch.setattr("uptrain.report.report.draw_svgs", lambda histories, names: [])


def titles(page):
    return re.findall(r'<svg role="img" aria-label="([^"]*)"', page)


def test_report_of_a_distillation(distilled, uptrain):
    result = uptrain("report", distilled)
    page, picture = distilled / "report.html", distilled / "report.png"
    assert (result.code, result.out) == (0, f"Wrote {page} and {picture}.\n")
    text = page.read_text()
    assert titles(text) == [DISTILL, HELD_OUT, RECOVERED, KL, RATE, SPEED]
    lines = map(json.loads, (distilled / "metrics.jsonl").read_text().splitlines())
    measured = [r["evaluation"] for r in lines if "evaluation" in r]
    assert len(measured) == 4
    for row in measured:  # 296 targets are too few to measure a share of 0.01 nats
        share = "0.0%" if row is measured[0] else "—"
        assert f"<td>{row['kl']:.4f}</td><td>{row['agreement']:.1%}</td><td>{share}</td>" in text
    assert "<td>6</td><td>resumed, " in text
    pixels = matplotlib.image.imread(picture)
    assert (pixels.shape, pixels.std() > 0.01) == ((3 * 465, 2 * 810, 4), True)


def test_report_of_numbers_of_any_size(tmp_path, uptrain):
    losses = zip((1e300, -1e300, 0.0, 1e-300), range(1, 5), strict=True)
    records = [with_teacher(0, 1e300, -1e300), *(step(n, loss) for loss, n in losses)]
    uptrain("report", write_run(tmp_path / "run", records)).succeeded()


def test_perplexities_up_to_the_largest_float(tmp_path, uptrain, text_only):
    """It is e^709.78; exp() raises OverflowError beyond."""
    run = write_run(
        tmp_path / "run", [evaluation(0, 705.0), step(1), evaluation(1, 710.0), step(2), evaluation(2, None)]
    )
    uptrain("report", run).succeeded()
    cells = re.findall(r"<td>([^<]*)</td><td>([^<]*)</td></tr>", (run / "report.html").read_text())
    assert cells[-3:] == [("705.0000", "1.505e+306"), ("710.0000", "—"), ("not finite", "—")]


def test_page_stands_alone(tmp_path, uptrain, page_only):
    """One valid file that asks for nothing outside, in colours for light and dark, with names that are text."""
    name = "a<b>& $x^2$"
    records = [with_teacher(0, 5.0), *(step(n, 4 - n / 100) for n in range(1, 50)), event(9, "not saved", why="<full>")]
    run = write_run(tmp_path / name, records, parent={"run": "/runs/<short>", "step": 3})
    uptrain("report", run).succeeded()
    text = (run / "report.html").read_text()
    assert not re.search(r"https?:|\ssrc=|@import|<script|<link", text)
    assert all(url.startswith("#") for url in re.findall(r'(?:href="|url\()([^")]*)', text))
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids)) > 0
    assert set(re.findall(r'href="#([^"]*)"', text)) <= set(ids)
    for raw in ("a<b>", "<short>", "<full>"):
        assert raw not in text
        assert escape(raw) in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == len(titles(text)) == 6
    for drawing in drawings:
        ET.fromstring(drawing)
        assert not re.search("#[0-9a-f]{6}[^0-9a-f]", drawing), "a colour that would stay in the dark"
    light, dark = re.findall(r":root \{([^}]*)\}", text)
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    for colours in (light, dark):
        assert used <= set(re.findall(r"--([\w-]+):", colours))


STEPS = [step(n) for n in range(1, 9)]
SKIPPED = [step(1), step(2, None, grad_norm=None, skipped=True), step(3, None, skipped=True), step(4)]
RESUMED = [event(0, "started"), *STEPS, event(8, "resumed", rejected=["step-00000008 has 3 bytes"]), step(9)]
NOT_FINITE = [with_teacher(0, None, kl=None), *STEPS, with_teacher(8, None, kl=None)]
TRAINED = [NEXT_TOKEN, RATE, SPEED]
CASES = {
    "one step": ([step(1)], {}, TRAINED, ["1 of 50"]),
    "only evaluated": ([evaluation(0, 5.0)], {}, [HELD_OUT], ["0 of 50", "148.4"]),
    "no teacher": ([evaluation(0, 5.0), *STEPS, evaluation(8, 4.0)], {}, [NEXT_TOKEN, HELD_OUT, RATE, SPEED], ["54.6"]),
    "teacher": ([with_teacher(0, 5.0), *STEPS, with_teacher(8, 4.0)], {}, [*TITLES[:1], *TITLES[3:]], ["33.3%"]),
    "distill": ([*STEPS, with_teacher(8, 4.0)], {"loss": "distill"}, [DISTILL, HELD_OUT, KL, RATE, SPEED], ["—"]),
    "mix": ([*STEPS], {"loss": "mix"}, [MIX, RATE, SPEED], ["half cross-entropy"]),
    "new": ([evaluation(0, 9.0), *STEPS], {"model": ""}, [NEXT_TOKEN, HELD_OUT, RATE, SPEED], ["from scratch"]),
    "skipped": (SKIPPED, {}, TRAINED, ["<td>2</td><td>update skipped", "update skipped</text>"]),
    "nothing but skipped": ([step(1, None, skipped=True)], {}, TRAINED, ["not finite"]),
    "resumed": (RESUMED, {}, TRAINED, ["not used: step-00000008", "2 processes", "resumed</text>"]),
    "not finite": (NOT_FINITE, {}, TRAINED, ["not finite"]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_run(tmp_path, uptrain, page_only, case):
    records, settings, panels, words = CASES[case]
    run = write_run(tmp_path / "run", records, **settings)
    uptrain("report", run).succeeded()
    text = (run / "report.html").read_text()
    assert titles(text) == panels
    for word in words:
        assert word in text


def test_several_runs_in_one(tmp_path, uptrain, page_only):
    one = write_run(tmp_path / "_one", [*STEPS, with_teacher(8, 4.0)], loss="distill")
    two = write_run(tmp_path / "two", [with_teacher(0, 9.0), *STEPS])
    page = tmp_path / "both.html"
    uptrain("report", one, two, "--out", page).succeeded()
    assert page.with_suffix(".png").exists()
    assert not list(one.glob("report*"))
    text = page.read_text()
    assert titles(text) == [NEXT_TOKEN, DISTILL, HELD_OUT, RECOVERED, KL, RATE, SPEED]
    for name, n_panels in (("_one", 5), ("two", 6)):
        assert f"<h2>Settings of {name}</h2>" in text
        assert len(re.findall(rf"> ?{name}</text>", text)) == n_panels


def test_runs_of_the_same_name_are_told_apart(tmp_path, uptrain, text_only):
    runs = [write_run(tmp_path / parent / "run", STEPS) for parent in "ab"]
    uptrain("report", *runs, "--out", tmp_path / "page.html").succeeded()
    assert all(f"Settings of {run}<" in (tmp_path / "page.html").read_text() for run in runs)


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_axes_hold_all_runs(tmp_path, panel):
    """A run drawn later may be longer, and its numbers larger."""
    loss = {DISTILL: "distill", MIX: "mix"}.get(panel.title, "next-token")
    histories = []
    for factor in (1, 10, 0.1):
        steps = [step(n, factor, learning_rate=factor, tokens_per_s=factor) for n in range(1, int(10 * factor) + 1)]
        records = [with_teacher(0, 5.0, kl=factor), *steps, with_teacher(len(steps), 5.0 - factor, kl=1.0)]
        histories.append(History.read(write_run(tmp_path / str(factor), records, loss=loss)))
    axes = Figure().subplots()
    _draw(axes, panel, histories, ["a", "b", "c"])
    curves = [line for line in axes.get_lines() if line.get_label() in (" a", " b", " c")]
    assert len(curves) == 3
    for limits, values in (
        (axes.get_xlim(), [line.get_xdata() for line in curves]),
        (axes.get_ylim(), [line.get_ydata() for line in curves]),
    ):
        low, high = limits
        assert low <= np.concatenate(values).min() < np.concatenate(values).max() <= high


def test_a_picture_of_something_else_stays(tmp_path, uptrain):
    run = write_run(tmp_path / "run", [step(1)])
    (tmp_path / "paper.png").write_text("mine")
    uptrain("report", run, "--out", tmp_path / "paper.html").refused(
        "paper.png exists, and is not of an earlier report"
    )
    assert (tmp_path / "paper.png").read_text() == "mine"


def test_a_page_of_something_else_stays(tmp_path, uptrain):
    run, page = write_run(tmp_path / "run", [step(1)]), tmp_path / "paper.html"
    page.write_text("<!doctype html>mine")
    (tmp_path / "paper.png").write_text("mine")
    uptrain("report", run, "--out", page).refused(
        "paper.html exists, and is no report of this version; remove it, or choose another name"
    )
    assert page.read_text() == "<!doctype html>mine" and (tmp_path / "paper.png").read_text() == "mine"
    (tmp_path / "folder.html").mkdir()
    uptrain("report", run, "--out", tmp_path / "folder.html").refused("folder.html exists, and is no report")
    assert not (tmp_path / "folder.png").exists()
    (tmp_path / "paper.png").unlink()
    page.unlink()
    for _ in range(2):
        uptrain("report", run, "--out", page).succeeded()


def test_a_report_replaces_the_one_before(tmp_path, uptrain, text_only):
    run = write_run(tmp_path / "run", STEPS)
    uptrain("report", run).succeeded()
    before = (run / "report.html").read_text()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(9)) + '\n{"step": 10, "lo')
    uptrain("report", run).succeeded()
    after = (run / "report.html").read_text()
    assert ("8 of 50" in before, "9 of 50" in after) == (True, True)
    assert {path.name for path in run.iterdir()} == {"run.json", "metrics.jsonl", "report.html", "report.png"}


def test_a_full_disk_leaves_the_report_before(tmp_path, uptrain, text_only, monkeypatch):
    run = write_run(tmp_path / "run", STEPS)
    uptrain("report", run).succeeded()
    before = tiny.snapshot(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(9)) + "\n")
    metrics = (run / "metrics.jsonl").read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = uptrain("report", run)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("Error: ") and "No space left on device" in result.err and result.err.count("\n") == 1
    assert tiny.snapshot(run) == {**before, "metrics.jsonl": metrics}


def test_invalid_reports_are_refused(tmp_path, uptrain):
    run, empty = write_run(tmp_path / "run", STEPS), write_run(tmp_path / "empty", [event(0, "started")])
    uptrain("report", tmp_path / "nowhere").refused("nowhere does not exist", "uptrain run")
    uptrain("report", empty).refused("empty has no metrics yet")
    uptrain("report", run, empty, "--out", tmp_path / "page.html").refused("empty has no metrics yet")
    uptrain("report", run, run).refused("--out")
    uptrain("report", run, "--out", tmp_path / "page.pdf").refused("page.pdf", ".html")
    uptrain("report", run, "--out", tmp_path / "no" / "page.html").refused("no folder", "page.html")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "empty"}


@pytest.mark.parametrize(
    ("first", "now", "expected"),
    [
        (with_teacher(0, 5.0), with_teacher(9, 5.0), 0.0),
        (with_teacher(0, 5.0), with_teacher(9, 2.0), 1.0),
        (with_teacher(0, 5.0), with_teacher(9, 4.25), 0.25),
        (with_teacher(0, 5.0), with_teacher(9, 6.5), -0.5),
        (with_teacher(0, 2.0), with_teacher(9, 2.0), None),  # conversion had cost nothing
        (with_teacher(0, 2.009), with_teacher(9, 1.7), None),  # nothing measurable, though training gained
        (with_teacher(0, 2.015625), with_teacher(9, 2.0), 1.0),
        (with_teacher(0, 1.9), with_teacher(9, 1.7), None),
        (with_teacher(0, 2.0625), with_teacher(9, 1.75), 5.0),
        (with_teacher(3, 5.0), with_teacher(9, 4.0), None),  # what it had cost is not known
        (with_teacher(0, None), with_teacher(9, 4.0), None),
        (with_teacher(0, 5.0), with_teacher(9, None), None),
        (evaluation(0, 5.0), evaluation(9, 4.0), None),
    ],
)
def test_recovered_fraction(first, now, expected):
    first, now = ({"step": record["step"], **record["evaluation"]} for record in (first, now))
    assert recovered_fraction(first, now) == expected


@pytest.mark.parametrize(
    ("before", "shown"), [(2.001, "none: the conversion cost less than 0.01 nats"), (2.5, "160.0%")]
)
def test_a_conversion_that_cost_nothing_measurable(tmp_path, uptrain, before, shown):
    run = write_run(tmp_path / "run", [with_teacher(0, before), step(1), with_teacher(1, 1.7)])
    uptrain("report", run).succeeded()
    assert f"<dt>recovered fraction</dt><dd>{shown}</dd>" in (run / "report.html").read_text()
    status = json.loads(uptrain("status", run, "--json").out)["evaluation"]
    assert status["conversion_cost"] == pytest.approx(before - 2.0)
    assert (status["recovered_fraction"] is None) == (before == 2.001)


@pytest.mark.parametrize(("error", "shown"), [
    (0.15, "75.0% ± 7.7%"), (0.25, "none: too little held-out text (its standard error is 13%)"),
])  # fmt: skip
def test_a_recovered_fraction_with_a_large_error(tmp_path, uptrain, error, shown):
    errors = {"above_teacher_error": error, "kl_error": 0.0125}
    records = [with_teacher(0, 4.0, **errors), step(1), with_teacher(1, 2.5, **errors)]
    run = write_run(tmp_path / "run", records)
    uptrain("report", run).succeeded()
    page = (run / "report.html").read_text()
    assert f"<dt>recovered fraction</dt><dd>{shown}</dd>" in page
    assert "<dt>KL from the teacher</dt><dd>0.2500 ± 0.0125</dd>" in page
    assert f"<td>50.0%</td><td>{'—' if error == 0.25 else '75.0%'}</td></tr>" in page
    last = json.loads(uptrain("status", run, "--json").out)["evaluation"]
    assert last["recovered_fraction"] == (None if error == 0.25 else 0.75)
    assert last["recovered_fraction_error"] == pytest.approx(math.hypot(error, error / 4) / 2)
    assert recovered_fraction(*({"step": r["step"], **r["evaluation"]} for r in (records[0], records[0]))) == 0.0


@pytest.mark.parametrize("n", [1, 2, 49, 50, 149, 150, 1000])
def test_moving_mean_against_brute_force(n):
    rng = np.random.default_rng(n)
    y = np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n))
    curve = Curve(np.arange(n) * 1.0, y)
    half = window(curve) // 2
    assert window(curve) == 2 * half + 1 <= n / 50 + 1
    pieces = [y[max(0, i - half) : i + half + 1] for i in range(n)]
    expected = [piece[~np.isnan(piece)].mean() if (~np.isnan(piece)).any() else np.nan for piece in pieces]
    np.testing.assert_allclose(moving_mean(curve).y, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [1, 1200, 1201, 100_000])
def test_thinning_keeps_ends_and_extremes(n):
    y = np.random.default_rng(n).normal(size=n)
    y[n // 3] = np.nan
    thinned = thin(Curve(np.arange(n) * 1.0, y))
    assert len(thinned.x) <= 1202
    assert (thinned.x[0], thinned.x[-1]) == (0, n - 1)
    assert (np.diff(thinned.x) > 0).all()
    np.testing.assert_array_equal(thinned.y, y[thinned.x.astype(int)])
    if n > 1:
        assert (np.nanmin(thinned.y), np.nanmax(thinned.y)) == (np.nanmin(y), np.nanmax(y))
    gap = thin(Curve(np.arange(n) * 1.0, np.where(np.arange(n) // (n // 3 + 1) == 1, np.nan, y)))
    assert n < 3 or np.isnan(gap.y).any()  # a gap stays one
    if n <= 1200:
        assert len(thinned.x) == n


def test_tokens_at_steps(tmp_path):
    history = History.read(write_run(tmp_path / "run", STEPS))
    assert tokens_at(history, [0, 3, 8]).tolist() == [0, 3000, 8000]


def test_a_model_of_the_hubs_cache_has_its_name_there(tmp_path, uptrain, page_only):
    model = f"/cache/models--acme--tiny/snapshots/{'a' * 40}"
    run = write_run(tmp_path / "run", [*STEPS], model=model, teacher=model)
    uptrain("report", run).succeeded()
    text = (run / "report.html").read_text()
    assert "Uptraining of acme/tiny" in text and "a" * 40 not in text


def test_an_evaluation_does_not_move_its_step(tmp_path, uptrain, page_only):
    lying = evaluation(8, 4.0)
    lying["evaluation"] |= {"step": None, "tokens": None}
    run = write_run(tmp_path / "run", [evaluation(0, 5.0), *STEPS, lying])
    uptrain("report", run).succeeded()


def test_a_name_in_letters_that_the_font_lacks(tmp_path, uptrain, recwarn):
    run = write_run(tmp_path / "运行一", [*STEPS])
    uptrain("report", run).succeeded()
    assert not [str(each.message) for each in recwarn if "Glyph" in str(each.message)]
