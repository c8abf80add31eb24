"""The README's commands, run as they stand there on tiny models, with the options that a tiny model needs besides."""

import json
import os
import re
import shutil
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
NEEDED = " --original-tokens 400k --lr 1e-3 --global-batch-tokens 512"
"""The README's checkpoint is in the table of pre-trainings; a random one is not."""


def blocks(chapter):
    """Return the lines of each shell block of a chapter."""
    (text,) = re.findall(rf"^## {chapter}\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)
    return [block.strip().splitlines() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]


def steps(lines):
    """Return each command with the output that the comment below it promises, or None."""
    following = [*lines[1:], ""]
    return [
        (line, after[2:] if after.startswith("# ") else None)
        for line, after in zip(lines, following, strict=True)
        if not line.startswith("#")
    ]


def save_parent(folder, **shape):
    make_tokenizer(tiny.save(tiny.build(vocab_size=300, **shape), folder), 300)


@pytest.fixture
def place(tmp_path):
    """Return a folder with what the README assumes: scripts/, docs/, checkpoints with 8 and 32 heads, and texts."""
    save_parent(tmp_path / "path/to/Llama-2-7b-hf", num_attention_heads=32, num_key_value_heads=32, hidden_size=128)
    save_parent(tmp_path / "assets/demo-mha")
    lines = [json.dumps({"text": text}) + "\n" for text in SENTENCES * 8]
    for name in ("texts", "held-out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "some.jsonl").write_text("".join(lines))
    for name in ("scripts", "docs", "SECURITY.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(commands, place):
    """Run commands and check what they print; figures may differ from those of the README."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "GPUS": "2"}
    environment |= {"LAYOUT": "ddp", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"PYTHONPATH": str(ROOT)}
    for command, expected in commands:
        line = command + (NEEDED if " --alpha " in command else "")
        options = {"cwd": place, "env": environment, "capture_output": True, "text": True}
        result = subprocess.run(line, shell=True, check=False, **options)
        assert result.returncode == 0, (line, result.stdout, result.stderr)
        if expected:
            printed = result.stdout + result.stderr
            assert re.sub(r"\d+", "N", expected) in re.sub(r"\d+", "N", printed), (line, printed)


def words(commands):
    return [" ".join(command.split()[:2]) for command, _ in commands]


QUICK_START = ["cat docs/*.md", "convert mha-to-gqa", "convert verify", "uptrain run", "uptrain export", "python -m"]


def test_quick_start(place):
    (quick_start,) = map(steps, blocks("Quick start"))
    assert words(quick_start) == QUICK_START
    assert all(expected for _, expected in quick_start[1:])
    run(quick_start, place)
    record = json.loads((place / "demo-final/uptraining.json").read_text())
    assert record["settings"]["loss"] == "distill"
    assert len(record["evaluations"]) > 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quick_start_on_the_bundled_model(place):
    """Each line that the README promises appears, and uptraining brings the model nearer to its parent."""
    shutil.rmtree(place / "assets")
    (place / "assets").symlink_to(ROOT / "assets")
    (quick_start,) = map(steps, blocks("Quick start"))
    run(quick_start, place)
    first, *_, last = json.loads((place / "demo-final/uptraining.json").read_text())["evaluations"]
    assert last["kl"] < first["kl"]


def test_llama_2_7b_step_by_step(place):
    walk = steps(blocks("Your Llama-2-7B")[0])
    named = ["convert inspect", "convert mha-to-gqa", "convert verify", "uptrain plan", "uptrain run", "uptrain export"]
    assert words(walk) == [*named, "python -m"]
    run(walk, place)
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
    walk, (on_gpus,) = blocks("Your Llama-2-7B")
    assert on_gpus.split()[0] == "scripts/uptrain_multi_gpu.sh"
    run([(walk[1], None), (on_gpus, None)], place)
    started = json.loads((place / "run/metrics.jsonl").read_text().splitlines()[0])
    assert (started["event"], started["processes"]) == ("started", 2)


def test_the_scripts_to_begin_with_exist():
    top = README.splitlines()[:25]
    for script in ("scripts/demo", "scripts/test"):
        assert any(line.split()[:1] == [script] for line in top)
        assert os.access(ROOT / script, os.X_OK)


def test_the_readme_is_short():
    assert len(README.split()) <= 900


def test_every_command_is_on_the_page_of_commands():
    from convert.cli import cli as convert
    from uptrain.cli import cli as uptrain

    page = (ROOT / "docs/cli.md").read_text()
    for program, group in (("convert", convert), ("uptrain", uptrain)):
        for name in group.commands:
            assert f"`{program} {name} " in page, (program, name)


def test_links_lead_somewhere():
    pages = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *(ROOT / "docs").glob("*.md")]
    for path in pages:
        for target, _, section in re.findall(r"\]\(([^)#]*)(#([^)]*))?\)", path.read_text()):
            if target.startswith("http"):
                continue
            page = path.parent / target if target else path
            assert page.exists(), (path.name, target)
            assert not section or section in headings(page), (path.name, target, section)


def headings(page):
    """Return the names by which links find a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
