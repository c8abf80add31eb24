"""Ask other programs about what `convert` writes. `scripts/interop` installs each in an environment of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_tokenizers
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from convert.cli import cli

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".interop"
WORKERS = ROOT / "tests/interop/workers"
REQUIREMENTS = ROOT / "tests/interop/requirements"
THETA = 54321.0
"""No family's default: who overlooks the base of RoPE computes something else."""
WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 128}


def need(program: str) -> Path:
    """Return the program's environment; skip the test, with the reason, if its pinned versions are not installed."""
    environment = ENVIRONMENTS / program
    ready, wanted = environment / "ready", REQUIREMENTS / f"{program}.txt"
    if ready.exists() and ready.read_bytes() == wanted.read_bytes():
        return environment
    failed = environment / "failed"
    if failed.exists():
        pytest.skip(f"scripts/interop could not install {program}: {failed.read_text().strip()}")
    pytest.skip(f"needs {program} in an environment of its own (`scripts/interop {program}` installs it)")


def ask(
    environment: Path | None, worker: str, folder: Path, **request: Any
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Run a worker in a program's environment, or in ours if None; return its answer and its arrays.

    It finds `request.json` in `folder`, and leaves `answer.json` and `answer.npz` there. It sees nothing of Groupwise.
    """
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps(request, default=str))
    python = environment / "bin/python" if environment else Path(sys.executable)
    run(python, WORKERS / f"{worker}.py", folder)
    with np.load(folder / "answer.npz") as arrays:
        return json.loads((folder / "answer.json").read_text()), dict(arrays)


def run(*command: object) -> str:
    """Run a command outside the repository; return its stdout."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}
    result = subprocess.run(
        [*map(str, command)], cwd=ENVIRONMENTS, env={**environment, **quiet},
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def call(*arguments: object) -> str:
    """Run `convert`."""
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def convert_to_all(source: Path, outs: Path) -> dict[int, Path]:
    """Convert to every number of groups that `inspect` offers; return the folders."""
    groups = [row["groups"] for row in json.loads(call("inspect", source, "--json"))["groups"]]
    for n in groups:
        call("mha-to-gqa", "--method", "mean", source, outs / str(n), "--groups", n)
    return {n: outs / str(n) for n in groups}


def theta_of(family: str) -> float:
    """Return the base of RoPE that `make_source` takes.

    transformers 5 gives the sliding layers of an Olmo 3 whose config is of version 4 the base 500000, whatever it says.
    """
    return 500000.0 if family == "olmo3" else THETA


def make_model(family: str = "llama", **changes: Any) -> Any:
    """Return a random MHA model whose RoPE has the base `theta_of(family)`, and whose heads look at some tokens more.

    Small random weights look at all tokens alike, and where they stand makes no difference.
    """
    rope = {"rope_type": "default", "rope_theta": theta_of(family)}
    model = tiny.build(family, **{"rope_parameters": rope, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name and parameter.dim() > 1:
                parameter *= 10
    return model


def make_source(
    folder: Path, family: str = "llama", tokenizer: Path | None = None, old: bool = True, **changes: Any
) -> Path:
    """Save such a model.

    If `old`, as transformers 4 wrote the config; else with the keys of version 5 alone. `tokenizer` is a folder.
    """
    tiny.save(make_model(family, **changes), folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_templates/tool.jinja"):
        (folder / name).unlink()
    for file in tokenizer.iterdir() if tokenizer else ():
        (folder / file.name).write_bytes(file.read_bytes())
    if old:
        spell_as_version_4(folder)
    return folder


def make_tokenizer(folder: Path) -> Path:
    """Save a tokenizer as transformers 4 does."""
    tiny_tokenizers.make_tokenizer(folder, WIDE["vocab_size"])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    changes = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
    return folder


def spell_as_version_4(folder: Path) -> None:
    """Write RoPE, the dtype and the names of vision tensors as transformers 4 does, and nothing as version 5 does."""
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "dtype" in part:
            part["torch_dtype"] = part.pop("dtype")
        if rope := part.pop("rope_parameters", None):
            part |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
            if "partial_rotary_factor" in rope:
                part["partial_rotary_factor"] = rope["partial_rotary_factor"]
    (folder / "config.json").write_text(json.dumps(config))
    if "vision_config" in config:
        (file,) = folder.glob("*.safetensors")
        tensors = {n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


def token_ids(n_rows: int = 3, length: int = 24, vocab_size: int = 66) -> list[list[int]]:
    """Return ids of no special token."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, vocab_size, (n_rows, length), generator=generator).tolist()


def open_in_transformers(folder: Path, family: str = "llama") -> Any:
    """Open an output in the transformers that is installed here, and check that every tensor found its place."""
    model, loading = tiny.model_class(family).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert not any(loading.values()), loading
    return model.eval()


def logits_of(folder: Path, ids: list[list[int]]) -> np.ndarray:
    with torch.inference_mode():
        return open_in_transformers(folder)(input_ids=torch.tensor(ids)).logits.numpy()


def greedy(folder: Path, prompt: list[int], n: int) -> list[int]:
    """Return the n most likely tokens, one after the other, each from a run over all before it."""
    model, ids = open_in_transformers(folder), list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
