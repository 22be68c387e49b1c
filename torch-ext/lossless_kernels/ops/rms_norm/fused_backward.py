"""The gradients of `F.rms_norm`: from LayerNorm's kernels, from ATen's operator, or from autograd."""

from typing import Callable, Optional

import torch

from ...core import launch
from ...core.domain import gradients_apart
from ...core.layout import rows_in_memory
from .. import layer_norm_backward
from .backward import Gradients
from .formulas import RMSNormFormula


def kernels(
    variant: RMSNormFormula, x, weight, needs_dx: bool, needs_dweight: bool, original: Callable
) -> Optional[layer_norm_backward.Backward]:
    """The kernels of calls like this one, in the forward kernel's domain.

    None on ROCm, whose order of additions is another, and without a proof.

    Args:
        original: the replaced forward, for reports.
    """
    found = None if torch.version.hip else rows_in_memory(x.shape, x.stride())
    if found is None or found[0] > launch.MAX_PROGRAMS:
        return None
    rows, row_stride, _ = found
    call = x, rows, row_stride, x.shape[-1:], _given(variant, weight), (needs_dx, needs_dweight, False)
    return layer_norm_backward.resolve(*call, centred=False, original=original)


def of_kernels(
    kernels: Optional[layer_norm_backward.Backward], variant: RMSNormFormula, dy, x, weight, rstd
) -> Optional[Gradients]:
    """Those of `kernels`; None without them, or if they do not take these tensors. `rstd` as in `of_aten`."""
    weight = _given(variant, weight)
    if kernels is None or not kernels.fits(dy := dy.contiguous(), x, weight):
        return None
    dx, dweight, _ = kernels(dy, x, None, rstd, weight, None)
    return Gradients(dx, None, dweight)


def of_aten(variant: RMSNormFormula, dy, x, weight, rstd, needs_dx: bool, needs_dweight: bool) -> Gradients:
    """Those of ATen's operator, on CUDA.

    Args:
        rstd: fp32, `[..., 1]`, contiguous, with the bits that ATen's forward pass saves.
    """
    needs = needs_dx, needs_dweight, False
    dx, dweight, _ = layer_norm_backward.eager(dy, x, x.shape[-1:], None, rstd, _given(variant, weight), None, needs)
    return Gradients(dx, None, dweight)


def formula(variant: RMSNormFormula, dy, x, weight, eps, needs_dx: bool, needs_dweight: bool) -> Gradients:
    """Those of autograd, whose formulas for double backward differ."""

    def out(*needed):
        given = iter(needed)
        activations = next(given) if needs_dx else x
        return variant.eager(activations, next(given) if needs_dweight else weight, eps)

    needed = [tensor for tensor, need in ((x, needs_dx), (weight, needs_dweight)) if need]
    gradients = iter(gradients_apart(out, needed, dy))
    return Gradients(next(gradients) if needs_dx else None, None, next(gradients) if needs_dweight else None)


def _given(variant: RMSNormFormula, weight) -> Optional[torch.Tensor]:
    """The weight; None for the empty tensor of a norm without one."""
    return None if variant.scale == "none" else weight
