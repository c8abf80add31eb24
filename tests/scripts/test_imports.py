"""What commands import: nothing heavy before it is needed, and what they say of a package that is missing."""

import resource
import subprocess
import sys
from importlib import import_module

import pytest
import real_runs
import written_runs

from model.checkpoint import READERS
from model.common.console import INSTALL_EXTRA

COMMANDS = [["--help"], *([name, "--help"] for name in ("mha-to-gqa", "mha-to-mqa", "to-hf", "inspect", "verify"))]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_fastest_help_of_five_takes_less_than_half_a_second_of_processor_time(arguments):
    """Not of time that passes: other tests run beside this one."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    def run() -> float:
        before = used()
        result = subprocess.run(
            [sys.executable, "-m", "convert", *arguments], capture_output=True, text=True, check=True
        )
        assert "Usage: " in result.stdout
        return used() - before

    assert any(run() < 0.5 for _ in range(5))


@pytest.mark.parametrize("name", ["convert.py", "model.py"])
def test_python_takes_modules_of_the_present_folder(tmp_path, name):
    """As docs/cli.md says; the program `convert` does not look there."""
    (tmp_path / name).write_text("raise SystemExit('of this folder')")
    shown = subprocess.run(
        [sys.executable, "-m", "convert", "inspect", "x"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert shown.stderr == "of this folder\n"
    begin = (
        f"import sys; sys.path[0] = {str(tmp_path / 'bin')!r}; sys.argv = ['convert', '--help']; "  # as pip's script
    )
    begin += "from convert.__main__ import main; main()"
    program = subprocess.run([sys.executable, "-c", begin], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert program.stdout.startswith("Usage: convert")


def imported_by(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_help_needs_no_numpy_and_conversion_no_torch():
    assert "numpy" not in imported_by("import convert.cli")
    everything = "import convert.cli, convert.conversion, convert.verification.verify, convert.commands.tables, "
    everything += "convert.inspection.summary, convert.inspection.table, model.checkpoint.formats.safetensors, "
    everything += "model.families"
    everything += "".join(f", model.checkpoint.formats.{name}" for name in READERS.values())
    assert not imported_by(everything) & {"torch", "transformers", "accelerate", "datasets", "gguf"}


def test_converting_safetensors_imports_no_torch(source, tmp_path):
    words = ["convert", "mha-to-mqa", str(source), str(tmp_path / "out"), "--method", "mean", "--json"]
    command = f"sys.argv = {words!r}"
    modules = imported_by(f"import sys; {command}; from convert.cli import cli; cli.main(standalone_mode=False)")
    assert (tmp_path / "out/model.safetensors.index.json").exists()
    assert not modules & {"torch", "transformers", "accelerate", "datasets", "gguf", "huggingface_hub"}


def test_every_module_imports():
    import pkgutil

    import convert
    import model
    import uptrain

    for package in (convert, model, uptrain):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                __import__(module.name)


def test_every_registered_name_has_its_module():
    from convert.merging.methods import HEAD_METHODS, find_head_method
    from model.families import FAMILIES, find_family

    for name in READERS.values():
        reader = import_module(f"model.checkpoint.formats.{name}")
        assert callable(reader.matches)
        assert callable(reader.read)
    assert all(callable(find_head_method(name)) for name in HEAD_METHODS)
    assert all(find_family({"model_type": name, "text_config": {}}).model_type == name for name in FAMILIES)


def test_no_arguments_shows_the_help():
    result = subprocess.run([sys.executable, "-m", "convert"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "Usage: " in result.stderr


@pytest.mark.parametrize("program", ["convert", "uptrain"])
def test_help_needs_neither_torch_nor_transformers(program):
    code = (
        f"import sys; from {program}.cli import cli; cli.main(['--help'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'transformers', 'datasets', 'accelerate'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["resume", "nothing"], "nothing does not exist"),
        (["extend", "nothing", "--out", "longer", "--steps", "5"], "nothing does not exist"),
        (["export", "nothing", "out"], "nothing does not exist"),
        (["run", ".", "--data", "cache", "--out", "new"], "give exactly one of --alpha, --tokens and --steps"),
        (["run", ".", "--data", "cache", "--out", ".", "--steps", "5"], ". exists already"),
    ],
    ids=" ".join,
)
def test_refusals_of_a_run_import_no_torch(tmp_path, words, error):
    """It takes seconds."""
    code = (
        f"import os, sys; os.chdir({str(tmp_path)!r}); sys.argv = {['uptrain', *words]!r}\nfrom uptrain.cli import cli"
    )
    code += "\ntry: cli.main(standalone_mode=False)\nexcept ValueError as e: print(str(e).replace(' ', '_'))\n"
    modules = imported_by(code)
    assert any(word.startswith(error.replace(" ", "_")) for word in modules), modules
    assert not modules & {"torch", "transformers", "accelerate"}


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
    written_runs.write_run(tmp_path / "stopped", [], {"status": "preempted", "step": 0, "reason": "SIGINT", "pid": 1})
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
