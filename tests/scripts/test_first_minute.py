"""What meets a user first: missing packages, narrow terminals, texts that end."""

import itertools
import json
import subprocess
import sys

import fake_runs
import pytest
import real_runs
import tiny
import torch

from model import generate, load_model
from model.common.console import INSTALL_EXTRA


@pytest.mark.parametrize(
    ("command", "package"),
    [
        *(("run", name) for name in ("torch", "accelerate")),
        ("resume", "accelerate"), ("evaluate", "torch"), ("evaluate", "accelerate"), ("prepare", "tokenizers"),
    ],
)  # fmt: skip
def test_a_package_of_the_extra_that_is_missing(tmp_path, command, package):
    """One line says which, and how to install it."""
    inputs, text = real_runs.make_inputs(tmp_path), tmp_path / "a.txt"
    text.write_text("text")
    fake_runs.write_run(tmp_path / "stopped", [], {"status": "preempted", "step": 0, "reason": "SIGINT", "pid": 1})
    arguments = {
        "run": real_runs.arguments(inputs, tmp_path / "run")[1:],
        "resume": [tmp_path / "stopped"],
        "evaluate": [inputs["model"], "--data", inputs["data"]],
        "prepare": ["--tokenizer", inputs["model"], "--data", text, "--out", tmp_path / "out", "--seq-len", 8],
    }
    code = f"import sys; sys.modules[{package!r}] = None; from uptrain.cli import main; main()"
    words = [sys.executable, "-c", code, command, *map(str, arguments[command])]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    expected = f"Error: this needs {package}, which is not installed; {INSTALL_EXTRA}.\n"
    assert (result.returncode, result.stderr) == (2, expected)


def test_a_module_of_our_own_that_is_missing_is_a_bug():
    code = "import sys; sys.modules['uptrain.budget.budget'] = None; from uptrain.cli import main; main()"
    words = [sys.executable, "-c", code, "plan", ".", "--steps", "1"]
    assert "Traceback" in subprocess.run(words, capture_output=True, text=True, check=False).stderr


PLAN = (
    "--alpha", "0.05", "--original-tokens", "2T", "--lr", "1e-3", "--global-batch-tokens", "4M", "--seq-len", "4000",
    "--teacher", "s", "--processes", "8",
)  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A folder with a tiny model of 32 layers and 32 heads, and a run of it that has finished."""
    folder = tmp_path_factory.mktemp("large")
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 128}
    tiny.save(tiny.build(intermediate_size=32, **shape), folder / "s")
    records = [fake_runs.with_teacher(0, 5.0), *(fake_runs.step(n + 1, 3.0) for n in range(50))]
    records.append(fake_runs.with_teacher(50, 2.75))
    fake_runs.write_run(folder / "run", records, {"status": "finished", "step": 50, "reason": "finished", "pid": 1})
    return folder


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        ("convert", ["inspect", "s"], [" kind ", "%  1 2 4 8 16 32 ", "tensor-parallel"]),
        ("convert", ["inspect", "s", "--heads"], ["\n    31 ", "GQA-16 %", "largest loss"]),
        (
            "convert",
            ["mha-to-gqa", "s", "o", "--groups", "8", "--method", "mean", "--dry-run"],
            ["to merge", "64 tensors"],
        ),
        ("convert", ["mha-to-gqa", "s", "o", "--groups", "8", "--method", "mean"], ["merged", "\n  uptrain run o "]),
        ("uptrain", ["plan", "s", *PLAN], ["100,000,000,000"]),
        ("uptrain", ["status", "run"], ["50 of 50", "recovered fraction"]),
    ],
)
def test_output_fits_80_columns(large, program, arguments, words):
    command, environment = [sys.executable, "-m", program, *arguments], {**real_runs.environment(), "COLUMNS": "80"}
    shown = subprocess.run(command, cwd=large, env=environment, capture_output=True, text=True, check=True).stdout
    assert max(map(len, shown.splitlines())) <= 80, shown
    assert "…" not in shown
    assert all(word in shown for word in words), shown


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "llava", "qwen3_moe", "phi3"])
def test_tables_fit_80_columns_with_whole_names(tmp_path, family):
    tiny.save(tiny.build(family), tmp_path / "s")
    command = [sys.executable, "-m", "convert", "mha-to-gqa", "s", "o", "--groups", "2", "--method", "mean"]
    environment = {**real_runs.environment(), "COLUMNS": "80"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    for entry in json.loads((tmp_path / "o/groupwise.json").read_text())["merge_report"]:
        parts = entry["tensor"].removesuffix(".weight").split(".")
        assert ".".join(parts[-2:]) in result.stdout, (entry["tensor"], result.stdout)


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("several", [False, True])
def test_texts_end_where_transformers_ends_them(tmp_path, where, several):
    from transformers import AutoModelForCausalLM

    folder, prompts = tiny.save(tiny.build(), tmp_path / "model"), [[1, 2, 3], [4, 5, 6]]
    free = [generate(load_model(folder), [prompt], 24, stop_ids=())[0] for prompt in prompts]
    ends = [free[0][7], free[1][3]] if several else free[0][7]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends} if where[0] == "g" else {}))
    tiny.edit_config(folder, eos_token_id=ends if where[0] == "c" else None, pad_token_id=0)
    ours = load_model(folder)
    known = ends if several else [ends]
    generated = generate(ours, prompts, 24)
    assert generated == [list(itertools.takewhile(lambda token: token not in known, text)) for text in free]
    assert any(len(text) < 24 for text in generated)
    if where[0] == "c":  # as transformers takes it where there is no generation_config.json
        (folder / "generation_config.json").unlink()
    hf_model = AutoModelForCausalLM.from_pretrained(folder)
    for prompt, text in zip(prompts, generated, strict=True):
        ids = torch.tensor([prompt])
        written = hf_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert [token for token in written[0, 3:].tolist() if token not in known] == text
    assert generate(ours, prompts, 24, stop_ids=()) == free
