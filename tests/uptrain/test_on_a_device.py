"""Losses, gradients, evaluation and generation where the models are, on a GPU that is pretended here.

tests/gpu use a real one. An operation on tensors of both devices fails.
"""

import pytest
import tiny
import torch
from pretended_device import NAME, pretended_device

from model.decoder import generation
from model.decoder.loading import load_model
from uptrain.data.batch import Batch
from uptrain.models.casting_layers import use_float32_states
from uptrain.models.load import load_student, load_teacher
from uptrain.models.teacher_sharing import equal_tensors, share, shareable
from uptrain.training.loss_module import LossModule

FAMILIES = {"llama": {}, "mistral": {"sliding_window": 7}, "qwen2": {}}
TOP_K = 5


@pytest.fixture(params=FAMILIES)
def folders(request, tmp_path):
    """Return a student with grouped heads, and a teacher."""
    return [
        tiny.save(tiny.build(request.param, vocab_size=96, **FAMILIES[request.param], **heads), tmp_path / name)
        for name, heads in (("student", {"num_key_value_heads": 2}), ("teacher", {}))
    ]


def to_device(*models):
    """Move models to the pretended device, with tied and shared parameters. (`Module.to` would need a driver.)"""
    moved = {}
    for module in (module for model in models for module in model.modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in moved:
                on_device = torch.nn.Parameter(parameter.detach().to(NAME), requires_grad=parameter.requires_grad)
                moved[id(parameter)] = on_device
            module._parameters[name] = None if parameter is None else moved[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(NAME)


@pytest.mark.parametrize("loss", ["next-token", "distill", "mix", "top-k"])
@pytest.mark.parametrize("part", ["all", "attention", "lora"])
def test_a_loss_and_its_gradients(folders, monkeypatch, part, loss):
    """Of windows with several documents and padding; with parameters that student and teacher share."""
    student_folder, teacher_folder = folders
    student, teacher = load_student(student_folder, part, 4 if part == "lora" else 0).train(), None
    if loss in ("distill", "mix"):
        owners = {}
        if part != "all":
            owners = shareable(student, equal_tensors(student_folder, part, teacher_folder), torch.bfloat16)
        teacher = load_teacher(teacher_folder, "bf16", float32_states=False)
        share(owners, teacher, torch.bfloat16)
        use_float32_states(teacher)
    with pretended_device(monkeypatch):
        to_device(*filter(None, (student, teacher)))
        models = LossModule(student, "distill" if loss == "top-k" else loss, teacher)
        ids = torch.arange(72).reshape(3, 24).to(NAME) % 90
        documents = torch.tensor([[0] * 7 + [1] * 17, [0] * 24, [0] * 20 + [-1] * 4]).to(NAME)
        batch = Batch.without_targets(24, NAME, 3, TOP_K if loss == "top-k" else 0)
        value = models(ids, ids.clone(), documents, top=batch.top and batch.top.as_inputs())
        value.backward()
        trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
        assert value.device == torch.device(NAME)
        assert trained and all(parameter.grad.device == torch.device(NAME) for parameter in trained)
        if teacher is not None:
            with torch.no_grad():
                assert models(ids, ids.clone(), documents, measure=True).device == torch.device(NAME)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation(folders, monkeypatch, dtype):
    """Prompts of two lengths, so that one is padded."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3]]
    expected = generation.generate(load_model(folders[0], dtype), prompts, 12, stop_ids=[])
    for name in ("prefill", "decode"):  # the pretended tensors know no inference mode
        monkeypatch.setattr(generation, name, torch.no_grad()(getattr(generation, name).__wrapped__))
    with pretended_device(monkeypatch):
        model = load_model(folders[0], dtype)
        to_device(model)
        generated = generation.generate(model, prompts, 12, stop_ids=[])
        assert [len(ids) for ids in generated] == [12, 12]
        if dtype == torch.float32:  # in bfloat16, rounding decides between tokens of random models
            assert generated == expected
        assert len(generation.generate(model, prompts, 12, stop_ids=[], temperature=0.8, top_p=0.9)[0]) == 12
