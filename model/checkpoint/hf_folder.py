"""Read a Hugging Face folder apart from its weights: `config.json`, and the list of other files of the model.

Every reader of such folders uses this module (reference: the file conventions of the Hugging Face Hub).
"""

import json
import os
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

from model.common.errors import CheckpointError
from model.files.names import CALIBRATION_TOKENS, CHECKPOINTS, CONVERSION_RECORD, METRICS, MODEL_CARD, RUN_JSON
from model.files.paths import leads_outside, refuse_dangling, refuse_outside
from model.files.read import (
    BOM,
    MAX_CONFIG_BYTES,
    MAX_LEVELS,
    check_regular,
    is_lfs_pointer,
    parse_json,
    read_bytes_up_to,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Weights in any format, leftovers of training, and hidden files such as .env. None of them describes the output.
SKIPPED_FILES = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.onnx_data", "*.ot",
    "*.npz", "*.distcp", "*.index.json", "trainer_state.json",
    "events.out.tfevents*", "params.json", "checklist.chk", "tokenizer_checklist.chk", ".*",
)  # fmt: skip
SKIPPED_FOLDERS = (
    ".*", "__pycache__", "original", "onnx", "openvino", "runs", "wandb", "checkpoint-*", "global_step*",
)  # fmt: skip

# The converter writes these files itself instead of copying them.
OWN_FILES = ("config.json", CONVERSION_RECORD, CALIBRATION_TOKENS)

MEGATRON = ("latest_checkpointed_iteration.txt", "mp_rank_*", "iter_*/mp_rank_*")
MEGATRON_ADVICE = (
    "export it as a Hugging Face folder first (Megatron Bridge: AutoBridge.export_ckpt), and convert that."
)

WEIGHTS = (
    "*.safetensors", "*.bin", "*.pth", "*.pt", "*.ckpt", "*.gguf", "*.distcp", "tf_model.h5", "flax_model.msgpack",
)  # fmt: skip

MODEL_FILES = (
    "config.json", "generation_config.json", CONVERSION_RECORD, "tokenizer*", "*.model", "*.tiktoken", "vocab*",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*processor*.json", MODEL_CARD,
    "LICENSE*", "NOTICE*", "USE_POLICY*", "modeling_*.py", "configuration_*.py", "tokenization_*.py", "processing_*.py",
    "image_processing_*.py", "feature_extraction_*.py", "tekken.json",
)  # fmt: skip
"""Patterns of a model's files beside its weights, in a folder that may hold a whole project."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def read_config(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """Return `config.json` as bytes and parsed. Raises CheckpointError unless it is a JSON object in UTF-8.

    The bytes become the output's file, so they are without a byte-order mark, which transformers does not read.
    """
    path = folder / "config.json"
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{path} is a dangling symlink to {path.readlink()}; copy the folder with its files (cp -rL), or give the "
            "folder that it was copied from."
        )
    if not path.is_file():
        is_gguf = folder.suffix == ".gguf" and folder.is_file()
        if is_gguf or any(folder.glob("consolidated.*.pth")):
            raise CheckpointError(
                f"{folder} is not a Hugging Face folder; make one of it first: "
                f"convert to-hf {shlex.quote(str(folder))} OUT"
            )
        if folder.is_file():
            refuse_file_of_model(folder)
            raise CheckpointError(f"{folder} is a file, not a checkpoint folder.")
        refuse_adapter(folder)
        raise CheckpointError(f"{folder} has no config.json; a checkpoint folder needs one.{_look_elsewhere(folder)}")
    text = read_bytes_up_to(path, MAX_CONFIG_BYTES)
    try:
        config = parse_json(text)
        json.dumps(config, ensure_ascii=False).encode()  # raises for halves of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON in UTF-8: {error}.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}, not a JSON object.")
    return text.removeprefix(BOM), config


def refuse_file_of_model(path: Path) -> None:
    """Raise CheckpointError, with the folder to give instead, if a file is one of the files of a model."""
    if path.suffix == ".nemo":
        raise CheckpointError(f"{path} is an archive of NeMo; {MEGATRON_ADVICE}")
    if any(fnmatch(path.name, pattern) for pattern in (*WEIGHTS, "*.json")):
        raise CheckpointError(f"{path} is one file of a checkpoint; give its folder: {path.parent}")


def weights_in(folder: Path) -> list[str]:
    """Return the names of a folder's files that hold weights in some format, readable or not."""
    return sorted({f.name for pattern in WEIGHTS for f in folder.glob(pattern)})


def refuse_checkpoint_of_run(folder: Path) -> None:
    """Raise CheckpointError if a folder is RUN/checkpoints/step-N of a run of `uptrain`.

    Read directly, it would be taken for the model that the run began with, whose model card and records lie in RUN.
    """
    for path in (folder.absolute(), folder.resolve()):  # a part of it may be a link
        step, run = re.fullmatch(r"step-0*([0-9]+)", path.name), path.parent.parent
        if step and path.parent.name == CHECKPOINTS and (run / RUN_JSON).is_file():
            raise CheckpointError(
                f"{path} is a checkpoint of a run; make a model of it first: uptrain export {shlex.quote(str(run))} "
                f"OUT --step {step[1]}"
            )


def refuse_without_weights(folder: Path) -> NoReturn:
    """Raise the CheckpointError for a folder that no reader matches. It states the reason."""
    refuse_adapter(folder)
    refuse_checkpoint_of_run(folder)
    elsewhere = _look_elsewhere(folder)
    if elsewhere:
        raise CheckpointError(f"{folder} itself holds no weights.{elsewhere}")
    read_config(folder)
    names = weights_in(folder)
    for name in names:
        if shard := re.fullmatch(r"(.+)-\d+-of-\d+(\.safetensors|\.bin)", name):
            index = f"{shard[1]}{shard[2]}.index.json"
            raise CheckpointError(
                f"{folder} holds {name} but no {index}, which says which tensor is in which file; download it again, "
                "or save the model again."
            )
    if names and names[0].startswith("consolidated") and names[0].endswith(".safetensors"):
        raise CheckpointError(
            f"{folder} holds {names[0]}, Mistral's own format, which is not read; download the files "
            "model*.safetensors of the same model."
        )
    if names and names[-1].endswith(".safetensors"):
        raise CheckpointError(f"{folder} holds no {SINGLE} and no {INDEX}, but {names[-1]}; rename it to {SINGLE}.")
    if names:
        raise CheckpointError(
            f"{folder} holds no weights that can be read, only {', '.join(names[:3])}; "
            "save the model as safetensors first."
        )
    raise CheckpointError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}, nor any other format's.")


def _look_elsewhere(folder: Path) -> str:
    """Return a sentence that names a checkpoint inside the folder; "" if there is none."""
    if gguf := sorted(folder.glob("*.gguf")):
        return f" To convert a GGUF model, name the file itself: {gguf[0]}"
    if any(folder.glob("original/consolidated.*.pth")):
        return f" To convert the model in Meta's format, name its folder: {folder / 'original'}"
    if (folder / RUN_JSON).is_file() and (folder / CHECKPOINTS).is_dir():
        return f" It is the folder of a run; make a model of it first: uptrain export {shlex.quote(str(folder))} OUT"
    if snapshots := sorted(folder.glob("snapshots/*/config.json")):  # a model in the cache of Hugging Face
        return f" Name one of its snapshots: {snapshots[-1].parent}"
    for name in ("tensors", "model_and_optim", "pytorch_model_fsdp_0"):  # of `uptrain`, OLMo-core and Accelerate
        if (folder / name / ".metadata").is_file():
            return f" To convert a training checkpoint, name the folder of its tensors: {folder / name}"
    if any(any(folder.glob(pattern)) for pattern in MEGATRON):
        return f" It is a checkpoint of Megatron; {MEGATRON_ADVICE}"
    if os.path.lexists(folder / "config.json") or weights_in(folder):
        return ""
    inside = [path.parent for path in sorted(folder.glob("*/config.json")) if weights_in(path.parent)]
    inside = [path for path in inside if not any(fnmatch(path.name, pattern) for pattern in SKIPPED_FOLDERS)]
    return f" Did you mean {' or '.join(map(str, inside[:3]))}?" if inside else ""


def refuse_lfs_pointer(path: Path) -> None:
    """Raise CheckpointError if a file is a git-lfs pointer instead of its content, or not a regular file."""
    check_regular(path)
    if is_lfs_pointer(path):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder.")


def refuse_adapter(folder: Path) -> None:
    """Raise CheckpointError if a folder holds a PEFT adapter."""
    for name in ADAPTER_FILES:
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder} holds an adapter ({name}), which does not fit other K/V heads; "
                "merge it into its base model first (PEFT: merge_and_unload)."
            )


def list_files(
    folder: Path, deep: bool = True, only: tuple[str, ...] = ("*",)
) -> tuple[dict[str, Path | bytes], tuple[str, ...]]:
    """Return the files to copy (by their name relative to the folder) and the names of the skipped files.

    Symlinks are followed if they lead into the folder, or, in a snapshot of the Hugging Face cache, to that model's
    blobs. Other symlinks are skipped, so that no other file of this machine is copied. FIFOs, sockets and devices are
    skipped without opening them. The reason follows the name of a skipped link or special file in brackets. Without
    `deep`, subfolders are ignored. Files whose names match no pattern of `only` are skipped.

    Raises CheckpointError for a dangling or circular link, for an unreadable file, and if config.json or
    groupwise.json, whose contents the output repeats, is a link out of the folder.
    """
    side_files: dict[str, Path | bytes] = {}
    skipped_files: list[str] = []
    seen: dict[Path, Path] = {}
    for root, subfolders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        here = Path(root)
        if len(here.parts) - len(folder.parts) > MAX_LEVELS:
            raise CheckpointError(f"{folder} holds folders more than {MAX_LEVELS} levels deep; move them elsewhere.")
        place = here.resolve()
        if place in seen:
            if here.parent.resolve().is_relative_to(place):
                raise CheckpointError(
                    f"{here} is a symlink back into {folder}; a checkpoint folder cannot contain itself."
                )
            raise CheckpointError(f"{seen[place]} and {here} are one folder; remove the symlink.")
        seen[place] = here
        entries = [*(sorted(subfolders) if deep else []), *sorted(names)]
        subfolders.clear()
        for path in (here / name for name in entries):
            relative = path.relative_to(folder).as_posix()
            if not any(fnmatch(path.name, pattern) for pattern in only):
                skipped_files.append(relative)
                continue
            reason = _reason_to_skip(path, folder)
            if reason is not None:
                skipped_files.append(f"{relative}{'/' if path.is_dir() else ''}{reason}")
            elif path.is_dir():
                subfolders.append(path.name)
            elif relative not in OWN_FILES:
                refuse_lfs_pointer(path)
                side_files[relative] = path
    return side_files, tuple(skipped_files)


def _refuse(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed; its files would be missing in the output."""
    if isinstance(error, PermissionError):
        raise CheckpointError(f"the folder {error.filename} cannot be read; make it readable, or move it elsewhere.")
    raise error


def _reason_to_skip(path: Path, folder: Path) -> str | None:
    """Return None for a file to copy or a folder to descend into, else the text that follows the skipped name.

    The text is empty if the name itself is the reason. Raises CheckpointError as `list_files` does.
    """
    refuse_dangling(path)
    if any(fnmatch(path.name, pattern) for pattern in (SKIPPED_FOLDERS if path.is_dir() else SKIPPED_FILES)):
        return ""
    if path.relative_to(folder).as_posix() in OWN_FILES:
        refuse_outside(path, folder)
    if leads_outside(path, folder):
        return " (a link out of the folder)"
    if path.is_dir() and os.access(path, os.R_OK | os.X_OK):
        return " (a training run, its data, or logits)" if is_uptrain_output(path) else None
    if not (path.is_file() or path.is_dir()):
        return " (not a regular file)"
    if path.is_dir() or not os.access(path, os.R_OK):
        raise CheckpointError(f"{path} cannot be read; check its permissions, or move it away.")
    return None


_UPTRAIN_DATA = re.compile(r"(tokens|documents|values|ids|crc)-\d{5,}\.bin")
"""The files of a token cache and of a teacher's logits."""


def is_uptrain_output(folder: Path) -> bool:
    """Return whether `uptrain` made a folder: a run, a token cache or logits. They hold paths of this machine."""
    names = {path.name for path in folder.iterdir()}
    is_run = RUN_JSON in names and not names.isdisjoint((METRICS, "model"))
    if is_run or "manifest.json" not in names:
        return is_run
    return any(name == "inputs.sha256" or _UPTRAIN_DATA.fullmatch(name) for name in names)
