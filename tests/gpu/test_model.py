"""Our Llama code on a GPU against itself on the CPU: `scripts/test --gpu tests/gpu`."""

import copy

import pytest
import tiny
import torch

from model import generate, load_model
from model.decoder.attention import has_packed_attention, torch_has_packed_attention
from model.decoder.losses import ChunkLogits, chunked_cross_entropy
from scripts.bench.loss import chunked_kl

pytestmark = pytest.mark.usefixtures("gpu_only")

VOCAB = 67


def random(*shape, seed=0):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["llama", "mistral"])
def folder(request, tmp_path):
    changes = {"mistral": {"sliding_window": 7}}.get(request.param, {})
    theirs = tiny.build(request.param, hidden_size=64, num_key_value_heads=2, vocab_size=VOCAB, **changes)
    for parameter in theirs.parameters():  # larger than at initialisation, so that attention is not flat
        if parameter.ndim == 2:
            parameter.data *= 4
    return tiny.save(theirs, tmp_path / "model")


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_logits(folder, device, dtype, allowed):
    ids = random(2, 20)
    expected = load_model(folder, torch.float32)(ids)
    logits = load_model(folder, dtype, str(device))(ids.to(device)).cpu()
    assert (logits - expected).norm() <= allowed * expected.norm()


def test_greedy_texts_of_unequal_length(folder, device):
    prompts = [random(n, seed=n).tolist() for n in (9, 4)]
    on_cpu, on_device = (generate(load_model(folder, torch.float32, str(d)), prompts, 12) for d in ("cpu", device))
    assert on_device == on_cpu


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_loss_and_gradients_of_packed_documents(folder, device, precision, allowed):
    """With float32 masters, as in training. In bfloat16 on a GPU this is the kernel for packed texts."""
    ids, documents = random(3, 24), torch.tensor([[0] * 7 + [1] * 17, [0] * 24, [0] * 23 + [1]])
    on_cpu = load_model(folder, torch.float32)
    on_device = copy.deepcopy(on_cpu).to(device)
    expected, _ = on_cpu(ids, ids, documents)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        packed = has_packed_attention(on_device.lm_head_weight, on_device.config.head_dim)
        assert packed == (device.type == "cuda" and precision == "bf16" and torch_has_packed_attention())
        loss, _ = on_device(*(x.to(device) for x in (ids, ids, documents)))
    expected.backward()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=allowed)
    for (name, ours), theirs in zip(on_device.named_parameters(), on_cpu.parameters(), strict=True):
        assert (ours.grad.cpu() - theirs.grad).norm() <= allowed * theirs.grad.norm(), name


def test_logits_of_half_precision_are_not_rounded(device):
    """Two models that are nearly the same differ by less than the spacing of large logits in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator).bfloat16().to(device) for shape in ((40, 64), (VOCAB, 64))
    )
    logits = ChunkLogits(hidden, weight, 16)
    assert logits._widens
    for start in range(0, 40, 16):
        chunk = slice(start, start + 16)
        exact = hidden[chunk].double() @ weight.double().T
        assert exact.abs().max() > 16
        assert (logits.of(chunk) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_chunked_losses(device, precision):
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 64), (VOCAB, 64), (40, 96), (VOCAB, 96))
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    exact = [x * x.shape[1] ** -0.5 if len(x) == VOCAB else x for x in exact]
    labels = random(40)
    hidden, weight, teacher, teacher_weight = (x.float().to(device) for x in exact)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        cross_entropy, _ = chunked_cross_entropy(hidden, weight, labels.to(device))
        kl = chunked_kl(hidden, weight, teacher, teacher_weight, torch.ones(40, dtype=torch.bool, device=device))
    p, q = ((x @ w.T).log_softmax(1) for x, w in (exact[:2], exact[2:]))
    allowed = 1e-5 if precision == "fp32" else 0.02
    assert cross_entropy.item() == pytest.approx(-p.gather(1, labels[:, None]).sum().item(), rel=allowed)
    assert kl.item() == pytest.approx((q.exp() * (q - p)).sum().item(), rel=allowed)
