"""`convert inspect --heads`: how alike heads are, what merging them would lose, and how to divide them over layers."""

import json
import sys

import matplotlib.image
import numpy as np
import pytest
import tiny
from commands import left_behind
from equivalent_heads import equivalent_mha
from safetensors.torch import save_file

from convert.inspection.figure import draw_png
from convert.inspection.heads import HeadReport, KeysValues, LayerHeads
from convert.inspection.table import shown_groups
from convert.layer_tensors.head_matrices import HeadMatrices
from convert.merging.moments import (
    energies,
    moments_from_weights,
    relative_logit_error,
    relative_output_error,
    split_groups,
)

SIZE = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.3}


def look(convert, source):
    result = convert("inspect", source, "--heads", "--json").succeeded()
    return json.loads(result.out)["heads"]


def by_groups(layer, method="pca"):
    return {entry["groups"]: entry[method] for entry in layer["lost"]}


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("mistral", {}), ("qwen2", {})])
def test_heads_equal_but_for_their_coordinates(convert, tmp_path, family, changes):
    source = tiny.save(tiny.build(family, num_key_value_heads=1, **SIZE, **changes), tmp_path / "source")
    for layer in look(convert, equivalent_mha(source, tmp_path / "many", 1))["layers"]:
        for kind in "kv":
            assert abs(layer["raw"][kind]) < 0.3
            assert layer["aligned"][kind] == pytest.approx(1, abs=1e-5)
            assert all(lost[kind] == pytest.approx(0, abs=1e-6) for lost in by_groups(layer).values())
            assert all(lost[kind] > 0.2 for lost in by_groups(layer, "mean").values())


def test_as_many_groups_as_there_are_different_heads(convert, tmp_path):
    source = tiny.save(tiny.build(num_key_value_heads=2, **SIZE), tmp_path / "source")
    for layer in look(convert, equivalent_mha(source, tmp_path / "many", 2))["layers"]:
        for kind in "kv":
            assert layer["aligned"][kind] < 0.9
            lost = {groups: losses[kind] for groups, losses in by_groups(layer).items()}
            assert lost[4] == pytest.approx(0, abs=1e-6)
            assert lost[2] == pytest.approx(0, abs=1e-6)
            assert lost[1] > 0.1


def test_keys_and_numbers(convert, source):
    heads = look(convert, source)
    assert list(heads) == ["layers", "worst_layers"]
    assert [layer["layer"] for layer in heads["layers"]] == [0, 1]
    assert sorted(heads["worst_layers"]) == [0, 1]
    for layer in heads["layers"]:
        assert list(layer) == ["layer", "raw", "aligned", "lost"]
        assert all(layer["aligned"][kind] > layer["raw"][kind] for kind in "kv")
        for kind in "kv":
            four, two, one = (by_groups(layer)[groups][kind] for groups in (4, 2, 1))
            assert 0 < four < two < one < 1
            assert all(by_groups(layer, "mean")[n][kind] > by_groups(layer)[n][kind] for n in (4, 2, 1))


def test_grouped_queries_may_be_grouped_further(convert, tmp_path):
    source = tiny.save(tiny.build(num_key_value_heads=4), tmp_path / "source")
    assert list(by_groups(look(convert, source)["layers"][0])) == [2, 1]


def test_the_rest_of_the_json_is_the_same(convert, source):
    whole = json.loads(convert("inspect", source, "--heads", "--json").out)
    assert whole.pop("heads")
    assert whole == json.loads(convert("inspect", source, "--json").out)


def test_table(convert, source):
    heads = look(convert, source)
    text = convert("inspect", source, "--heads").out
    assert "MHA: 8 query heads, 8 K/V heads" in text
    lost = by_groups(heads["layers"][1])[2]
    for words in (
        "GQA-4 %", "GQA-2 %", "MQA %", f"{100 * lost['k']:.1f} {100 * lost['v']:.1f}", "without text",
        f"Layers with the largest loss: {heads['worst_layers'][0]}, {heads['worst_layers'][1]}.",
    ):  # fmt: skip
        assert words in text


def test_a_table_has_room_for_four_numbers_of_groups():
    assert shown_groups(32, (16, 8, 4, 2, 1)) == [16, 8, 4, 1]
    assert shown_groups(40, (20, 10, 8, 5, 4, 2, 1)) == [20, 10, 5, 1]
    assert shown_groups(45, (15, 9, 5, 3, 1)) == [15, 9, 5, 1]
    assert shown_groups(9, (3, 1)) == [3, 1]


def layer_attention(n_heads=8, n_kv_heads=4):
    rng = np.random.default_rng(0)
    shapes = ((n_heads, 6, 16), (n_kv_heads, 6, 16), (n_kv_heads, 6, 16), (n_heads, 16, 6))
    return HeadMatrices(*map(rng.standard_normal, shapes), n_rotary_pairs=2)


@pytest.mark.parametrize("n_groups", [4, 2, 1])
def test_a_whole_layers_moments_hold_those_of_its_groups(n_groups):
    attention = layer_attention()
    groups = zip(split_groups(moments_from_weights(attention), n_groups), attention.groups(n_groups), strict=True)
    for ours, group in groups:
        theirs = moments_from_weights(group)
        for name in ("queries_HDD", "keys_FF", "values_FF", "outputs_HDD"):
            assert np.allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-12, atol=1e-12)


def test_the_plain_mean_loses_what_it_leaves_in_weights():
    """With weights, not with the moments that are tested; here of values, whose losses are plain squares."""
    from convert.inspection.heads import _mean

    attention = layer_attention()
    moments = moments_from_weights(attention)
    mean_DX = attention.v_KDX.mean(axis=0)
    outs = list(zip(attention.o_HMD, attention.v_KDX.repeat(2, axis=0), strict=True))
    lost = sum(np.sum((o_MD @ (v_DX - mean_DX)) ** 2) for o_MD, v_DX in outs)
    whole = sum(np.sum((o_MD @ v_DX) ** 2) for o_MD, v_DX in outs)
    assert relative_output_error(moments, _mean(moments)) == pytest.approx(lost / whole)
    assert energies(moments)[1] == pytest.approx(whole)
    assert relative_logit_error(moments, _mean(moments)) > 0


def test_figure(convert, source, tmp_path):
    path = tmp_path / "heads.png"
    result = convert("inspect", source, "--heads", "--figure", path)
    assert (result.code, result.out.endswith(f"\nWrote {path}.\n")) == (0, True), result.err
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 500
    assert pixels[..., :3].std() > 0.05
    again = tmp_path / "again.png"
    assert json.loads(convert("inspect", source, "--heads", "--figure", again, "--json").out)["heads"]
    assert again.read_bytes() == path.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"heads.png", "again.png", "source"}


def test_figure_of_a_large_model():
    rng = np.random.default_rng(0)
    losses = {n: KeysValues(1.2 / n, 0.001) for n in (32, 16, 8, 4, 2, 1)}
    alike_KK = rng.random((64, 64))
    layers = [LayerHeads(i, KeysValues(0, 0), alike_KK, alike_KK, {"pca": losses, "mean": losses}) for i in range(80)]
    assert draw_png(HeadReport(64, tuple(losses), tuple(layers)), "a $name$ <b>").startswith(b"\x89PNG")


def test_refused_families_say_why(convert, tmp_path):
    source = tiny.save(tiny.build("phi3", partial_rotary_factor=0.5), tmp_path / "source")
    tiny.edit_config(source, partial_rotary_factor=0.9, rope_parameters=None)
    convert("inspect", source, "--heads").refused(
        "--heads rotates heads", "is not implemented", "model_type 'phi3'; leave --heads out."
    )


def test_heads_needs_several_kv_heads(convert, tmp_path):
    source = tiny.save(tiny.build(num_key_value_heads=1), tmp_path / "source")
    convert("inspect", source, "--heads").refused("one K/V head in each layer")


def test_not_finite(convert, tmp_path):
    source = tiny.save(tiny.build(), tmp_path / "source")
    tensors = tiny.tensors(source)
    tensors["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert("inspect", source, "--heads").refused("model.layers.1.self_attn.k_proj.weight holds NaN")


def test_a_head_of_zeros_loses_nothing(convert, tmp_path):
    source = tiny.save(tiny.build(), tmp_path / "source")
    tensors = tiny.tensors(source)
    for part in "qkvo":
        tensors[f"model.layers.0.self_attn.{part}_proj.weight"].zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    layer = look(convert, source)["layers"][0]
    assert all(lost == {"k": 0, "v": 0} for lost in by_groups(layer).values())


def test_where_no_figure_can_be_written(convert, source, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.inspection.heads.report_heads", lambda *_: pytest.fail("it began to work"))
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "photo.png").write_bytes(b"of the user")
    (tmp_path / "link.png").symlink_to(tmp_path / "gone")
    for path, words in (
        (tmp_path / "heads.pdf", "the name must end in .png"),
        (tmp_path / "folder.png", "exists; choose another name, or remove it"),
        (tmp_path / "none/heads.png", "there is no folder"),
        (tmp_path / "photo.png", f"--figure {tmp_path}/photo.png exists; choose another name, or remove it."),
        (tmp_path / "link.png", "exists; choose another name"),
    ):
        convert("inspect", source, "--heads", "--figure", path).refused(words)
    assert (tmp_path / "photo.png").read_bytes() == b"of the user"
    convert("inspect", source, "--figure", tmp_path / "heads.png").refused("give --heads too")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    convert("inspect", source, "--heads", "--figure", tmp_path / "heads.png").refused("pip install matplotlib")


def test_a_disk_that_fails_is_one_line(convert, source, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("model.files.write.sync_file", full)
    result = convert("inspect", source, "--heads", "--figure", tmp_path / "heads.png")
    assert (result.code, result.err) == (1, f"Error: [Errno 28] No space left on device: '{tmp_path}/heads.png'\n")
    assert not (tmp_path / "heads.png").exists()
    assert left_behind(tmp_path) == []
