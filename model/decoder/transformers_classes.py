"""Build the classes of transformers from a checkpoint's config, without running code of the checkpoint.

Bad configs and weights raise a CheckpointError of one line, in place of transformers' own errors and warnings.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.common import checks
from model.common.errors import CheckpointError, InputError, RunError, is_device_error, is_out_of_memory, prefix_path
from model.decoder.config import MAX_LAYERS
from model.families import FAMILIES, Family
from model.families.family import get_key
from model.files.read import refuse_bom
from model.geometry import check_class_settings
from model.language_model import read_language_config, wrapper_of

_OLDEST_VERSION, _TESTED_VERSION = "transformers 5.23", "transformers 5.24"
"""The oldest version of transformers that the project runs with, and the one that the tests use."""


def build_hf_model(folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Return transformers' model of a folder's config.json, without the folder's weights.

    Raises CheckpointError if transformers has no such model, or cannot build it.
    """
    from transformers import AutoModelForCausalLM

    config = read_hf_config(folder)
    with refusing(f"transformers can build no model from {folder}/config.json"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype)  # type: ignore[no-untyped-call]
    return model


def build_observable_model(model_type: str, config: Mapping[str, Any], source: str) -> Any:
    """Return transformers' model of a language model's config, float32, with parameters on the meta device.

    `observe_attention` can observe its attention, which calibrating needs. `source` names the config in errors.
    Raises CheckpointError if transformers has no such model, cannot build it, or the class does not take an attention
    function.
    """
    from accelerate import init_empty_weights
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from model.decoder.observed_attention import OBSERVED, attention_function
    from model.remote_code.register import register

    register()
    _refuse_kernels(Path(source), config)
    _check_layers(Path(source), config)
    _check_loading()
    try:
        with refusing(f"transformers can build no model from the config of {source}"):
            hf_config = CONFIG_MAPPING[model_type].from_dict(deepcopy(dict(config)))  # it edits what is inside
            auto_class = AutoModelForSeq2SeqLM if hf_config.is_encoder_decoder else AutoModelForCausalLM
            with init_empty_weights(include_buffers=False):
                model = auto_class.from_config(  # type: ignore[no-untyped-call]
                    hf_config,
                    trust_remote_code=False,
                    dtype=torch.float32,
                    attn_implementation=attention_function(model_type),
                )
    except CheckpointError as error:
        if OBSERVED in str(error):
            raise no_attention_function(model_type) from error
        raise
    return model.eval()


def cache_argument(hf_model: nn.Module) -> str:
    """Return the name of the KV cache among a model's arguments, which transformers 5.24 changed."""
    return "cache" if "cache" in inspect.signature(hf_model.forward).parameters else "past_key_values"


def no_attention_function(model_type: str) -> CheckpointError:
    """Return the error for a class that does not call the attention function of its config."""
    return CheckpointError(
        f"transformers {version('transformers')} has a class for model_type {model_type!r} that takes no attention "
        f"function, which calibrating needs; install {_OLDEST_VERSION} or newer."
    )


def _refuse_version_4() -> None:
    """Raise CheckpointError for transformers 4: it ignores the base of RoPE as version 5 spells it, and uses 10,000."""
    if int(version("transformers").partition(".")[0]) < 5:
        raise CheckpointError(
            f"transformers {version('transformers')} does not read all settings that version 5 writes to config.json, "
            f"so it may compute another model; install {_OLDEST_VERSION} or newer."
        )


def _check_loading() -> None:
    """Raise CheckpointError for a version that loads weights by other arguments."""
    _refuse_version_4()
    from transformers.core_model_loading import convert_and_load_state_dict_in_model

    if "load_config" not in inspect.signature(convert_and_load_state_dict_in_model).parameters:
        raise CheckpointError(
            f"transformers {version('transformers')} loads weights in a way that calibrating does not know; install "
            f"{_TESTED_VERSION}."
        )


def load_state(
    model: Any,
    state: dict[str, Tensor],
    prefix: str,
    source: str,
    dtype: torch.dtype = torch.float32,
    name_in_files: Callable[[str], str] = str,
) -> None:
    """Load tensors, by their names in a checkpoint, into the parameters of an empty model that begin with `prefix`.

    Applies the conversions of transformers 5, which joins the experts of a layer, for example. Raises CheckpointError
    if a tensor is missing, left over or of the wrong shape, under its `name_in_files`. A lack of memory passes.
    """
    with refusing(f"transformers cannot load the weights of {source}", running=True):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        mapping: Any = get_model_conversion_mapping(model)
        how = LoadStateDictConfig(weight_mapping=mapping, dtype=dtype)
        loading, _ = convert_and_load_state_dict_in_model(model, state, how)
        for report in loading.conversion_errors.values():  # transformers caught an error, and continued
            lacks_memory = any(name in report for name in ("MemoryError", "can't allocate memory"))
            raise (MemoryError if lacks_memory else RuntimeError)(" ".join(report.splitlines()[-2:]))
    missing = [name for name, parameter in model.named_parameters() if name.startswith(prefix) and parameter.is_meta]
    for problem, names in (
        ("holds a tensor unknown to its config.json:", loading.unexpected_keys),
        ("has another shape than config.json implies in", loading.mismatched_keys),
        ("lacks the tensor", missing),
    ):
        if names:  # those with another shape come with both shapes
            first = min(name if isinstance(name, str) else name[0] for name in names)
            raise CheckpointError(f"{source} {problem} {name_in_files(first)}.")


def names_in_files(model: nn.Module) -> set[str]:
    """Return the names that transformers gives a model's parameters in files, where they may differ from those here."""
    from transformers.core_model_loading import revert_weight_conversion

    return set(revert_weight_conversion(model, dict(model.named_parameters())))  # type: ignore[arg-type]


def read_hf_config(folder: Path) -> Any:
    """Return transformers' config of a folder, without dropout.

    Of a wrapper, it is the config of the language model inside. Code in the folder is not run: the code that is copied
    into converted models is registered from `model.remote_code`.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from model.remote_code.register import register

    _refuse_version_4()
    register()
    values = read_language_config(folder)
    refuse_bom(folder / "config.json")
    _refuse_kernels(folder, values)
    _check_layers(folder, values)
    family = FAMILIES.get(str(values.get("model_type")))
    if isinstance(family, Family):
        switch = family.switch if family.own_code_key is not None else None
        if switch is not None and get_key(values, switch.key) == switch.merged:
            raise CheckpointError(
                f"{folder}: transformers' class of {family.model_type!r} cannot open merged heads, so they cannot be "
                "trained or evaluated here; open the model with the code beside it: trust_remote_code=True."
            )
        with prefix_path(folder):
            check_class_settings(values, family, lm_head=True)
    with refusing(f"transformers can build no model from {folder}/config.json"):
        if wrapper_of(values) is None:
            config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        else:
            config = CONFIG_MAPPING[str(values["model_type"])].from_dict(deepcopy(values))  # it edits what is inside
        # What the file names may not be installed, and may not take the masks of packed documents.
        config._attn_implementation = None
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{folder}: model_type {config.model_type!r} is an encoder-decoder, and only causal language models can be "
            "trained and evaluated here; open it with transformers' AutoModelForSeq2SeqLM."
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CheckpointError(
            f"{folder}: transformers has no causal language model of model_type {config.model_type!r}; open it with "
            "the class that config.json names under architectures."
        )
    return config


def _refuse_kernels(folder: Path, config: Any) -> None:
    """Raise CheckpointError if config.json names a kernel of the hub, such as `attn_implementation: org/kernel`.

    transformers would download and run it (`PreTrainedModel._check_and_adjust_attn_implementation`).
    """
    pairs = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in pairs:
        if str(key).endswith(("_implementation", "_implementation_internal")) and "/" in str(value):
            raise CheckpointError(
                f"{folder}/config.json has {key} = {value!r}, code from the hub, which is never run; remove that key."
            )
        _refuse_kernels(folder, value)


def _check_layers(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a number of layers that transformers would need hours to build."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_layers(folder, value)
        elif key.endswith(("layer", "layers")) and isinstance(value, int) and value > MAX_LAYERS:
            raise CheckpointError(
                f"{folder}/config.json has {key} = {checks.short_repr(value)}; it must be at most {MAX_LAYERS}."
            )


@contextmanager
def refusing(problem: str, running: bool = False) -> Iterator[None]:
    """Turn transformers' errors into a CheckpointError of one line, which begins with `problem`.

    Many classes of errors are caught, because a value of a wrong type or size can raise any of them inside
    transformers. The only inputs are config.json and the weights. While a model is `running`, a lack of memory and an
    error of the disk are not the checkpoint's fault, and pass; nor is a failure of the device, a RunError.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        with _without_warnings():
            yield
    except InputError:  # our own
        raise
    except (
        StrictDataclassError, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
        MemoryError, OSError, RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        if running and (is_out_of_memory(error) or (isinstance(error, OSError) and error.errno is not None)):
            raise
        message = " ".join(f"{type(error).__name__}: {error}".split())
        if running and is_device_error(error):
            raise RunError(f"the device failed ({message[:400]})") from error
        raise CheckpointError(f"{problem}: {message[:400]}") from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the warnings of transformers and torch, and progress bars; `refusing` reports errors."""
    from transformers.utils import logging as hf_logging

    verbosity, had_bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
