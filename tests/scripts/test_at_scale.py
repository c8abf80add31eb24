"""The estimates for large models: sparse checkpoints, and communication against what processes exchange."""

import json

import count_traffic
import forks
import pytest
from count_traffic import GATHER, REDUCE
from real_runs import arguments, make_inputs

from model.checkpoint import open_checkpoint
from scripts.bench.at_scale import communication
from scripts.bench.llama_checkpoint import Shape, write_sparse
from uptrain.estimates.memory import MemoryEstimator

SMALL = Shape("small", 64, 2, 4, 96, 100)


@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_a_sparse_checkpoint_has_the_tensors_of_transformers_class(tmp_path, n_kv_heads):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_sparse(SMALL, n_kv_heads, tmp_path / "sparse")
    with open_checkpoint(folder) as checkpoint:
        ours = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    stock = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert ours == {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("n_processes", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("part", ["all", "attention"])
def test_communication_is_what_processes_receive(tmp_path, convert, part, precision, n_processes):
    inputs = make_inputs(tmp_path)
    model = tmp_path / "converted"  # its frozen parameters are the parent's
    convert("mha-to-gqa", "--method", "mean", inputs["parent"], model, "--groups", 2).succeeded()
    inputs["model"] = model
    more = ("--micro-batch", 4, "--trainable", part, "--precision", precision)
    jobs = [
        {"arguments": arguments(inputs, tmp_path / f"run-{steps}", *more, loss="distill", steps=steps)}
        for steps in (4, 5)
    ]
    outputs = [tmp_path / f"output-{rank}" for rank in range(n_processes)]
    started = forks.start_ranks(count_traffic.drive, jobs, str(tmp_path), outputs=outputs, sharded=True)
    results = forks.finish(started, outputs, seconds=300)
    assert [result.code for result in results] == [0] * n_processes, results
    estimator = MemoryEstimator.read(inputs["model"], inputs["parent"], 32, precision)
    expected = communication(estimator, part, n_processes)
    for rank in range(n_processes):
        shorter, longer = json.loads((tmp_path / f"{rank}.json").read_text())
        # Shards are of one length: the last may have padding.
        assert longer[GATHER] - shorter[GATHER] == pytest.approx(expected.student + expected.teacher, rel=0.03)
        assert longer[REDUCE] - shorter[REDUCE] == pytest.approx(expected.gradients, rel=0.03)
