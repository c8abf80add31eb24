"""Fixtures that all tests share."""

import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import rich.console
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent / "support"))

import forks
import tiny
from commands import Result

if TYPE_CHECKING:
    import torch
    from faulty_runs import Runs

settings.register_profile("groupwise", deadline=None)  # machines differ, and both cores may be busy
settings.load_profile("groupwise")

for colour in ("FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(colour, None)  # tests that want colours set them


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="Run tests/gpu on the GPUs of this machine.")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # bit-for-bit comparisons hold on the CPU only
        return
    import torch

    from uptrain.distributed.accelerator import uses_gpu

    if not uses_gpu():
        raise pytest.UsageError(
            f"--gpu: torch {torch.__version__} finds no GPU; leave --gpu out, or install a build of torch for this one."
        )


def command_line(
    name: str, main: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    def run(*arguments: object) -> Result:
        capsys.readouterr()
        # No folding of long paths. (Tables of 80 columns were seen twice with the variable alone, on a busy machine.)
        monkeypatch.setenv("COLUMNS", "300")
        monkeypatch.setattr(rich.console.Console, "_environ", ChainMap({"COLUMNS": "300"}, os.environ))
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return Result(int(stop.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command line in this process."""
    from convert.cli import main

    return command_line("convert", main, capsys, monkeypatch)


@pytest.fixture
def uptrain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command line in this process; the workers of `prepare` are forks."""
    from uptrain.cli import main

    forks.fork_workers(monkeypatch)
    return command_line("uptrain", main, capsys, monkeypatch)


@pytest.fixture
def generation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run `python -m model.decoder.generation` in this process."""
    from model.decoder.generation import main

    return command_line("generation", main, capsys, monkeypatch)


@pytest.fixture
def refuse_path(convert: Callable[..., Result], tmp_path: Path) -> Callable[..., None]:
    """Convert what is at a path, and check the refusal: one line with all words."""

    def run(path: Path, *words: str) -> None:
        convert("mha-to-gqa", "--method", "mean", path, tmp_path / "out", "--groups", 2).refused(*words)

    return run


@pytest.fixture
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    """Check after a test that there is no OUT, no staging area, and nothing that a payload has made."""
    yield
    left = {p.name for p in tmp_path.iterdir()}
    assert not {name for name in left if name in ("out", "pwned") or name.endswith(".groupwise")}, left


class Payload:
    """Object whose unpickling makes the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    """Return an object whose pickle runs code; that it does is checked first."""
    pickled = Payload(tmp_path / "pwned")
    pickle.loads(pickle.dumps(pickled))
    (tmp_path / "pwned").rmdir()
    return pickled


@pytest.fixture(scope="session")
def device() -> "torch.device":
    """Return what `tests/gpu` runs on: a GPU with `--gpu`, else the CPU."""
    import torch

    from uptrain.distributed.accelerator import uses_gpu

    accelerator = torch.accelerator.current_accelerator() if uses_gpu() else None
    return accelerator or torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a plain MHA Llama folder in two shards of bfloat16."""
    return tiny.save(tiny.build(), tmp_path / "source", "bfloat16", max_shard_size="40KB")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small tokenizer, which tests do not change."""
    from tiny_tokenizers import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run on the CPU: 12 steps of distillation, evaluated every 4, stopped and resumed after 6."""
    from real_runs import arguments, drive, make_inputs

    folder = tmp_path_factory.mktemp("distilled")
    inputs, run = make_inputs(folder), folder / "run"
    more = ("--eval-data", inputs["held_out"], "--eval-every", 4, "--save-every-steps", 4)
    resume = {"arguments": ["resume", str(run)]}
    drive([{"arguments": arguments(inputs, run, *more, loss="distill"), "stop_in": 5}, resume], on_cpu=True)
    return run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> "Runs":
    """Return the inputs of runs with injected faults, and the same runs undisturbed."""
    from faulty_runs import Runs

    return Runs(tmp_path_factory.mktemp("runs"))
