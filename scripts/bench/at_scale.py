"""Estimate conversion and uptraining of large models on 1 to 512 devices, from file headers alone.

The checkpoints are sparse: their files have headers and lengths, and no data. Sizes, memory and FLOPs are those of
`convert --dry-run` and `uptrain plan`; communication is counted by `communication` below, and compared with the bytes
that two and four processes really exchange in tests/scripts/test_at_scale.py. Nothing of this has run on a GPU.

    python -m scripts.bench.at_scale --out docs/bench/at_scale
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.merging.merge_recipe import MergeRecipe
from convert.planning.merge_plan import make_merge_plan
from model.checkpoint import open_checkpoint
from scripts.bench.llama_checkpoint import LLAMA_2_7B, Shape, write_sparse
from scripts.bench.machine import write_rows
from uptrain.estimates.memory import COMPUTE_BYTES, GRADIENT_BYTES, MemoryEstimator, MemoryOptions
from uptrain.estimates.parameter_counts import count_multiplied, count_parameters
from uptrain.estimates.training_time import MFU, PEAK_FLOPS, flops_per_token_of
from uptrain.models.trainable_parts import part_pattern

DEVICES = (1, 8, 64, 512)
GROUPS, SEQ_LEN, MICRO_BATCH, GLOBAL_BATCH = 8, 2048, 4, 4_194_304
PART = "attention"
NVLINK, NETWORK = 450e9, 50e9
"""Bytes per second of a device in one direction: NVLink of an H100 (NVIDIA's data sheet: 900 GB/s both ways), and one
400 Gb/s network card for each device."""


SHAPES = (
    LLAMA_2_7B,
    Shape("70B", 8192, 80, 64, 28672, 32000),
    Shape("405B", 16384, 126, 128, 53248, 128256),
)
"""The larger two have the sizes of Llama 2 70B and Llama 3.1 405B, but a K/V head for each query head."""


@dataclass(frozen=True)
class Communication:
    """Bytes that a device receives for a micro-batch, under FSDP2."""

    student: int
    """Its layers, gathered for the forward pass and again for the backward; embedding and LM head, gathered once."""
    gradients: int
    """Of trained parameters, reduced in float32."""
    teacher: int
    """Its layers, gathered once; embedding and LM head are on every device. Layers that use parameters of the student's
    gather the student's layers again, and their own parameters."""

    @property
    def total(self) -> int:
        return self.student + self.gradients + self.teacher


def communication(estimator: MemoryEstimator, part: str, devices: int) -> Communication:
    """Return the bytes of a micro-batch: each device receives what it does not hold, (devices − 1) / devices of all."""
    pattern, width = part_pattern(part, estimator.config), COMPUTE_BYTES[estimator.precision]
    trained = count_parameters(estimator.trained(part))
    layers, teacher_tensors = (
        {tensor for tensor in tensors if ".layers." in tensor.name}
        for tensors in (estimator.tensors, estimator.teacher_tensors)
    )
    frozen = {
        tensor for tensor in layers if not pattern.search(tensor.name) and tensor.name in estimator.equal_to_teacher
    }
    lent = layers if teacher_tensors & frozen else set()

    def received(n: int) -> int:
        return n * (devices - 1) // devices

    return Communication(
        student=received(width * (count_parameters(layers) + count_parameters(estimator.tensors))),
        gradients=received(GRADIENT_BYTES * trained),
        teacher=received(width * (count_parameters(lent) + count_parameters(teacher_tensors - frozen))),
    )


def conversion(source: Path) -> dict[str, Any]:
    """Return the bytes and memory of a conversion by the mean."""
    with open_checkpoint(source) as checkpoint:
        plan = make_merge_plan(checkpoint, GROUPS, MergeRecipe("mean"), None)
        return {
            "source_bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
            "out_bytes": plan.output_bytes,
            "memory_bytes": plan.peak_memory(4),
            "cache_bytes_before": plan.geometry.kv_cache_bytes_per_token(plan.geometry.n_kv_heads),
            "cache_bytes_after": plan.geometry.kv_cache_bytes_per_token(GROUPS),
        }


def uptraining(estimator: MemoryEstimator, devices: int) -> dict[str, Any]:
    """Return memory, compute and communication of a device, for micro-batches of MICRO_BATCH windows."""
    tokens = MICRO_BATCH * SEQ_LEN
    # the forward pass again, of activation checkpointing
    recomputing = 2 * count_multiplied(estimator.tensors, estimator.config)
    flops = (flops_per_token_of(estimator, PART) + recomputing) * tokens
    computing = flops / (MFU * PEAK_FLOPS["H100"])
    exchanged = communication(estimator, PART, devices).total
    micro_batches = GLOBAL_BATCH // (tokens * devices)
    return {
        "devices": devices,
        "memory_bytes": estimator.memory(MemoryOptions(PART, MICRO_BATCH, True)).per_device(devices),
        "least_memory_bytes": estimator.memory(MemoryOptions(PART, 1, True)).per_device(devices),
        "micro_batches": micro_batches,
        "computing_s": computing,
        "received_bytes": exchanged,
        "nvlink_s": exchanged / NVLINK,
        "network_s": exchanged / NETWORK,
        "step_s": micro_batches * max(computing, exchanged / (NVLINK if devices <= 8 else NETWORK)),
    }


def estimates(shape: Shape, folder: Path) -> dict[str, Any]:
    source = write_sparse(shape, shape.heads, folder / f"{shape.name}-mha")
    estimator = MemoryEstimator.read(write_sparse(shape, GROUPS, folder / f"{shape.name}-gqa"), source, SEQ_LEN)
    rows = [uptraining(estimator, devices) for devices in DEVICES]
    return {
        "name": shape.name, "n_params": count_parameters(estimator.teacher_tensors), "conversion": conversion(source),
        "uptraining": rows,
    }  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """Return the estimates as two Markdown tables."""
    lines = [
        f"| | source | as GQA-{GROUPS} | memory to convert by the mean | KV cache of a token |",
        "|---|---:|---:|---:|---:|",
    ]
    for result in results:
        row = result["conversion"]
        lines.append(
            f"| {result['name']} | {row['source_bytes'] / 1e9:,.0f} GB | {row['out_bytes'] / 1e9:,.0f} GB "
            f"| {row['memory_bytes'] / 1e6:.0f} MB "
            f"| {row['cache_bytes_before'] / 1e6:.2f} → {row['cache_bytes_after'] / 1e6:.3f} MB |"
        )
    lines += [
        "",
        "| | H100s | memory of each | with one window | micro-batches of a step | computing one | receives for it "
        "| over NVLink | over the network | a step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        for row in result["uptraining"]:
            lines.append(
                f"| {result['name']} | {row['devices']} | {row['memory_bytes'] / 1e9:,.0f} GB "
                f"| {row['least_memory_bytes'] / 1e9:,.0f} GB | {row['micro_batches']} | {row['computing_s']:.1f} s "
                f"| {row['received_bytes'] / 1e9:,.0f} GB | {row['nvlink_s']:.1f} s | {row['network_s']:.1f} s "
                f"| {row['step_s']:,.0f} s |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write OUT.json and OUT.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = [estimates(shape, Path(folder)) for shape in SHAPES]
    print(table(results))
    if options.out:
        write_rows(options.out.with_suffix(".json"), results, part=PART, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH)
        options.out.with_suffix(".md").write_text(table(results) + "\n")


if __name__ == "__main__":
    main()
