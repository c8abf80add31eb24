"""The README's commands, run as they stand there on a tiny model, but for what a tiny model needs besides."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from tiny_tokenizers import SENTENCES, make_tokenizer
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BESIDES = " --original-tokens 400k --lr 1e-3 --global-batch-tokens 512"
"""The README's checkpoint is in the table of originals; a random one is not."""


def blocks():
    """Return the commands of each block of the chapter that shows the whole way."""
    (chapter,) = re.findall(r"^## The whole way\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    return [block.strip().splitlines() for block in re.findall(r"```sh\n(.*?)```", chapter, re.DOTALL)]


@pytest.fixture
def place(tmp_path):
    """Return a folder with what the README supposes: a checkpoint with 32 heads, texts, scripts/ and .venv/."""
    parent = tmp_path / "path/to/Llama-2-7b-hf"
    shape = {"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 128}
    make_tokenizer(tiny.save(tiny.build(vocab_size=300, **shape), parent), 300)
    lines = [json.dumps({"text": text}) + "\n" for text in SENTENCES * 8]
    for name in ("texts", "held-out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "some.jsonl").write_text("".join(lines))
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    return tmp_path


def run(commands, place):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "GPUS": "2"}
    environment |= {"LAYOUT": "ddp", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for command in commands:
        line = command + (BESIDES if " --alpha " in command else "")
        options = {"cwd": place, "env": environment, "capture_output": True, "text": True}
        result = subprocess.run(line, shell=True, check=False, **options)
        assert result.returncode == 0, (line, result.stdout, result.stderr)


def test_the_whole_way(place):
    whole_way, _ = blocks()
    assert [line.split()[0] for line in whole_way] == [".", "convert", "uptrain", "uptrain"]
    run(whole_way, place)
    record = json.loads((place / "Llama-2-7b-gqa8/uptraining.json").read_text())
    assert record["budget"]["alpha"] == 0.0025
    assert record["settings"]["loss"] == "distill"
    assert record["evaluations"]
    model, loading = AutoModelForCausalLM.from_pretrained(place / "Llama-2-7b-gqa8", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_key_value_heads == 8
    converted = tiny.tensors(place / "gqa8")
    assert any(not torch.equal(weight, converted[name]) for name, weight in model.state_dict().items())


@pytest.mark.slow
def test_the_same_on_many_devices(place):
    """Two processes of gloo in place of eight GPUs, which this command is for."""
    whole_way, (on_gpus,) = blocks()
    assert on_gpus.split()[0] == "scripts/uptrain_multi_gpu.sh"
    run([whole_way[1], on_gpus], place)
    started = json.loads((place / "run/metrics.jsonl").read_text().splitlines()[0])
    assert (started["event"], started["processes"]) == ("started", 2)


def test_every_command_is_named():
    from convert.cli import cli as convert
    from uptrain.cli import cli as uptrain

    for program, group in (("convert", convert), ("uptrain", uptrain)):
        for name in group.commands:
            assert f"`{program} {name} " in README, (program, name)


def test_links_lead_somewhere():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), (path.name, target)
