"""A checkpoint of latent attention without its norm is the same files as the checkpoint itself."""

import os

import latent

from model.checkpoint import open_checkpoint
from model.checkpoint.latent_norm import WithoutLatentNorm, without_latent_norm


def test_a_file_that_has_changed_since_it_was_opened_is_noticed(convert, tmp_path):
    source = latent.make_source(tmp_path / "source", rms_norm_eps=1e-5)
    convert("mha-to-mla", source, tmp_path / "out", "--latent", 12, "--rope", 8, "--calibration", "none").succeeded()
    with open_checkpoint(tmp_path / "out") as stored:
        wrapped = without_latent_norm(stored)
        assert isinstance(wrapped, WithoutLatentNorm)
        assert wrapped.is_unchanged()
        file = wrapped.weight_files[0]
        opened = wrapped.version(file)
        os.utime(file, ns=(0, 0))
        assert not wrapped.is_unchanged()
        assert wrapped.version(file) == opened == stored.version(file)
