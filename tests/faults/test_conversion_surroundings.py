"""What a conversion meets besides weights: configs that disagree, its own folder, its output's reader."""

import json
import os
import subprocess
import sys

import pytest
import tiny
import torch
from commands import left_behind
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from tiny_tokenizers import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from convert.calibration.generated_text import TextGeneration
from convert.calibration.transformers_layer import TransformersLayer
from convert.merging.layer_file import save_layer
from model.checkpoint import open_checkpoint
from model.common import console
from model.common.errors import CheckpointError
from model.decoder import generation

CALIBRATE = ("--groups", 2, "--calibration-tokens", 1024)
BY_WEIGHTS = ("--groups", 2, "--method", "pca", "--calibration", "none")


@pytest.fixture
def source(tmp_path):
    return make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)


def test_latent_attention_takes_the_dtype_of_its_tensors(convert, tmp_path):
    """float16 in config.json would let the latent's norm overflow."""
    parent = tiny.save(tiny.build(), tmp_path / "source")
    tiny.edit_config(parent, torch_dtype="float16", dtype=None)
    out = tmp_path / "out"
    sizes = ("--latent", 16, "--rope", 4, "--calibration", "none")
    convert("mha-to-mla", parent, out, *sizes).succeeded()
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    with torch.inference_mode():
        assert AutoModelForCausalLM.from_pretrained(out)(torch.arange(8)[None]).logits.isfinite().all()


def test_biases_that_the_config_does_not_declare(convert, tmp_path):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300, attention_bias=True), tmp_path / "source"), 300)
    tiny.edit_config(folder, attention_bias=False)
    tensor, reason = "holds the tensor model.layers.0.self_attn.k_proj.bias", "unknown to its config.json"
    convert("mha-to-gqa", folder, tmp_path / "out", *CALIBRATE).refused(f"{tensor}, {reason}")
    convert("mha-to-mla", folder, tmp_path / "out", "--calibration", "none").refused(tensor, reason)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["olmo", "mpt"])
def test_clipping_is_not_seen_in_weights(convert, tmp_path, family):
    folder = tiny.save(tiny.build(family), tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    if family == "mpt":
        config["attn_config"]["clip_qkv"] = 0.3
    else:
        config["clip_qkv"] = 0.3
    (folder / "config.json").write_text(json.dumps(config))
    convert("mha-to-gqa", folder, tmp_path / "out", *BY_WEIGHTS).refused("clip_qkv = 0.3", "--method mean")
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()


def test_longrope_as_transformers_4_reads_it(convert, tmp_path):
    """Phi 3's class there wants these three keys in rope_scaling, and no others."""
    factors = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    folder = tiny.save(tiny.build("phi3", max_position_embeddings=64), tmp_path / "source")
    tiny.edit_config(folder, rope_parameters=rope, original_max_position_embeddings=32)
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_scaling"] == {"type": "longrope", **factors}
    assert config["original_max_position_embeddings"] == 32
    assert config["rope_parameters"] == rope


@pytest.mark.parametrize("setting", ["attention_factor", "factor"])
def test_longrope_that_transformers_4_cannot_read(convert, tmp_path, setting):
    """Version 5 would read `rope_scaling` in place of the whole settings, without this one."""
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
        "partial_rotary_factor": 1.0, "short_factor": [1.0, 1.1], "long_factor": [2.0, 3.0], setting: 1.7,
    }  # fmt: skip
    model = tiny.build("phi3", num_key_value_heads=4, original_max_position_embeddings=16, rope_parameters=rope)
    folder, out = tiny.save(model, tmp_path / "source"), tmp_path / "out"
    result = convert("repeat-kv", folder, out, "--groups", 8, "--json")
    assert any(f"version 4 has no keys for {setting}, " in note for note in json.loads(result.out)["notes"])
    config = AutoConfig.from_pretrained(out)
    assert config.rope_parameters == AutoConfig.from_pretrained(folder).rope_parameters
    ids = torch.arange(48)[None]
    with torch.inference_mode():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(each)(ids).logits for each in (out, folder))
    assert (ours - theirs).abs().max() <= 1e-5


def test_an_empty_tensor(convert, tmp_path):
    folder = make_tokenizer(tiny.save(tiny.build("qwen3", vocab_size=300), tmp_path / "source"), 300)
    tensors = tiny.tensors(folder) | {"extra": torch.zeros(0, 4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    options = ("--groups", 2, "--calibration", "self", "--calibration-tokens", 1024, "--refine", 0)
    convert("mha-to-gqa", folder, tmp_path / "out", *options).refused(
        "holds a tensor unknown to its config.json: extra"
    )


def test_attention_sinks_that_take_everything(convert, tmp_path):
    """Then a query's weights on its keys may all be 0."""
    model = tiny.build("gpt_oss", vocab_size=300)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.fill_(150.0)
    folder = make_tokenizer(tiny.save(model, tmp_path / "source"), 300)
    convert("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024).succeeded()
    assert all(tensor.isfinite().all() for tensor in tiny.tensors(tmp_path / "out").values())


def test_two_bases_of_the_rotary_embedding(convert, source, tmp_path):
    tiny.edit_config(source, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_theta=5e5)
    convert("mha-to-gqa", source, tmp_path / "out", *CALIBRATE).refused("rope_theta = 500000.0", "make them equal")


def test_the_frequencies_are_announced_and_reported(convert, source, tmp_path):
    """In the plan, before they are chosen, and in the JSON of the conversion as in its record."""
    sizes = ("--latent", 16, "--rope", 4, "--calibration-tokens", 1024, "--refine", 0)
    dry = json.loads(convert("mha-to-mla", source, tmp_path / "out", *sizes, "--dry-run", "--json").out)
    assert any("rope_type longrope" in note for note in dry["notes"])
    summary = json.loads(convert("mha-to-mla", source, tmp_path / "out", *sizes, "--json").out)
    record = json.loads((tmp_path / "out/groupwise.json").read_text())
    assert summary["latent"] == record["latent"]
    assert summary["latent"]["positions"] is not None
    assert any("rope_type longrope" in note for note in summary["notes"])


def test_the_text_that_was_written_is_that_of_the_tokenizer(source):
    """A conversion that goes on must not mix the texts of two chat templates."""

    def inputs():
        with open_checkpoint(source) as checkpoint:
            return TextGeneration(checkpoint, (0,), 4, 64, 0).inputs_sha256

    before = inputs()
    (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    changed = inputs()
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert len({before, changed, inputs()}) == 3


def test_the_plan_of_a_text_of_its_own_sees_missing_tensors(convert, tmp_path):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    arguments = ("mha-to-gqa", folder, tmp_path / "out", *CALIBRATE, "--calibration", "self", "--dry-run")
    convert(*arguments).refused("lacks the tensor lm_head.weight")


@pytest.mark.parametrize("seed", [2**60 + 1, 10**30])
def test_seeds_that_no_record_holds(convert, source, tmp_path, seed):
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "random", "--seed", seed)
    result.refused("is not in the range")


def test_overwriting_keeps_what_is_no_conversions(convert, source, tmp_path):
    out = tmp_path / "out"
    convert("mha-to-gqa", source, out, "--groups", 2, "--method", "mean").succeeded()
    (out / "text.txt").write_text("A text to calibrate on. " * 2000)
    text = ("--calibration", out / "text.txt", "--overwrite")
    for groups in (2, 8, 5):  # 8 heads stay 8; 5 are not possible
        options = ("--groups", groups, "--calibration-tokens", 1024)
        convert("mha-to-gqa", source, out, *options, *text).refused("holds the calibration text", "would delete")
    (out / ".git").mkdir()
    convert("mha-to-gqa", source, out, "--groups", 2, "--method", "mean", "--overwrite").refused("such as .git")
    assert (out / "text.txt").exists() and (out / ".git").exists()


@pytest.mark.parametrize(
    ("option", "name"),
    [
        (("--calibration", "/no/such/text"), "--calibration"),
        (("--calibration-tokens", 1024), "--calibration-tokens"),
        (("--method", "fit", "--refit"), "--refit"),
        (("--refine", 1024), "--refine"),
    ],
)
def test_what_has_no_effect_where_the_heads_stay(convert, source, tmp_path, option, name):
    """The command does not read a text either."""
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 8, *option).succeeded()
    assert result.err == f"Warning: {name} has no effect: the model has 8 K/V heads already.\n"


def test_an_empty_calibration_is_no_default(convert, source, tmp_path):
    convert("mha-to-gqa", source, tmp_path / "out", *CALIBRATE, "--calibration", "").refused("--calibration is empty")


def test_a_folder_that_cannot_be_listed_is_not_dropped(convert, source, tmp_path, monkeypatch):
    (source / "extra").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(source / "extra") and real(path, mode))
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean")
    result.refused(f"{source / 'extra'} cannot be read")


def program(*arguments, **environment):
    words = [sys.executable, "-m", "convert", *map(str, arguments)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment}, text=True
    )


@pytest.mark.parametrize(("groups", "code"), [(2, 0), (3, 2)])
def test_a_reader_that_leaves_changes_no_exit_code(source, tmp_path, groups, code):
    process = program("mha-to-gqa", source, tmp_path / "out", "--groups", groups, "--method", "mean")
    process.stdout.close()
    process.stderr.close()
    assert process.wait() == code
    assert (tmp_path / "out").exists() == (code == 0)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("mha-to-gqa", "--help")])
def test_a_reader_of_help_that_leaves(arguments):
    process = program(*arguments)
    process.stdout.close()
    with process.stderr:
        assert (process.wait(), process.stderr.read()) == (0, "")


def test_a_terminal_of_few_characters(source, tmp_path):
    arguments = ("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean")
    out, err = (process := program(*arguments, PYTHONIOENCODING="ascii")).communicate()
    assert (process.returncode, err) == (0, "")
    assert r"8 \u2192 2" in out


@pytest.mark.parametrize("rank", ["1", ""])
def test_errors_do_not_depend_on_a_launcher(source, tmp_path, rank):
    process = program("mha-to-gqa", source, tmp_path / "out", "--groups", 3, "--method", "mean", LOCAL_RANK=rank)
    _, err = process.communicate()
    assert process.returncode == 2 and err.startswith("Error: --groups 3 is not possible")


def test_a_lack_of_memory_is_one_line(capsys, monkeypatch):
    def lacking(**options):
        raise MemoryError("Unable to allocate 8.00 MiB for an array")

    with pytest.raises(SystemExit) as stop:
        console.run(type("Command", (), {"main": staticmethod(lacking)}))
    assert stop.value.code == 1
    assert capsys.readouterr().err == "Error: not enough memory (Unable to allocate 8.00 MiB for an array).\n"


def test_too_little_memory_to_join_experts(convert, tmp_path, monkeypatch):
    """Transformers catches the error and continues, so a tensor is missing: that is not the checkpoint's fault."""
    folder = make_tokenizer(tiny.save(tiny.build("qwen3_moe", vocab_size=302), tmp_path / "model"), 300)
    arguments = ("mha-to-gqa", folder, tmp_path / "out", *CALIBRATE, "--calibration-tokens", 1024)

    def fail(*arguments, **options):
        raise MemoryError("Unable to allocate 8.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.core_model_loading.MergeModulelist.convert", fail)
        result = convert(*arguments)
    assert result.code == 1
    assert result.err.startswith("Error: not enough memory (") and "Unable to allocate 8.00 GiB" in result.err
    assert "lacks the tensor" not in result.err
    convert(*arguments).succeeded()


def test_a_device_that_fails(convert, tmp_path, monkeypatch):
    """That is not the checkpoint's fault, and the layers that are finished are kept."""
    folder = make_tokenizer(tiny.save(tiny.build("qwen3", vocab_size=302), tmp_path / "model"), 300)
    arguments = ("mha-to-gqa", folder, tmp_path / "out", *CALIBRATE)
    real = TransformersLayer.__init__

    def fail_at_the_second(self, layer, index, *others):
        if index == 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        real(self, layer, index, *others)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersLayer, "__init__", fail_at_the_second)
        result = convert(*arguments)
    kept = tmp_path / ".out.groupwise"
    assert result.code == 1
    assert "Error: the device failed (RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED" in result.err
    assert f"finished work is kept in {kept}, and the same command continues from there.\n" in result.err
    assert len(list(kept.rglob("*.npz"))) == 1
    saves = []
    monkeypatch.setattr(
        "convert.calibration.calibrate_layers.save_layer", lambda *given: saves.append(save_layer(*given))
    )
    convert(*arguments).succeeded()
    assert len(saves) == tiny.N_LAYERS - 1


def test_a_prompt_of_another_tokenizer(tmp_path):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=67), tmp_path / "model"), 300)
    with pytest.raises(CheckpointError, match="but the model has 67 tokens; they do not belong together"):
        generation.show(folder, "~ z", 4, 0.0, 1.0, 0, "cpu")


def test_a_part_of_a_gguf(convert, tmp_path):
    model = tiny.build(vocab_size=300)
    part = write_gguf(tmp_path / "a-00001-of-00002.gguf", model, **{"split.count": 2, "split.no": 0})
    convert("to-hf", part, tmp_path / "out").refused("is one of 2 parts", "llama-gguf-split --merge")


def test_weights_under_another_name(convert, source, tmp_path):
    (source / "model.safetensors").rename(source / "pytorch_model.safetensors")
    words = "but pytorch_model.safetensors; rename it to model.safetensors"
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean").refused(words)


@pytest.mark.parametrize(
    ("name", "options"), [("README.md", ()), ("model-00001-of-00004.safetensors", ("--max-shard-size", "40KB"))]
)
def test_a_folder_where_a_file_is_written(convert, source, tmp_path, monkeypatch, name, options):
    """It is found before hours of work."""
    monkeypatch.delattr("convert.conversion.write_shards")
    (source / name).unlink(missing_ok=True)
    (source / name).mkdir()
    (source / name / "notes.txt").write_text("mine")
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean", *options).refused(
        f"{source / name} is a folder, but OUT has a file of that name; rename it"
    )
    assert left_behind(tmp_path) == []


def test_folders_within_folders_of_the_source(convert, source, tmp_path):
    (source / "/".join("a" * 64)).mkdir(parents=True)
    options = ("--groups", 2, "--method", "mean")
    convert("mha-to-gqa", source, tmp_path / "out", *options, "--dry-run").succeeded()
    (source / "/".join("a" * 65)).mkdir()
    convert("mha-to-gqa", source, tmp_path / "out", *options).refused("folders more than 64 levels deep")


def test_a_shard_of_the_longest_name(convert, source, tmp_path):
    name = f"{'x' * 243}.safetensors"
    (source / "model.safetensors").rename(source / name)
    index = {"weight_map": dict.fromkeys(tiny.tensors(source), name)}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "mean").succeeded()
    assert (tmp_path / "out" / name).is_file()
    assert not list((tmp_path / "out").glob("*.partial"))


def test_a_model_card_of_more_than_can_be_read(convert, source, tmp_path, monkeypatch):
    monkeypatch.delattr("convert.conversion.write_shards")
    os.truncate(source / "README.md", 100_000_001)
    options = ("--groups", 2, "--method", "mean")
    convert("mha-to-gqa", source, tmp_path / "out", *options).refused("README.md has 100,000,001 bytes")
    assert left_behind(tmp_path) == []
