"""The gradients of `F.rms_norm`: from LayerNorm's kernels, from ATen's operator, or from autograd."""

from typing import Optional

import torch

from ...core.calls import UNSEEN, remember
from ...core.domain import are_as_saved, gradients_apart, layouts_of
from .. import layer_norm_backward
from .backward import Gradients
from .formulas import RMSNormFormula


class Kernels:
    """The kernels of calls of the same layouts in the forward kernel's domain.

    Args:
        x, weight: of the first.
        rows, row_stride: of x.

    Attributes:
        known: what `find` has found, by the gradients that are needed.
    """

    def __init__(self, variant: RMSNormFormula, x, weight, rows: int, row_stride: int):
        self._variant, self._rows, self._layouts = variant, (rows, row_stride), layouts_of(x, _given(variant, weight))
        self.known: dict[tuple[bool, bool], Optional[layer_norm_backward.Backward]] = {}

    def find(self, x, weight, needs_dx: bool, needs_dweight: bool) -> Optional[layer_norm_backward.Backward]:
        """Those of these gradients; None on ROCm, whose order of additions is another, and without a proof.

        A new call asks for them before its forward pass: in the backward pass less memory is free for a proof, and a model may
        have another dtype by then.
        """
        needs, weight = (needs_dx, needs_dweight), _given(self._variant, weight)
        found = self.known.get(needs, UNSEEN)
        if found is UNSEEN:
            if torch.version.hip is not None or not are_as_saved(self._layouts, x, weight):
                return None
            found = layer_norm_backward.resolve(x, *self._rows, x.shape[-1:], weight, (*needs, False), centred=False)
            remember(self.known, needs, found)
        return found

    def gradients(self, dy, x, weight, rstd, needs_dx: bool, needs_dweight: bool) -> Optional[Gradients]:
        """None if no kernel takes these tensors. The arguments are those of `of_aten`."""
        kernels, weight = self.find(x, weight, needs_dx, needs_dweight), _given(self._variant, weight)
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
