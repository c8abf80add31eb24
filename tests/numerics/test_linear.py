"""The faster order of factors is no less exact than the kernel that prefill and training use."""

import pytest
import torch
import torch.nn.functional as F

from model.decoder.linear import linear


def error(y, x, weight):
    """Return the root-mean-square error of y, relative to x · weightᵀ in float64."""
    exact = x.double() @ weight.double().T
    return ((y.double() - exact).square().mean() / exact.square().mean()).sqrt()


@pytest.mark.parametrize("shape", [(1024, 1024), (2752, 1024), (1024, 2752), (96, 32)])
@pytest.mark.parametrize("batch", [2, 3, 8, 32])
@torch.inference_mode()
def test_decoding_is_as_exact_as_many_rows(batch, shape):
    torch.manual_seed(batch)
    weight, x = torch.randn(shape), torch.randn(batch, 1, shape[1])
    many = F.linear(x.repeat(512 // batch, 1, 1), weight)[:batch]
    # Each processor adds up in an order of its own: 1.1 of one kind, 1.9 of another.
    assert error(linear(x, weight), x, weight) <= 2 * error(many, x, weight)


@pytest.mark.parametrize("x_shape", [(1, 1, 32), (4, 1, 32), (2, 3, 32), (64, 1, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_any_shape_gives_what_torch_gives(x_shape, dtype):
    weight, bias, x = (torch.randn(s, dtype=dtype) for s in ((48, 32), (48,), x_shape))
    out = linear(x, weight, bias)
    assert out.is_contiguous()
    torch.testing.assert_close(out, F.linear(x, weight, bias))
