"""More K/V heads by repetition: the same model, to the last bit, for engines that divide heads among more devices."""

import json

import pytest
import tiny
import torch
from safetensors.torch import save_file
from stock_families import CASES, SIZE, difference, open_folder


@pytest.mark.parametrize("n_kv_heads", [pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_the_model_stays_the_same(convert, tmp_path, family, changes, n_kv_heads):
    """OUT computes SOURCE's logits, but for rounding: processors add up otherwise where matrices have more rows."""
    source, out, back = (tmp_path / name for name in ("source", "out", "back"))
    settings = {**SIZE, **({"head_dim": 16} if "head_dim" in tiny.SETTINGS.get(family, {}) else {}), **changes}
    tiny.save(tiny.build(family, num_key_value_heads=2, **settings), source, max_shard_size="100KB")
    result = convert("repeat-kv", source, out, "--groups", n_kv_heads, "--json").succeeded()
    summary = json.loads(result.out)
    assert (summary["method"], summary["n_kv_heads_in"], summary["groups"]) == ("repeat", 2, n_kv_heads)

    parent, child = open_folder(family, source), open_folder(family, out)
    assert child.config.get_text_config().num_key_value_heads == n_kv_heads
    assert difference(parent, child) <= 1e-6

    report = json.loads(convert("verify", source, out, "--json").out)
    assert (report["ok"], report["differences"]) == (True, [])
    convert("mha-to-gqa", "--method", "mean", out, back, "--groups", 2).succeeded()
    before, after = tiny.tensors(source), tiny.tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_earlier_name_of_the_option(convert, tmp_path):
    source = tiny.save(tiny.build(num_key_value_heads=2), tmp_path / "source")
    convert("repeat-kv", source, tmp_path / "out", "--kv-heads", 4, "--dry-run").succeeded()
    assert "--kv-heads" not in convert("repeat-kv", "--help").out


def test_verify_sees_a_repetition_that_differs(convert, tmp_path):
    source, out = tiny.save(tiny.build(num_key_value_heads=2), tmp_path / "source"), tmp_path / "out"
    convert("repeat-kv", source, out, "--groups", 4).succeeded()
    tensors = tiny.tensors(out)
    tensors["model.layers.1.self_attn.v_proj.weight"][-1, -1] += 1  # the last number of a head's second copy
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    result = convert("verify", source, out)
    assert result.code == 3
    assert "differs from the one recomputed" in result.err


@pytest.mark.parametrize(
    ("n_kv_heads", "wanted", "words"),
    [
        (2, 3, "2 K/V heads, and repeating makes a multiple of 2 that divides the 8 query heads"),
        (2, 6, "choose one of 4, 8."),
        (2, 2, "choose one of 4, 8."),
        (2, 1, "choose one of 4, 8."),
        (2, 16, "choose one of 4, 8."),
        (2, -4, "--groups -4 is not possible"),
        (8, 8, "the model has 8 K/V heads, one for each query head already; there is nothing to repeat."),
    ],
)
def test_impossible_numbers(convert, tmp_path, n_kv_heads, wanted, words):
    source = tiny.save(tiny.build(num_key_value_heads=n_kv_heads), tmp_path / "source")
    convert("repeat-kv", source, tmp_path / "out", "--groups", wanted).refused(words)
    assert not (tmp_path / "out").exists()


def test_inspect_says_what_is_possible_and_the_card_what_was_done(convert, tmp_path):
    source, out = tiny.save(tiny.build(num_key_value_heads=2), tmp_path / "source"), tmp_path / "out"
    assert "4, 8 K/V heads" in convert("inspect", source).out
    assert json.loads(convert("inspect", source, "--json").out)["repeats"] == [4, 8]
    shown = convert("repeat-kv", source, out, "--groups", 4)
    assert "2 → 4, method repeat" in shown.out and "repeated" in shown.out
    record = json.loads((out / "groupwise.json").read_text())
    assert (record["method"], record["groups"], record["merge_report"]) == ("repeat", 4, [])
    card = (out / "README.md").read_text()
    assert "Each K/V head stands here several times" in card and "Merging costs quality" not in card
