"""What `convert mha-to-gqa` does where no method is given: the best that the model allows, and it says which."""

import json
import subprocess
import sys

import pytest
import tiny
from tiny_tokenizers import make_tokenizer

TOKENS = ("--calibration-tokens", 1024)
FIT = {"method": "fit", "refit": True, "renorm": "spread"}
MEAN = {"method": "mean", "refit": False, "renorm": "none", "calibration": None}


@pytest.fixture
def source(tmp_path):
    return make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)


def record(folder):
    return json.loads((folder / "groupwise.json").read_text())


def chosen(convert, source, out, *options):
    """Convert; return what was done, and what was said of it."""
    result = convert("mha-to-gqa", source, out, "--groups", 2, *options, "--json")
    assert result.code == 0, result.err
    return record(out), [note for note in json.loads(result.out)["notes"] if note.startswith("Merged by")]


def test_fit_and_refit_where_the_model_can_run(convert, source, tmp_path):
    plan, notes = chosen(convert, source, tmp_path / "out", *TOKENS)
    assert plan.items() >= FIT.items()
    assert plan["calibration"]["text"] == "shipped"
    assert not notes
    chosen(convert, source, tmp_path / "asked", *TOKENS, "--method", "fit", "--refit")
    assert tiny.snapshot(tmp_path / "out") == tiny.snapshot(tmp_path / "asked")


def test_given_options_are_kept(convert, source, tmp_path):
    plan, notes = chosen(convert, source, tmp_path / "out", *TOKENS, "--renorm", "norm", "--group-heads", "similar")
    assert plan.items() >= {**FIT, "renorm": "norm", "grouping": "similar"}.items()
    assert not notes


def test_without_calibration_the_default_is_mean(convert, source, tmp_path):
    plan, notes = chosen(convert, source, tmp_path / "out", "--calibration", "none")
    assert plan.items() >= MEAN.items()
    assert not notes


@pytest.mark.parametrize(
    ("family", "changes", "expected", "why"),
    [
        ("llama", {}, MEAN, "has no tokenizer.json"),
        ("olmo2", {}, MEAN, "'olmo2'"),
        ("qwen3", {}, MEAN, "'qwen3'"),
    ],
)
def test_default_method_of_models_without_calibration(convert, tmp_path, family, changes, expected, why):
    source = tiny.save(tiny.build(family, **changes), tmp_path / "source")
    (source / "tokenizer.json").unlink()
    plan, notes = chosen(convert, source, tmp_path / "out")
    assert plan.items() >= expected.items()
    assert notes[0].startswith(f"Merged by {expected['method']}; the default method is not possible: ")
    assert why in notes[0]
    plain = convert("mha-to-gqa", source, tmp_path / "plain", "--groups", 2, "--dry-run").out
    assert f"Merged by {expected['method']}; the default method is not possible" in plain


@pytest.mark.parametrize("wish", [("--refit",), TOKENS, ("--calibration", "shipped")])
def test_impossible_requests_are_refused(convert, source, tmp_path, wish):
    (source / "tokenizer.json").unlink()
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *wish).refused(
        "the default method (fit)", "has no tokenizer.json", "Without these options, heads are merged by their mean."
    )


def test_contradictory_options(convert, source, tmp_path):
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--calibration", "none", "--refit").refused(
        "--refit needs a calibration text"
    )


def test_a_damaged_tokenizer_is_no_reason_for_another_method(convert, source, tmp_path):
    (source / "tokenizer.json").write_text("{}")
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2).refused("tokenizer.json is damaged")


def test_nothing_to_merge_needs_no_method(convert, source, tmp_path):
    assert convert("mha-to-gqa", source, tmp_path / "out", "--groups", 8).code == 0
    assert record(tmp_path / "out")["method"] == "mean"


def test_without_torch(source, tmp_path):
    code = "import sys; sys.modules['torch'] = None; from convert.cli import main; main()"
    command = [sys.executable, "-c", code, "mha-to-mqa", str(source), str(tmp_path / "out"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert record(tmp_path / "out").items() >= MEAN.items()
    assert "the default method is not possible: calibrating runs the model, which needs torch" in done.stdout
