"""Code that comes with a checkpoint, a tokenizer or a dataset is never run, and nobody is asked whether it should be.

The payload makes a folder; stdin answers "y" to any question.
"""

import ast
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from calibrated import FIT
from calls import named_calls
from tiny_tokenizers import make_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pwned(tmp_path, monkeypatch):
    """Return the folder that no code may make; whoever asks on stdin hears yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    yield tmp_path / "pwned"
    assert not (tmp_path / "pwned").exists()


def code(path, pwned):
    path.write_text(f"import os\nos.mkdir({str(pwned)!r})\nclass T:\n    pass\n")


def with_own_tokenizer(folder, pwned, **config):
    """Let a folder name code of its own for its tokenizer."""
    path = folder / "tokenizer_config.json"
    existing = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**existing, "auto_map": {"AutoTokenizer": ["tok.T", "tok.T"]}, **config}))
    code(folder / "tok.py", pwned)
    return folder


def slow_only(folder):
    """Take a folder's tokenizer.json away, so that only its own code could open the tokenizer."""
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("a\nb\n")
    return folder


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "the folder is the interface"}) + "\n")
    return tmp_path / "texts.jsonl"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_prepare_runs_no_tokenizer_of_its_own(uptrain, tmp_path, pwned, texts, options):
    folder = with_own_tokenizer(slow_only(make_tokenizer(tmp_path / "t")), pwned, tokenizer_class="T")
    command = ("prepare", "--tokenizer", folder, "--data", texts, "--seq-len", 8, "--out", tmp_path / "out")
    uptrain(*command, *options).refused("code of its own (tok.T), which is never run", "put a tokenizer.json there")


def test_prepare_opens_tokenizer_json_without_the_code_beside_it(uptrain, tmp_path, pwned, texts):
    plain = make_tokenizer(tmp_path / "plain")
    named = with_own_tokenizer(make_tokenizer(tmp_path / "named"), pwned, tokenizer_class="T")
    for folder in (plain, named):
        out = tmp_path / f"cache of {folder.name}"
        command = ("prepare", "--tokenizer", folder, "--data", texts, "--seq-len", 8, "--out", out)
        result = uptrain(*command, "--json", "--workers", 1).succeeded()
        json.loads(result.out)
    caches = [tmp_path / f"cache of {name}" for name in ("plain", "named")]
    tokens = [{p.name: p.read_bytes() for p in cache.rglob("*.bin")} for cache in caches]
    assert tokens[0] == tokens[1]
    assert tokens[0]


def test_run_on_texts_runs_no_tokenizer_of_its_own(uptrain, tmp_path, pwned, texts):
    model = tiny.save(tiny.build(), tmp_path / "model")
    with_own_tokenizer(slow_only(make_tokenizer(model)), pwned, tokenizer_class="T")
    command = ("run", model, "--out", tmp_path / "run", "--data", texts, "--loss", "next-token", "--steps", 2)
    options = ("--seq-len", 8, "--global-batch-tokens", 16, "--lr", 1e-3)
    uptrain(*command, *options).refused("code of its own (tok.T), which is never run")


def test_generating_runs_no_tokenizer_of_its_own(generation, tmp_path, pwned, monkeypatch):
    model = tiny.save(tiny.build(), tmp_path / "model")
    with_own_tokenizer(slow_only(make_tokenizer(model)), pwned, tokenizer_class="T")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    generation(model, "--prompt", "x").refused("code of its own (tok.T), which is never run")


def test_the_payload_would_run(tmp_path):
    """As transformers does it when it may: the tests above would notice."""
    folder = with_own_tokenizer(slow_only(make_tokenizer(tmp_path / "t")), tmp_path / "pwned", tokenizer_class="T")
    script = "import sys; from transformers import AutoTokenizer as A; A.from_pretrained(sys.argv[1])"
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    subprocess.run(
        [sys.executable, "-c", script, folder],
        input="y\n",
        text=True,
        check=False,
        capture_output=True,
        env=environment,
    )
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize("auto_map", ["x", [], ["a.B"], {"AutoTokenizer": []}, {"AutoTokenizer": 5}, 7])
def test_odd_names_of_code(uptrain, tmp_path, pwned, texts, auto_map):
    folder = with_own_tokenizer(
        slow_only(make_tokenizer(tmp_path / "t")), pwned, tokenizer_class="T", auto_map=auto_map
    )
    command = ("prepare", "--tokenizer", folder, "--data", texts, "--seq-len", 8, "--out", tmp_path / "out")
    uptrain(*command).refused(str(folder))


def test_datasets_with_a_script(uptrain, convert, tmp_path, pwned):
    folder = tmp_path / "evil"
    folder.mkdir()
    code(folder / "evil.py", pwned)
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    tokenizer = make_tokenizer(tmp_path / "t")
    for name in (f"hub:{folder}", f"hub:{folder}/evil.py"):
        command = ("prepare", "--tokenizer", tokenizer, "--data", name, "--seq-len", 8, "--out", tmp_path / "out")
        uptrain(*command).refused(f"{name} is loaded by a script of its own, which is never run")
    source = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"))
    command = ("mha-to-gqa", source, tmp_path / "out", "--groups", 2, "--method", "pca", "--calibration")
    convert(*command, f"hub:{folder}").refused("script of its own, which is never run")


def test_version_3_of_datasets_is_told_not_to_ask(monkeypatch, tmp_path):
    """Version 3 asks on stdin where `trust_remote_code` is None, its default; 4 and later drop the argument."""
    import datasets

    from model.texts.hub import hub_files

    class Loaded:
        cache_files = ({"filename": "a.arrow"},)

    def load_dataset(name, config=None, split=None, trust_remote_code=None, keep_in_memory=None):
        assert (trust_remote_code, keep_in_memory) == (False, False)  # in memory, a dataset has no files
        return Loaded()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert hub_files(f"hub:{tmp_path}") == ("a.arrow",)


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": {"": "evil/kernel"}},
        {"x": [{"experts_implementation": "evil/kernel@main"}]},
        {"_attn_implementation_internal": "evil/kernel"},
    ],
)
def test_kernels_of_the_hub_are_not_fetched(tmp_path, config):
    from model.common.errors import CheckpointError
    from model.decoder.transformers_classes import build_hf_model

    folder = tiny.save(tiny.build(), tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(CheckpointError, match=r"evil/kernel.*never run"):
        build_hf_model(folder, None)


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_calibrating_fetches_no_kernel(convert, tmp_path, key):
    source = make_tokenizer(tiny.save(tiny.build("olmo2", vocab_size=300), tmp_path / "source"), 300)
    tiny.edit_config(source, **{key: "evil/kernel"})
    convert("mha-to-gqa", source, tmp_path / "out", "--groups", 2, *FIT).refused("evil/kernel", "never run")


# The source itself

SOURCES = [
    path for folder in ("convert", "model", "uptrain", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))
]
BY_NAME = {"model.decoder.llama.LlamaForCausalLM", "transformers.LlamaForCausalLM"}
"""Classes that are called by name, and so run nobody's code."""
UNPICKLERS = ("pickle", "_pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "cloudpickle")
"""Modules whose readers run what a file names."""


def risky(tree):
    """Yield line and name of every call that could run code from a file it reads."""
    for call, full_name in named_calls(tree):
        owner, _, name = full_name.rpartition(".")
        given = {k.arg: getattr(k.value, "value", None) for k in call.keywords}
        needed = {
            "from_pretrained": "trust_remote_code", "from_config": "trust_remote_code",
            "load_dataset": "trust_remote_code",
        }.get(name)  # fmt: skip
        if needed and owner not in BY_NAME and given.get(needed) is not False:
            yield call.lineno, ast.unparse(call.func)
        if (owner, name) == ("torch", "load") and given.get("weights_only") is not True:
            yield call.lineno, "torch.load"
        if owner in ("np", "numpy") and name == "load" and given.get("allow_pickle") is not False:
            yield call.lineno, f"{owner}.load"
        if owner in UNPICKLERS:
            yield call.lineno, ast.unparse(call.func)
        if (owner, name) in (("yaml", "load"), ("os", "system"), ("os", "popen")) or (
            not owner and name in ("eval", "exec")
        ):
            yield call.lineno, ast.unparse(call.func)
        if given.get("shell") not in (None, False):
            yield call.lineno, "shell=True"


def test_the_source_has_no_risky_call():
    violations = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in risky(ast.parse(path.read_text()))
    ]
    assert not violations
    assert len(SOURCES) > 150


def imported_unpicklers(tree):
    for node in ast.walk(tree):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in modules if name in UNPICKLERS)


def test_only_the_restricted_unpickler_imports_pickle():
    """`torch_file` names an exception of pickle's; `dcp/metadata` derives an unpickler that knows a few classes."""
    importing = [
        str(path.relative_to(ROOT)) for path in SOURCES for _ in imported_unpicklers(ast.parse(path.read_text()))
    ]
    assert importing == ["model/checkpoint/formats/dcp/metadata.py", "model/checkpoint/formats/torch_file.py"]


@pytest.mark.parametrize(
    "text",
    [
        "AutoModel.from_pretrained(x)", "AutoConfig.from_pretrained(x, trust_remote_code=None)", "torch.load(x)",
        "np.load(x)", "pickle.loads(x)", "load_dataset(x)", "eval(x)", "subprocess.run(x, shell=True)", "yaml.load(x)",
        "torch.load(x, weights_only=False)",
        "from os import system; system(x)", "from pickle import loads; loads(x)", "import pickle as p; p.loads(x)",
        "from numpy import load as read_array; read_array(x, None, True)", "import numpy as n; n.load(x)",
        "from torch import load; load(x, weights_only=False)", "from os import popen as run; run(x)",
        "from transformers import AutoModel as A; A.from_pretrained(x)",
    ],
)  # fmt: skip
def test_risky_calls_are_seen(text):
    assert len(list(risky(ast.parse(text)))) == 1


@pytest.mark.parametrize("text", ["import pickle", "import os, pickle as p", "from marshal import loads as f"])
def test_imports_of_unpicklers_are_seen(text):
    assert len(list(imported_unpicklers(ast.parse(text)))) == 1
