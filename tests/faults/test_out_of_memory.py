"""Memory runs out, or a device fails: one line that blames no checkpoint, exit code 1, and finished work is kept."""

import shutil
from types import SimpleNamespace

import pytest
import real_runs
import tiny
import torch
from tiny_tokenizers import make_tokenizer
from torch.distributed import DistBackendError

from convert.layer_tensors.layer_file import save_layer
from convert.layers.transformers_layer import TransformersLayer
from model.common import console
from model.common.machine import available_memory
from uptrain.training import loop

GPU_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            MemoryError("Unable to allocate 8.00 MiB for an array"),
            "not enough memory (Unable to allocate 8.00 MiB for an array).",
        ),
        (
            RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …"),
            "the GPU failed (CUDA error: an illegal memory access was encountered); if it fails again, use another.",
        ),
        (
            RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
            "another process cannot be reached, and may have ended ([/gloo/gloo/transport/tcp/pair.cc:553] Connection "
            "closed by peer).",
        ),
        (
            DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error"),
            "another process cannot be reached, and may have ended (NCCL error in: ProcessGroupNCCL.cpp:94, unhandled "
            "system error).",
        ),
        (
            DistBackendError(
                "NCCL error in: ProcessGroupNCCL.cpp:94, invalid usage, NCCL version 2.27\nLast error:\n"
                "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
            ),
            "two processes use the same GPU; start at most one process for each GPU.",
        ),
    ],
)
def test_a_failure_of_the_machine_is_one_line_in_any_command(capsys, error, line):
    def fail(**options):
        raise error

    with pytest.raises(SystemExit) as stop:
        console.run(type("Command", (), {"main": staticmethod(fail)}))
    assert stop.value.code == 1
    assert capsys.readouterr().err == f"Error: {line}\n"


def test_too_little_memory_to_join_experts(convert, tmp_path, monkeypatch):
    """Transformers catches the error and continues, so a tensor is missing: that is not the checkpoint's fault."""
    folder = make_tokenizer(tiny.save(tiny.build("qwen3_moe", vocab_size=302), tmp_path / "model"), 300)
    arguments = ("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024)

    def fail(*arguments, **options):
        raise MemoryError("Unable to allocate 8.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.core_model_loading.MergeModulelist.convert", fail)
        result = convert(*arguments)
    assert result.code == 1
    assert result.err.startswith("Error: not enough memory (") and "Unable to allocate 8.00 GiB" in result.err
    assert "lacks the tensor" not in result.err
    convert(*arguments).succeeded()


@pytest.mark.parametrize(("error", "words"), [
    ("CUDA error: uncorrectable ECC error encountered", "the device failed (RuntimeError: {})"),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
     "cpu has too little memory ({}); continue with --device cpu"),
])  # fmt: skip
def test_a_device_that_fails(convert, tmp_path, monkeypatch, error, words):
    """That is not the checkpoint's fault, and the layers that are finished are kept."""
    folder = make_tokenizer(tiny.save(tiny.build("qwen3", vocab_size=302), tmp_path / "model"), 300)
    arguments = ("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024)
    real = TransformersLayer.__init__

    def fail_at_the_second(self, layer, index, *others):
        if index == 1:
            raise RuntimeError(error)
        real(self, layer, index, *others)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersLayer, "__init__", fail_at_the_second)
        result = convert(*arguments)
    kept = tmp_path / ".out.groupwise"
    assert result.code == 1
    assert f"Error: {words.format(error)}" in result.err
    assert f"finished work is kept in {kept}, and the same command continues from there.\n" in result.err
    assert len(list(kept.rglob("*.npz"))) == 1
    saves = []
    monkeypatch.setattr(
        "convert.calibration.convert_layers.save_layer", lambda *given: saves.append(save_layer(*given))
    )
    convert(*arguments).succeeded()
    assert len(saves) == tiny.N_LAYERS - 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to"), MemoryError("8.00 MiB")])
def test_a_lack_of_memory_in_a_run_is_one_line(uptrain, runs, tmp_path, monkeypatch, error):
    def lacking(*arguments, **options):
        raise error

    monkeypatch.setattr(loop, "_backward", lacking)
    result = uptrain(*real_runs.arguments(runs.inputs, tmp_path / "run"))
    assert result.code == 1
    assert result.err.splitlines()[-1].startswith("Error: after step 0, memory ran out (")
    assert "`uptrain resume" in result.err and "Traceback" not in result.err
    assert "; to use less memory, add a smaller --micro-batch" in result.err
    monkeypatch.setattr("uptrain.evaluate_folder.evaluate", lacking)
    result = uptrain("evaluate", runs.inputs["model"], "--data", runs.inputs["data"])
    assert (result.code, result.err.splitlines()[-1][:26]) == (1, "Error: not enough memory (")
    assert result.err.endswith(" for the models; give --micro-batch 1, or use another --device.\n")


def test_a_lack_of_memory_while_a_checkpoint_is_read(uptrain, distilled, tmp_path, monkeypatch):
    """The optimizer's states are made then."""

    def lacking(*arguments):
        raise GPU_MEMORY

    run = shutil.copytree(distilled, tmp_path / "run")
    shutil.rmtree(run / "checkpoints/step-00000012")
    monkeypatch.setattr("uptrain.runs.start_and_resume.read_tensors", lacking)
    result = uptrain("resume", run)
    assert (result.code, result.err.splitlines()[-1]) == (
        1,
        "Error: not enough memory (CUDA out of memory) for the models; use devices with more, or more devices. "
        "`uptrain plan --memory` shows what fits.",
    )


def test_a_lack_of_memory_while_a_teacher_computes(uptrain, runs, tmp_path, monkeypatch):
    def lacking(*arguments):
        raise GPU_MEMORY

    monkeypatch.setattr("uptrain.teach._top_k_of_windows", lacking)
    result = uptrain("teach", runs.inputs["parent"], "--data", runs.inputs["data"], "--out", tmp_path / "logits")
    assert (result.code, result.err.splitlines()[-1]) == (
        1,
        "Error: cpu has too little memory (CUDA out of memory); set ACCELERATE_USE_CPU=true to continue on the CPU.",
    )


def test_a_lack_of_memory_while_text_is_generated(generation, tmp_path, monkeypatch):
    """The line of the error does not continue the prompt, which is printed already."""

    def lacking(*arguments, **options):
        raise GPU_MEMORY
        yield

    monkeypatch.setattr("model.decoder.generation.stream", lacking)
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=302), tmp_path / "model"), 300)
    result = generation(folder, "--prompt", "hello")
    assert (result.code, result.out) == (1, "hello\n")
    assert result.err == "Error: cpu has too little memory (CUDA out of memory); give --device cpu.\n"


ECC = """CUDA error: uncorrectable ECC error encountered
Search for `cudaErrorECCUncorrectable' in https://docs.nvidia.com for more information. CUDA kernel errors might be
asynchronously reported at some other API call."""


def test_a_device_that_fails_in_a_run_is_one_line(uptrain, runs, tmp_path, monkeypatch):
    """A failed assertion on the device is no fault of the device: it keeps its traceback."""

    def failing(message):
        def fail(*arguments, **options):
            raise RuntimeError(message)

        return fail

    out = tmp_path / "run"
    arguments = real_runs.arguments(runs.inputs, out)
    with monkeypatch.context() as patch:
        patch.setattr("uptrain.runs.start_and_resume.build_initial", failing(ECC))
        result = uptrain(*arguments)
    assert (result.code, result.err.splitlines()[-1]) == (
        1,
        "Error: the GPU failed (CUDA error: uncorrectable ECC error encountered); try again, or use another device.",
    )
    monkeypatch.setattr(loop, "_backward", failing(ECC))
    result = uptrain(*arguments)
    assert (result.code, result.err.splitlines()[-1]) == (
        1,
        "Error: after step 0, the GPU failed (CUDA error: uncorrectable ECC error encountered). "
        f"`uptrain resume {out}` starts at step 0 (no checkpoint was saved); if it fails again, on another device.",
    )
    monkeypatch.setattr(loop, "_backward", failing("CUDA error: device-side assert triggered"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        uptrain("resume", out)


def test_a_limit_of_the_control_group(tmp_path, monkeypatch):
    """The least of the machine and of every group with a limit; what the kernel can free counts as free."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**12))
    own = tmp_path / "own"
    assert available_memory(tmp_path / "none", own) == 10**12

    def write(group, **files):
        group.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (group / name.replace("__", ".")).write_text(f"{content}\n")

    v2 = tmp_path / "v2"
    write(v2 / "job", memory__max="max", memory__high="max", memory__current=5, memory__stat="inactive_file 2")
    write(
        v2 / "job/step", memory__max=50_000, memory__current=30_000, memory__stat="inactive_file 4000\nactive_file 900"
    )
    own.write_text("0::/job/step\n")
    assert available_memory(v2, own) == 24_900
    (v2 / "job/step/memory.stat").unlink()
    assert available_memory(v2, own) == 20_000
    write(v2 / "job", memory__high=21_000, memory__current=20_000)
    assert available_memory(v2, own) == 1_002
    own.write_text("0::/job/other\n")  # no such group: those above it count
    assert available_memory(v2, own) == 1_002
    v1 = tmp_path / "v1"
    write(v1 / "memory", memory__limit_in_bytes=9000, memory__usage_in_bytes=9500, memory__stat="total_inactive_file 0")
    for controllers in ("memory", "cpuset,memory"):
        own.write_text(f"9:name=systemd:/\n4:{controllers}:/docker/abc\n0::/\n")
        assert available_memory(v1, own) == 0
    write(v1 / "memory", memory__limit_in_bytes=2**63 - 4096)
    assert available_memory(v1, own) == 10**12
