"""The product of a gated MLP in the backward pass: computed again instead of kept.

Eager keeps four tensors of `[tokens, intermediate_size]` for each MLP: gate, its activation, up, and the product. The layers of
this package keep gate, up and the product. Of these the backward pass needs the product for the weight's gradient of the last
projection alone, and gate and up give it again, by the same kernel and with the same bits.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..core.domain import PLAIN_TYPES, is_checkpointed
from ..core.torch_internals import saved_tensor_hooks_enabled
from . import attention

# In the `__dict__` of an MLP.
_MARK = "_recomputes_product"


def mark(module: nn.Module, recompute: bool) -> None:
    """Turns the recomputation of this MLP's product on or off."""
    if recompute:
        vars(module)[_MARK] = True
    else:
        vars(module).pop(_MARK, None)


def is_marked(module: nn.Module) -> bool:
    return _MARK in module.__dict__


class _Kept:
    """A tensor that autograd keeps, with its version: saved-tensor hooks omit autograd's check for later writes."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor):
        # A result that its own operation saves would keep the graph alive.
        self.tensor = tensor.detach()
        self.version = tensor._version

    def get(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version}"
            )
        return self.tensor


def _identity(tensor) -> tuple:
    """The same for the product and for its views, while the product lives."""
    return tensor.device, tensor.dtype, tensor.untyped_storage().data_ptr(), tensor._version


def project(down_proj: nn.Module, product: torch.Tensor, gate, up, compute: Callable) -> torch.Tensor:
    """`down_proj(product)`; autograd keeps gate and up in place of the product.

    Args:
        product: `compute(gate, up)`.

    Where other saved-tensor hooks are active, such as a checkpoint's, or none are allowed, autograd keeps the product.
    """
    empty_or_constant = product.numel() == 0 or not product.requires_grad
    if empty_or_constant or is_checkpointed() or not saved_tensor_hooks_enabled():
        return attention.project(down_proj, product)
    # down_proj may write to the product: then it saves other values, of another version.
    identity, sources = _identity(product), (_Kept(gate), _Kept(up))

    def pack(tensor):
        if type(tensor) not in PLAIN_TYPES or _identity(tensor) != identity:
            return _Kept(tensor)
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(kept):
        if isinstance(kept, _Kept):
            return kept.get()
        with torch.no_grad():
            return compute(*(source.get() for source in sources)).as_strided(*kept)

    with saved_tensors_hooks(pack, unpack):
        return attention.project(down_proj, product)
