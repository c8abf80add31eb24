"""Which devices are trained on."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import real_runs
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType

from model.common.errors import InputError, is_out_of_memory
from uptrain.distributed import accelerator as accelerators
from uptrain.distributed.accelerator import choose_device, make_accelerator, uses_gpu
from uptrain.runs import device_memory, resolve_settings


@pytest.mark.parametrize(("available", "kind", "expected"), [
    (False, None, False), (True, "cuda", True), (True, "xpu", True), (True, "mps", False),
])  # fmt: skip
def test_all_but_apples(monkeypatch, available, kind, expected):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    assert uses_gpu() == expected
    for value in ("true", "yes", "ON"):
        monkeypatch.setenv("ACCELERATE_USE_CPU", value)
        assert not uses_gpu()


@pytest.mark.parametrize(("kind", "native", "expected"), [
    ("cuda", True, "bf16"), ("cuda", False, "fp32"), ("xpu", False, "bf16"), ("mps", True, "fp32"),
    ("cpu", True, "fp32"),
])  # fmt: skip
def test_the_default_precision_is_one_that_the_device_has(monkeypatch, kind, native, expected):
    """On a T4, which emulates bfloat16, torch says that it is supported."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert accelerators.default_precision(torch.device(kind)) == expected


def test_devices_of_different_defaults(monkeypatch):
    monkeypatch.setattr(accelerators, "all_gather", lambda accelerator, value: [value, "bf16"])
    with pytest.raises(InputError, match=r"default precision \(bf16 and fp32\); give --precision"):
        make_accelerator("fp32", ())


def test_processes_meet_without_a_barrier(monkeypatch):
    """The one of accelerate would fail where a process sees only its own device."""
    monkeypatch.setattr(Accelerator, "wait_for_everyone", lambda self: pytest.fail("a barrier"))
    assert make_accelerator("fp32", ()).num_processes == 1


@pytest.mark.parametrize(("local_ranks", "kind", "refused"), [
    ([0, 1], "MULTI_GPU", True), ([0, 0], "MULTI_GPU", False), ([0, 1], "FSDP", False), ([0, 1], "MULTI_CPU", False),
])  # fmt: skip
def test_replicas_on_processes_that_see_only_their_own_device(monkeypatch, local_ranks, kind, refused):
    """As with `srun --gpus-per-task=1`: all processes refuse, also the first, whose own number is there."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(accelerators, "all_gather", lambda accelerator, value: [rank < 1 for rank in local_ranks])
    accelerator = SimpleNamespace(distributed_type=DistributedType[kind], local_process_index=0)
    with pytest.raises(InputError, match=r"replicas \(DDP\) .* see all GPUs") if refused else nullcontext():
        accelerators.check_replicas(accelerator)


def test_the_loop_alone_accumulates(monkeypatch):
    """Else accelerate would divide the gradient by what stands in the environment."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert make_accelerator("fp32", ()).gradient_accumulation_steps == 1


def test_one_device_for_many_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--device cpu is for one process, but 2 were started; leave it out"):
        choose_device("cpu")
    assert choose_device("auto").type == "cpu"


@pytest.mark.parametrize(("local_rank", "seen", "index"), [(1, 2, 1), (3, 1, 0), (0, 8, 0)])
def test_each_process_asks_its_own_device(monkeypatch, local_rank, seen, index):
    """Not the first of its machine, which may be of another kind."""
    current, asked = [], []
    monkeypatch.setattr(accelerators, "uses_gpu", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: asked.append(list(current)) or True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    device = choose_device("auto")
    assert (device, accelerators.default_precision(device)) == (torch.device("cuda", index), "bf16")
    assert asked == [[index]]


def test_a_given_precision_leaves_the_device_to_be_chosen(uptrain, tmp_path, monkeypatch):
    """The warning of slow attention is about the current device."""
    chosen = []
    inputs = real_runs.make_inputs(tmp_path)
    monkeypatch.setattr(resolve_settings, "choose_device", lambda name: chosen.append(name) or torch.device("cpu"))
    arguments = real_runs.arguments(inputs, tmp_path / "run", "--precision", "fp32", "--max-minutes", 0)
    uptrain(*arguments).succeeded()
    assert chosen == ["auto"]


def test_a_device_against_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(InputError, match="--device cuda:0 is not possible with ACCELERATE_USE_CPU; unset"):
        make_accelerator("fp32", (), device=torch.device("cuda:0"))
    assert choose_device("auto").type == "cpu"


@pytest.mark.parametrize(("on_gpus", "seen", "refused"), [
    (True, 2, True), (True, 4, False), (True, 8, False), (True, 1, False), (False, 2, False),
])  # fmt: skip
def test_more_processes_than_devices(monkeypatch, on_gpus, seen, refused):
    """NCCL would refuse them, with a traceback of each. With `srun --gpus-per-task=1`, each sees only its own."""
    monkeypatch.setattr(accelerators, "uses_gpu", lambda: on_gpus)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    for name, value in {"WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    words = r"^4 processes for 2 GPUs on this machine; start at most 2 \(GPUS=2\)\.$"
    with pytest.raises(InputError, match=words) if refused else nullcontext():
        accelerators.check_launcher()


@pytest.mark.parametrize(("variables", "unset"), [
    ({"LOCAL_RANK": "0"}, "LOCAL_RANK"), ({"LOCAL_RANK": "1", "MASTER_ADDR": "elsewhere"}, "LOCAL_RANK"),
    ({"LOCAL_RANK": ""}, "LOCAL_RANK"), ({"PMI_SIZE": "2"}, "PMI_SIZE"), ({"PMI_SIZE": ""}, "PMI_SIZE"),
    ({"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "elsewhere"}, "OMPI_COMM_WORLD_SIZE"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE"),
    ({"MV2_COMM_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_RANK and MV2_COMM_WORLD_SIZE"),
    ({"LOCAL_RANK": "0", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "LOCAL_RANK"),
    ({"ACCELERATE_USE_CPU": "maybe"}, "it"), ({"ACCELERATE_USE_CPU": ""}, "it"),
    ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "ACCELERATE_USE_MEGATRON_LM"),
])  # fmt: skip
def test_leftover_variables_that_accelerate_would_fail_with(monkeypatch, variables, unset):
    """It would raise in many lines, or wait for processes that nobody started."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=rf"^.*; unset {unset}[.,]"):
        accelerators.check_launcher()


@pytest.mark.parametrize("variables", [
    {"LOCAL_RANK": "-1"}, {"PMI_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1"}, {"ACCELERATE_USE_CPU": "yes"},
    {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1", "PMI_SIZE": "2"},
])  # fmt: skip
def test_variables_of_one_process(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    accelerators.check_launcher()


@pytest.mark.parametrize(("name", "value", "problem"), [
    ("OFFLOAD_PARAMS", "true", "fsdp_offload_params: true is not supported: parameters stay on the device"),
    ("ACTIVATION_CHECKPOINTING", "true", "fsdp_activation_checkpointing: true .*the option --activation-checkpointing"),
    ("RESHARD_AFTER_FORWARD", "false", "fsdp_reshard_after_forward: false is not supported"),
])  # fmt: skip
def test_settings_of_fsdp_that_would_not_be_obeyed(monkeypatch, name, value, problem):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv(f"FSDP_{name}", value)
    with pytest.raises(InputError, match=problem):
        make_accelerator("fp32", ())


@pytest.mark.parametrize(("sizes", "sharded", "given"), [
    ({"TP": 2, "DP_SHARD": 2}, True, "TP_SIZE=2, DP_SHARD_SIZE=2"), ({"CP": 4}, True, "CP_SIZE=4"),
    ({"SP": 2, "DP_SHARD": 2}, True, "SP_SIZE=2, DP_SHARD_SIZE=2"), ({}, True, "no sizes"),
    ({"DP_REPLICATE": 4}, False, "DP_REPLICATE_SIZE=4, without FSDP"),
    ({"DP_SHARD": 4}, False, "DP_SHARD_SIZE=4, without FSDP"), ({"DP_REPLICATE": 4}, True, "DP_REPLICATE_SIZE=4"),
    ({"DP_REPLICATE": 2, "DP_SHARD": 4}, True, "DP_REPLICATE_SIZE=2, DP_SHARD_SIZE=4"),
    ({"DP_SHARD": -4}, True, "DP_SHARD_SIZE=-4"),
])  # fmt: skip
def test_a_parallelism_config_that_divides_more_than_the_data(monkeypatch, sizes, sharded, given):
    """With TP_SIZE=2, the norm of the gradient was 1.343 in place of 0.936."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(sharded).lower())
    for kind, size in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{kind}_SIZE", str(size))
    with pytest.raises(InputError, match=rf"parallelism_config \({given}\) that is not supported: .* = 4, the number"):
        accelerators._refuse_parallelism(sharded)


def test_a_parallelism_config_of_shards_and_replicas(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    for sizes in ({"DP_REPLICATE": 2, "DP_SHARD": 2}, {"DP_REPLICATE": 1, "DP_SHARD": 4, "TP": 1, "CP": 1, "SP": 1}):
        for kind, size in sizes.items():
            monkeypatch.setenv(f"PARALLELISM_CONFIG_{kind}_SIZE", str(size))
        accelerators._refuse_parallelism(sharded=True)


def test_a_model_is_divided_among_the_devices_of_a_replica(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    counts = [accelerators.devices_per_replica()]
    settings = {"USE_FSDP": "true", "USE_PARALLELISM_CONFIG": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
        monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
        monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "8")
        counts.append(accelerators.devices_per_replica())
    assert counts == [1, 16, 8]


def test_a_parallelism_config_is_checked_before_processes_join(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(InputError, match="TP_SIZE=2, without FSDP"):
        make_accelerator("fp32", ())


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_OFFLOAD_PARAMS"])
def test_a_variable_of_a_launcher_that_is_neither_true_nor_false(monkeypatch, variable):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv(variable, "maybe")
    with pytest.raises(InputError, match=f"the variable {variable} is 'maybe', neither true nor false; unset it"):
        make_accelerator("fp32", ())


def test_compilation_by_the_launcher(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(InputError, match=r"ACCELERATE_DYNAMO_BACKEND=INDUCTOR .* the option --compile in its place"):
        make_accelerator("fp32", ())
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")  # as `accelerate launch` sets it
    assert make_accelerator("fp32", ()).num_processes == 1


def test_a_process_that_sees_one_of_many_devices(monkeypatch):
    """As with `srun --gpus-per-task=1`."""
    asked = []
    monkeypatch.setattr(device_memory, "uses_gpu", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    device = SimpleNamespace(mem_get_info=lambda index: asked.append(index) or (1000, 2000))
    monkeypatch.setattr(torch, "cuda", device)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert (device_memory.usable_memory(), asked) == (920, [0])


@pytest.mark.parametrize(("error", "expected"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
    (dist.DistBackendError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"), True),
    (dist.DistBackendError("NCCL error: remote process exited"), False), (MemoryError(), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), False),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True), (ValueError("out of memory"), False),
])  # fmt: skip
def test_lack_of_memory(error, expected):
    assert is_out_of_memory(error) == expected
