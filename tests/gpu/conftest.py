"""The device that is tested: a GPU with `--gpu`, else the CPU."""

import pytest
import torch

from uptrain.parallel import has_accelerator


@pytest.fixture(scope="session")
def device():
    return torch.accelerator.current_accelerator() if has_accelerator() else torch.device("cpu")
