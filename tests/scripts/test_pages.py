"""Every command in every page runs on a tiny model, or at least its options are those of the program.

Each fenced block runs in a folder of its own, in the order of its lines. The folder holds a stand-in for everything
that the pages name. A line `# …` below a command is what the command prints; its numbers may differ.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import tiny
import torch_files
from pages import PYTHON, ROOT, SHELLS, Block, PageCommand, UnknownCommandError
from tiny_tokenizers import SENTENCES, make_tokenizer
from transformers import AutoModelForCausalLM

ONLY_PARSED = {
    "scripts/setup": "makes a virtual environment",
    "scripts/demo": "installs a model from the network",
    "scripts/test": "runs this test",
    "scripts/check": "checks the whole repository",
    "scripts/interop": "installs other programs: half an hour",
    "scripts/uptrain_multi_gpu.sh": "needs several GPUs; the slow test below runs it on two processes of the CPU",
    "sbatch scripts/launch/slurm/uptrain.sbatch": "needs Slurm; test_launch_files.py runs it with stand-ins",
    "python -m scripts.bench": "test_bench.py runs it at a small size",
    "python -m scripts.study.distil_on_text_kinds": "needs SmolLM2, and hours",
}
"""Commands that begin with this are parsed, not run, and why."""

OTHER_PROGRAMS = (
    ".", "pip", "python3 -m venv",
    # docs/serving.md: these need engines that take half an hour to install; they were run by hand, with SmolLM2
    "cmake", "curl", ".interop/vllm/bin/python", ".interop/llama_cpp/bin/python",
    ".interop/llama_cpp/native/bin/llama-server",
)  # fmt: skip
"""Commands that begin with this are ignored."""

ALSO = {
    r"\S* (plan|run) .*--alpha": "--original-tokens 400k --lr 1e-3 --global-batch-tokens 512",
    r"\S* (plan|run) .*--tokens 50M": "--tokens 1k --lr 1e-3 --global-batch-tokens 512",
    r"uptrain run --init": "--tokens 1k --global-batch-tokens 512",
    r"uptrain prepare .*--tokens": "--tokens 2k",
    r"uptrain prepare": "--seq-len 64 --workers 1",
    r"uptrain export .*--step": "--step 1",
    r"convert mha-to-gqa (SOURCE|path)(?!.*mean)": "--calibration-tokens 1024",
    r"convert mha-to-mla": "--latent 64 --rope 16 --calibration-tokens 1024",
    r"scripts/study/run": "--dry-run",
}
"""Options that a tiny model or a short test needs, by the commands that take them. They come last, so they win."""

OTHER_OPTIONS = {"--enforce-eager", "--help", "--model", "--model-impl"}
"""Options in sentences that click adds, or that other programs have."""

CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def save_parent(folder: Path, **shape: int) -> Path:
    return make_tokenizer(tiny.save(tiny.build(vocab_size=1000, **shape), folder), 300)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with everything that the pages name."""
    folder = tmp_path_factory.mktemp("pages")
    shape = {"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 128}
    save_parent(folder / "path/to/Llama-2-7b-hf", **shape)
    save_parent(folder / "assets/demo-mha")
    (save_parent(folder / "path/to/instruct-model") / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hello."}]}) + "\n")
    torch_files.write_meta(folder / "consolidated", tiny.build(**torch_files.META_SHAPE))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in SENTENCES * 8)
    (folder / "my-texts.jsonl").write_text(lines)
    for name in ("texts", "held-out", "code", "prose"):
        (folder / name).mkdir()
        (folder / name / "some.jsonl").write_text(lines)
    for name in ("README.md", "docs", "assets/speeches"):
        copy(ROOT / name, folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_outputs()
    return folder


def make_outputs() -> None:
    """Convert, prepare, train and export in the present folder; copy the folders under each name that pages use."""
    copies = {"path/to/Llama-2-7b-hf": ("SOURCE", "parent", "FOLDER")}
    for command in (
        "convert mha-to-gqa path/to/Llama-2-7b-hf gqa8 --groups 8 --method mean",
        "uptrain prepare --data texts --tokenizer gqa8 --seq-len 64 --out cache",
        "uptrain run gqa8 --teacher path/to/Llama-2-7b-hf --data cache --eval-data cache --alpha 0.0025 --out run",
        "uptrain export run Llama-2-7b-gqa8",
    ):
        run(PageCommand("the prepared folder", command))
    copies |= {"gqa8": ("OUT", "MODEL"), "cache": ("CACHE", "held-out-cache"), "run": ("RUN", "runs/gqa8", "runs/gqa4")}
    for original, names in copies.items():
        for name in names:
            copy(Path(original), Path(name))


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the prepared folder, which is the present folder."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: PageCommand) -> None:
    """Parse a command, remove the output of an earlier one of the same name, run it and check what it prints."""
    try:
        program = pages.find_program(command.words)
        out = program and program.parse().get("out")
    except UnknownCommandError as error:
        pytest.fail(f"{command.place}: {command.text}: {error}")
    if program is None:
        assert command.begins_with(*OTHER_PROGRAMS), f"{command.place}: {command.text}: a program unknown to this test"
    if program is None or command.begins_with(*ONLY_PARSED):
        return
    if out and Path(str(out)).is_dir() and not command.begins_with("convert verify"):
        shutil.rmtree(str(out))
    result = program.run(also(command).split())
    assert result.exit_code == 0, (command.place, command.text, result.output, result.exception)
    if command.promised:
        assert re.sub(r"\d+", "N", command.promised) in re.sub(r"\d+", "N", result.output), (command, result.output)
    if command.begins_with("uptrain export"):
        check_exported(Path(str(out)))


def also(command: PageCommand) -> str:
    return " ".join(more for pattern, more in ALSO.items() if re.match(pattern, command.text))


def check_exported(out: Path) -> None:
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert json.loads((out / "uptraining.json").read_text())["evaluations"]


@pytest.mark.parametrize("block", pages.blocks(*SHELLS), ids=lambda block: block.place)
def test_shell_block(folder: Path, block: Block) -> None:
    for command in block.commands():
        run(command)


@pytest.mark.parametrize("block", pages.blocks(PYTHON), ids=lambda block: block.place)
def test_python_block(folder: Path, block: Block) -> None:
    """All run. One that needs what a test cannot have would only be compiled."""
    exec(compile("\n" * block.line + block.text, block.place, "exec"), {})


def run_in_shell(command: PageCommand, *programs: Path) -> str:
    """Run a command as a user does, a launcher for GPUs with two processes of gloo on the CPU.

    `programs` are folders of programs to prefer.
    """
    path = ":".join(map(str, (*programs, Path(sys.executable).parent, os.environ["PATH"])))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    environment |= {"GPUS": "2", "LAYOUT": "ddp", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    line = f"{command.text} {also(command)}"
    result = subprocess.run(line, shell=True, check=False, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, (command.place, line, result.stdout, result.stderr)
    return result.stdout + result.stderr


MULTI_GPU = [block for block in pages.blocks(*SHELLS) if "scripts/uptrain_multi_gpu.sh" in block.text]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", MULTI_GPU, ids=lambda block: block.place)
def test_on_many_devices(folder: Path, block: Block) -> None:
    (folder / "scripts").symlink_to(ROOT / "scripts")
    shutil.rmtree("run")
    python = folder / "two-devices/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\ncase "$2" in *device_count*) echo 2;; *) exec {sys.executable} "$@";; esac\n')
    python.chmod(0o755)
    for command in block.commands():
        run_in_shell(command, python.parent)
    started = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])
    assert (started["event"], started["processes"]) == ("started", 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quick_start_on_the_bundled_model(folder: Path) -> None:
    """As a user types it: each line that the README promises appears, and the model comes nearer to its parent."""
    shutil.rmtree("assets")
    Path("assets").symlink_to(ROOT / "assets")
    (quick_start,) = (block for block in pages.blocks(*SHELLS) if "assets/demo-mha" in block.text)
    for command in quick_start.commands():
        assert (command.promised or "") in run_in_shell(command)
    first, *_, last = json.loads(Path("demo-final/uptraining.json").read_text())["evaluations"]
    assert last["kl"] < first["kl"] and last["loss"] < first["loss"]


def test_every_entry_of_these_tables_is_on_a_page() -> None:
    commands = pages.commands()
    for beginning in (*ONLY_PARSED, *OTHER_PROGRAMS):
        assert any(command.begins_with(beginning) for command in commands), beginning
    for pattern in ALSO:
        assert any(re.match(pattern, command.text) for command in commands), pattern


def test_the_language_of_every_block_is_known() -> None:
    """A block of another language would not be tested."""
    languages = {block.language for block in pages.blocks()}
    assert languages <= {*SHELLS, PYTHON, *pages.OTHERS}, languages


def test_commands_options_and_paths_in_sentences() -> None:
    """`convert …`, `uptrain …`, `python -m …`, `scripts/…`, `--option` and `folder/file`, with any placeholders."""
    faults = [f"{code.place}: {code.text}: {fault}" for code in pages.code_in_sentences() for fault in faults_of(code)]
    assert not faults, "\n".join(faults)


def faults_of(code: PageCommand) -> list[str]:
    if not code.words:  # `VARIABLE=value` alone
        return []
    first, *others = code.words
    folder, _, below = first.partition("/")
    is_made = folder in (".interop", ".venv")  # by scripts, in part or not at all
    if below and not others and (ROOT / folder).is_dir() and not is_made:
        return [] if (ROOT / first).exists() else ["there is no such path"]
    if first.startswith("--"):
        known = OTHER_OPTIONS.union(*map(options_of, ("convert", "uptrain", "scripts/study/run")))
        return [] if first in known else ["no command has this option"]
    try:
        program = pages.find_program([first, *others])
        known = program.options() if program else set()
        if program and not (program.click_command or program.argparse_main):
            program.parse()
    except UnknownCommandError as error:
        return [str(error)]
    return [f"the command has no {word}" for word in others if known and word.startswith("--") and word not in known]


@pytest.mark.parametrize(
    "text",
    [
        "convert inspect --no-such", "uptrain no-such", "scripts/no-such", "convert/no-such.py", "--no-such",
        "PROCESSES=2 scripts/uptrain_multi_cpu.sh run … --no-such", "CUDA_VISIBLE_DEVICES=1 uptrain run --no-such",
        "scripts/test --a", "scripts/test -r", "scripts/test --gpu --all", "scripts/test tests/no-such",
    ],
)  # fmt: skip
def test_wrong_commands_are_found(text: str) -> None:
    assert faults_of(PageCommand("a page", text))


def options_of(program: str) -> set[str]:
    program_of_page = pages.find_program(program.split())
    assert program_of_page
    return program_of_page.options()
