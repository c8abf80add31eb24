"""Names of models that are not in the hub's cache, or that are no names."""

import shutil
import sys
from pathlib import Path

import pytest
import real_runs

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.parametrize(
    ("name", "fetch"),
    [("org/name", "hf download org/name."), ("org/name@v1.0", "hf download org/name --revision v1.0.")],
)
def test_hub_names_that_are_not_in_the_cache(refuse_path, tmp_path, monkeypatch, name, fetch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    refuse_path(name, "no such file or folder", "not in the cache", fetch)


def test_hub_names_without_the_package(refuse_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refuse_path("org/name", "no such file or folder", "pip install huggingface_hub", "hf download org/name")


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "org/name@", "@/x", "org/", "../x/y", "org/na me"])
def test_invalid_hub_names(refuse_path, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    refuse_path(name, "no such file or folder; a model is")


@pytest.mark.parametrize("form", ["assets/demo-mah", "./assets/demo-mah", "demo-mah", "ABSOLUTE"])
def test_a_misspelt_path(convert, uptrain, tmp_path, monkeypatch, form):
    """The message names the path that was meant first, and how to fetch a model of the hub if it may be one."""
    folder = tmp_path / "assets"
    for name in ("demo-mha", "speeches"):
        (folder / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path if "assets" in form else folder)
    path = Path(f"{folder}/demo-mah" if form == "ABSOLUTE" else form)
    words = f"{path}: no such file or folder; did you mean {path.with_name('demo-mha')}?"
    result = convert("inspect", path)
    result.refused(words)
    assert ("fetch it: hf download assets/demo-mah." in result.err) == ("assets" in form)
    if form == "assets/demo-mah":
        uptrain("plan", path, "--steps", 5).refused(words)


def test_a_file_of_a_model(convert, uptrain, source):
    file = next(source.glob("model-*.safetensors"))
    for path in (file, source / "config.json"):
        words = f"{path} is one file of a checkpoint; give its folder: {source}"
        convert("inspect", path).refused(words)
        uptrain("plan", path, "--steps", 5).refused(words)


def test_the_address_of_a_dataset_is_no_models(convert):
    result = convert("inspect", "https://huggingface.co/datasets/org/name").refused("no such file or folder")
    assert "hf download" not in result.err


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/org/name", "https://huggingface.co/org/name/tree/main", "http://hf.co/org/name?x=1",
        "hf://org/name",
    ],
)  # fmt: skip
def test_the_address_of_a_model(convert, uptrain, tmp_path, address):
    words = (
        f"{address} is an address; give the model's name, as org/name, once it is in the cache: hf download org/name."
    )
    convert("inspect", address).refused(words)
    uptrain("plan", address, "--steps", 4).refused(words)
    uptrain("prepare", "--data", "x", "--tokenizer", address, "--out", tmp_path / "out").refused(words)


@pytest.fixture
def cached(runs, tmp_path, monkeypatch):
    """Put a model named acme/tiny into the hub's cache."""
    folder = tmp_path / "cache/models--acme--tiny"
    shutil.copytree(runs.inputs["model"], folder / "snapshots" / ("a" * 40))
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cached")
def test_names_of_models_in_the_hubs_cache(uptrain, runs, tmp_path):
    named, direct = tmp_path / "named", tmp_path / "direct"
    uptrain(*real_runs.arguments({**runs.inputs, "model": "acme/tiny"}, named, steps=4)).succeeded()
    uptrain(*real_runs.arguments(runs.inputs, direct, steps=4)).succeeded()
    real_runs.assert_same_run(named, direct)
    uptrain("evaluate", "acme/other", "--data", runs.inputs["data"]).refused("hf download acme/other")


@pytest.mark.usefixtures("cached")
def test_out_may_not_be_named_as_a_source_of_the_cache(convert, tmp_path, monkeypatch):
    """The commands that follow would compare OUT with itself."""
    monkeypatch.chdir(tmp_path)
    convert("mha-to-gqa", "acme/tiny", "acme/tiny", "--groups", 1, "--method", "mean").refused("the name of SOURCE")
    assert not (tmp_path / "acme").exists()
