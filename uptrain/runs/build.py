"""Build what a run trains: the models on their devices, the optimizer and the data."""

from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from model.decoder.loading import LanguageModel
from model.files.names import METRICS
from uptrain.checkpoints.store import CheckpointStore
from uptrain.data.checks import check_caches
from uptrain.data.teacher_logits import TeacherLogits
from uptrain.data.token_cache import TokenCache
from uptrain.distributed.collectives import on_main
from uptrain.distributed.fsdp import broadcast_weights, is_sharded, load_on_main, place_teacher
from uptrain.distributed.signals import stop_request
from uptrain.models.casting_layers import set_state_dtype, use_float32_states
from uptrain.models.checks import check_exportable, check_packing
from uptrain.models.decoder_layers import compile_layers, decoder_layers, recompute_activations
from uptrain.models.load import (
    load_student,
    load_teacher,
    random_student,
    teacher_dtype,
    uninitialized_student,
    uninitialized_teacher,
)
from uptrain.models.lora import initialise_adapters
from uptrain.models.teacher_sharing import ParameterOwners, equal_tensors, owner_layers, share, shareable
from uptrain.models.vocabularies import check_same_vocab_size
from uptrain.runs.checks import check_teacher_logits
from uptrain.runs.progress import ProgressSink
from uptrain.runs.settings import Settings
from uptrain.training.loop import NO_STEP, Training
from uptrain.training.loss_module import STUDENT, LossModule
from uptrain.training.metrics_log import Metrics
from uptrain.training.optimizer import make_optimizer


@dataclass(frozen=True)
class RunContext:
    """Where a run trains, where it saves and logs, and how long."""

    accelerator: Accelerator
    folder: Path
    """The run's folder. It need not exist yet."""
    checkpoints: CheckpointStore
    deadline: float
    """`time.monotonic()` at which to stop."""
    show: ProgressSink
    """Called with each record of the loop."""


def build_initial(settings: Settings, config_folder: Path, context: RunContext, saved_step: int = NO_STEP) -> Training:
    """Build a Training with the initial weights of a run; arguments as of `build`."""
    accelerator, trainable = context.accelerator, settings.trainable
    source = config_folder if trainable == "all" else Path(settings.model)
    student, weights = load_on_main(
        accelerator,
        lambda: initial_student(settings, config_folder),
        lambda: uninitialized_student(source, trainable, settings.lora_rank),
    )
    training = build(settings, student, context, saved_step)
    broadcast_weights(accelerator, training.loss_module, {STUDENT + name: tensor for name, tensor in weights.items()})
    return training


def build(settings: Settings, student: LanguageModel, context: RunContext, saved_step: int = NO_STEP) -> Training:
    """Open data and teacher, and place the models on all processes. Writes nothing into the run's folder.

    `saved_step`: the step of the checkpoint whose tensors the caller then loads, NO_STEP if there is none.

    Raises InputError if data, student and teacher are incompatible.
    """
    accelerator = context.accelerator
    cache = TokenCache.open(Path(settings.data))
    eval_cache = TokenCache.open(Path(settings.eval_data)) if settings.eval_data else None
    caches = [opened for opened in (cache, eval_cache) if opened]
    vocab_size = student.lm_head_weight.shape[0]
    on_main(accelerator, lambda: check_caches(caches, vocab_size))
    for opened in caches:
        check_packing(student, opened.seq_len)
    logits = TeacherLogits.open(Path(settings.teacher_logits), cache) if settings.teacher_logits else None
    if logits is not None:
        check_teacher_logits(logits, vocab_size)
    if is_sharded(accelerator) and settings.precision == "bf16":
        # There is no autocast then. FSDP2 rounds what enters a layer, after the dtype has chosen how to attend.
        set_state_dtype(student, torch.bfloat16)
    layers = decoder_layers(student)
    if settings.compile:
        compile_layers(layers)
    if settings.activation_checkpointing:
        recompute_activations(layers)
    teacher, shared_bytes = None, 0
    if settings.teacher:
        teacher, shared_bytes = _build_teacher(settings, student, accelerator)
        for opened in caches:
            check_packing(teacher, opened.seq_len)
    loss_module = LossModule(student, settings.loss, teacher)
    optimizer = make_optimizer(settings.optimizer, loss_module, settings.weight_decay)
    loss_module, optimizer = accelerator.prepare(loss_module, optimizer)
    return Training(
        loss_module=loss_module,
        optimizer=optimizer.optimizer,
        accelerator=accelerator,
        cache=cache,
        schedule=settings.lr_schedule,
        checkpoints=context.checkpoints,
        metrics=Metrics(context.folder / METRICS),
        stop_request=stop_request,
        deadline=context.deadline,
        show=context.show,
        global_batch=settings.global_batch,
        micro_batch=settings.micro_batch,
        seed=settings.seed,
        save_every=settings.save_every,
        eval_cache=eval_cache,
        eval_every=settings.eval_every,
        spike_sigma=settings.spike_sigma,
        logits=logits,
        shared_bytes=shared_bytes,
        saved_step=saved_step,
        rotation_is_due=saved_step != NO_STEP,
    )


def _build_teacher(
    settings: Settings, student: LanguageModel, accelerator: Accelerator
) -> tuple[LanguageModel, int]:  # fmt: skip
    """Load and place the teacher; return it, and the bytes that it shares with the student (whole, not a shard's)."""
    path, dtype = Path(settings.teacher), teacher_dtype(settings.precision)
    owners: ParameterOwners = {}
    if settings.trainable != "all":
        names = on_main(accelerator, lambda: equal_tensors(Path(settings.model), settings.trainable, path))
        owners = shareable(student, names, dtype)
    teacher, weights = load_on_main(
        accelerator,
        lambda: load_teacher(path, settings.precision, float32_states=False, skip=owners),
        lambda: uninitialized_teacher(path, settings.precision),
    )
    check_same_vocab_size(student.lm_head_weight.shape[0], teacher.lm_head_weight.shape[0], settings.teacher)
    shared_bytes = share(owners, teacher, dtype)
    layers = decoder_layers(student)
    place_teacher(accelerator, teacher, decoder_layers(teacher), lambda layer: owner_layers(layer, layers))
    own = teacher.state_dict().keys()
    broadcast_weights(accelerator, teacher, {name: tensor for name, tensor in weights.items() if name in own})
    # After `share`, which sets the dtype of states. Shards need all parameters in one dtype.
    if settings.precision == "bf16" and not is_sharded(accelerator):
        use_float32_states(teacher)
    return teacher, shared_bytes


def initial_student(settings: Settings, config_folder: Path) -> LanguageModel:
    """Return the student with its initial weights."""
    if not settings.model:
        return random_student(config_folder, settings.seed)
    model = Path(settings.model)
    check_exportable(model, settings.trainable)
    student = load_student(model, settings.trainable, settings.lora_rank)
    initialise_adapters(student, settings.seed)
    return student
