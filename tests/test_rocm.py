"""What the package does with torch's build for ROCm, on a machine without an AMD GPU.

No kernel has run on one yet: these tests are transcriptions, refusals and compilations.
"""

from types import SimpleNamespace

import pytest
import torch
from places import forget_calls

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own properties and kernels are here")


@pytest.fixture
def rocm(module, monkeypatch):
    """torch as built for ROCm."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    forget_calls(module)
    yield
    forget_calls(module)


@pytest.fixture
def launched(module, monkeypatch):
    """The launchers that were asked to compile or launch."""
    found = []
    through_triton = module("launch").Launcher.through_triton
    monkeypatch.setattr(
        module("launch").Launcher,
        "through_triton",
        lambda self, *arguments: (found.append(self), through_triton(self, *arguments))[1],
    )
    return found


@pytest.mark.parametrize("wave", [64, 32])
def test_a_gpu_has_the_reductions_of_its_wave(module, monkeypatch, rocm, wave):
    plans, config = module("plans"), module("reduce_config")
    properties = SimpleNamespace(
        major=9, warp_size=wave, multi_processor_count=304, max_threads_per_multi_processor=2048
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = plans.gpu.__wrapped__(torch.device("cuda", 0))
    assert found == plans.Gpu(None, 48 << 10, 304, 2048, config.ROCM[wave])
    assert plans.tuned(module("rms_norm_plan").Plan, found, "rms_norm", 4096, 16, 2) is None, "plans are NVIDIA's"
    order = config.row_reduction(16, 16384, found.build)
    assert (order.width, order.height, order.neighbours) == (wave, 512 // wave, wave)


@pytest.mark.parametrize("wave", [64, 32])
def test_a_program_has_as_many_threads_in_wider_waves(module, monkeypatch, wave):
    plans, launch = module("plans"), module("launch")
    build = module("reduce_config").ROCM[wave]
    monkeypatch.setattr(plans, "gpu", lambda device: plans.Gpu(None, 48 << 10, 304, 2048, build))
    kernel = module("kernels_src.activation").activation_forward
    for num_warps in (1, 2, 8):
        bound = launch.bind(kernel, {}, num_warps, torch.device("cpu"), (torch.float32,), 1)
        assert bound._launcher.num_warps == max(num_warps * 32 // wave, 1)


def test_a_known_refusal_is_settled_before_anything_is_compiled(kernel, module, monkeypatch, rocm, launched):
    """Softmax and cross-entropy have CUDA's orders alone. A norm reaches its kernel: the proof decides there."""
    monkeypatch.setenv("LOSSLESS_PROOF", "off")
    x, target = torch.randn(3, 40), torch.tensor([1, 2, 3])
    assert torch.equal(kernel.softmax(x), torch.softmax(x, -1))
    expected = torch.nn.functional.cross_entropy(x, target)
    assert torch.equal(kernel.cross_entropy(x, target), expected)
    assert not launched
    kernel.rms_norm(torch.randn(3, 64), torch.randn(64), 1e-6)
    assert [launcher.kernel.__name__ for launcher in launched] == ["rms_norm_forward"]


def test_triton_launches_every_time(module, rocm):
    """It tells apart compiled kernels for storages below 2 GB and others, which the short path does not."""
    assert not module("core.triton_internals").has_short_path()
