"""What the scripts for `kernels benchmark` share."""

import torch
from kernels.benchmark import Benchmark

_INTEGERS = {2: torch.int16, 4: torch.int32}


class EqualBitsBenchmark(Benchmark):
    """A benchmark whose `verify_*` demand eager's bits: the runner itself accepts what is close.

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
