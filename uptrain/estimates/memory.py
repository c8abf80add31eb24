"""Estimate the memory of a device from file headers, by a formula, which `plan --json` prints.

Of a teacher, some rows are read too: parameters that equal the student's are in memory once. Only classes of
transformers need torch: their modules say which frozen parameters are float32, and what is kept for the backward pass.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.checkpoint import Checkpoint, TensorInfo
from model.checkpoint.latent_norm import without_latent_norm
from model.checkpoint.same_bytes import sampled_rows
from model.checkpoint.tensor import BITS, layer_number
from model.common import checks
from model.common.errors import InputError
from model.decoder.chunk_size import max_chunk_logits
from model.decoder.config import is_native
from model.geometry import ModelSizes, read_sizes
from model.language_model import open_language_model
from uptrain.estimates.parameter_counts import (
    count_by_layer,
    count_gathered,
    count_lm_head,
    count_outside_layers,
    count_parameters,
    without_buffers,
)
from uptrain.models.trainable_choices import DEFAULT_LORA_RANK, check_lora_rank
from uptrain.models.trainable_parts import common_dtype, knows_attention, part_pattern

if TYPE_CHECKING:
    from uptrain.models.kept_activations import KeptBytes

MASTER_BYTES, GRADIENT_BYTES = 4, 4
"""Bytes of a trained parameter: float32 weight and gradient."""
COMPUTE_BYTES = {"bf16": 2, "fp32": 4}
"""Bytes, by precision, of an activation, a teacher's parameter, and the copy of a trained one in the computation."""
ADAMW_BYTES = 8
"""Bytes of AdamW's two moments of a parameter."""
MAX_SHARD_SHARE = 0.5
"""Largest share of a parameter that a device holds where it is sharded: two devices."""
LOGIT_BYTES, TEACHER_LOGIT_BYTES = 6, 10
"""Bytes of a logit of a chunk, in bfloat16 and float32; with a teacher also its logits, and the log ratio."""
WHOLE_LOGIT_BYTES, TEACHER_WHOLE_LOGIT_BYTES = 14, 16
"""The same where all logits are there at once, with their log-softmax and its gradient."""
MEMORY_FORMULA = (
    "8 bytes x trained parameters (float32 weight and gradient) + the optimizer's states (AdamW: 8 bytes) + 2 bytes "
    "(their bfloat16 copies; none where sharded) + the frozen parameters in the model's dtype (in float32 where "
    "transformers' classes cannot cast them: norms, routers, scaled embeddings) + 2 bytes x the teacher's "
    "parameters, without those that equal frozen ones in the model's dtype (all / devices where sharded) + activations "
    "of the micro-batch + a chunk of the LM head's logits + 4 bytes x the LM head's parameters if they are trained "
    "(their gradient in the loss); where sharded, also the embedding, the LM head and two layers gathered, and the "
    "gradients that are reduced: 8 bytes x the trained parameters of a layer in addition to the activations, or of the "
    "embedding and the LM head without them, if that is more. Not counted: buffers, and what allocators lose."
)


@dataclass(frozen=True)
class MemoryOptions:
    """The options of a run that save memory."""

    trainable: str
    """As in `--trainable`."""
    micro_batch: int
    """Windows."""
    activation_checkpointing: bool = False
    """Whether the activations of a layer are computed again in the backward pass."""

    @property
    def flags(self) -> str:
        """The options as `uptrain run` takes them, besides the micro-batch."""
        return f"--trainable {self.trainable}{' --activation-checkpointing' * self.activation_checkpointing}"


@dataclass(frozen=True)
class Memory:
    """Bytes of one device that holds everything."""

    frozen: int
    """Parameters that are not trained: in the model's dtype, or float32 where their modules cannot cast them."""
    masters: int
    copies: int
    """bfloat16 copies of the trained parameters."""
    gradients: int
    optimizer: int
    teacher: int
    shared: int
    """The part of `teacher` that devices do not hold, because it equals frozen parameters."""
    activations: int
    logits: int
    """A chunk of the LM head's logits, and its gradient in float32."""
    gathered: int
    """Bytes that FSDP2 gathers at once: embedding and LM head of student and teacher, two layers of the student and one
    of the teacher, without what the teacher shares. Added are the gradients that it reduces, if they take more than the
    activations and logits, which are freed before."""

    def replicated(self) -> int:
        """Return the bytes of a device on its own, or with DDP."""
        states = self.frozen + self.masters + self.copies + self.gradients + self.optimizer
        return states + self.teacher - self.shared + self.activations + self.logits

    def sharded(self, devices: int) -> int:
        """Return the bytes of each device with FSDP2."""
        states = self.frozen + self.masters + self.gradients + self.optimizer + self.teacher - self.shared
        return -(-states // devices) + self.gathered + self.activations + self.logits

    def per_device(self, devices: int) -> int:
        """Return the bytes of each device: one, or several with FSDP2."""
        return self.replicated() if devices == 1 else self.sharded(devices)


@dataclass(frozen=True)
class MemoryEstimator:
    """Student, teacher, and the settings of a run that its memory depends on, besides `MemoryOptions`."""

    tensors: tuple[TensorInfo, ...]
    teacher_tensors: tuple[TensorInfo, ...]
    """Empty without a teacher."""
    equal_to_teacher: frozenset[str]
    """The tensors that equal the teacher's of that name, as far as some of their rows tell."""
    config: Mapping[str, Any]
    sizes: ModelSizes
    intermediate_size: int
    seq_len: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    lora_rank: int = DEFAULT_LORA_RANK
    repeats_kv: bool = False
    """Whether the own decoder's attention copies keys and values for each query head, as without flash attention."""
    always_float32_names: frozenset[str] = frozenset()
    """The tensors that are float32 even if they are frozen. A teacher has its own."""
    measure_kept: "Callable[[str], KeptBytes | InputError] | None" = None
    """Measures what transformers' class keeps when a part is trained, or returns why it cannot be measured. None: it is
    estimated by the formula of the own decoder."""

    @classmethod
    def read(
        cls,
        model: Path,
        teacher: Path | None,
        seq_len: int,
        precision: str = "bf16",
        optimizer: str = "adamw",
        lora_rank: int = DEFAULT_LORA_RANK,
    ) -> "MemoryEstimator":
        """Read the headers of two folders. Raises InputError if the config does not say the sizes of the model."""
        with open_language_model(model) as checkpoint:
            if not knows_attention(checkpoint.config):
                raise InputError(
                    f"uptrain plan knows the families that convert merges, and model_type "
                    f"{checkpoint.config.get('model_type')!r} is none of them. `uptrain run` says whether it can be "
                    "trained."
                )
            config, sizes = checkpoint.config, read_sizes(checkpoint)
            tensors = without_buffers(without_latent_norm(checkpoint).tensors.values())
        if "intermediate_size" not in config and not is_native(config):
            raise InputError(
                f"the memory of model_type {config.get('model_type')!r} cannot be estimated: its config.json has no "
                "intermediate_size. `uptrain run` says whether it can be trained."
            )
        inner = checks.config_size(config, "intermediate_size")
        teacher_tensors, equal = _read_teacher(model, teacher) if teacher is not None else ((), frozenset())
        float32 = _read_always_float32_names(model, config)
        kept = _make_measure_kept(model, config, seq_len, precision, lora_rank)
        return cls(
            tensors=tensors,
            teacher_tensors=teacher_tensors,
            equal_to_teacher=equal,
            config=config,
            sizes=sizes,
            intermediate_size=inner,
            seq_len=seq_len,
            precision=precision,
            optimizer=optimizer,
            lora_rank=lora_rank,
            always_float32_names=float32,
            measure_kept=kept,
        )

    def trained(self, trainable: str) -> list[TensorInfo]:
        """Return the parameters that are trained. Raises InputError if the model does not have the part."""
        pattern = part_pattern(trainable, self.config)
        if trainable == "lora":
            return list(self._adapters())
        return [tensor for tensor in self.tensors if pattern.search(tensor.name)]

    def memory(self, chosen: MemoryOptions) -> Memory:
        """Return the memory of a run with these options. Raises InputError if the model does not have its part.

        Tensors of the teacher count as shared if they are in `equal_to_teacher`, frozen, and not always float32.
        """
        pattern, compute_bytes = part_pattern(chosen.trainable, self.config), COMPUTE_BYTES[self.precision]
        trained = self.trained(chosen.trainable)
        frozen = [tensor for tensor in self.tensors if not pattern.search(tensor.name)]
        n_trained, tokens = count_parameters(trained), chosen.micro_batch * self.seq_len
        float32_frozen = {tensor for tensor in frozen if tensor.name in self.always_float32_names}
        shared = {tensor for tensor in frozen if tensor.name in self.equal_to_teacher} - float32_frozen
        stored_bytes = BITS[common_dtype(self.tensors)] // 8
        activations, logits = self._activation_bytes(chosen), self._logit_bytes(tokens)
        lm_head = count_lm_head(trained) if is_native(self.config) else 0
        logits += GRADIENT_BYTES * lm_head
        return Memory(
            frozen=stored_bytes * count_parameters(set(frozen) - float32_frozen)
            + MASTER_BYTES * count_parameters(float32_frozen),
            masters=MASTER_BYTES * n_trained,
            copies=compute_bytes * n_trained if self.precision == "bf16" else 0,
            gradients=GRADIENT_BYTES * n_trained,
            optimizer=sum(state_bytes(self.optimizer, tensor.shape) for tensor in trained),
            teacher=compute_bytes * count_parameters(self.teacher_tensors),
            shared=compute_bytes * count_parameters(shared),
            activations=activations,
            logits=logits,
            gathered=compute_bytes
            * (count_gathered(self.tensors, 2) + count_gathered(set(self.teacher_tensors) - shared, 1))
            + self._reduced_bytes(trained, lm_head, activations, logits),
        )

    def host_bytes(self, needed: Memory) -> int:
        """Return the bytes of the host while models are read: in each process, or once if sharded.

        Models of transformers' classes are read whole in float32, and so are the parts of their teachers that are then
        replaced by shared ones.
        """
        read = needed.frozen + needed.masters + needed.teacher
        if is_native(self.config):
            return read - needed.shared
        return max(read, MASTER_BYTES * count_parameters(self.tensors))

    def _adapters(self) -> Iterator[TensorInfo]:
        """Yield the two matrices of each adapter."""
        for tensor in self.adapted():
            n_out, n_in = tensor.shape
            yield TensorInfo(f"{tensor.name}.lora_A", "F32", (self.lora_rank, n_in))
            yield TensorInfo(f"{tensor.name}.lora_B", "F32", (n_out, self.lora_rank))

    def adapted(self) -> list[TensorInfo]:
        """Return the matrices that have an adapter with `--trainable lora`: of every linear layer in decoder layers."""
        weights = (x for x in self.tensors if layer_number(x.name) is not None and x.name.endswith(".weight"))
        return [x for x in weights if len(x.shape) == 2 and x.name not in self.always_float32_names]

    def check_lora_rank(self, trainable: str) -> None:
        """Raise InputError if adapters are trained, and their rank is higher than that of any matrix."""
        if trainable == "lora" and (adapted := self.adapted()):
            check_lora_rank(self.lora_rank, max(min(matrix.shape) for matrix in adapted))

    def activation_warning(self, trainable: str) -> str | None:
        """Return a warning if the activations of transformers' class are estimated by the formula of another."""
        if is_native(self.config) or self._measured(trainable):
            return None
        failure = self.measure_kept and self.measure_kept(trainable)
        if isinstance(failure, InputError) and failure.__cause__ is None:  # our refusal, which `run` gives too
            return None
        why = "" if failure is None else f" ({str(failure).rstrip('.')})"
        return (
            f"the activations of model_type {self.config.get('model_type')!r} are estimated as Llama's, since those of "
            f"transformers' class are not known{why}: training may take far more memory than estimated."
        )

    def _measured(self, trainable: str) -> "KeptBytes | None":
        """Return what transformers' class keeps when a part is trained; None if it was not measured."""
        kept = self.measure_kept and self.measure_kept(trainable)
        return None if isinstance(kept, InputError) else kept

    def _activation_bytes(self, chosen: MemoryOptions) -> int:
        """Return the bytes of a micro-batch that are kept for the backward pass."""
        n_layers, hidden_bytes_per_window = self.sizes.n_layers, self.seq_len * 4 * self.sizes.hidden_size
        kept = self._measured(chosen.trainable)
        layer = kept.layer if kept else self.seq_len * self._layer_bytes(chosen.trainable)
        outside = kept.outside if kept else self._mask_bytes()
        layers = n_layers * hidden_bytes_per_window + layer if chosen.activation_checkpointing else n_layers * layer
        return int(chosen.micro_batch * (layers + outside))

    def _layer_bytes(self, trainable: str) -> int:
        """Return the bytes per token that a layer of the own decoder keeps."""
        compute_bytes = COMPUTE_BYTES[self.precision]
        layer = layer_activation_bytes(self.sizes, self.intermediate_size, trainable, compute_bytes, self.repeats_kv)
        if trainable == "lora":
            n_adapters = sum(tensor.name.endswith("lora_A") for tensor in self._adapters()) // self.sizes.n_layers
            layer += n_adapters * compute_bytes * self.lora_rank
        return layer

    def _mask_bytes(self) -> int:
        """Return the bytes of a window's mask, which transformers' classes take, and all layers share."""
        return 0 if is_native(self.config) else COMPUTE_BYTES[self.precision] * self.seq_len**2

    def _logit_bytes(self, tokens: int) -> int:
        """Return the bytes of logits: of a chunk, or of all tokens in models of transformers."""
        vocab = max(x.shape[0] for x in self.tensors if layer_number(x.name) is None and len(x.shape) == 2)
        if is_native(self.config):
            chunk = min(max_chunk_logits(tokens, self.sizes.hidden_size), tokens * vocab)
            return chunk * (LOGIT_BYTES + (TEACHER_LOGIT_BYTES if self.teacher_tensors else 0))
        return tokens * vocab * (WHOLE_LOGIT_BYTES + (TEACHER_WHOLE_LOGIT_BYTES if self.teacher_tensors else 0))

    def _reduced_bytes(self, trained: list[TensorInfo], lm_head: int, activations: int, logits: int) -> int:
        """Return the bytes of gradients that FSDP2 reduces, beyond those of activations and logits.

        A reduced gradient takes three buffers: as computed, in float32 for the reduction, and this device's shard of
        the result. The largest of three moments counts: in the loss, in the backward pass of the last layer, and at its
        end, when embedding and LM head are reduced together. `lm_head`: parameters of an LM head whose gradient the
        loss computes.
        """
        compute_bytes = COMPUTE_BYTES[self.precision]
        reduced = int(compute_bytes + GRADIENT_BYTES + MAX_SHARD_SHARE * GRADIENT_BYTES)
        # The loss sums it in float32, in `logits`; then it is held in the dtype of the computation.
        lm_head_gradient = compute_bytes * lm_head
        in_loss = activations + logits + (lm_head_gradient if compute_bytes < GRADIENT_BYTES else 0)
        in_last_layer = activations + lm_head_gradient + reduced * max(count_by_layer(trained).values(), default=0)
        at_the_end = reduced * count_outside_layers(trained)
        return max(in_loss, in_last_layer, at_the_end) - activations - logits


def _read_teacher(model: Path, teacher: Path) -> tuple[tuple[TensorInfo, ...], frozenset[str]]:
    """Return the teacher's parameters, and the names of those that equal the model's.

    Three rows of each tensor are compared: what was trained or rescaled differs in nearly all of them.
    """
    with open_language_model(model) as student, open_language_model(teacher) as parent:
        own, theirs = without_latent_norm(student), without_latent_norm(parent)
        teacher_tensors = without_buffers(theirs.tensors.values())
        alike = [tensor for tensor in teacher_tensors if own.tensors.get(tensor.name) == tensor]
        return teacher_tensors, frozenset(tensor.name for tensor in alike if _rows_equal(own, theirs, tensor))


def _read_always_float32_names(model: Path, config: Mapping[str, Any]) -> frozenset[str]:
    """Return `MemoryEstimator.always_float32_names`. They depend on modules of transformers, which need torch."""
    if is_native(config):
        return frozenset()
    from uptrain.models.stored_names import stored_always_float32_names

    return stored_always_float32_names(model)


def _make_measure_kept(
    model: Path, config: Mapping[str, Any], seq_len: int, precision: str, lora_rank: int
) -> "Callable[[str], KeptBytes | InputError] | None":
    """Return `MemoryEstimator.measure_kept`, which measures a part when it is first asked for."""
    if is_native(config):
        return None

    @cache
    def measure_kept(trainable: str) -> "KeptBytes | InputError":
        from uptrain.models.kept_activations import kept_bytes

        try:
            return kept_bytes(model, trainable, seq_len, precision, lora_rank)
        except InputError as error:
            return error

    return measure_kept


def _rows_equal(one: Checkpoint, other: Checkpoint, tensor: TensorInfo) -> bool:
    return list(sampled_rows(one, tensor.name)) == list(sampled_rows(other, tensor.name))


def state_bytes(optimizer: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of an optimizer's states of a parameter.

    Adafactor holds a matrix's second moments as one number per row and column. torchao holds moments in 8 bits, with a
    float32 scale for each block of 256; those of small tensors, or with an incomplete block, in float32.
    """
    n = prod(shape)
    if optimizer == "adamw8bit" and n >= 4096 and n % 256 == 0:
        return 2 * (n + 4 * n // 256)
    if optimizer == "adafactor" and len(shape) > 1:
        return 4 * (prod(shape[:-1]) + prod((*shape[:-2], shape[-1])))
    if optimizer == "adafactor":
        return 4 * n
    return ADAMW_BYTES * n


def layer_activation_bytes(
    sizes: ModelSizes, intermediate_size: int, trainable: str, compute_bytes: int, repeats_kv: bool = False
) -> int:
    """Return the bytes per token that a layer keeps for the backward pass, for attention without a score matrix.

    A layer keeps the float32 inputs of its two norms; queries, keys, values, the attention output, and SwiGLU's gate,
    activation and up in `compute_bytes` bytes. `repeats_kv`: attention keeps keys and values of each query head. A
    trained projection also keeps its input, and a trained norm its float32 result before the weight. Latent attention
    keeps the latent too, and for a trained output projection its input, a copy of the attention output without padding.
    """
    hidden, query = sizes.hidden_size, sizes.n_heads * sizes.head_dim
    kv = query if repeats_kv else sizes.n_kv_heads * sizes.head_dim
    layer = 2 * 4 * hidden + compute_bytes * (2 * query + 2 * kv + 3 * intermediate_size)
    layer += compute_bytes * hidden  # the input of keys and values
    if sizes.latent is not None:
        layer += compute_bytes * sizes.latent[0]
        layer += compute_bytes * sizes.n_heads * sizes.v_head_dim if trainable != "kv" else 0
    if trainable in ("all", "attention"):
        layer += 4 * hidden
    if trainable == "lora":
        layer += compute_bytes * hidden + compute_bytes * intermediate_size
    if trainable == "all":
        layer += 4 * hidden + compute_bytes * hidden + compute_bytes * intermediate_size
    return layer
