"""What a user is told of a config that may mislead: code that `auto_map` names, numbers that stay. None of it runs."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors.torch import save_file
from tiny_tokenizers import make_tokenizer

from convert.calibration.calibrate import calibrate
from convert.planning.notes import notes_of_checkpoint
from model.common.errors import CheckpointError
from model.decoder.loading import load_model
from model.families import find_family

LLAMA = find_family({"model_type": "llama"}).family

WARNING = (
    "config.json has auto_map: with trust_remote_code=True, transformers runs code from {}, which may ignore "
    "num_key_value_heads; open the result without it."
)
BESIDE = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
ELSEWHERE = {name: f"org/repo--{value}" for name, value in BESIDE.items()}
CASES = [(BESIDE, "configuration_x.py beside it and modeling_x.py beside it"), (ELSEWHERE, "org/repo")]


@pytest.mark.parametrize(("auto_map", "place"), CASES)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_the_note_is_everywhere_and_nothing_runs(convert, source, tmp_path, monkeypatch, auto_map, place, form):
    if form == "bin":
        from torch_files import write_bin

        for file in source.glob("model*"):
            file.unlink()
        write_bin(source, tiny.build())
    code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    for name in ("configuration_x.py", "modeling_x.py", "convert.py", "sitecustomize.py"):
        (source / name).write_text(code)
    tiny.edit_config(source, auto_map=auto_map)
    monkeypatch.chdir(source)
    warning, out = WARNING.format(place), tmp_path / "out"
    assert json.loads(convert("inspect", source, "--json").out)["notes"] == [warning]
    planned = convert("mha-to-mqa", "--method", "mean", source, out, "--dry-run", "--json")
    assert json.loads(planned.out)["notes"] == [warning]
    shown = convert("mha-to-mqa", "--method", "mean", source, out).succeeded()
    assert "trust_remote_code=True" in shown.out
    assert f"- {warning}\n" in (out / "README.md").read_text()
    assert json.loads((out / "config.json").read_text())["auto_map"] == auto_map
    assert {f.name for f in out.glob("*.py")} == {f.name for f in source.glob("*.py")}
    assert (out / "modeling_x.py").read_text() == code
    convert("verify", source, out).succeeded()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "auto_map",
    [None, {}, [], "x", {"AutoTokenizer": ["tokenization_x.X", None]}, {"AutoModel": None}, {"AutoModel": 3}],
)
def test_no_note_where_no_model_s_code_is_named(auto_map):
    rest = {"notes": (), "tensors": {}, "path": Path("model"), "config_folder": Path("model"), "side_files": {}}
    for config in ({"model_type": "llama", "auto_map": auto_map}, {"model_type": "llama"}):
        assert notes_of_checkpoint(SimpleNamespace(config=config, **rest), LLAMA) == ()


def test_no_note_where_that_code_is_needed(convert, tmp_path):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=67, hidden_size=32, num_hidden_layers=1, num_attention_heads=8, intermediate_size=40
    )
    source = tiny.save(GPTNeoXForCausalLM(config), tmp_path / "source")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    assert json.loads(convert("inspect", tmp_path / "out", "--json").out)["notes"] == []
    assert "auto_map" in json.loads((tmp_path / "out/config.json").read_text())


def test_a_note_of_numbers_that_stay(convert, source, tmp_path):
    """As configs have them that passed through other programs; the class reads one of them."""
    tiny.edit_config(source, num_kv_heads=8, num_query_groups=8)
    shown = convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2, "--json")
    notes = json.loads(shown.out)["notes"]
    assert [note.split(",")[0] for note in notes] == [
        "config.json has num_kv_heads = 8", "config.json has num_query_groups = 8",
    ]  # fmt: skip
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["num_kv_heads"], config["num_key_value_heads"]) == (8, 2)


def test_a_note_of_tensors_that_are_no_part_of_the_language_model(convert, source, tmp_path):
    """The head of a reward, as PPO leaves it, or Medusa's heads: transformers ignores them."""
    extra = {"v_head.summary.bias": torch.zeros(1), "medusa_head.0.0.linear.weight": torch.zeros(2, 2)}
    known = {"rotary_emb.inv_freq": torch.ones(2)}
    for file in source.glob("model*"):
        file.unlink()
    save_file({**tiny.build().state_dict(), **extra, **known}, source / "model.safetensors", metadata={"format": "pt"})
    (note,) = json.loads(convert("inspect", source, "--json").out)["notes"]
    assert note.startswith("the source holds medusa_head.0.0.linear.weight and 1 more, no part of a language model")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", 2).succeeded()
    assert all(torch.equal(tiny.tensors(tmp_path / "out")[name], tensor) for name, tensor in extra.items())
    with pytest.raises(CheckpointError, match=r"unknown to its config\.json; remove it if it is no part of the lang"):
        load_model(tmp_path / "out")


def test_an_embedding_of_another_size_than_the_vocabulary(convert, source):
    tiny.edit_config(source, vocab_size=66)
    (note,) = json.loads(convert("inspect", source, "--json").out)["notes"]
    assert note == (
        "config.json has vocab_size = 66, but model.embed_tokens.weight has 67 rows, which transformers refuses; "
        "set vocab_size to 67."
    )


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "llava"])
@pytest.mark.parametrize("more", [1, -1])
def test_a_conversion_that_nothing_could_open_is_refused(convert, tmp_path, family, more):
    """Transformers refuses the source too; the advice makes it accept both. It comes before a text is looked for."""
    folder, out = tiny.save(tiny.build(family), tmp_path / "source"), tmp_path / "out"
    config = json.loads((folder / "config.json").read_text())
    stated = config.get("text_config", config)
    stated["vocab_size"] -= more
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="mismatch"):
        tiny.model_class(family).from_pretrained(folder)
    mean = ("mha-to-gqa", folder, out, "--groups", 2, "--method", "mean")
    advice = f"set vocab_size{' of text_config' if family == 'llava' else ''} to 67."
    fit = ("mha-to-gqa", folder, out, "--groups", 2, "--calibration", tmp_path / "no-such-text.jsonl")
    for given in (mean, (*mean, "--dry-run"), fit):
        convert(*given).refused(f"config.json has vocab_size = {67 - more}, but", advice)
    assert not out.exists()
    stated["vocab_size"] = 67
    (folder / "config.json").write_text(json.dumps(config))
    tiny.model_class(family).from_pretrained(folder)
    convert(*mean).succeeded()


def test_notes_come_before_hours_of_calibrating(convert, tmp_path, monkeypatch):
    source = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)
    tiny.edit_config(source, num_query_groups=8)
    note, calibrated = "config.json has num_query_groups = 8", []

    def announced(*given):
        calibrated.append(sys.stderr.getvalue())
        return calibrate(*given)

    monkeypatch.setattr("convert.calibration.calibrate.calibrate", announced)
    given = ("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024)
    shown = convert(*given)
    assert f"Note: {note}" in calibrated[0]
    assert ((shown.out + shown.err).count(note), note in shown.out) == (1, False)
    shown = convert(*given, "--overwrite", "--json")
    assert (calibrated[1], shown.err) == ("", "")
    assert note in json.loads(shown.out)["notes"][0]
    shown = convert(*given[:-2], "--method", "mean", "--overwrite")
    assert (shown.out.count(note), shown.err) == (1, "")


def test_a_wrapper_has_the_vocabulary_of_its_language_model(convert, tmp_path):
    folder = tiny.save(tiny.build("llava"), tmp_path / "llava")
    tiny.edit_config(folder, vocab_size=66)
    assert json.loads(convert("inspect", folder, "--json").out)["notes"] == []
    text = json.loads((folder / "config.json").read_text())["text_config"]
    tiny.edit_config(folder, text_config={**text, "vocab_size": 66})
    (note,) = json.loads(convert("inspect", folder, "--json").out)["notes"]
    assert note.startswith("config.json has vocab_size = 66")


def test_the_record_of_an_uptraining_is_not_copied_with_other_heads(convert, source, tmp_path):
    (source / "uptraining.json").write_text("{}")
    for command, kept in ((("to-hf",), True), (("mha-to-gqa", "--groups", 2, "--method", "mean"), False)):
        out = tmp_path / command[0]
        convert(command[0], source, out, *command[1:]).succeeded()
        assert (out / "uptraining.json").exists() == kept
        convert("verify", source, out).succeeded()


def test_runs_inside_the_source_are_not_copied(convert, source, tmp_path):
    for name in (
        "exp/run.json",
        "exp/metrics.jsonl",
        "exp.data/manifest.json",
        "exp.data/inputs.sha256",
        "assets/manifest.json",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean", "--json")
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {"assets", "chat_templates"}
    why = "(a training run, its data, or logits)"
    assert json.loads(result.out)["skipped_files"] == [f"exp/ {why}", f"exp.data/ {why}"]


def test_a_partly_cached_model(convert, tmp_path):
    """As AutoModelForCausalLM.from_pretrained leaves it: without a tokenizer."""
    snapshot = tmp_path / "models--org--model/snapshots" / ("a" * 40)
    tiny.save(tiny.build(), snapshot)
    for file in snapshot.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (shutil.rmtree if file.is_dir() else Path.unlink)(file)
    arguments = ("mha-to-gqa", snapshot, tmp_path / "out", "--groups", 2)
    (note,) = json.loads(convert(*arguments, "--method", "mean", "--json").out)["notes"]
    assert "the cache holds no tokenizer of org/model" in note and note.endswith("hf download org/model.")
    convert(*arguments, "--overwrite").refused("fetch all files of the model: hf download org/model")
