"""What conversions write into `config.json`: transformers reads the same settings from it as from the source's."""

import json

import pytest
import tiny
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from convert.merging.merge_recipe import MergeRecipe
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import open_checkpoint
from model.common.errors import CheckpointError

FAMILIES = [family for family in tiny.STOCK if family not in tiny.WRAPPERS]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 7000.0},
    "linear": {"rope_type": "linear", "rope_theta": 7000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 7000.0, "factor": 2.0, "original_max_position_embeddings": 16,
        "beta_fast": 20.0,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 7000.0, "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0],
        "short_mscale": 1.0, "long_mscale": 1.0, "original_max_position_embeddings": 16,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    folders = {}

    def folder_of(family):
        if family not in folders:
            folders[family] = tiny.save(tiny.build(family), tmp_path_factory.mktemp(family) / "source")
        return folders[family]

    return folder_of


def settings(folder, config):
    """Return what transformers reads from a config, without the number of K/V heads; None if it refuses it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        read = AutoConfig.from_pretrained(folder).to_dict()
    except (ValueError, TypeError, KeyError, StrictDataclassError):
        return None
    # Of what `rope_parameters` also holds, some classes keep a copy if config.json has it.
    ignored = ("num_key_value_heads", "_name_or_path", "partial_rotary_factor")
    return {key: value for key, value in read.items() if key not in ignored}


def merged(folder, family):
    with open_checkpoint(folder) as checkpoint:
        return json.loads(make_merge_plan(checkpoint, tiny.few(family), MergeRecipe("mean"), None).config_json)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_settings_are_read(folder_of, tmp_path, family, rope):
    """Also where a class ignores what all layers share, as those of gemma3_text and olmo3 do."""
    source = folder_of(family)
    before = (source / "config.json").read_text()
    config = json.loads(before)
    partial = {k: v for k, v in (config.get("rope_parameters") or {}).items() if k == "partial_rotary_factor"}
    config |= {"rope_parameters": {**partial, **ROPES[rope]}}
    theirs = settings(tmp_path / "theirs", config)
    if theirs is None:
        pytest.skip("the class has no such scaling")
    try:
        (source / "config.json").write_text(json.dumps(config))
        ours = settings(tmp_path / "ours", merged(source, family))
    except CheckpointError as error:
        pytest.skip(f"refused: {error}")
    else:
        assert ours == theirs
    finally:
        (source / "config.json").write_text(before)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt_oss"])
def test_two_bases_are_refused(convert, tmp_path, family):
    """Transformers 5 takes the outer one as soon as there is `rope_scaling`, which conversions add for version 4."""
    source = tiny.save(tiny.build(family), tmp_path / "source")
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    tiny.edit_config(source, rope_parameters=rope, rope_theta=1e4)
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", tiny.few(family), "--method", "mean").refused(
        "rope_theta = 10000.0, and another in its rope_parameters (500000.0)", "make them equal"
    )
    assert not (tmp_path / "out").exists()
    tiny.edit_config(source, rope_theta=5e5)
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", tiny.few(family), "--method", "mean").succeeded()
    ours, theirs = (AutoConfig.from_pretrained(folder) for folder in (tmp_path / "out", source))
    assert ours.rope_parameters == theirs.rope_parameters


def test_two_bases_without_scaling_stay(tmp_path):
    """Transformers 5 reads the inner one, and nothing is added that changes this."""
    source = tiny.save(tiny.build("qwen3"), tmp_path / "source")
    tiny.edit_config(source, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta=1e4)
    ours, theirs = merged(source, "qwen3"), json.loads((source / "config.json").read_text())
    assert ours == theirs | {"num_key_value_heads": tiny.few("qwen3")}
    assert settings(tmp_path / "ours", ours)["rope_parameters"]["rope_theta"] == 5e5


def test_two_parts_of_rotation_are_refused(convert, tmp_path):
    source = tiny.save(tiny.build("glm"), tmp_path / "source")
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 1.0}
    tiny.edit_config(source, rope_parameters=rope, partial_rotary_factor=0.5)
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean").refused(
        "partial_rotary_factor = 0.5, and another in its rope_parameters (1.0)"
    )


def test_the_length_of_pretraining_is_not_moved(tmp_path):
    """Phi 3's class takes its own default, 4,096, if the length is in `rope_parameters` alone."""
    source = tiny.save(tiny.build("phi3"), tmp_path / "source")
    rope = {key: value for key, value in ROPES["longrope"].items() if "mscale" not in key}
    tiny.edit_config(source, rope_parameters=rope, original_max_position_embeddings=...)
    ours, theirs = merged(source, "phi3"), json.loads((source / "config.json").read_text())
    assert ours["rope_scaling"]["type"] == "longrope"
    assert "original_max_position_embeddings" not in ours
    both = [settings(tmp_path / "read", config) for config in (ours, theirs)]
    assert both[0]["rope_parameters"]["original_max_position_embeddings"] == 4096
    for read in both:
        read["rope_parameters"] = {key: value for key, value in read["rope_parameters"].items() if key != "type"}
    assert both[0] == both[1]
