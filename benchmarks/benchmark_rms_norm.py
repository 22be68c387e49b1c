"""RMSNorm against eager, for `kernels benchmark`: `make build`, then `kernels benchmark .`"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from equal_bits import EqualBitsBenchmark

EPS = 1e-5


def eager(hidden_states, weight):
    """transformers' LlamaRMSNorm."""
    h = hidden_states.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * h.to(hidden_states.dtype)


class RMSNorm(EqualBitsBenchmark):
    """Forward, and forward with backward, bf16."""

    def draw(self, *shape):
        weight = torch.rand(shape[-1], device=self.device, dtype=torch.bfloat16) + 0.5
        self.inputs = (self.normal(*shape), weight)

    def ours(self, hidden_states, weight):
        return self.kernel.rms_norm(hidden_states, weight, EPS)

    def setup_decode(self):
        self.draw(1, 4096)

    def benchmark_decode(self):
        self.keep(self.inference(self.ours))

    def verify_decode(self):
        return self.demand(self.inference(eager))

    def setup_prefill(self):
        self.draw(8192, 4096)

    def benchmark_prefill(self):
        self.keep(self.inference(self.ours))

    def verify_prefill(self):
        return self.demand(self.inference(eager))

    def setup_long_rows(self):
        self.draw(16384, 8192)

    def benchmark_long_rows(self):
        self.keep(self.inference(self.ours))

    def verify_long_rows(self):
        return self.demand(self.inference(eager))

    def setup_heads(self):
        self.draw(4096, 32, 128)

    def benchmark_heads(self):
        self.keep(self.inference(self.ours))

    def verify_heads(self):
        return self.demand(self.inference(eager))

    def setup_training(self):
        self.draw(8192, 4096)
        self.need_gradients()

    def benchmark_training(self):
        self.keep(self.training(self.ours))

    def verify_training(self):
        return self.demand(self.training(eager))
