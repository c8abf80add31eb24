"""transformers 4.57 opens what we write, and computes what transformers 5 computes from it."""

import json
import shutil
from pathlib import Path

import interop
import numpy as np
import pytest
import tiny
from families_without_gqa import gpt_neox, t5
from gguf_files import write_gguf
from torch_files import write_meta

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Answers:
    """Folders that both versions opened."""

    def __init__(self, folders: dict[str, Path], place: Path) -> None:
        request = {"folders": folders, "ids": interop.token_ids()}
        self.answer, self.logits = interop.ask(
            interop.need("transformers4"), "transformers_logits", place / "4", **request
        )
        answer, self.expected = interop.ask(None, "transformers_logits", place / "5", **request)
        assert self.answer["version"].startswith("4.57.")
        assert answer["version"].startswith("5.")
        self.expected_answer = answer

    def check(self, name: str) -> dict:
        answer, expected = self.answer["models"][name], self.expected_answer["models"][name]
        assert "error" not in answer, (name, answer["error"])
        assert answer == expected, name
        assert answer["loading"] == {}
        assert np.std(self.expected[name]) > 1e-3
        return answer

    def difference(self, name: str) -> float:
        return float(np.abs(self.logits[name] - self.expected[name]).max())


UNKNOWN = ("cwm", "hyperclovax", "jais2", "ministral3", "mistral3", "nanochat", "solar_open")
"""What 4.57 does not have."""
TAKEN_OTHERWISE = {
    "apertus": "version 5 takes the base 12,000,000 from a config of version 4, whatever it says",
    "aya_vision": "version 4 asks for the tied LM head, which version 5 does not save",
    "cohere2_vision": "version 4 asks for the tied LM head, which version 5 does not save",
    "deepseek_vl": "version 4 asks for the tied LM head and other names of vision tensors than version 5 saves",
    "deepseek_vl_hybrid": "version 4 asks for the tied LM head and other names of vision tensors than version 5 saves",
    "gemma3": "version 4 asks for the tied LM head, which version 5 does not save",
    "got_ocr2": "version 4 asks for the tied LM head, which version 5 does not save",
    "gpt_oss": "the versions read YaRN otherwise from a config without it",
    "internvl": "version 4 asks for the tied LM head and other names of vision tensors than version 5 saves",
    "janus": "version 4 asks for the tied LM head, which version 5 does not save",
    "ovis2": "version 4 asks for the tied LM head and other names of vision tensors than version 5 saves",
    "paligemma": "version 4 asks for the tied LM head, which version 5 does not save",
    "qwen2_audio": "version 4 has it in another auto class",
    "qwen3_moe": "version 5 saves the number of experts under another name",
    "qwen3_vl": "version 4 stops where the config leaves the sections of rotary embedding to the class",
    "video_llava": "version 4 has it in no auto class",
    "vipllava": "version 5 saves the number of vision layers under another name",
}
"""Whose sources, saved by version 5, the two versions take for different models, unconverted too."""
FROM_4 = [family for family in tiny.STOCK if family not in UNKNOWN and family not in TAKEN_OTHERWISE]
FROM_5 = [family for family in FROM_4 if family not in (*tiny.WRAPPERS, "gemma3_text", "olmo3")]
"""Version 5 names vision tensors otherwise, and says the RoPE of Gemma 3 and Olmo 3 by kinds of layer."""


def ask_families(names: list[str], place: Path, old: bool) -> Answers:
    folders = {}
    for family in names:
        source = interop.make_source(place / family / "source", family, old=old)
        for groups, out in interop.convert_to_all(source, place / family).items():
            folders[f"{family} {groups}"] = out
    answers = Answers(folders, place)
    answers.is_new = not old
    return answers


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Answers:
    """Return the outputs of all families, of sources that transformers 4 saved."""
    interop.need("transformers4")
    return ask_families(FROM_4, tmp_path_factory.mktemp("families"), old=True)


@pytest.fixture(scope="module")
def of_version_5(tmp_path_factory) -> Answers:
    """Return the outputs of sources that transformers 5 saved, whose RoPE version 4 does not find."""
    interop.need("transformers4")
    return ask_families(FROM_5, tmp_path_factory.mktemp("of-version-5"), old=False)


@pytest.mark.parametrize("family", FROM_4)
def test_families(families, figure, family):
    check_family(families, figure, family, "all families")


@pytest.mark.parametrize("family", FROM_5)
def test_sources_with_the_spelling_of_version_5_alone(of_version_5, figure, family):
    """Version 4 overlooks `rope_parameters`; we add what it reads."""
    check_family(of_version_5, figure, family, "sources of transformers 5")


def check_family(answers, figure, family, what):
    for groups in (8, 4, 2, 1):
        name = f"{family} {groups}"
        if groups == 8 and answers.is_new:
            continue  # nothing is merged, and nothing written but the source
        answer = answers.check(name)
        told = (answer["n_kv_heads"], answer["theta"], answer["dtype"])
        assert told == (groups, interop.theta_of(family), "torch.float32")
        figure(f"transformers 4.57: logits, {what}", answers.difference(name))
        assert answers.difference(name) <= 1e-6, name


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Answers:
    """Return outputs whose config we wrote, from a GGUF file and from Meta's."""
    interop.need("transformers4")
    place = tmp_path_factory.mktemp("written")
    model = interop.make_model(vocab_size=68)
    facts = {"llama.rope.freq_base": interop.THETA}
    meta = {"rope_theta": interop.THETA, "vocab_size": 68, "multiple_of": 8, "ffn_dim_multiplier": 0.46875}
    sources = {
        "gguf": write_gguf(place / "model.gguf", model, **facts),
        "gguf F16": write_gguf(place / "model-f16.gguf", model, "F16", **facts),
        "meta": write_meta(place / "meta", model, 2, **meta),
        "meta bfloat16": write_meta(place / "meta-bf16", model, 1, "bfloat16", **meta),
        "transformers 4": interop.make_source(place / "old"),
    }
    wide = interop.make_model(
        vocab_size=68, hidden_size=128, intermediate_size=192
    )  # heads whose slow angles are scaled
    scaled = {**meta, "ffn_dim_multiplier": 0.5625, "use_scaled_rope": True, "rope_scaling_factor": 8.0}
    sources["meta llama3"] = write_meta(place / "llama3", wide, 1, **scaled)
    folders = {}
    for name, source in sources.items():
        for groups, out in interop.convert_to_all(source, place / f"{name} out").items():
            folders[f"{name} {groups}"] = out
    bare = folders["transformers 4, base removed 2"] = place / "bare"
    shutil.copytree(folders["transformers 4 2"], bare)
    tiny.edit_config(bare, rope_theta=...)
    answers = Answers(folders, place)
    answers.folders = folders
    return answers


@pytest.mark.parametrize(
    ("source", "dtype"),
    [("gguf", "float32"), ("gguf F16", "float16"), ("meta", "float32"), ("meta bfloat16", "bfloat16"),
     ("meta llama3", "float32")],
)  # fmt: skip
def test_configs_that_we_write(written, figure, source, dtype):
    """They have both spellings, and either version reads its own."""
    for groups in (8, 4, 2, 1):
        name = f"{source} {groups}"
        config = json.loads((written.folders[name] / "config.json").read_text())
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == interop.THETA
        assert config["torch_dtype"] == config["dtype"] == dtype
        answer = written.check(name)
        assert (answer["n_kv_heads"], answer["theta"], answer["dtype"]) == (groups, interop.THETA, f"torch.{dtype}")
        figure("transformers 4.57: logits, configs that we write", written.difference(name))
        assert written.difference(name) <= 1e-6, name


def test_an_overlooked_base_would_show(written):
    """The control: without `rope_theta` the same weights give other logits."""
    told, untold = written.logits["transformers 4 2"], written.logits["transformers 4, base removed 2"]
    assert np.abs(told - untold).max() > 1e-3


@pytest.mark.parametrize("make", [gpt_neox, t5])
def test_the_code_in_the_folder(tmp_path, figure, make):
    """What the stock class cannot hold opens with the code beside it, in either version, and computes the same."""
    interop.need("transformers4")
    source = tiny.save(make(), tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    outs = interop.convert_to_all(source, tmp_path / "outs")
    answers = Answers({str(groups): out for groups, out in outs.items() if groups < 8}, tmp_path)
    for name in ("4", "2", "1"):
        answer = answers.check(name)
        assert (answer["n_kv_heads"], "GQA" in answer["class"]) == (int(name), True)
        figure("transformers 4.57: logits, our code for GPT-NeoX and T5", answers.difference(name))
        assert answers.difference(name) <= 1e-6
