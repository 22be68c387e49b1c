"""`decoding_graph`: the step of `generate` that decodes one token, replayed as a CUDA graph."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import nn

from .core import warn
from .core.inspection import CACHE, PAST_KEY_VALUES
from .core.torch_internals import dispatch_modes, function_modes

# Arguments of a captured call: tensors, and what two calls can be compared by.
_LEAVES = (torch.Tensor, bool, int, float, str)


@contextlib.contextmanager
def decoding_graph(model: nn.Module) -> Iterator[None]:
    """In this context, calls of `model` that decode one token with a static cache replay a CUDA graph.

    The graph launches the kernels that the call itself launches, so the bits are the same, without the CPU time of Python,
    torch and the driver. `generate` stays transformers' own: sampling, stopping criteria and streamers work as they do without
    the context.

        with kernel.decoding_graph(model):
            model.generate(**inputs, cache_implementation="static", disable_compile=True)

    For each cache the first such call runs as it is, which compiles and verifies the kernels. The second is captured, and
    later ones replay it. A call with other arguments is captured anew. What has no graph runs as it is: prompts, growing and
    offloaded caches, caches with a sliding window, training, calls that record gradients, calls that return attentions or
    hidden states, dispatch modes, and models that are on a CPU or on several GPUs.

    The graph reads weights where they lay at its capture, and runs the forwards of then. Leave the context before you move
    the model, put other tensors in place of weights, or call `apply` or `restore`. Weights may be changed in place. Hooks of
    modules would not run in a replay: if there are any, nothing is captured, and a RuntimeWarning names one.

    Args:
        model: a causal language model of transformers, with or without this package's layers.

    Raises:
        TypeError: `model` is no `torch.nn.Module`.
        RuntimeError: a context of this model is open.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"decoding_graph: model: expected a torch.nn.Module, found {type(model).__name__}")
    own = vars(model).get("forward")
    if isinstance(own, _Forward):
        raise RuntimeError("decoding_graph: model: expected no open context of this model, found one")
    model.forward = _Forward(model)
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


class _Forward:
    """The forward of a model in the context."""

    def __init__(self, model):
        # `generate` reads the signature.
        functools.update_wrapper(self, model.forward)
        self.model, self.original = model, model.forward
        # The last call that decoded a token, whether hooks or something else keep it from being captured, and its graph.
        self.last: Optional[tuple] = None
        self.hooked, self.can_be_captured = False, False
        self.step: Optional[_Step] = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = _name_of_cache(kwargs)
        if args or name is None or not _decodes_one_token(self.model, kwargs, kwargs[name]):
            return self.original(*args, **kwargs)
        cache = kwargs[name]
        places, leaves = _flatten({other: each for other, each in kwargs.items() if other != name})
        if not all(each is None or isinstance(each, _LEAVES) for each in leaves):
            return self.original(**kwargs)
        surroundings = (
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(),
            torch.get_autocast_dtype("cuda"),
        )
        call = (places, [_look(each) for each in leaves], surroundings)
        if self.last is None or cache is not self.last[0] or call != self.last[1]:
            self.last, self.step, self.can_be_captured = (cache, call), None, False
            self.hooked = _hooked(self.model)
        if not self.can_be_captured:
            before = _on_the_host(cache)
            output = self.original(**kwargs)
            self.can_be_captured = not self.hooked and _is_plain(output, cache) and _on_the_host(cache) == before
            return output
        if self.step is None:
            self.step = _Step(functools.partial(self.original, **{name: cache}), places, leaves)
        return self.step(leaves)


class _Step:
    """A captured call. It returns copies of what the graph wrote, because the next replay writes there again."""

    def __init__(self, forward, places, leaves):
        self.inputs = [each.clone() if isinstance(each, torch.Tensor) else each for each in leaves]
        self.graph = torch.cuda.CUDAGraph()
        device = next(each.device for each in leaves if isinstance(each, torch.Tensor))
        with torch.cuda.device(device), torch.cuda.graph(self.graph):
            self.output = forward(**_unflatten(places, self.inputs))

    def __call__(self, leaves):
        for mine, given in zip(self.inputs, leaves):
            if isinstance(given, torch.Tensor):
                mine.copy_(given)
        self.graph.replay()
        fields = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in self.output.items()}
        return type(self.output)(**fields)


def _flatten(arguments):
    """Where each argument stands, and the arguments: masks come in a dictionary where layers differ."""
    pairs = []
    for name, each in arguments.items():
        inner = each.items() if isinstance(each, dict) and each else [(None, each)]
        pairs += [((name, key), value) for key, value in inner]
    return [place for place, _ in pairs], [value for _, value in pairs]


def _unflatten(places, leaves):
    arguments: dict = {}
    for (name, key), each in zip(places, leaves):
        if key is None:
            arguments[name] = each
        else:
            arguments.setdefault(name, {})[key] = each
    return arguments


def _look(leaf):
    """All of an argument but a tensor's values."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return leaf


def _name_of_cache(kwargs) -> Optional[str]:
    """The cache's name among a call's arguments; None if none or two are given."""
    given = [name for name in (PAST_KEY_VALUES, CACHE) if kwargs.get(name) is not None]
    return given[0] if len(given) == 1 else None


def _decodes_one_token(model, kwargs, cache):
    tokens = kwargs.get("input_ids")
    return (
        isinstance(tokens, torch.Tensor)
        and tokens.is_cuda
        and tokens.dim() == 2
        and tokens.shape[1] == 1
        and getattr(cache, "is_compileable", False)
        and not getattr(cache, "offloading", False)
        and not model.training
        and not torch.is_grad_enabled()
        and len(set(getattr(model, "hf_device_map", {}).values())) < 2
        and not dispatch_modes()
        and not function_modes()
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
    )


def _on_the_host(cache):
    """What a call may change of a cache but its tensors' values. If it changes, a replay would not go on where it ended:
    layers with a sliding window count their tokens in Python."""
    return [
        {name: each.data_ptr() if isinstance(each, torch.Tensor) else each for name, each in vars(layer).items()}
        for layer in getattr(cache, "layers", ())
    ]


def _is_plain(output, cache):
    """Whether a call returned nothing but tensors and its cache, as a mapping with names."""
    return hasattr(output, "items") and all(
        each is None or each is cache or isinstance(each, torch.Tensor) for _, each in output.items()
    )


def _hooked(model):
    """Whether modules have hooks on their calls, but for those by which transformers returns hidden states."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if module is not model and not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                warn(
                    f"decoding_graph captures nothing, because {name} has a hook on its calls, which a "
                    "graph would leave out. Remove the hook before the context."
                )
                return True
    return False
