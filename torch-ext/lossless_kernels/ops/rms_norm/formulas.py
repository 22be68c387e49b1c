"""The RMSNorm formulas of transformers' models. One kernel family computes all; a proof finds the formula of a class.

With `h = hidden_states.to(float32)` and `n = h * rsqrt(mean(h**2, -1) + eps)` they differ in the place of the weight
and of the rounding. Fresh weights are all 1 and hide the difference.
"""

from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F

from ...core.domain import FLOAT_DTYPES
from ...core.torch_internals import fused_rms_norm


def eager_rstd(h: torch.Tensor, eps: float) -> torch.Tensor:
    """`rsqrt(mean(h**2, -1) + eps)`, `[..., 1]`."""
    return torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class RMSNormFormula:
    """One way to write RMSNorm.

    Args:
        name: unique; the registered operators take it.
        formula: for reports.
        scale: the place of the weight, the kernels' constant SCALE.
        keeps_fp32: the output is fp32 for activations of any dtype.
        fused: `F.rms_norm` of tensors of one dtype: one ATen kernel with its own reduction order, one for gradients.
        two_edges: the product takes the activations without a cast, so that 16-bit ones get two gradients, as fp32 ones do.
    """

    name: str
    formula: str
    scale: str
    keeps_fp32: bool = False
    fused: bool = False
    two_edges: bool = False

    def eager(self, hidden_states: torch.Tensor, weight: Optional[torch.Tensor], eps: float) -> torch.Tensor:
        """The formula in torch operations, one rounding each."""
        if self.fused:
            return F.rms_norm(hidden_states, hidden_states.shape[-1:], None if self.scale == "none" else weight, eps)
        h = hidden_states.to(torch.float32)
        normalized = (hidden_states if self.two_edges else h) * eager_rstd(h, eps)
        if self.scale == "after_cast":
            return weight * normalized.to(hidden_states.dtype)
        if self.scale != "none":
            normalized = normalized * self.factor(weight)
        return normalized if self.keeps_fp32 else normalized.to(hidden_states.dtype)

    def rstd(self, hidden_states: torch.Tensor, weight: Optional[torch.Tensor], eps: float) -> torch.Tensor:
        """The fp32 statistics in `eager`, `[..., 1]`."""
        if self.fused:
            return self.with_rstd(hidden_states, weight, eps)[1]
        return eager_rstd(hidden_states.to(torch.float32), eps)

    def with_rstd(
        self, hidden_states: torch.Tensor, weight: Optional[torch.Tensor], eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`eager` and `rstd` at once."""
        if self.fused:
            weight = None if self.scale == "none" else weight
            return fused_rms_norm(hidden_states, hidden_states.shape[-1:], weight, eps)
        return self.eager(hidden_states, weight, eps), self.rstd(hidden_states, weight, eps)

    def factor(self, weight: torch.Tensor) -> torch.Tensor:
        """The factor of the normalised fp32 values."""
        return 1.0 + weight.to(torch.float32) if self.scale == "one_plus" else weight

    def output_dtype(self, dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype:
        if self.scale == "after_cast":
            return torch.promote_types(weight_dtype, dtype)
        return torch.float32 if self.keeps_fp32 else dtype

    def has_two_edges(self, dtype: torch.dtype) -> bool:
        """Whether activations of `dtype` get two gradients, of the product and of the mean, each rounded to their dtype."""
        return not self.fused and (self.two_edges or dtype == torch.float32)

    def grad_of_product(self, dy: torch.Tensor) -> torch.Tensor:
        """The gradient of the product with the weight: through a final cast, autograd passes it back in fp32."""
        return dy if self.scale == "after_cast" else dy.to(torch.float32)

    def grad_of_normalized(self, dy: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The fp32 gradient of the normalised values `n`, of activations of `dtype`; dy is that of the product."""
        dy = dy if self.scale == "none" else dy * self.factor(weight)
        return dy.to(dtype).to(torch.float32) if self.scale == "after_cast" else dy


LLAMA = RMSNormFormula("llama", "weight * n.to(dtype)", "after_cast")
T5 = RMSNormFormula("t5", "weight * (x * rsqrt(...)).to(dtype)", "after_cast", two_edges=True)
FP32_PRODUCT = RMSNormFormula("fp32_product", "(weight * n).to(dtype)", "fp32")
ONE_PLUS_WEIGHT = RMSNormFormula("one_plus_weight", "((1 + weight) * n).to(dtype)", "one_plus")
FP32_OUTPUT = RMSNormFormula("fp32_output", "weight.float() * n", "fp32", keeps_fp32=True)
UNWEIGHTED = RMSNormFormula("unweighted", "n.to(dtype)", "none")

FUSED = RMSNormFormula("fused", "F.rms_norm", "fp32", fused=True)
FUSED_UNWEIGHTED = RMSNormFormula("fused_unweighted", "F.rms_norm without weight", "none", fused=True)

WEIGHTED = (LLAMA, T5, FP32_PRODUCT, ONE_PLUS_WEIGHT, FP32_OUTPUT)
BY_NAME = {variant.name: variant for variant in (*WEIGHTED, UNWEIGHTED, FUSED, FUSED_UNWEIGHTED)}


def _eager_layer(variant: RMSNormFormula) -> type:
    class Eager(torch.nn.Module):
        def forward(self, hidden_states):
            return variant.eager(hidden_states, self.weight, self.variance_epsilon)

    Eager.__qualname__ = f"RMSNorm, {variant.formula}"
    return Eager


# Layers that compute a formula in torch operations.
EAGER = {variant: _eager_layer(variant) for variant in BY_NAME.values()}
# The attribute that holds eps, by the name of this package's layer and by layer name.
EPS_NAMES = {"LlamaRMSNorm": "variance_epsilon", "RMSNorm": "variance_epsilon", "RMSNormZeroCentered": "eps"}
EPS_NAME = EPS_NAMES["LlamaRMSNorm"]


MIN_HIDDEN_SIZE = 64
MAX_HIDDEN_SIZE = 32768
# At most 128 lanes share a row of `F.rms_norm`; a longer row's part does not fit into a thread's registers (H200).
MAX_FUSED_HIDDEN_SIZE = 8192


def in_domain(dtype: torch.dtype, weight_dtype: torch.dtype, hidden_size: int) -> bool:
    """Whether there is a kernel for these dtypes and this hidden size."""
    return (
        dtype in FLOAT_DTYPES
        and weight_dtype in FLOAT_DTYPES
        and hidden_size % 4 == 0
        and MIN_HIDDEN_SIZE <= hidden_size <= MAX_HIDDEN_SIZE
    )
