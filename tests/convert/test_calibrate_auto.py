"""`--method auto`: the method that predicts best on a text is taken."""

import json

import pytest
import tiny
import torch
from calibrated import record
from tiny_tokenizers import make_tokenizer


def test_auto_chooses_the_lowest_loss(convert, parent, tmp_path):
    out = tmp_path / "out"
    options = ("--groups", 2, "--method", "auto", "--calibration-tokens", 2048)
    result = convert("mha-to-gqa", parent, out, *options, "--json")
    assert result.code == 0, result.err
    plan = json.loads(result.out)
    assert set(plan["auto"]) == {"aligned", "pca", "fit", "fit, similar heads grouped"}
    best, _, grouped = min(plan["auto"], key=plan["auto"].__getitem__).partition(", ")
    for made in (plan, record(out)):
        assert (made["method"], made["grouping"]) == (best, "similar" if grouped else "contiguous")
        assert made["refit"] == (best == "fit")
        assert made["calibration"]["windows"] == 32
    assert json.loads(convert("verify", parent, out, "--json").out)["ok"]
    plain = ["--groups", 2, "--method", best, "--group-heads", record(out)["grouping"], "--calibration-tokens", 2048]
    plain += ["--refit"] * (best == "fit")
    assert convert("mha-to-gqa", parent, tmp_path / "plain", *plain).code == 0
    assert tiny.snapshot(tmp_path / "plain") == tiny.snapshot(out)


def test_the_score_is_the_models_loss(convert, parent, tmp_path, prose, monkeypatch):
    """What `auto` says of a merge is what transformers measures on the windows held out."""
    from transformers import AutoModelForCausalLM

    from convert.calibration import choose_method
    from convert.calibration.text import read_calibration_text
    from model.checkpoint import open_checkpoint

    given = ("--groups", 1, "--calibration-tokens", 1024, "--calibration", prose)
    result = convert("mha-to-gqa", parent, tmp_path / "auto", "--method", "auto", *given, "--json")
    with open_checkpoint(parent) as checkpoint:
        fitting, scoring = choose_method.divided(read_calibration_text(checkpoint, str(prose), 1024))
    monkeypatch.setattr("convert.planning.resolve_options.read_calibration_text", lambda *rest: fitting)
    assert convert("mha-to-gqa", parent, tmp_path / "pca", "--method", "pca", *given).code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pca", dtype=torch.float32).eval()
    ids = torch.from_numpy(scoring.ids_NT)
    with torch.inference_mode():
        loss = float(model(ids, labels=ids).loss)
    assert json.loads(result.out)["auto"]["pca"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("method", ["auto", "fit", "pca"])
def test_text_is_ignored_if_nothing_is_merged(convert, parent, tmp_path, prose, method):
    options = ("--groups", 8, "--method", method, "--calibration", prose, "--calibration-tokens", 1024)
    result = convert("mha-to-gqa", parent, tmp_path / "out", *options, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["n_regrouped"] == 0
    assert record(tmp_path / "out")["calibration"] is None
    prose.unlink()
    assert convert("verify", parent, tmp_path / "out").code == 0


def test_auto_resumes(convert, parent, tmp_path, monkeypatch):
    """Interrupted while it chooses, and again while it converts."""
    from convert import conversion
    from convert.calibration import choose_method

    scored, score, execute = [], choose_method.score, conversion.execute

    def until_interrupted(checkpoint, merges, merged, *rest):
        scored.append(merged.parent.name)
        if len(scored) == 2:
            raise KeyboardInterrupt
        return score(checkpoint, merges, merged, *rest)

    def interrupted(*rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(choose_method, "score", until_interrupted)
    options = ("--groups", 2, "--method", "auto", "--calibration-tokens", 1024)
    before = {path.name for path in tmp_path.iterdir()}
    result = convert("mha-to-gqa", parent, tmp_path / "out", *options)
    assert (result.code, "the same command continues" in result.err) == (1, True)
    assert {path.name for path in tmp_path.iterdir()} - before == {".out.groupwise"}
    monkeypatch.setattr(conversion, "execute", interrupted)
    assert convert("mha-to-gqa", parent, tmp_path / "out", *options).code == 1
    monkeypatch.setattr(conversion, "execute", execute)
    monkeypatch.setattr("convert.calibration.solve._merge", lambda *rest: pytest.fail("merged again"))
    result = convert("mha-to-gqa", parent, tmp_path / "out", *options)
    assert result.code == 0, result.err
    assert scored == ["aligned", "pca", "pca", "fit", "fit, similar heads grouped"]
    assert {path.name for path in tmp_path.iterdir()} - before == {"out"}


def test_a_dry_run_does_not_choose(convert, parent, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.conversion.choose_recipe", lambda *rest, **more: pytest.fail("chose"))
    before = tiny.snapshot(tmp_path)
    options = ("--groups", 2, "--method", "auto", "--calibration-tokens", 1024, "--dry-run", "--json")
    plan = json.loads(convert("mha-to-gqa", parent, tmp_path / "out", *options).out)
    assert (plan["method"], plan["calibration_seconds"] >= 0, "auto" in plan) == ("auto", True, False)
    assert tiny.snapshot(tmp_path) == before


def test_auto_needs_windows_to_compare_by(convert, parent, tmp_path):
    options = ("--groups", 2, "--method", "auto", "--calibration-tokens", 256)
    convert("mha-to-gqa", parent, tmp_path / "out", *options).refused("needs 5 windows of 64", "tokens 320 or more")


def test_auto_needs_a_head(convert, tmp_path):
    bare = tiny.build(vocab_size=300).model
    folder = make_tokenizer(tiny.save(bare, tmp_path / "bare"), 300)
    options = ("--groups", 2, "--calibration-tokens", 1024)
    convert("mha-to-gqa", folder, tmp_path / "out", "--method", "auto", *options).refused(
        "lacks the tensor lm_head.weight"
    )
    assert convert("mha-to-gqa", folder, tmp_path / "out", "--method", "fit", *options).code == 0


def test_out_is_checked_before_the_work(convert, parent, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.conversion.choose_recipe", lambda *rest, **more: pytest.fail("chose"))
    (tmp_path / "out").mkdir()
    convert("mha-to-gqa", parent, tmp_path / "out", "--groups", 2, "--method", "auto").refused("exists")
