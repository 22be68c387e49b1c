"""What kernel-builder runs as `nix run .#ci-test`: one call and one gradient of each op, equal to eager's bits.

That environment has torch, kernels and pytest alone, and names the build in LOCAL_KERNELS. Without the variable the build
of `make build` is taken. On a GPU these are the kernels; on a CPU the original operations run.
"""

import os
from pathlib import Path

import kernels
import pytest
import torch
import torch.nn.functional as F
from bits import assert_bits_equal

REPO_ID = "lossless-kernels/lossless-kernels"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

pytestmark = [pytest.mark.kernels_ci, pytest.mark.either]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(scope="module")
def kernel():
    with pytest.MonkeyPatch.context() as patch:
        if REPO_ID not in os.environ.get("LOCAL_KERNELS", ""):
            patch.setenv("LOCAL_KERNELS", f"{REPO_ID}={Path(__file__).parent.parent / 'build'}")
        return kernels.get_kernel(REPO_ID, version=1)


def eager_norm(x, weight):
    h = x.to(torch.float32)
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def eager_add_norm(x, residual, weight):
    total = residual + x
    return eager_norm(total, weight), total


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


# Name -> the kernel's function, eager's, the shapes of the arguments that have gradients.
OPS = {
    "rms_norm": (lambda kernel, x, w: kernel.rms_norm(x, w, 1e-6), eager_norm, ((7, 256), (256,))),
    "silu": (lambda kernel, x: kernel.silu(x), F.silu, ((7, 256),)),
    "gelu": (lambda kernel, x: kernel.gelu(x), F.gelu, ((7, 256),)),
    "silu_and_mul": (
        lambda kernel, gate, up: kernel.silu_and_mul(gate, up),
        lambda gate, up: F.silu(gate) * up,
        ((7, 256), (7, 256)),
    ),
    "softmax": (lambda kernel, x: kernel.softmax(x), lambda x: F.softmax(x, dim=-1), ((7, 256),)),
    "fused_add_rms_norm": (
        lambda kernel, x, residual, w: kernel.fused_add_rms_norm(x, residual, w, 1e-6),
        eager_add_norm,
        ((7, 256), (7, 256), (256,)),
    ),
}


def inputs_of(shapes, dtype):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def assert_same(ours, eagers, arguments, name):
    ours, eagers = ([out] if isinstance(out, torch.Tensor) else [*out] for out in (ours, eagers))
    assert len(ours) == len(eagers)
    for mine, theirs in zip(ours, eagers):
        assert_bits_equal(mine, theirs, name)
    gradients = [
        torch.autograd.grad(outs, arguments, [torch.ones_like(out) for out in outs]) for outs in (ours, eagers)
    ]
    for mine, theirs in zip(*gradients):
        assert_bits_equal(mine, theirs, f"{name}, gradient")


@each_dtype
@pytest.mark.parametrize("name", OPS)
def test_an_op_and_its_gradients(kernel, name, dtype):
    function, eager, shapes = OPS[name]
    arguments = inputs_of(shapes, dtype)
    assert_same(function(kernel, *arguments), eager(*arguments), arguments, name)


@each_dtype
def test_the_rotation(kernel, dtype):
    q, k, cos, sin = inputs_of(((2, 4, 9, 64), (2, 2, 9, 64), (2, 9, 64), (2, 9, 64)), dtype)
    cos, sin = cos.detach(), sin.detach()
    eager = (rotate(q, cos, sin), rotate(k, cos, sin))
    assert_same(kernel.apply_rotary_pos_emb(q, k, cos, sin), eager, [q, k], "rotation")


@each_dtype
def test_the_cross_entropy(kernel, dtype):
    (logits,) = inputs_of(((7, 1000),), dtype)
    target = torch.arange(7, device=DEVICE) * 100
    target[3] = -100
    expected = F.cross_entropy(logits.float(), target)
    assert_same(kernel.cross_entropy(logits, target), expected, [logits], "cross-entropy")


class Norm(torch.nn.Module):
    """As transformers writes Llama's norm."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, generator=torch.Generator().manual_seed(2)))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def test_kernelize_replaces_a_layer(kernel):
    kernels.replace_kernel_forward_from_hub(Norm, "RMSNorm")
    model = torch.nn.Sequential(Norm()).to(DEVICE)
    (x,) = inputs_of(((7, 256),), torch.float32)
    expected = model(x)
    mapping = kernel.kernel_mapping(devices=(DEVICE,))
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        model = kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    assert model[0].forward.__func__ is kernel.layers.LlamaRMSNorm.forward
    assert_same(model(x), expected, [x, model[0].weight], "kernelized norm")
