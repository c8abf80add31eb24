"""Fixtures that several tests of uptrain share."""

import pytest
from real_runs import make_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return a small model, its parent, and data. Tests that need others have a fixture of their own."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))
