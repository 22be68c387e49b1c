"""Eager attention of transformers' models with softmax from the kernels: `register_attention`."""

import inspect
import sys
from collections.abc import Callable

import torch

from .ops.softmax_callers import with_our_softmax

NAME = "lossless_eager"
# What transformers' model files call the function that `attn_implementation="eager"` runs.
_EAGER = "eager_attention_forward"


def register_attention() -> str:
    """Registers the attention function "lossless_eager" with transformers: eager attention, softmax from the kernels.

    `model.set_attn_implementation("lossless_eager")` or `from_pretrained(..., attn_implementation="lossless_eager")` selects
    it. It runs the `eager_attention_forward` of the model's own file, operation by operation, and takes softmax alone from the
    kernels of `kernel.softmax`, where they are verified: outputs, gradients and random numbers of dropout are eager's. Masks are
    those of "eager". The memory is eager's too.

    Returns:
        The name, "lossless_eager".

    Raises:
        ImportError: transformers is not installed, or too old to register attention functions.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, lossless_eager)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME


def lossless_eager(module: torch.nn.Module, *arguments, **named) -> tuple:
    """The attention function: `eager_attention_forward(module, ...)` of the file that has the module's forward.

    Under torch.compile it is traced with its own softmax.
    """
    return with_our_softmax(_eager_of(type(module)))(module, *arguments, **named)


def _eager_of(owner: type) -> Callable:
    forward = inspect.unwrap(owner.forward)
    for namespace in (getattr(forward, "__globals__", {}), vars(sys.modules[owner.__module__])):
        if _EAGER in namespace:
            return namespace[_EAGER]
    raise ValueError(
        f"attn_implementation: expected {_EAGER} in the file of {owner.__qualname__}, which {NAME!r} runs, found none: "
        'use another implementation, such as "sdpa"'
    )
