"""Random histories of small models: the same operations on a model and on its kernelized twin, compared after each of them.

python tests/histories.py --histories 10000        all subjects and levels; prints and shrinks what fails
python tests/histories.py --repeat "Llama decoder 17 forward=12 backward=34"

A history is a subject, a level, a seed and some operations, each with a seed of its own for what it draws. Both models go through
it, and outputs, gradients, what hooks saw and the types of exceptions must be the same, with the bits, dtypes and strides of tensors.
Afterwards nothing of either may be alive.

In place of each compiled kernel runs the eager formula that it stands for (`cpu_arithmetic`), so that the unkernelized model on the
CPU is the reference as it is. That is what is tested here: all that surrounds the kernels. With `--arithmetic triton` Triton's
interpreter runs the kernels, and the proof, which refuses those that differ from the CPU, is on.
"""

import argparse
import collections
import contextlib
import copy
import functools
import gc
import importlib
import logging
import os
import random
import sys
import warnings
import weakref
from pathlib import Path
from types import FunctionType

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LOSSLESS_PROOF", "on")

import torch
import transformers
from bits import bits_equal
from kernels import Mode, get_local_kernel, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from places import python_module
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode
from transformers import activations, models

HIDDEN = 64
VOCABULARY = 32
LEVELS = ("layer", "mlp", "decoder")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


# The CPU's own arithmetic in place of compiled kernels


def cpu_kernels(package):
    """By its name what each kernel writes, from the formulas of eager that the package names: `kernel(constants, scalars, *tensors)`."""

    def module(name):
        return python_module(package, name)

    backward, activation, gated = module("rms_norm_backward"), module("activation"), module("gated_activation")
    rotary, variants, products = module("rotary"), module("variants").BY_NAME.values(), []

    def variant_of(constants, x, weight, out):
        scale, fused = constants["SCALE"], constants.get("FUSED", False)
        found = (v for v in variants if v.scale == scale and v.fused == fused)
        return next(v for v in found if v.output_dtype(x.dtype, weight.dtype) == out.dtype)

    def write(into, values):
        into.copy_(values.reshape(into.shape))

    def rms_norm_forward(constants, scalars, x, weight, out, rstd=None):
        variant, eps = variant_of(constants, x, weight, out), scalars[-1]
        write(out, variant.eager(x, weight, eps))
        if rstd is not None and scalars[2]:
            h = x.to(torch.float32)
            write(rstd, torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps))

    def add_rms_norm_forward(constants, scalars, x, residual, weight, out, total, rstd=None):
        summed = residual.reshape(total.shape) + x.reshape(total.shape)
        write(total, summed)
        rms_norm_forward(constants, (0, 0, *scalars[1:]), summed, weight, out, rstd)

    def rms_norm_backward(constants, scalars, dy, x, weight, rstd, dx, dx_mean, d_rstd, blocks, d_sum):
        variant, h = variant_of(constants, x, weight, dy), x.to(torch.float32)
        found = backward.formula(variant, dy, x, weight, rstd, True, False)
        terms = [d_sum] * constants.get("ADD", False) + [each for each in found[:2] if each is not None]
        if constants.get("TWO_EDGES"):
            write(dx_mean, terms.pop())
        write(dx, functools.reduce(torch.add, terms))
        if scalars[0]:
            d_normalized = variant.incoming(dy) * (1.0 if variant.scale == "none" else variant.factor(weight))
            if variant.scale == "after_cast":
                d_normalized = d_normalized.to(x.dtype).to(torch.float32)
            write(d_rstd, (d_normalized * h).sum(-1, keepdim=True))
        if constants.get("SUM_CHAINS", True):
            rms_norm_sum_chains(constants, scalars, dy, x, rstd, blocks)

    def rms_norm_sum_chains(constants, scalars, dy, x, rstd, blocks):
        variant = next(v for v in variants if v.scale == constants["SCALE"] and not v.fused)
        products[:] = [backward.weight_products(variant, dy, x.to(torch.float32), rstd, x.dtype)]

    def rms_norm_sum_blocks(constants, scalars, blocks, dweight_sum, dweight):
        (product,) = products
        write(dweight, product.sum_to_size(dweight.shape))
        if scalars[-1]:
            write(dweight_sum, product.sum(tuple(range(product.dim() - 1)), dtype=torch.float32))

    def activation_forward(constants, scalars, x, out):
        write(out, activation._ACTIVATIONS[constants["ACTIVATION"]].forward(None, x))

    def activation_backward(constants, scalars, dy, x, *dxs):
        for dx, values in zip(dxs, activation._ACTIVATIONS[constants["ACTIVATION"]].gradients(dy, x), strict=True):
            write(dx, values)

    def gated_activation_forward(constants, scalars, gate, out, up):
        write(out, gated._eager(gated.ACTIVATIONS[constants["ACTIVATION"]], gate, up))

    def gated_activation_backward(constants, scalars, dy, gate, d_gate, up, d_up=None):
        found = gated._eager_gradients(gated.ACTIVATIONS[constants["ACTIVATION"]], dy, gate, up)
        for into, values in zip((d_gate, d_up), found):
            if into is not None:
                write(into, values)

    def rotate(constants, scalars, q, k, cos, sin, q_out, k_out, *straight):
        tokens, _, _, q_heads, k_heads, *steps = scalars
        dim, unit = 2 * constants["HALF"], constants["UNIT"]
        batch = q_out.numel() // (tokens * q_heads * dim)

        def heads(tensor, count, at):
            return tensor.as_strided((batch, tokens, count, dim), (*(step * unit for step in steps[at]), 1))

        cos, sin = (
            table.as_strided((batch, tokens, 1, dim), (*(step * unit for step in steps[at : at + 2]), 0, 1))
            for table, at in ((cos, 12), (sin, 14))
        )
        tensors = [(q, q_out, q_heads, 0), (k, k_out, k_heads, 3)]
        for number, (x, out, count, at) in enumerate(tensors if k_heads else tensors[:1]):
            x, into = heads(x, count, slice(at, at + 3)), slice(at + 6, at + 9)
            if constants["STEP"] == "forward":
                variant = rotary.WIDENED if constants["WIDENED"] else rotary.PLAIN
                heads(out, count, into).copy_(variant.rotate(x, cos, sin))
                continue
            halves, through_cos = rotary.PLAIN.gradients(x, cos, sin, out.dtype)
            heads(out, count, into).copy_(halves if straight else halves + through_cos)
            if straight:
                heads(straight[number], count, into).copy_(through_cos)

    kernels = (rms_norm_forward, add_rms_norm_forward, rms_norm_backward, rms_norm_sum_chains, rms_norm_sum_blocks)
    kernels += (activation_forward, activation_backward, gated_activation_forward, gated_activation_backward)
    return {each.__name__: each for each in kernels} | {"rotary": rotate, "rms_norm_backward_streamed": rms_norm_backward}


@contextlib.contextmanager
def cpu_arithmetic(package, changes=None):
    """While it lasts, launches compute what the original layers do on the CPU; `changes` are other kernels, by name."""
    launcher = python_module(package, "launch").Launcher
    kernels = {**cpu_kernels(package), **(changes or {})}

    def launch(self, blocks, tensors, scalars):
        # As a kernel, which nobody sees.
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            kernels[self.kernel.__name__](self.constants, scalars, *tensors)

    original, launcher.through_triton = launcher.through_triton, launch
    try:
        yield
    finally:
        launcher.through_triton = original


# Draws: every choice has a plainest option, the first, to which shrinking goes


# Options that are left out: what is known to differ, until it is mended. `--leave-out` adds to it.
LEFT_OUT = set()


class Draw:
    """What one operation draws: the same for both models, and again when a history is repeated."""

    def __init__(self, seed, plain=()):
        self.seed, self.plain = seed, frozenset(plain)
        self.random = random.Random(seed)
        self.asked, self.told = 0, []

    def pick(self, what, *options):
        options = [option for option in options if not (isinstance(option, str) and option in LEFT_OUT)] or options
        chosen = self.random.choice(options)
        if self.asked in self.plain:
            chosen = options[0]
        self.asked += 1
        if chosen is not options[0]:
            self.told.append(f"{what}={chosen}")
        return chosen

    def often(self, what, *options):
        """`pick` that takes the first option three times out of four."""
        return self.pick(what, *[options[0]] * 3 * (len(options) - 1), *options[1:])

    def normal(self, *shape, dtype=torch.float32):
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        return torch.randn(shape, generator=generator).to(dtype)

    def tokens(self, *shape):
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        return torch.randint(VOCABULARY, shape, generator=generator)


# Subjects


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": HIDDEN,
    "intermediate_size": 72,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


class TiedBlock(nn.Module):
    """A norm called three times, an activation and an MLP whose inputs have other consumers too."""

    def __init__(self):
        super().__init__()
        self.norm = models.llama.modeling_llama.LlamaRMSNorm(HIDDEN)
        self.mlp = models.llama.modeling_llama.LlamaMLP(transformers.LlamaConfig(**SIZES))
        self.act = activations.SiLUActivation()

    def forward(self, x):
        y = x + self.mlp(self.norm(x))
        z = self.norm(y) * y + self.act(y)
        return self.norm(z * 2.0) + x


class Subject:
    """Makes models of one kind and what they are called with."""

    def __init__(self, make, names=(), inputs=1):
        self.make, self.names, self.inputs = make, names, inputs
        self.is_decoder, self.keeps_copies = False, False

    def __call__(self, seed):
        torch.manual_seed(seed)
        model = self.make()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
        return model.eval()

    def arguments(self, world, draw):
        """The leaves that gradients may be asked of, and what the model is called with."""
        shape = draw.pick("shape", (2, 3, HIDDEN), (5, HIDDEN), (1, HIDDEN), (1, 1, HIDDEN), (0, HIDDEN), (HIDDEN,),
                          (17, HIDDEN), (2, 2, 3, HIDDEN))  # fmt: skip
        dtype = draw.often("dtype", world.dtype(), *DTYPES.values())
        layout = draw.often("layout", "contiguous", "transposed", "columns of wider", "expanded", "offset", "strided")
        grad = draw.often("input", "needs grad", "needs no grad", "is not a leaf", "is not a leaf and hooked", "is inference")
        leaves, given = [], []
        for number in range(self.inputs):
            leaf, x = _laid_out(draw, shape, dtype, layout)
            if grad == "is inference":
                with torch.inference_mode():
                    x = x.clone()
            elif grad != "needs no grad":
                leaf.requires_grad_()
                x = _view(leaf, shape, layout)
                leaves.append(leaf)
                if grad.startswith("is not a leaf"):
                    x = x * 1.0
                    if grad.endswith("hooked"):
                        x.register_hook(functools.partial(world.saw, f"gradient of input {number}"))
            given.append(x)
        return leaves, given, {}


def _laid_out(draw, shape, dtype, layout):
    wide = {"columns of wider": 4, "strided": shape[-1]}.get(layout, 0)
    if layout == "transposed" and len(shape) > 1:
        leaf = draw.normal(shape[1], shape[0], *shape[2:], dtype=dtype)
    elif layout == "expanded":
        leaf = draw.normal(*(1,) * (len(shape) > 1), *shape[1:] if len(shape) > 1 else shape, dtype=dtype)
    elif layout == "offset":
        leaf = draw.normal(torch.Size(shape).numel() + 1, dtype=dtype)
    else:
        leaf = draw.normal(*shape[:-1], shape[-1] + wide, dtype=dtype)
    return leaf, _view(leaf, shape, layout)


def _view(leaf, shape, layout):
    if layout == "transposed" and len(shape) > 1:
        return leaf.transpose(0, 1)
    if layout == "expanded":
        return leaf.expand(shape)
    if layout == "offset":
        return leaf[1:].view(shape)
    if layout == "strided":
        return leaf[..., ::2]
    return leaf[..., : shape[-1]]


class Decoder(Subject):
    def __init__(self, name, **changes):
        config, model = (getattr(transformers, f"{name}{kind}") for kind in ("Config", "ForCausalLM"))
        super().__init__(lambda: model(config(**SIZES | changes)))
        self.is_decoder = True

    def arguments(self, world, draw):
        batch, tokens = draw.pick("batch and tokens", (2, 3), (1, 1), (1, 3), (1, 1), (2, 1), (1, 5))
        named = {"use_cache": False}
        if world.cache is not None:
            batch, tokens = world.cache_batch, draw.pick("more tokens", 1, 2)
            named = {"use_cache": True, "past_key_values": world.cache}
        if draw.often("mask", None, "padding") and world.cache is None and tokens > 1:
            named["attention_mask"] = torch.ones(batch, tokens, dtype=torch.long)
            named["attention_mask"][0, 0] = 0
        if draw.often("given", "ids", "embeddings") == "ids":
            return [], [draw.tokens(batch, tokens)], named
        leaf = draw.normal(batch, tokens, HIDDEN, dtype=world.dtype()).requires_grad_()
        return [leaf], [], {"inputs_embeds": leaf, **named}


def _activation(name):
    return lambda: activations.ACT2FN[name]


def subjects():
    llama, gemma = models.llama.modeling_llama, importlib.import_module("transformers.models.gemma.modeling_gemma")
    qwen35, next_ = (importlib.import_module(f"transformers.models.{n}.modeling_{n}") for n in ("qwen3_5", "qwen3_next"))
    mlp = transformers.LlamaConfig(**SIZES)
    return {
        "Llama": Decoder("Llama"),
        "Qwen3": Decoder("Qwen3"),
        "Gemma": Decoder("Gemma", num_hidden_layers=1),
        "Qwen2": Decoder("Qwen2", num_hidden_layers=1),
        "TiedBlock": Subject(TiedBlock),
        "LlamaRMSNorm": Subject(lambda: llama.LlamaRMSNorm(HIDDEN)),
        "Qwen3_5RMSNorm": Subject(lambda: qwen35.Qwen3_5RMSNorm(HIDDEN)),
        "GemmaRMSNorm": Subject(lambda: gemma.GemmaRMSNorm(HIDDEN), {gemma.GemmaRMSNorm: "RMSNormZeroCentered"}),
        "RMSNorm": Subject(lambda: nn.RMSNorm(HIDDEN, eps=1e-6), {nn.RMSNorm: "TorchRMSNorm"}),
        "RMSNormGated": Subject(lambda: next_.Qwen3NextRMSNormGated(HIDDEN), inputs=2),
        "LlamaMLP": Subject(lambda: llama.LlamaMLP(mlp), {llama.LlamaMLP: "SwiGLUMLP"}),
        "GemmaMLP": Subject(lambda: gemma.GemmaMLP(transformers.GemmaConfig(**SIZES)), {gemma.GemmaMLP: "GeGLUMLP"}),
        "SiLUActivation": Subject(activations.SiLUActivation),
        "SiLU": Subject(nn.SiLU, {nn.SiLU: "SiLU"}),
        "GELU": Subject(lambda: nn.GELU("tanh"), {nn.GELU: "GeLU"}),
        "GELUActivation": Subject(activations.GELUActivation),
        "NewGELU": Subject(activations.NewGELUActivation),
        "FastGELU": Subject(activations.FastGELUActivation),
        "QuickGELU": Subject(activations.QuickGELUActivation),
    }  # fmt: skip


# A model in the course of a history


class World:
    """One of the two models and all that a history has made of it."""

    def __init__(self, subject, model, kernelize=None):
        self.subject, self.model, self.kernelize = subject, model, kernelize
        self.seen, self.handles, self.pending = [], [], collections.deque(maxlen=2)
        self.cache = self.cache_batch = None
        self.rotations = {}

    def dtype(self):
        return next((p.dtype for p in self.model.parameters()), torch.float32)

    def saw(self, what, *tensors):
        def kept(tensor):
            if not isinstance(tensor, torch.Tensor):
                return tensor
            functorch = torch._C._functorch
            if functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
                return f"{list(tensor.shape)} in a transform"
            return tensor.detach().clone()

        self.seen.append((what, [*map(kept, tensors)]))

    def writes_weights(self):
        """Where a weight around zero is written to after the forward pass, ours raises and eager has a copy (README, Limits)."""
        if self.subject.keeps_copies:
            self.pending.clear()

    def modules(self, *suffixes):
        """The modules whose names end so, the model itself where it is a layer."""
        found = [m for name, m in self.model.named_modules() if name.endswith(suffixes)]
        return found if self.subject.is_decoder or found else [self.model]

    @contextlib.contextmanager
    def at_work(self):
        """kernelize replaces functions for all models of a file: here for this one alone."""
        functions = rotary_functions()
        for function in functions:
            vars(function).pop("forward", None)
            if function in self.rotations:
                function.forward = self.rotations[function]
        try:
            yield
        finally:
            self.rotations = {f: vars(f).pop("forward") for f in functions if "forward" in vars(f)}


@functools.cache
def rotary_functions():
    """The modules that kernels made of the functions of transformers' model files."""
    files = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3", "gemma"))
    return [importlib.import_module(name).apply_rotary_pos_emb for name in files]


# Operations: what each returns is compared


OPERATIONS = {}


def operation(weight=1, decoder=None, ours=False):
    """Draws it so often; for decoders alone, for layers alone (False) or for both (None); `ours` is for the kernelized model."""

    def register(function):
        OPERATIONS[function.__name__] = (function, weight, decoder, ours)
        return function

    return register


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        return operator(*arguments, **(named or {}))


class Functions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), named=None):
        return function(*arguments, **(named or {}))


@contextlib.contextmanager
def _global_hooks(world):
    register = nn.modules.module.register_module_forward_hook
    handle = register(lambda module, given, out: world.saw(f"global hook, {type(module).__name__}", *_tensors(out)))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _other_forward(world):
    """Of a class that all models share."""
    owners = {type(m) for m in world.modules("norm", "mlp", "act_fn", "act")}
    owner = sorted(owners, key=lambda each: each.__qualname__)[0]
    original, own = owner.forward, "forward" in vars(owner)
    owner.forward = lambda self, *given, **named: 2.0 * original(self, *given, **named)
    try:
        yield
    finally:
        if own:
            owner.forward = original
        else:
            del owner.forward


SURROUNDINGS = {
    "nothing": lambda world: contextlib.nullcontext(),
    "FLOP counter": lambda world: FlopCounterMode(display=False),
    "dispatch mode": lambda world: Watching(),
    "function mode": lambda world: Functions(),
    "autocast to float16": lambda world: torch.autocast("cpu", dtype=torch.float16),
    "autocast to bfloat16": lambda world: torch.autocast("cpu", dtype=torch.bfloat16),
    "saved tensors packed": lambda world: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "saved tensors on the CPU": lambda world: torch.autograd.graph.save_on_cpu(),
    "anomaly mode": lambda world: torch.autograd.set_detect_anomaly(True),
    "global hooks": _global_hooks,
    "another forward of a class": _other_forward,
    "a level of forward-mode AD": lambda world: torch.autograd.forward_ad.dual_level(),
    "deterministic": lambda world: _deterministic(),
}
MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _tensors(out):
    out = out.logits if hasattr(out, "logits") else out
    return [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]


@operation(weight=10)
def forward(world, draw):
    mode = draw.pick("mode", "grad", "grad", "no_grad", "inference_mode", "no_grad")
    around = SURROUNDINGS[draw.often("under", *SURROUNDINGS)]
    leaves, given, named = world.subject.arguments(world, draw)
    with MODES[mode](), around(world):
        outs = _tensors(world.model(*given, **named))
    if any(out.requires_grad for out in outs):
        world.pending.append((outs, leaves))
    return outs


@operation(weight=8)
def calls_again(world, draw):
    """Many calls of the same shape, which are recognised and recorded."""
    leaves, given, named = world.subject.arguments(world, draw)
    with MODES[draw.pick("mode", "no_grad", "grad", "inference_mode")]():
        return [_tensors(world.model(*given, **named)) for _ in range(3)]


def _step_back(world, draw, how, outs, leaves):
    weights = [p for p in world.model.parameters() if p.requires_grad]
    inputs = [*leaves, *weights]
    outs = [out for out in outs if out.requires_grad]
    dys = [draw.normal(*out.shape, dtype=out.dtype) for out in outs]
    if how == "backward":
        torch.autograd.backward(outs, dys)
    elif how == "twice":
        torch.autograd.backward(outs, dys, retain_graph=True)
        torch.autograd.backward(outs, dys)
    elif how == "of inputs":
        return torch.autograd.grad(outs, leaves or weights, dys, allow_unused=True)
    elif how == "of weights":
        return torch.autograd.grad(outs, weights or leaves, dys, allow_unused=True)
    elif how == "zeros":
        torch.autograd.backward(outs, [torch.zeros_like(out) for out in outs])
    elif how == "expanded":
        torch.autograd.backward([out.sum() for out in outs])
    else:
        found = torch.autograd.grad(outs, inputs, dys, allow_unused=True, create_graph=True)
        if how == "create_graph":
            return found
        again = [g for g in found if g is not None and g.requires_grad]
        seen, world.seen = world.seen, []
        second = torch.autograd.grad(again, inputs, [draw.normal(*g.shape, dtype=g.dtype) for g in again], allow_unused=True)
        world.seen = seen + [(what, [Nearly(t) if isinstance(t, torch.Tensor) else t for t in ts]) for what, ts in world.seen]
        return [found, [g if g is None else Nearly(g) for g in second]]
    return [tensor.grad for tensor in inputs]


WAYS_BACK = ("backward", "twice", "of inputs", "of weights", "zeros", "expanded", "create_graph", "second derivatives")


@operation(weight=8)
def backward(world, draw):
    how, around = draw.pick("how", *WAYS_BACK), draw.often("under", *SURROUNDINGS)
    if world.pending:
        with SURROUNDINGS[around](world):
            return _step_back(world, draw, how, *world.pending.pop())


@operation(weight=8)
def training_step(world, draw):
    how = draw.often("how", *WAYS_BACK)
    forward_under, backward_under = (draw.often(f"{what} under", *SURROUNDINGS) for what in ("forward", "backward"))
    rate = draw.pick("learning rate", 0.0, 0.01)
    leaves, given, named = world.subject.arguments(world, draw)
    with SURROUNDINGS[forward_under](world):
        outs = _tensors(world.model(*given, **named))
    found = []
    if any(out.requires_grad for out in outs):
        with SURROUNDINGS[backward_under](world):
            found = _step_back(world, draw, how, outs, leaves)
        if rate:
            world.writes_weights()
            with torch.no_grad():
                for parameter in world.model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(rate * parameter.grad)
    return [outs, found]


@operation(weight=2)
def forget_gradients(world, draw):
    world.model.zero_grad(set_to_none=draw.pick("to", "none", "zeros") == "none")


@operation(weight=2, decoder=True)
def start_cache(world, draw):
    world.cache_batch = draw.pick("batch", 1, 2)
    kind = draw.pick("cache", "dynamic", "static", "none")
    if kind == "none":
        world.cache = None
    elif kind == "dynamic":
        world.cache = transformers.DynamicCache(config=world.model.config)
    else:
        world.cache = transformers.StaticCache(config=world.model.config, max_cache_len=32)


@operation(weight=3, decoder=True)
def generate(world, draw):
    kind = draw.pick("cache", "dynamic", "static", "none")
    options = {"use_cache": False} if kind == "none" else {"cache_implementation": kind}
    out = world.model.generate(draw.tokens(draw.pick("batch", 1, 2), 3), max_new_tokens=draw.pick("new tokens", 4, 2),
                               do_sample=False, output_logits=True, return_dict_in_generate=True, **options)  # fmt: skip
    return [out.sequences, *out.logits]


@operation(weight=2, decoder=True)
def checkpointing(world, draw):
    kind = draw.pick("kind", "not reentrant", "reentrant", "none")
    if kind == "none":
        world.model.gradient_checkpointing_disable()
    else:
        world.model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})


@operation(weight=2, decoder=True)
def attention(world, draw):
    world.model.set_attn_implementation(draw.pick("attention", "sdpa", "eager"))


@operation(weight=1, decoder=True)
def recorded_outputs(world, draw):
    leaves, given, named = world.subject.arguments(world, draw)
    out = world.model(*given, **named, output_hidden_states=True)
    return [out.logits, list(out.hidden_states)]


@operation(weight=2, decoder=True)
def gradients_of_parts(world, draw):
    """Of what some layers return, or of cached keys or values: what else the layers compute is not used."""
    of, ids = draw.pick("of", "keys", "values", "hidden states"), draw.tokens(1, 3)
    cache = transformers.DynamicCache(config=world.model.config)
    out = world.model(ids, use_cache=True, past_key_values=cache, output_hidden_states=of == "hidden states")
    number = draw.pick("layer", -1, 0)
    part = out.hidden_states[number] if of == "hidden states" else getattr(cache.layers[number], of)
    weights = [p for p in world.model.parameters() if p.requires_grad]
    return torch.autograd.grad(part, weights, draw.normal(*part.shape, dtype=part.dtype), allow_unused=True)


# Parts of models, by the ends of their names
PARTS = ("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "mlp", "act_fn", "act", "self_attn", "layers.0", "up_proj", "o_proj")


def _part(world, draw, *suffixes):
    found = world.modules(*(suffixes or (draw.pick("part", *PARTS),)))
    return found[draw.pick("number", 0, 1, 2) % len(found)] if found else world.model


def _double(out):
    return (2.0 * out[0], *out[1:]) if isinstance(out, tuple) else 2.0 * out


@operation(weight=5)
def add_hook(world, draw):
    module = _part(world, draw)
    kind = draw.pick("kind", "sees outputs", "changes outputs", "sees inputs", "changes inputs", "sees gradients",
                     "sees incoming gradients", "changes gradients", "hooks its input", "hooks its output")  # fmt: skip
    name = f"{type(module).__name__}, {kind}"

    def watch(tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda g: world.saw(name, g))

    hooks = {
        "sees outputs": ("forward_hook", lambda m, given, out: world.saw(name, *_tensors(out))),
        "changes outputs": ("forward_hook", lambda m, given, out: _double(out)),
        "sees inputs": ("forward_pre_hook", lambda m, given: world.saw(name, *_tensors(given))),
        "changes inputs": ("forward_pre_hook", lambda m, given: tuple(2.0 * x if torch.is_tensor(x) and x.is_floating_point() else x for x in given)),
        "sees gradients": ("full_backward_hook", lambda m, dx, dy: world.saw(name, *dx, *dy)),
        "sees incoming gradients": ("full_backward_pre_hook", lambda m, dy: world.saw(name, *dy)),
        "changes gradients": ("full_backward_hook", lambda m, dx, dy: tuple(None if d is None else 2.0 * d for d in dx)),
        "hooks its input": ("forward_pre_hook", lambda m, given: watch(given)),
        "hooks its output": ("forward_hook", lambda m, given, out: watch(_tensors(out))),
    }  # fmt: skip
    register, hook = hooks[kind]
    world.handles.append(getattr(module, f"register_{register}")(hook))


@operation(weight=4)
def remove_hook(world, draw):
    if world.handles:
        world.handles.pop(draw.pick("which", -1, 0)).remove()


@operation(weight=2)
def hook_on_weight(world, draw):
    weights = [p for p in world.model.parameters() if p.requires_grad]
    if weights:
        weight = weights[draw.random.randrange(len(weights))]
        world.handles.append(weight.register_hook(lambda g: world.saw("gradient of a weight", g)))


@operation(weight=5)
def change_weight(world, draw):
    module = _part(world, draw, "norm", "proj")
    weight = getattr(module, "weight", None)
    how = draw.pick("how", "copied into", "another parameter", "data", "needs no gradient", "needs a gradient", "another bias",
                    "none", "deleted gradient", "a plain tensor", "swapped dtype")  # fmt: skip
    if not isinstance(weight, torch.Tensor) or "weight" not in module._parameters:
        return
    values = draw.normal(*weight.shape, dtype=weight.dtype)
    if how == "copied into":
        world.writes_weights()
        with torch.no_grad():
            weight.copy_(values)
    elif how == "another parameter":
        module.weight = nn.Parameter(values)
    elif how == "data":
        weight.data = values
    elif how == "needs no gradient":
        weight.requires_grad_(False)
    elif how == "needs a gradient":
        weight.requires_grad_(True)
    elif how == "another bias" and isinstance(module, nn.Linear):
        module.bias = nn.Parameter(draw.normal(module.out_features, dtype=weight.dtype))
    elif how == "none" and isinstance(module, nn.RMSNorm):
        module.weight = None
    elif how == "deleted gradient":
        weight.grad = None
    elif how == "a plain tensor":
        del module.weight
        module.weight = values
    elif how == "swapped dtype":
        weight.data = values.to(draw.pick("dtype", *DTYPES.values()))


@operation(weight=2)
def change_eps(world, draw):
    module = _part(world, draw, "norm")
    for name in ("variance_epsilon", "eps"):
        if hasattr(module, name):
            setattr(module, name, draw.pick("eps", 0.5, 1e-6, 0.01, 1))
            return


@operation(weight=2)
def move_dtype(world, draw):
    world.model.to(draw.pick("dtype", *DTYPES.values()))
    world.cache = None


@operation(weight=2)
def train_or_eval(world, draw):
    world.model.train(draw.pick("train", True, False))


@operation(weight=2)
def freeze(world, draw):
    which, needed = draw.pick("which", "all", "norms", "linear layers"), draw.pick("needs grad", False, True)
    for name, parameter in world.model.named_parameters():
        if which == "all" or (parameter.dim() == 1) == (which == "norms"):
            parameter.requires_grad_(needed)


@operation(weight=2)
def deep_copy(world, draw):
    world.handles.clear(), world.pending.clear()
    for module in world.model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
            hooks.clear()
    world.model, world.cache = copy.deepcopy(world.model), None


@operation(weight=1)
def load_state(world, draw):
    state = {name: value.clone() for name, value in world.model.state_dict().items()}
    assign = draw.pick("assign", False, True)
    world.writes_weights()
    world.model.load_state_dict({name: 1.5 * v if v.is_floating_point() else v for name, v in state.items()}, assign=assign)


class LoRA(nn.Module):
    def __init__(self, base, draw):
        super().__init__()
        self.base = base
        down, up = (draw.normal(*s, dtype=base.weight.dtype) for s in ((2, base.in_features), (base.out_features, 2)))
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


class Doubled(nn.Module):
    def forward(self, weight):
        return 2.0 * weight


class GeluMLP(models.llama.modeling_llama.LlamaMLP):
    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


class LouderMLP(models.llama.modeling_llama.LlamaMLP):
    def forward(self, x):
        return 2.0 * super().forward(x)


class LouderNorm(models.llama.modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2.0 * super().forward(hidden_states)


@operation(weight=5)
def change_module(world, draw):
    how = draw.pick("how", "LoRA", "parametrized", "another activation", "subclass of MLP", "subclass of norm", "tied norms", "wrapped",
                    "a function in its place", "own forward", "dropout", "louder MLP", "attribute", "detached")  # fmt: skip
    linear, norm, mlp = (_part(world, draw, suffix) for suffix in ("proj", "norm", "mlp"))
    llama = models.llama.modeling_llama
    owners = {id(child): (parent, name) for parent in world.model.modules() for name, child in parent.named_children()}
    if how == "LoRA" and type(linear) is nn.Linear and id(linear) in owners:
        parent, name = owners[id(linear)]
        setattr(parent, name, LoRA(linear, draw))
    elif how == "parametrized" and "weight" in norm._parameters and norm.weight is not None:
        nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    elif how == "another activation" and hasattr(mlp, "act_fn"):
        mlp.act_fn = draw.pick("act_fn", nn.SiLU, nn.GELU, nn.ReLU, activations.NewGELUActivation, activations.SiLUActivation, nn.Tanh)()
    elif how in ("subclass of MLP", "louder MLP") and type(mlp) is llama.LlamaMLP:
        mlp.__class__ = GeluMLP if how == "subclass of MLP" else LouderMLP
    elif how == "subclass of norm" and type(norm) is llama.LlamaRMSNorm:
        norm.__class__ = LouderNorm
    elif how == "tied norms" and id(norm) in owners:
        parent, name = owners[id(world.modules("norm")[0])]
        setattr(parent, name, norm)
    elif how in ("wrapped", "detached") and id(mlp) in owners:
        parent, name = owners[id(mlp)]
        setattr(parent, name, nn.Sequential(mlp, nn.Tanh() if how == "wrapped" else Detached()))
    elif how == "a function in its place" and id(norm) in owners:
        parent, name = owners[id(norm)]
        delattr(parent, name)
        setattr(parent, name, lambda x: 2.0 * x)
    elif how == "own forward":
        original = type(norm).forward
        norm.forward = lambda x, *more: 3.0 * original(norm, x, *more)
    elif how == "dropout" and world.subject.is_decoder:
        for module in world.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
    elif how == "attribute":
        norm.something = draw.normal(3)


@operation(weight=4, ours=True)
def kernelize_again(world, draw):
    world.kernelize(world.model, draw.pick("level", *LEVELS, None), draw.pick("mode", Mode.TRAINING, Mode.INFERENCE))


@operation(weight=5, decoder=False)
def transform(world, draw):
    """The layer under functorch and forward-mode AD."""
    kind = draw.pick("kind", "vmap", "functional_call", "grad", "vjp", "jvp", "dual", "vmap of grad", "batched grads")
    xs = [draw.normal(4, HIDDEN, dtype=world.dtype()) for _ in range(world.subject.inputs)]
    weights = {name: p.detach().clone() for name, p in world.model.named_parameters()}

    def call(weights, *xs):
        return torch.func.functional_call(world.model, weights, xs)

    if kind == "vmap":
        return torch.vmap(world.model)(*xs)
    if kind == "functional_call":
        return call({name: 1.5 * w for name, w in weights.items()}, *xs)
    if kind == "grad":
        return torch.func.grad(lambda w, *xs: call(w, *xs).sum(), argnums=1)(weights, *xs)
    if kind == "vjp":
        out, back = torch.func.vjp(world.model, *xs)
        return [out, back(torch.ones_like(out))]
    if kind == "jvp":
        return torch.func.jvp(world.model, tuple(xs), tuple(draw.normal(*x.shape, dtype=x.dtype) for x in xs))
    if kind == "dual":
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(x, draw.normal(*x.shape, dtype=x.dtype)) for x in xs]
            return list(torch.autograd.forward_ad.unpack_dual(world.model(*duals)))
    if kind == "vmap of grad":
        return torch.vmap(lambda *xs: torch.func.grad(lambda *xs: world.model(*xs).sum())(*xs))(*xs)
    xs = [x.requires_grad_() for x in xs]
    out = world.model(*xs)
    return torch.autograd.grad(out, xs, torch.stack([draw.normal(*out.shape, dtype=out.dtype)] * 2), is_grads_batched=True)


# Running


class Nearly:
    """A second derivative: of eager's formula, added up in another order."""

    def __init__(self, tensor):
        self.tensor = tensor


class Difference(Exception):
    """The two models' results, as a sentence."""


def compare(ours, theirs, where=""):
    if isinstance(theirs, Nearly):
        if ours is None or ours.tensor.shape != theirs.tensor.shape:
            raise Difference(f"{where}: another shape, or none")
        # Half of 16 bits' digits; in fp32 some roundings.
        ours, theirs = ours.tensor.float(), theirs.tensor.float()
        scale = theirs.nan_to_num(0, 0, 0).abs().max().item() if theirs.numel() else 0.0
        if not torch.allclose(ours, theirs, rtol=0.02, atol=0.02 * max(scale, 1e-3), equal_nan=True):
            raise Difference(f"{where}: second derivatives, {(ours - theirs).abs().max():.3g} apart of {scale:.3g}")
    elif isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor):
            raise Difference(f"{where}: {type(ours).__name__} instead of a tensor")
        for what in ("dtype", "shape", "requires_grad", "is_inference"):
            a, b = (getattr(each, what) for each in (ours, theirs))
            a, b = (a(), b()) if callable(a) else (a, b)
            if a != b:
                raise Difference(f"{where}: {what} {a} instead of {b}")
        strides = [
            [step for step, size in zip(t.stride(), t.shape) if size != 1 or "strides of 1" not in LEFT_OUT]
            for t in (ours, theirs)
        ]
        if strides[0] != strides[1]:
            raise Difference(f"{where}: strides {ours.stride()} instead of {theirs.stride()}")
        if not bits_equal(ours.detach(), theirs.detach()):
            a, b = ours.detach().double(), theirs.detach().double()
            raise Difference(f"{where}: {int((a != b).sum())} of {a.numel()} elements differ, by {(a - b).abs().max():.3g} "
                             f"of {b.abs().max():.3g}")  # fmt: skip
    elif isinstance(theirs, (tuple, list)):
        if not isinstance(ours, (tuple, list)) or len(ours) != len(theirs):
            raise Difference(f"{where}: {_summary(ours)} instead of {_summary(theirs)}")
        for number, (a, b) in enumerate(zip(ours, theirs)):
            compare(a, b, f"{where}[{number}]")
    elif ours != theirs:
        raise Difference(f"{where}: {_summary(ours)} instead of {_summary(theirs)}")


def _summary(value):
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_summary, value))}]"
    return repr(value)


class History:
    """A subject, a level, the seed of the model and the operations: `(name, seed, the draws that are made plain)`."""

    def __init__(self, subject, level, seed, operations):
        self.subject, self.level, self.seed, self.operations = subject, level, seed, operations

    @classmethod
    def random(cls, seed, subject=None, level=None):
        chance = random.Random(seed)
        subject = chance.choice(subject or [s for s in SUBJECTS if s not in LEFT_OUT] + ["Llama"] * 6 + ["Qwen3"] * 4 + ["TiedBlock"] * 2)
        level = chance.choice(level or LEVELS)
        fit = {n: w for n, (_, w, decoder, _) in OPERATIONS.items() if decoder in (None, SUBJECTS[subject].is_decoder)}
        names = chance.choices([*fit], [*fit.values()], k=chance.randint(6, 14))
        return cls(subject, level, seed, [(name, chance.randrange(10**6), ()) for name in names])

    def __str__(self):
        steps = (f"{n}={s}{''.join(f':{i}' for i in plain)}" for n, s, plain in self.operations)
        return " ".join((self.subject, self.level, str(self.seed), *steps))

    @classmethod
    def parse(cls, text):
        subject, level, seed, *steps = text.split()
        operations = []
        for step in steps:
            name, numbers = step.split("=")
            first, *plain = map(int, numbers.split(":"))
            operations.append((name, first, tuple(plain)))
        return cls(subject, level, int(seed), operations)


SUBJECTS = subjects()
for _name in ("Gemma", "GemmaRMSNorm", "Qwen3_5RMSNorm"):
    SUBJECTS[_name].keeps_copies = True


class Runner:
    """Runs histories with one built kernel."""

    def __init__(self, kernel):
        self.kernel = kernel
        gc.collect()
        gc.freeze()  # All that is here to stay: what a history leaves behind is found sooner.

    def kernelize(self, model, level, mode):
        mapping = {}
        if level is not None:
            if level != "layer":
                self.named.update(type(m) for m in model.modules() if not hasattr(type(m), "kernel_layer_name"))
                self.kernel.name_layers(model)
            mapping = self.kernel.kernel_mapping(devices=("cpu",), level="decoder" if level == "decoder" else "layer")
        # What somebody put there himself stays.
        own = {m: vars(m)["forward"] for m in model.modules() if isinstance(vars(m).get("forward"), FunctionType)}
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(model, mode=mode, device="cpu")
        for module in model.modules():
            bound = vars(module).get("forward")
            if module in own:
                module.forward = own[module]
            elif bound is not None and bound.__func__ is type(module).forward:
                del module.forward  # kernelize binds it where there is no kernel.

    def run(self, history, told=None):
        """Raises Difference if it does not hold; `told` takes a line for each operation."""
        self.named = set()
        subject = SUBJECTS[history.subject]
        for owner, name in dict(subject.names).items():
            self.named.add(owner)
            replace_kernel_forward_from_hub(owner, name)
        try:
            alive = self._run(history, subject, [] if told is None else told)
        finally:
            for owner in self.named:
                for name in ("kernel_layer_name", "kernel_condition"):
                    if name in vars(owner):
                        delattr(owner, name)
        gc.collect()
        theirs, left = ([kind for kind, each in found.values() if each() is not None] for found in alive)
        if left and not theirs:  # What eager's own cycles keep alive, ours may keep more of.
            raise Difference(f"alive afterwards: {dict(collections.Counter(left))}")

    def _run(self, history, subject, told):
        model = subject(history.seed)
        theirs = World(subject, copy.deepcopy(model))
        ours = World(subject, model, self.kernelize)
        chance, alive = random.Random(history.seed), ({}, {})
        with ours.at_work(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.kernelize(model, history.level, chance.choice((Mode.TRAINING, Mode.INFERENCE)))
        del model
        try:
            for number, (name, seed, plain) in enumerate(history.operations):
                function, _, _, of_ours = OPERATIONS[name]
                results, message = [], ""
                for world in (theirs, ours):
                    if of_ours and world is theirs:
                        results.append([])
                        continue
                    draw = Draw(seed, plain)
                    torch.manual_seed(seed)
                    with world.at_work(), warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        try:
                            result = function(world, draw)
                            result = [] if of_ours else result
                        except Exception as error:
                            # Values that the exception's frames hold are not kept alive.
                            result = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    raised = isinstance(result, str)
                    state = torch.get_rng_state()
                    results.append([result.split(":")[0] if raised else result, list(world.seen), state])
                    world.seen.clear()
                    message = f"{message} {result if raised else ''}"
                    for each in (*world.model.modules(), *world.model.parameters()):
                        alive[world is ours][id(each)] = type(each).__name__, weakref.ref(each)
                    each = None
                told.append(f"{number}: {name} {', '.join(draw.told)}".rstrip())
                if not of_ours:
                    try:
                        compare(results[1][0], results[0][0], "result")
                        if not isinstance(results[0][0], str):  # Before it raised, the engine may have taken another way.
                            compare(results[1][1], results[0][1], "what hooks saw")
                        compare(results[1][2], results[0][2], "random state")
                    except Difference as difference:
                        raise Difference(f"operation {number}, {name}: {difference} {message}".strip()) from None
                results = result = None
        finally:
            # Hooks that hold a model, in a graph that it holds, are a cycle that Python does not see.
            for world in (theirs, ours):
                vars(world).clear()
            # autograd keeps the graph of a backward pass that raised until the next one.
            torch.ones((), requires_grad=True).mul(1.0).backward()
        return alive

    def problem(self, history, told=None):
        """What is wrong with a history, None if nothing."""
        try:
            self.run(history, told)
        except Difference as difference:
            return str(difference)
        return None

    def shrink(self, history):
        """The history with as few operations and as plain draws as fail in the same way."""

        def fails(operations):
            return self.problem(History(history.subject, history.level, history.seed, operations)) is not None

        operations, before = history.operations, None
        while before != operations:
            before = operations
            for index in reversed(range(len(operations))):
                fewer = operations[:index] + operations[index + 1 :]
                if fails(fewer):
                    operations = fewer
        for index, (name, seed, plain) in enumerate(operations):
            for draw in range(12):
                plainer = [*operations[:index], (name, seed, (*operations[index][2], draw)), *operations[index + 1 :]]
                if fails(plainer):
                    operations = plainer
        return History(history.subject, history.level, history.seed, operations)

    def report(self, history):
        """A failing history, shrunk, as text."""
        small = self.shrink(history)
        told = []
        problem = self.problem(small, told)
        return "\n".join([f"python tests/histories.py --repeat \"{small}\"", *(f"    {line}" for line in told), f"    {problem}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="of the first history; the others follow it")
    parser.add_argument("--level", choices=LEVELS, nargs="+", help="the level to kernelize at (default: any)")
    parser.add_argument("--subject", choices=[*SUBJECTS], nargs="+", help="what to kernelize (default: any)")
    parser.add_argument("--repeat", metavar="HISTORY", help="run one history, as a failure names it")
    parser.add_argument("--build", type=Path, default=Path(__file__).parent.parent / "build")
    parser.add_argument("--leave-out", nargs="*", default=[], metavar="OPTION", help="draws' options to leave out")
    parser.add_argument("--arithmetic", choices=("cpu", "triton"), default="cpu")
    arguments = parser.parse_args()
    LEFT_OUT.update(arguments.leave_out)
    torch.set_num_threads(1)
    logging.getLogger("kernels").setLevel(logging.ERROR)
    kernel = get_local_kernel(arguments.build.absolute())
    with cpu_arithmetic(kernel.__name__) if arguments.arithmetic == "cpu" else contextlib.nullcontext():
        runner = Runner(kernel)
        if arguments.repeat:
            told = []
            problem = runner.problem(History.parse(arguments.repeat), told)
            print(*told, problem or "no difference", sep="\n")
            return int(problem is not None)
        from rich.progress import track

        first = arguments.seed if arguments.seed is not None else random.randrange(1 << 30)
        print(f"seed {first}")
        failed = 0
        for seed in track(range(first, first + arguments.histories), "histories"):
            history = History.random(seed, arguments.subject, arguments.level)
            if runner.problem(history) is not None:
                failed += 1
                print(runner.report(history), flush=True)
        print(f"{arguments.histories} histories, {failed} failed")
        return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
