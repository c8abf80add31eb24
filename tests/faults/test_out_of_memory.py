"""Memory runs out, or a device fails: one line that blames no checkpoint, exit code 1, and finished work is kept."""

import pytest
import tiny
from tiny_tokenizers import make_tokenizer

from convert.calibration.transformers_layer import TransformersLayer
from convert.merging.layer_file import save_layer
from model.common import console


def test_a_lack_of_memory_of_any_command_is_one_line(capsys, monkeypatch):
    def lacking(**options):
        raise MemoryError("Unable to allocate 8.00 MiB for an array")

    with pytest.raises(SystemExit) as stop:
        console.run(type("Command", (), {"main": staticmethod(lacking)}))
    assert stop.value.code == 1
    assert capsys.readouterr().err == "Error: not enough memory (Unable to allocate 8.00 MiB for an array).\n"


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


def test_a_device_that_fails(convert, tmp_path, monkeypatch):
    """That is not the checkpoint's fault, and the layers that are finished are kept."""
    folder = make_tokenizer(tiny.save(tiny.build("qwen3", vocab_size=302), tmp_path / "model"), 300)
    arguments = ("mha-to-gqa", folder, tmp_path / "out", "--groups", 2, "--calibration-tokens", 1024)
    real = TransformersLayer.__init__

    def fail_at_the_second(self, layer, index, *others):
        if index == 1:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        real(self, layer, index, *others)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersLayer, "__init__", fail_at_the_second)
        result = convert(*arguments)
    kept = tmp_path / ".out.groupwise"
    assert result.code == 1
    assert "Error: the device failed (RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED" in result.err
    assert f"finished work is kept in {kept}, and the same command continues from there.\n" in result.err
    assert len(list(kept.rglob("*.npz"))) == 1
    saves = []
    monkeypatch.setattr(
        "convert.calibration.calibrate_layers.save_layer", lambda *given: saves.append(save_layer(*given))
    )
    convert(*arguments).succeeded()
    assert len(saves) == tiny.N_LAYERS - 1
