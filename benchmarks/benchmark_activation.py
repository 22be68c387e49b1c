"""SiLU against eager, for `kernels benchmark`: `make build`, then `kernels benchmark .`"""

import sys
from pathlib import Path

from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent))

from equal_bits import EqualBitsBenchmark


class SiLU(EqualBitsBenchmark):
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
