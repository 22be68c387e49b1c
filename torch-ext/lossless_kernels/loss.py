"""The loss of transformers' causal language models, from the kernels: `attach_loss`."""

import functools
from collections.abc import Iterator
from typing import Callable

import torch

from .core import proof
from .mapping import check_model
from .ops.cross_entropy import causal_lm_loss, eager_causal_lm_loss

_ORIGINAL = ("transformers.loss.loss_utils", "ForCausalLMLoss")


def attach_loss(model: torch.nn.Module) -> list[str]:
    """Makes `causal_lm_loss` the loss function of every causal language model in `model`.

    Sets `loss_function`, the property of transformers' models, where its value is `ForCausalLMLoss` and where both functions
    return the same loss and gradient on small fp32 and bf16 logits, bit for bit. Losses and gradients stay eager's; the fp32
    copies of the logits are not made. `replacement_report` shows the loss. `restore(model)`, or
    `module.loss_function = transformers.loss.loss_utils.ForCausalLMLoss`, gives the original back.

    Args:
        model: a model of transformers, or a module that holds one, as PEFT's does.

    Returns:
        The names of the modules whose loss is `causal_lm_loss` now, as in `named_modules()`; "" for the model itself.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.
        ValueError: no module of `model` has the loss of a causal language model.
    """
    check_model(model)
    attached, others = [], set()
    for name, module in _causal_models(model):
        if _is_original(module.loss_function):
            module.loss_function = causal_lm_loss
        if module.loss_function is causal_lm_loss:
            attached.append(name)
        else:
            others.add(getattr(module.loss_function, "__qualname__", type(module.loss_function).__name__))
    if not attached:
        found = f"the loss functions {', '.join(sorted(others))}" if others else "none with a head and a loss function"
        raise ValueError(f"model: expected a causal language model with the loss {_ORIGINAL[1]}, found {found}")
    return attached


def takes_our_loss(model: torch.nn.Module) -> bool:
    """Whether `attach_loss` would attach anything."""
    return any(
        module.loss_function is causal_lm_loss or _is_original(module.loss_function)
        for _, module in _causal_models(model)
    )


def _causal_models(model) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(getattr(type(module), "loss_function", None), property) and _has_head(module):
            yield name, module


def has_our_loss(module: torch.nn.Module) -> bool:
    """Whether the module's loss is `causal_lm_loss`."""
    return vars(module).get("_loss_function") is causal_lm_loss


def _has_head(module) -> bool:
    embeddings = getattr(module, "get_output_embeddings", None)
    return embeddings is not None and embeddings() is not None


def _is_original(function: Callable) -> bool:
    """Whether this is transformers' function, and returns the bits of `causal_lm_loss`."""
    if (getattr(function, "__module__", None), getattr(function, "__name__", None)) != _ORIGINAL:
        return False
    subject = proof.Subject(function, torch.device("cpu"), "fp32 and bf16", "cross-entropy of logits.float()")
    candidates = {True: lambda: _comparisons(function)}
    key, refuse = ("formula of causal_lm_loss", function), functools.partial(_refuse_parts, function)
    return bool(proof.match_formula(key, subject, candidates, refuse=refuse))


def _refuse_parts(function) -> None:
    """Cross-entropies of parts have another sum than that of all tokens."""

    def loss(logits):
        labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
        return function(logits, labels=labels, vocab_size=logits.shape[-1])

    proof.refuse_parts(loss, [(128256, torch.bfloat16)], [])


def _comparisons(function):
    source = proof.generator(torch.device("cpu"), 7)
    labels = torch.randint(31, (2, 9), device=source.device, generator=source)
    every, labels = labels.clone(), labels.index_fill(1, torch.arange(4, device=source.device), -100)
    for dtype in (torch.float32, torch.bfloat16):
        logits = proof.normal(source, 2, 9, 31).to(dtype)
        for arguments in (
            {"labels": labels},
            {"labels": labels, "num_items_in_batch": 11},
            {"labels": labels, "num_items_in_batch": torch.tensor(7, dtype=torch.int64, device=source.device)},
            {"labels": labels, "shift_labels": labels.flip(1)},
            {"labels": every, "ignore_index": int(every[1, 3])},
        ):
            results = []
            for compute in (eager_causal_lm_loss, function):
                leaf = logits.clone().requires_grad_()
                with torch.enable_grad():
                    loss = compute(leaf, vocab_size=31, **arguments)
                results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
            yield from zip(("the loss", "the gradient"), *results)
