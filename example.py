# /// script
# requires-python = ">=3.10"
# dependencies = ["kernels", "numpy", "torch"]
# ///
"""Load the build and compare RMSNorm with eager, bit for bit. `python scripts/build_kernel.py` makes the build."""

from pathlib import Path

import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(__file__).parent / "build")
device = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the original arithmetic runs
x = torch.randn(17, 1024, device=device)
weight = torch.rand(1024, device=device)

y = kernel.rms_norm(x, weight, 1e-6)
expected = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
assert torch.equal(y.view(torch.int32), expected.view(torch.int32)), "the bits differ from eager's"
print(f"{device}: RMSNorm of {tuple(x.shape)} has eager's bits")
