"""Benchmarks of the layers beside eager, for the command `kernels benchmark`: `make build`, then `kernels benchmark .`

One file without imports from this folder, because only benchmarks/benchmark*.py are published to the Hub.
"""

import sys

import torch
from kernels.benchmark import Benchmark
from torch.nn import functional

EPS = 1e-5
_INTEGERS = {2: torch.int16, 4: torch.int32}


class EqualBits:
    """Base class: its `verify_*` methods compare with eager bit by bit; the runner alone compares with a tolerance.

    It does not derive from `Benchmark`, because the runner would then run it. A subclass sets `inputs`, the arguments of
    the measured function, activations first. `keep` and `demand` take the results of `inference` or `training`.
    """

    seed = 42

    def normal(self, rows: int, *sizes: int) -> torch.Tensor:
        # On a CPU, which only shows that everything runs, two rows are enough.
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
        """Returns the expected output.

        Raises:
            RuntimeError: a bit differs. It ends the run.
        """
        # The runner also times this method as the reference, so the kept results are compared only once.
        results, self.results = self.results, ()
        for found, wanted in zip(results, expected):
            if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
                raise RuntimeError(
                    f"{type(self).__name__}: expected {wanted.dtype} {list(wanted.shape)}, found {found.dtype} "
                    f"{list(found.shape)}"
                )
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
    sys.exit("benchmark_layers: error: not a program; run `make build`, then `kernels benchmark .`")
