"""What the tests of a GPU share."""

import pytest


@pytest.fixture
def gpu_only(device):
    """Skip without a GPU, where a comparison with the CPU would be one of the CPU with itself."""
    if device.type == "cpu":
        pytest.skip("needs a GPU")
