"""The layers against eager, for `kernels benchmark`: `make build`, then `kernels benchmark .`

One file, since the Hub gets benchmarks/benchmark*.py and nothing else of this folder.
"""

import sys

import torch
from kernels.benchmark import Benchmark
from torch.nn import functional

EPS = 1e-5
_INTEGERS = {2: torch.int16, 4: torch.int32}


class EqualBits:
    """A benchmark whose `verify_*` demand eager's bits: the runner itself accepts what is close.

    Not a `Benchmark` itself, which the runner would run.

    A subclass draws `inputs`, the arguments of a function, activations first; `keep` and `demand` take what `inference` or
    `training` return.
    """

    seed = 42

    def normal(self, rows: int, *sizes: int) -> torch.Tensor:
        # Times of a CPU mean nothing; there a few rows show that everything runs.
        rows = rows if self.device == "cuda" else min(rows, 2)
        return torch.randn(rows, *sizes, device=self.device, dtype=torch.bfloat16)

    def need_gradients(self) -> None:
        self.dy = torch.randn_like(self.inputs[0])
        for tensor in self.inputs:
            tensor.requires_grad_()

    def inference(self, function) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (function(*self.inputs),)

    def training(self, function) -> tuple[torch.Tensor, ...]:
        """The output and the gradients of the inputs."""
        out = function(*self.inputs)
        return out.detach(), *torch.autograd.grad(out, self.inputs, self.dy)

    def keep(self, results: tuple[torch.Tensor, ...]) -> None:
        self.results = results
        self.out = results[0]

    def demand(self, expected: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Returns the expected output. Raises RuntimeError, which ends the run, unless all bits are the same."""
        # The runner times the reference together with this, so what was kept is compared once.
        results, self.results = self.results, ()
        for found, wanted in zip(results, expected):
            if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
                raise RuntimeError(f"{found.shape} {found.dtype} instead of {wanted.shape} {wanted.dtype}")
            integer = _INTEGERS[wanted.itemsize]
            differing = int((found.view(integer) != wanted.view(integer)).sum())
            if differing:
                raise RuntimeError(
                    f"{type(self).__name__}: {differing} of {wanted.numel()} elements differ from eager's"
                )
        return expected[0]


def eager(hidden_states, weight):
    """transformers' LlamaRMSNorm."""
    h = hidden_states.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * h.to(hidden_states.dtype)


class RMSNorm(EqualBits, Benchmark):
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


class SiLU(EqualBits, Benchmark):
    """Forward, and forward with backward, bf16."""

    def setup(self):
        self.inputs = (self.normal(8192, 14336),)

    def setup_training(self):
        self.setup()
        self.need_gradients()

    def benchmark_inference(self):
        self.keep(self.inference(self.kernel.silu))

    def verify_inference(self):
        return self.demand(self.inference(functional.silu))

    def benchmark_training(self):
        self.keep(self.training(self.kernel.silu))

    def verify_training(self):
        return self.demand(self.training(functional.silu))


if __name__ == "__main__":
    sys.exit("benchmark_layers: holds benchmarks and runs none: `make build`, then `kernels benchmark .`")
