"""Every bad input gets one clear line, exit code 2, and leaves nothing behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from commands import MEAN, left_behind
from damage import rewrite
from safetensors.torch import save_file
from transformers import AutoConfig

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# The number of groups


@pytest.mark.parametrize("groups", [3, 5, 16, 0, -2])
def test_groups_that_do_not_divide(refuse_source, groups):
    refuse_source(f"--groups {groups} is not possible", "8 K/V heads", "choose one of 1, 2, 4, 8", groups=groups)


def test_groups_that_are_no_number(convert, source, tmp_path):
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out", "--groups", "many").refused("--groups", "many")
    convert("mha-to-gqa", "--method", "mean", source, tmp_path / "out").refused(
        "Missing option '--groups'. `convert inspect SOURCE` lists the possible numbers.",
        "mha-to-gqa --help` shows all options.",
    )


def test_unknown_method(convert, source, tmp_path):
    convert("mha-to-mqa", source, tmp_path / "out", "--method", "median").refused("median", "mean", "first", "random")


# SOURCE as a whole


def test_missing_source(refuse_source, tmp_path):
    refuse_source("nowhere", "no such file", path=tmp_path / "nowhere")


def test_source_is_a_file_of_another_kind(refuse_source, source):
    refuse_source("unknown kind", ".gguf", path=source / "LICENSE")


def test_paths_of_unset_shell_variables(convert, uptrain, source, tmp_path, monkeypatch):
    """An empty path means the working directory to pathlib; here it holds a checkpoint."""
    shutil.copytree(source, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    words = "path is empty. Is a variable of the shell unset?"
    convert("mha-to-mqa", "--method", "mean", source, "", "--overwrite").refused("OUT", words)
    convert("inspect", "").refused("SOURCE", words)
    uptrain("evaluate", "", "--data", source).refused("MODEL", words)
    uptrain("evaluate", source, "--data", "").refused("--data", words)
    uptrain("status", "").refused("RUN", words)
    assert (tmp_path / "here/config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_home_that_no_shell_has_replaced(convert, uptrain, source, tmp_path, monkeypatch):
    """As in quotes, after `=` and in a TOML file."""
    monkeypatch.chdir(tmp_path)
    words = "begins with ~, which was not replaced; write the whole path (in a shell, $HOME/…), or ./~"
    convert("mha-to-mqa", "--method", "mean", source, "~/out").refused("OUT", f"~/out {words}/out.")
    convert("inspect", "~me/model").refused("SOURCE", words)
    uptrain("evaluate", "~/model", "--data", source).refused("MODEL", words)
    uptrain("prepare", "--data", source, "--seq-len", 32, "--tokenizer", "~/model", "--out", "out").refused(words)
    (tmp_path / "run.toml").write_text('out = "~/run"')
    options = ("--config", "run.toml", "--data", source, "--steps", 1)
    uptrain("run", source, *options).refused("--out", f"~/run {words}/run.")
    assert [path.name for path in tmp_path.iterdir() if "~" in path.name] == []


def test_damaged_record_of_an_earlier_conversion(refuse_source, source):
    (source / "groupwise.json").write_text("[" * 100_000)
    refuse_source("groupwise.json", "damaged", options=("--dry-run",))
    (source / "groupwise.json").unlink()
    (source / "groupwise.json").mkdir()
    refuse_source(f"Error: {source / 'groupwise.json'} is not a regular file; replace it by the file itself.")


def test_dangling_source(refuse_source, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    refuse_source("dangling symlink", path=tmp_path / "link")


def test_no_config(refuse_source, source):
    (source / "config.json").rename(source / "other.json")
    refuse_source("no config.json")
    snapshot = source / "snapshots/0a1b"  # as in the cache of Hugging Face
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    refuse_source("no config.json", f"Name one of its snapshots: {snapshot}")
    (source / "model.gguf").write_text("")
    refuse_source("no config.json", "model.gguf")


def test_a_folder_above_the_checkpoint(refuse_path, source, tmp_path):
    refuse_path(tmp_path, f"itself holds no weights. Did you mean {source}?")
    (tmp_path / "config.json").touch()  # then what is wrong here is said
    refuse_path(tmp_path, "config.json is not valid JSON")


@pytest.mark.parametrize("name", ["model.gguf", "meta/consolidated.00.pth"])
def test_training_from_another_format(uptrain, tmp_path, name):
    """Only conversions read these."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    given = path.parent if path.suffix == ".pth" else path
    result = uptrain("run", given, "--data", tmp_path, "--out", tmp_path / "run", "--steps", 1, "--lr", 1e-3)
    result.refused(f"{given} is not a Hugging Face folder", f"convert to-hf {given} OUT")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("\xff", "valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": "\\ud800"}', "not valid JSON"),
        ("", "not valid JSON"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "not valid JSON"),
        ("\xff\xfe{\x00}\x00", "not valid JSON in UTF-8: it is in UTF-16, or damaged; save it in UTF-8."),
        ("{\x00}\x00", "it is in UTF-16, or damaged; save it in UTF-8."),
        ("{\x00\x00\x00}\x00\x00\x00", "it is in UTF-32, or damaged; save it in UTF-8."),
        ('{"a": "\xe9"}', "the byte at offset 7 is not UTF-8; save it in UTF-8."),
    ],
)
def test_damaged_config(refuse_source, source, text, word):
    (source / "config.json").write_text(text, encoding="latin-1")
    refuse_source("config.json", word)


@pytest.mark.parametrize("command", ["to-hf", "mha-to-gqa"])
def test_a_config_after_a_byte_order_mark(convert, source, tmp_path, command):
    """Editors on Windows write the mark. transformers does not read it, so the output has none."""
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config, encoding="utf-8-sig")
    made = tmp_path / "made"
    convert(command, source, made, *(MEAN if command == "mha-to-gqa" else ())).succeeded()
    AutoConfig.from_pretrained(made)
    if command == "to-hf":
        assert (made / "config.json").read_text() == config
    convert("verify", source, made).succeeded()


def test_no_weights(refuse_source, source):
    for file in [*source.glob("*.safetensors"), source / "model.safetensors.index.json"]:
        file.unlink()
    refuse_source("holds no weights")
    (source / "tf_model.h5").write_text("")
    refuse_source("only tf_model.h5", "safetensors first")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("alone", [False, True])
def test_adapter_folder(refuse_source, source, name, alone):
    if alone:
        for file in source.glob("model*"):
            file.unlink()
    (source / name).write_text("{}")
    refuse_source("adapter", name, "merge it into its base model")


@pytest.mark.parametrize("name", ["NOTICE", "model-00001-of-00002.safetensors", "config.json"])
def test_dangling_symlink_inside(refuse_source, source, name):
    names = {p.name for p in source.iterdir()}
    name = next((n for n in names if n.startswith("model-00001")), name) if name.startswith("model") else name
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(source / "gone")
    refuse_source(f"{source / name} is a dangling symlink to {source / 'gone'}")


def test_symlink_cycle(refuse_source, source):
    (source / "loop").symlink_to(source)
    refuse_source("cannot contain itself")


def test_two_ways_to_a_folder(refuse_source, source):
    (source / "texts").mkdir()
    (source / "texts/a.txt").write_text("a")
    (source / "more").symlink_to(source / "texts")
    refuse_source("/more and ", "/texts are one folder", "remove the symlink")


def test_both_a_single_file_and_an_index(refuse_source, source):
    save_file(tiny.tensors(source), source / "model.safetensors")
    refuse_source("holds both", "remove the outdated one")


# Permissions bind root only when it gives up its right to ignore them.
NO_OVERRIDE = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


def run_without_override(*arguments, program="convert"):
    prefix = NO_OVERRIDE if Path("/proc/self").stat().st_uid == 0 else []
    if prefix and (not shutil.which("setpriv") or subprocess.run([*prefix, "true"], check=False).returncode):
        pytest.skip("running as root, and setpriv cannot drop its override of permissions here")
    command = [*prefix, sys.executable, "-m", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["config.json", "LICENSE", "model-00001"])
def test_unreadable_source(source, tmp_path, name):
    path = next(source.glob(f"{name}*"))
    path.chmod(0)
    result = run_without_override("mha-to-mqa", "--method", "mean", source, tmp_path / "out")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert path.name in result.stderr
    assert "permissions" in result.stderr


def test_read_only_target(source, tmp_path):
    parent = tmp_path / "locked"
    parent.mkdir(mode=0o555)
    result = run_without_override("mha-to-mqa", "--method", "mean", source, parent / "new" / "out")
    assert (result.returncode, result.stdout) == (2, "")
    assert "locked cannot be written to" in result.stderr
    assert not list(parent.iterdir())


def test_a_run_that_may_not_be_written_is_not_resumed(distilled, tmp_path):
    run = shutil.copytree(distilled, tmp_path / "run")
    (run / ".lock").unlink(missing_ok=True)
    run.chmod(0o555)
    result = run_without_override("resume", run, program="uptrain")
    run.chmod(0o755)
    shutil.rmtree(run)
    assert result.returncode == 2
    assert result.stderr.startswith(f"Error: {run} cannot be written to (Permission denied), so it cannot be trained")


def test_an_out_that_may_not_be_replaced_is_refused_before_the_work(source, tmp_path):
    out = tiny.save(tiny.build(seed=1), tmp_path / "out")
    out.chmod(0o555)
    result = run_without_override("mha-to-mqa", "--method", "mean", source, out, "--overwrite")
    out.chmod(0o755)
    shutil.rmtree(out)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"Error: OUT ({out}) cannot be written to, so it cannot be replaced; choose another OUT.\n"


# OUT


def test_out_exists(convert, source, tmp_path):
    target = tmp_path / "there"
    target.mkdir()
    convert("mha-to-mqa", "--method", "mean", source, target).refused("exists", "--overwrite")
    assert not list(target.iterdir())


@pytest.mark.parametrize("name", ["", "inside", "deep/inside"])
def test_out_in_source(refuse_source, source, name):
    before = tiny.snapshot(source)
    for options in ((), ("--overwrite",)):
        refuse_source("SOURCE or lies inside it", out=source / name, options=options)
    assert tiny.snapshot(source) == before


def test_source_in_out(convert, source, tmp_path):
    holder = tiny.save(tiny.build(), tmp_path / "holder")
    shutil.copytree(source, holder / "source")
    convert("mha-to-mqa", "--method", "mean", holder / "source", holder, "--overwrite").refused("holds files of SOURCE")
    assert (holder / "source/config.json").exists()


def test_source_in_the_staging_area_of_out(convert, source, tmp_path):
    place = tmp_path / ".elsewhere.groupwise/replaced"
    shutil.copytree(source, place)
    convert("mha-to-mqa", "--method", "mean", place, tmp_path / "elsewhere").refused("holds files of SOURCE")
    assert (place / "config.json").exists()
    shutil.rmtree(place.parent)


def test_a_refusal_gives_back_what_a_killed_run_took_away(convert, source, tmp_path):
    """Killed between the two renames of --overwrite; then the source turns out to be damaged."""
    old = tiny.save(tiny.build(seed=1), tmp_path / ".there.groupwise/replaced")
    before = tiny.snapshot(old)
    rewrite(source, lambda t: t["model.layers.0.self_attn.k_proj.weight"].fill_(float("nan")))
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "there", "--overwrite").refused("NaN or infinite")
    assert tiny.snapshot(tmp_path / "there") == before


def test_odd_targets(convert, source, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    convert("mha-to-mqa", "--method", "mean", source, loop).refused("OUT")
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "x", "--max-shard-size", "9" * 400 + "GB").refused(
        "is not a size"
    )
    convert("mha-to-mqa", "--method", "mean", source, tmp_path / "x", "--max-shard-size", "").refused("is not a size")


def test_linked_weights_in_out(convert, source, tmp_path):
    """A snapshot of links, as in the Hugging Face cache: what they point to counts."""
    store = tiny.save(tiny.build(), tmp_path / "store")
    (source / "model.safetensors.index.json").unlink()
    (source / "model.safetensors").symlink_to(store / "model.safetensors")
    convert("mha-to-mqa", "--method", "mean", source, store, "--overwrite").refused("holds files of SOURCE")
    assert (store / "model.safetensors").exists()


def test_overwrite_keeps_a_training_run(convert, source, tmp_path):
    """`uptrain run converted --out converted/run` is easily written."""
    out = tmp_path / "converted"
    convert("mha-to-mqa", "--method", "mean", source, out).succeeded()
    (out / "trained/run").mkdir(parents=True)
    (out / "trained/run/run.json").write_text("{}")
    convert("mha-to-mqa", "--method", "mean", source, out, "--overwrite").refused("a training run", "will not replace")
    assert (out / "trained/run/run.json").exists()


@pytest.mark.parametrize("name", ["inputs.sha256", "values-00000.bin"])
def test_overwrite_keeps_tokens_and_logits(convert, source, tmp_path, name):
    """`uptrain prepare --tokenizer converted --out converted/tokens` is easily written too."""
    out = tmp_path / "converted"
    convert("mha-to-mqa", "--method", "mean", source, out).succeeded()
    (out / "data/tokens").mkdir(parents=True)
    for file in ("manifest.json", name):
        (out / "data/tokens" / file).write_text("{}")
    convert("mha-to-mqa", "--method", "mean", source, out, "--overwrite").refused("a training run", "will not replace")
    assert (out / "data/tokens" / name).exists()


def test_overwrite_onto_something_else(convert, source, tmp_path):
    folder, file = tmp_path / "diary", tmp_path / "file.txt"
    folder.mkdir()
    for path in (folder / "monday.txt", file):
        path.write_text("precious")
    for target in (folder, file):
        convert("mha-to-mqa", "--method", "mean", source, target, "--overwrite").refused("not a checkpoint folder")
    assert (folder / "monday.txt").read_text() == file.read_text() == "precious"


def test_not_enough_disk(refuse_source, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refuse_source("1 MB free", "are needed")


def test_second_conversion_at_the_same_time(convert, source, tmp_path):
    from model.files.staging import Staging

    with Staging(tmp_path / "out"):
        convert("mha-to-mqa", "--method", "mean", source, tmp_path / "out").refused("is being written by process")


@pytest.mark.parametrize("seed", [2**60 + 1, 10**30])
def test_seeds_that_no_record_holds(convert, source, tmp_path, seed):
    result = convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "random", "--seed", seed)
    result.refused("is not in the range")


def test_a_folder_that_cannot_be_listed_is_not_dropped(convert, source, tmp_path, monkeypatch):
    (source / "extra").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(source / "extra") and real(path, mode))
    result = convert("mha-to-gqa", source, tmp_path / "out", *MEAN)
    result.refused(f"{source / 'extra'} cannot be read")


@pytest.mark.parametrize(
    ("name", "options"), [("README.md", ()), ("model-00001-of-00004.safetensors", ("--max-shard-size", "40KB"))]
)
def test_a_folder_where_a_file_is_written(convert, tmp_path, monkeypatch, name, options):
    """It is found before hours of work."""
    source = tiny.save(tiny.build(vocab_size=300), tmp_path / "source")
    monkeypatch.delattr("convert.conversion.write_shards")
    (source / name).unlink(missing_ok=True)
    (source / name).mkdir()
    (source / name / "notes.txt").write_text("mine")
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN, *options).refused(
        f"{source / name} is a folder, but OUT has a file of that name; rename it"
    )
    assert left_behind(tmp_path) == []


def test_folders_within_folders_of_the_source(convert, source, tmp_path):
    (source / "/".join("a" * 64)).mkdir(parents=True)
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN, "--dry-run").succeeded()
    (source / "/".join("a" * 65)).mkdir()
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).refused("folders more than 64 levels deep")


def test_a_model_card_of_more_than_can_be_read(convert, source, tmp_path, monkeypatch):
    monkeypatch.delattr("convert.conversion.write_shards")
    os.truncate(source / "README.md", 100_000_001)
    convert("mha-to-gqa", source, tmp_path / "out", *MEAN).refused("README.md has 100,000,001 bytes")
    assert left_behind(tmp_path) == []
