"""Random histories of small models: the same operations on a model and on its kernelized twin, compared after each of them.

python tests/histories.py --histories 10000 --processes 2      prints every history that fails, shrunk
python tests/histories.py --repeat "Llama decoder 17 forward=12 backward=34:0:2"

A history is a subject, a level, the seed of its weights, and operations, each with a seed for what it draws and with the numbers of
the draws that shrinking has made plain. Outputs, gradients, what hooks saw and the random state have to be the same in both models,
tensors in bits, dtype and strides, and where one model raises the other has to, too. Afterwards nothing of either may be alive.

`--arithmetic cpu`: in place of each compiled kernel runs the eager formula that it stands for (`cpu_kernels.py`). The proof, which is
on, admits these, so this tests everything but the kernels: what is recognised and remembered, graphs, hooks, modes, memory.
`--arithmetic triton`: Triton's interpreter runs the kernels, and the proof refuses those whose bits are CUDA's and not the CPU's.
"""

import argparse
import collections
import contextlib
import copy
import functools
import gc
import logging
import multiprocessing
import os
import random
import sys
import warnings
import weakref
from pathlib import Path
from types import FunctionType

os.environ.update(TRITON_INTERPRET="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("LOSSLESS_PROOF", "on")

import cpu_kernels
import decorated  # noqa: F401
import torch
import torch.nn.functional as F
import transformers
from bits import bits_equal
from graphs import Around, add_rms_norm, cross_entropy, linear_cross_entropy
from kernels import Mode, get_local_kernel, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from places import modeling, name_of_cache, python_module
from torch import nn
from torch.autograd import forward_ad, graph
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.activations import ACT2FN
from transformers.loss.loss_utils import ForCausalLMLoss

HIDDEN, VOCABULARY = 64, 32
LEVELS = ("layer", "mlp", "decoder")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FILES = ("llama", "qwen2", "qwen3", "gemma", "qwen3_5", "qwen3_next", "phi3", "t5", "cohere")
LLAMA, QWEN2, QWEN3, GEMMA, QWEN3_5, QWEN3_NEXT, PHI3, T5, COHERE = map(modeling, FILES)
SIZES = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "intermediate_size": 72, "num_attention_heads": 2, "head_dim": 64,
         "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": None,
         "bos_token_id": None, "eos_token_id": None}  # fmt: skip


# What is known to differ (docs/limits.md): an option that is not drawn, or what is not compared. `--known` leaves out nothing.
LEFT_OUT = {
    "keys": "where a key alone has a gradient, the query's weights may get zeros instead of None",
    "hooks that get None": "hooks are called with None where another output of a fused operation has a gradient",
    "hooks of the sum": "where a norm's weight alone is differentiated, hooks of what comes after the sum are called",
    "dtypes of GroupNorm": "create_graph raises where GroupNorm's weight has another dtype than in the forward pass",
}


class Draw:
    """What an operation draws, the same for both models. The first option is the plainest: shrinking goes there."""

    def __init__(self, seed, plain=()):
        self.random, self.plain, self.asked, self.told = random.Random(seed), plain, 0, []

    def pick(self, what, *options):
        options = [option for option in options if not isinstance(option, str) or option not in LEFT_OUT]
        chosen = self.random.choice(options)
        if self.asked in self.plain:
            chosen = options[0]
        self.asked += 1
        if chosen is not options[0]:
            self.told.append(f"{what}: {chosen}")
        return chosen

    def rarely(self, what, *options):
        """`pick`, that takes the first option three times out of four."""
        return self.pick(what, *options[:1] * 3 * (len(options) - 1), *options[1:])

    def _generator(self):
        return torch.Generator().manual_seed(self.random.randrange(1 << 30))

    def normal(self, *shape, dtype=torch.float32):
        return torch.randn(shape, generator=self._generator()).to(dtype)

    def like(self, tensor):
        return self.normal(*tensor.shape, dtype=tensor.dtype)

    def tokens(self, *shape):
        return torch.randint(VOCABULARY, shape, generator=self._generator())


# Subjects


class Subject:
    """Makes layers of one kind and what they are called with.

    Args:
        names: layer names that classes get first.
        inputs: how many tensors a call takes.
        keeps_copies: of its weight eager keeps a copy for the backward pass, in which ours sees or refuses what was written
            to the weight since (docs/limits.md).
    """

    is_decoder = False

    def __init__(self, make, names=None, inputs=1, keeps_copies=False):
        self.make, self.names, self.inputs, self.keeps_copies = make, names or {}, inputs, keeps_copies

    def __call__(self, seed):
        torch.manual_seed(seed)
        model = self.make()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
        return model.eval()

    def arguments(self, world, draw):
        """Leaves whose gradients may be asked for, and what the model is called with."""
        shape = draw.pick("shape", (2, 3, 64), (5, 64), (1, 64), (1, 1, 64), (0, 64), (64,), (17, 64), (2, 2, 3, 64))
        dtype = draw.rarely("dtype", world.dtype(), *DTYPES.values())
        numbers = functools.partial(draw.normal, dtype=dtype)
        # Of a transposed row eager's norm keeps the strides and ours does not: a product of it may then have other bits.
        rows = 0 if len(shape) == 1 else 1
        swapped = (shape[1], shape[0], *shape[2:]) if rows else shape
        make, view = draw.rarely("layout", *{
            "contiguous": (lambda: numbers(*shape), lambda x: x.view_as(x)),
            "transposed": (lambda: numbers(*swapped), lambda x: x.transpose(0, rows)),
            "columns of wider": (lambda: numbers(*shape[:-1], 68), lambda x: x[..., :64]),
            "every other column": (lambda: numbers(*shape[:-1], 128), lambda x: x[..., ::2]),
            "expanded": (lambda: numbers(64), lambda x: x.expand(shape)),
            "not aligned": (lambda: numbers(torch.Size(shape).numel() + 1), lambda x: x[1:].view(shape)),
        }.items())[1]  # fmt: skip
        kind = draw.rarely(
            "input", "needs grad", "needs none", "is no leaf", "is no leaf and has a hook", "of inference mode"
        )
        leaves, given = [], []
        for number in range(self.inputs):
            with torch.inference_mode(kind == "of inference mode"):
                leaf = make()
                x = view(leaf.requires_grad_(kind.startswith(("needs grad", "is no leaf"))))
                x = x * 1.0 if kind.startswith("is no leaf") else x
            if kind.endswith("hook"):
                x.register_hook(functools.partial(world.saw, f"gradient of input {number}"))
            leaves += [leaf] * leaf.requires_grad
            given.append(x)
        return leaves, given, {}


class Decoder(Subject):
    is_decoder = True

    def __init__(self, name, keeps_copies=False, **changes):
        config, model = (getattr(transformers, f"{name}{kind}") for kind in ("Config", "ForCausalLM"))
        super().__init__(lambda: model(config(**SIZES | changes)), keeps_copies=keeps_copies)

    def arguments(self, world, draw):
        batch, tokens = draw.pick("batch and tokens", (2, 3), (1, 1), (1, 3), (2, 1), (1, 5))
        named = {"use_cache": False}
        if world.cache is not None:
            batch, tokens = world.cache_batch, draw.pick("more tokens", 1, 2)
            named = {"use_cache": True, name_of_cache(): world.cache}
        elif draw.rarely("mask", None, "padding") and tokens > 1:
            named["attention_mask"] = (torch.arange(batch * tokens) > 0).long().view(batch, tokens)
        if draw.rarely("labels", None, "labels"):
            labels = draw.tokens(batch, tokens)
            named["labels"] = labels.masked_fill(labels % 5 == 0, -100)
            if divisor := draw.pick("num_items_in_batch", None, 3, torch.tensor(7)):
                named["num_items_in_batch"] = divisor
        if draw.rarely("given", "ids", "embeddings") == "ids":
            return [], [draw.tokens(batch, tokens)], named
        leaf = draw.normal(batch, tokens, HIDDEN, dtype=world.dtype()).requires_grad_()
        return [leaf], [], {"inputs_embeds": leaf, **named}


class Tied(nn.Module):
    """One norm called three times; its inputs and the activation's have other consumers too."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = LLAMA.LlamaRMSNorm(HIDDEN), LLAMA.LlamaMLP(transformers.LlamaConfig(**SIZES))
        self.act = ACT2FN["silu"]

    def forward(self, x):
        y = x + self.mlp(self.norm(x))
        return self.norm((self.norm(y) * y + self.act(y)) * 2.0) + x


class Block(nn.Module):
    """An MLP between LayerNorms, with a residual; the last has no bias."""

    def __init__(self):
        super().__init__()
        self.input_layernorm, self.norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN, eps=1e-3, bias=False)
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, 72), nn.Linear(72, HIDDEN)
        self.act = ACT2FN["gelu_new"]

    def forward(self, x):
        return self.norm(x + self.down_proj(self.act(self.up_proj(self.input_layernorm(x)))))


class OfChannels(nn.Module):
    """A GroupNorm of rows, each a sample whose channels have two positions."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, HIDDEN // 2)

    def forward(self, x):
        return self.norm(x.reshape(-1, HIDDEN // 2, 2)).view(x.shape)


class Function(Around):
    """A public function of the package, in the place of eager's while the model is kernelized."""

    def __init__(self, name, *arguments):
        super().__init__(*arguments)
        self.name, self.eager = name, self.f


def of_targets(f, x, *weights):
    """A loss of rows of x, some of which do not count."""
    rows = x.reshape(-1, HIDDEN)
    target = torch.arange(len(rows)) % 7
    return f(rows, *weights[:1], target.masked_fill(target == 3, -100), *weights[1:])


def silu_and_mul(gate, up):
    return F.silu(gate) * up


SUBJECTS = {
    "Llama": Decoder("Llama"),
    "Qwen2": Decoder("Qwen2", num_hidden_layers=1),
    "Qwen3": Decoder("Qwen3"),
    "Gemma": Decoder("Gemma", num_hidden_layers=1, keeps_copies=True),
    "Tied": Subject(Tied),
    "LlamaRMSNorm": Subject(lambda: LLAMA.LlamaRMSNorm(HIDDEN)),
    "Qwen3_5RMSNorm": Subject(lambda: QWEN3_5.Qwen3_5RMSNorm(HIDDEN), keeps_copies=True),
    "GemmaRMSNorm": Subject(
        lambda: GEMMA.GemmaRMSNorm(HIDDEN), {GEMMA.GemmaRMSNorm: "RMSNormZeroCentered"}, keeps_copies=True
    ),
    "T5LayerNorm": Subject(lambda: T5.T5LayerNorm(HIDDEN), {T5.T5LayerNorm: "RMSNorm"}),
    "RMSNorm": Subject(lambda: nn.RMSNorm(HIDDEN, eps=1e-6), {nn.RMSNorm: "TorchRMSNorm"}),
    "LayerNorm": Subject(lambda: nn.LayerNorm(HIDDEN), {nn.LayerNorm: "TorchLayerNorm"}),
    "GroupNorm": Subject(OfChannels, {nn.GroupNorm: "TorchGroupNorm"}),
    "CohereLayerNorm": Subject(
        lambda: COHERE.CohereLayerNorm(HIDDEN), {COHERE.CohereLayerNorm: "CohereLayerNorm"}, keeps_copies=True
    ),
    "Block": Subject(Block, {nn.LayerNorm: "TorchLayerNorm"}),
    "RMSNormGated": Subject(lambda: QWEN3_NEXT.Qwen3NextRMSNormGated(HIDDEN), inputs=2),
    "LlamaMLP": Subject(lambda: LLAMA.LlamaMLP(transformers.LlamaConfig(**SIZES)), {LLAMA.LlamaMLP: "SwiGLUMLP"}),
    "GemmaMLP": Subject(lambda: GEMMA.GemmaMLP(transformers.GemmaConfig(**SIZES)), {GEMMA.GemmaMLP: "GeGLUMLP"}),
    # Whole vectors in each row: a CPU's SiLU has other bits for the rest of a row, and a saved copy of a half is dense.
    "Phi3MLP": Subject(
        lambda: PHI3.Phi3MLP(transformers.LlamaConfig(**{**SIZES, "intermediate_size": 64})), {PHI3.Phi3MLP: "Phi3MLP"}
    ),
    "SiLU": Subject(nn.SiLU, {nn.SiLU: "SiLU"}),
    "GELU": Subject(lambda: nn.GELU("tanh"), {nn.GELU: "GeLU"}),
    **{
        name: Subject(lambda name=name: ACT2FN[name])
        for name in ("silu", "gelu", "gelu_new", "gelu_fast", "quick_gelu")
    },
    "softmax": Subject(lambda: Function("softmax", F.softmax, lambda f, x: f(x, dim=-1))),
    "silu_and_mul": Subject(lambda: Function("silu_and_mul", silu_and_mul, lambda f, *xs: f(*xs)), inputs=2),
    "fused_add_rms_norm": Subject(
        # Products have the outputs' strides and gradients of their own: that of the sum itself lacks a part (docs/limits.md).
        lambda: Function(
            "fused_add_rms_norm", add_rms_norm, lambda f, *given: tuple(1.0 * out for out in f(*given, 1e-6)), HIDDEN
        ),
        inputs=2,
    ),
    "layer_norm": Subject(
        lambda: Function("layer_norm", F.layer_norm, lambda f, x, *vectors: f(x, (HIDDEN,), *vectors), HIDDEN, HIDDEN)
    ),
    "cross_entropy": Subject(lambda: Function("cross_entropy", cross_entropy, of_targets)),
    "linear_cross_entropy": Subject(
        lambda: Function("linear_cross_entropy", linear_cross_entropy, of_targets, (VOCABULARY, HIDDEN), VOCABULARY)
    ),
}
# How often each is drawn: a few hundred histories launch every kernel.
OFTEN = {"Llama": 7, "Qwen3": 5, "Tied": 3, "softmax": 3, "GroupNorm": 3, "CohereLayerNorm": 3}


# A model in the course of a history


@functools.cache
def rotary_functions():
    """The modules that kernels has made of functions of model files."""
    return [file.apply_rotary_pos_emb for file in (LLAMA, QWEN2, QWEN3, GEMMA)]


def tensors_of(out):
    out = (out.loss, out.logits) if hasattr(out, "logits") else out
    return [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]


class World:
    """One of the two models, and all that a history has made of it."""

    def __init__(self, subject, model, kernelize=None):
        self.subject, self.model, self.kernelize = subject, model, kernelize
        self.seen, self.handles, self.pending = [], [], []
        self.cache = self.cache_batch = None
        self.rotations = {}

    def dtype(self):
        return next((p.dtype for p in self.model.parameters()), torch.float32)

    def needing(self):
        return [p for p in self.model.parameters() if p.requires_grad]

    def saw(self, what, *tensors):
        """Remembers what a hook was given."""
        if "hooks that get None" in LEFT_OUT:
            tensors = [tensor for tensor in tensors if tensor is not None]
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.is_legacy_batchedtensor
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                in_transform = any(is_wrapped(tensor) for is_wrapped in wrapped)
                tensor = f"{list(tensor.shape)} in a transform" if in_transform else tensor.detach().clone()
            self.seen.append((what, tensor))

    def part(self, draw, *suffixes):
        """A module whose name ends so, or the model itself."""
        found = [m for name, m in self.model.named_modules() if name.endswith(suffixes)] or [self.model]
        return found[draw.pick("number", 0, 1, 2) % len(found)]

    def writes_weights(self):
        if self.subject.keeps_copies:
            self.pending.clear()

    @contextlib.contextmanager
    def at_work(self):
        """kernelize replaces a file's rotary function for all models: here for this one alone."""
        for function in rotary_functions():
            vars(function).pop("forward", None)
        for function, forward in self.rotations.items():
            function.forward = forward
        try:
            yield
        finally:
            self.rotations = {f: vars(f).pop("forward") for f in rotary_functions() if "forward" in vars(f)}


# What is around a forward or a backward pass


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        return operator(*arguments, **(named or {}))


class Between(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), named=None):
        return function(*arguments, **(named or {}))


@contextlib.contextmanager
def global_hooks(world):
    handle = register_module_forward_hook(lambda m, given, out: world.saw(type(m).__name__, *tensors_of(out)))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def other_forward(world):
    """Another forward of a class, which all models share.

    Not of a checkpointed model, whose backward pass would compute another function than its forward pass.
    """
    if getattr(world.model, "is_gradient_checkpointing", False):
        yield
        return
    # In the order of modules: parametrized classes have one name.
    owners = dict.fromkeys(type(module) for module in world.model.modules() if "Norm" in type(module).__name__)
    owner = min(owners or {ACT2FN["silu"].__class__}, key=str)
    original, own = owner.forward, "forward" in vars(owner)
    owner.forward = lambda self, *given, **named: 2.0 * original(self, *given, **named)
    try:
        yield
    finally:
        setattr(owner, "forward", original) if own else delattr(owner, "forward")


def forward_mode(world):
    """Not of a checkpointed model: docs/limits.md has it."""
    checkpointed = getattr(world.model, "is_gradient_checkpointing", False)
    return contextlib.nullcontext() if checkpointed else forward_ad.dual_level()


def tensors_elsewhere():
    """`torch.autograd.graph.save_on_cpu` as it acts on a GPU's tensors. On the CPU it copies nothing, so that operations that
    save their own result, such as rsqrt, are never freed, eager's no less than those of our second derivatives."""
    return graph.saved_tensors_hooks(lambda t: (t.device, t.clone()), lambda packed: packed[1].to(packed[0]))


AROUND = {
    "nothing": lambda world: contextlib.nullcontext(),
    "a FLOP counter": lambda world: FlopCounterMode(display=False),
    "a dispatch mode": lambda world: Watching(),
    "a function mode": lambda world: Between(),
    "autocast to float16": lambda world: torch.autocast("cpu", dtype=torch.float16),
    "autocast to bfloat16": lambda world: torch.autocast("cpu", dtype=torch.bfloat16),
    "packed tensors": lambda world: graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "tensors on the CPU": lambda world: tensors_elsewhere(),
    "anomaly mode": lambda world: torch.autograd.set_detect_anomaly(True),
    "hooks on all modules": global_hooks,
    "another forward": other_forward,
    "a level of forward-mode AD": forward_mode,
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


# Operations: `operation(world, draw)`, what it returns is compared


OPERATIONS = {}


def operation(weight, decoder=None, ours=False):
    """One that is drawn so often, for decoders alone (True), layers alone (False) or both; `ours`: for the kernelized model."""

    def register(function):
        OPERATIONS[function.__name__] = function, weight, decoder, ours
        return function

    return register


@operation(10)
def forward(world, draw):
    mode, around = draw.pick("mode", "grad", "no_grad", "inference", "grad", "no_grad"), draw.rarely("under", *AROUND)
    leaves, given, named = world.subject.arguments(world, draw)
    with MODES[mode](), AROUND[around](world):
        outs = tensors_of(world.model(*given, **named))
    if any(out.requires_grad for out in outs):
        world.pending.append((outs, leaves))
    return outs


@operation(8)
def calls_again(world, draw):
    """Calls of the same shape, which are recognised and recorded."""
    mode = draw.pick("mode", "no_grad", "grad", "inference")
    leaves, given, named = world.subject.arguments(world, draw)
    with MODES[mode]():
        return [tensors_of(world.model(*given, **named)) for _ in range(3)]


BACK = ("backward", "twice", "of inputs", "of weights", "zeros", "of a sum", "create_graph", "second derivatives")


def step_back(world, draw, how, outs, leaves):
    weights, outs = world.needing(), [out for out in outs if out.requires_grad]
    if how == "of weights" and world.subject is SUBJECTS["fused_add_rms_norm"] and "hooks of the sum" in LEFT_OUT:
        outs = outs[:1]
    dys, inputs = [*map(draw.like, outs)], [*leaves, *weights]
    if how.startswith("of ") and how != "of a sum":
        inputs = leaves or weights if how == "of inputs" else weights or leaves
        return torch.autograd.grad(outs, inputs, dys, allow_unused=True)
    other_dtypes = outs and weights and outs[0].dtype != weights[0].dtype
    if other_dtypes and world.subject is SUBJECTS["GroupNorm"] and "dtypes of GroupNorm" in LEFT_OUT:
        how = BACK[0]
    if how in ("create_graph", "second derivatives"):
        first = torch.autograd.grad(outs, inputs, dys, allow_unused=True, create_graph=True)
        if how == "create_graph":
            return first
        again = [g for g in first if g is not None and g.requires_grad]
        seen, world.seen = world.seen, []
        second = torch.autograd.grad(again, inputs, [*map(draw.like, again)], allow_unused=True)
        world.seen = seen + [(what, nearly(g)) for what, g in world.seen]
        return first, [*map(nearly, second)]
    if how == "twice":
        torch.autograd.backward(outs, dys, retain_graph=True)
    given = {
        "zeros": [*map(torch.zeros_like, outs)],
        "of a sum": [torch.ones(()).to(o.dtype).expand_as(o) for o in outs],
    }
    torch.autograd.backward(outs, given.get(how, dys))
    return [tensor.grad for tensor in inputs]


@operation(8)
def backward(world, draw):
    how, around = draw.pick("how", *BACK), draw.rarely("under", *AROUND)
    if world.pending:
        with AROUND[around](world):
            return step_back(world, draw, how, *world.pending.pop())


@operation(8)
def training_step(world, draw):
    how, rate = draw.rarely("how", *BACK), draw.pick("rate", 0.0, 0.01)
    forward_under, backward_under = (draw.rarely(f"{what} under", *AROUND) for what in ("forward", "backward"))
    leaves, given, named = world.subject.arguments(world, draw)
    with AROUND[forward_under](world):
        outs, found = tensors_of(world.model(*given, **named)), None
    if any(out.requires_grad for out in outs):
        with AROUND[backward_under](world):
            found = step_back(world, draw, how, outs, leaves)
        world.writes_weights()
        with torch.no_grad():
            for parameter in world.needing():
                if parameter.grad is not None and rate:
                    parameter.sub_(rate * parameter.grad)
    return outs, found


@operation(2)
def forget_gradients(world, draw):
    world.model.zero_grad(set_to_none=draw.pick("to none", True, False))


@operation(2, decoder=True)
def start_cache(world, draw):
    world.cache_batch, config = draw.pick("batch", 1, 2), world.model.config
    kind = draw.pick("kind", "dynamic", "static", "none")
    make = {
        "dynamic": transformers.DynamicCache,
        "static": functools.partial(transformers.StaticCache, max_cache_len=32),
    }
    world.cache = make[kind](config=config) if kind in make else None


@operation(3, decoder=True)
def generate(world, draw):
    options = draw.pick(
        "options", *({"cache_implementation": kind} for kind in ("dynamic", "static")), {"use_cache": False}
    )
    given = draw.tokens(draw.pick("batch", 1, 2), 3)
    kept = {"output_logits": True, "return_dict_in_generate": True}
    out = world.model.generate(given, max_new_tokens=draw.pick("new", 4, 2), do_sample=False, **options, **kept)
    return out.sequences, out.logits


@operation(2, decoder=True)
def checkpointing(world, draw):
    kind = draw.pick("kind", "not reentrant", "reentrant", "none")
    enable, disable = world.model.gradient_checkpointing_enable, world.model.gradient_checkpointing_disable
    disable() if kind == "none" else enable({"use_reentrant": kind == "reentrant"})


@operation(2, decoder=True)
def attention(world, draw):
    world.model.set_attn_implementation(draw.pick("attention", "sdpa", "eager"))


@operation(2, decoder=True)
def gradients_of_parts(world, draw):
    """Of what a layer returns, or of cached keys or values: what else is computed has no gradient."""
    of, number = draw.pick("of", "keys", "values", "hidden states"), draw.pick("layer", -1, 0)
    cache = transformers.DynamicCache(config=world.model.config)
    out = world.model(draw.tokens(1, 3), **{name_of_cache(): cache}, output_hidden_states=of == "hidden states")
    part = out.hidden_states[number] if of == "hidden states" else getattr(cache.layers[number], of)
    return part, torch.autograd.grad(part, world.needing(), draw.like(part), allow_unused=True)


PARTS = ("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "mlp", "act_fn", "act", "self_attn", "layers.0",
         "up_proj", "o_proj")  # fmt: skip


@operation(5)
def add_hook(world, draw):
    module = world.part(draw, draw.pick("part", *PARTS))
    saw = functools.partial(world.saw, f"hook on {type(module).__name__}")

    def watch(tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(saw)

    def twice(given):
        return tuple(2.0 * x if torch.is_tensor(x) and x.is_floating_point() else x for x in given)

    hooks = {
        "sees outputs": ("forward_hook", lambda m, given, out: saw(*tensors_of(out))),
        "changes outputs": ("forward_hook", lambda m, given, out: twice(out) if type(out) is tuple else 2.0 * out),
        "sees inputs": ("forward_pre_hook", lambda m, given: saw(*tensors_of(given))),
        "changes inputs": ("forward_pre_hook", lambda m, given: twice(given)),
        "sees gradients": ("full_backward_hook", lambda m, dx, dy: saw(*dx, *dy)),
        "sees incoming gradients": ("full_backward_pre_hook", lambda m, dy: saw(*dy)),
        "changes gradients": ("full_backward_hook", lambda m, dx, dy: twice(dx)),
        "hooks its input": ("forward_pre_hook", lambda m, given: watch(given)),
        "hooks its output": ("forward_hook", lambda m, given, out: watch(tensors_of(out))),
    }
    register, hook = hooks[draw.pick("kind", *hooks)]
    world.handles.append(getattr(module, f"register_{register}")(hook))


@operation(4)
def remove_hook(world, draw):
    if world.handles:
        world.handles.pop(draw.pick("which", -1, 0)).remove()


@operation(2)
def hook_on_weight(world, draw):
    if weights := world.needing():
        weight = weights[draw.random.randrange(len(weights))]
        world.handles.append(weight.register_hook(functools.partial(world.saw, "gradient of a weight")))


@operation(5)
def change_weight(world, draw):
    module, dtype = world.part(draw, "norm", "proj"), draw.pick("dtype", *DTYPES.values())
    how = draw.pick(
        "how", "copy", "another", "data", "needs none", "needs grad", "bias", "none", "no grad", "tensor", "dtype"
    )
    weight = module._parameters.get("weight")
    if weight is None:
        return
    values = draw.like(weight)
    if how in ("copy", "data", "dtype"):
        world.writes_weights()
    if how == "copy":
        with torch.no_grad():
            weight.copy_(values)
    elif how == "another" or (how == "none" and isinstance(module, (nn.RMSNorm, nn.LayerNorm))):
        module.weight = None if how == "none" else nn.Parameter(values)
    elif how in ("data", "dtype"):
        weight.data = values if how == "data" else values.to(dtype)
    elif how.startswith("needs"):
        weight.requires_grad_(how == "needs grad")
    elif how == "bias" and isinstance(module, nn.Linear):
        module.bias = nn.Parameter(draw.normal(module.out_features, dtype=weight.dtype))
    elif how == "no grad":
        weight.grad = None
    elif how == "tensor":
        del module.weight
        module.weight = values


@operation(2)
def change_eps(world, draw):
    module, eps = world.part(draw, "norm"), draw.pick("eps", 0.5, 1e-6, 0.01, 1)
    for name in ("variance_epsilon", "eps"):
        if hasattr(module, name):
            setattr(module, name, eps)


@operation(2)
def move_dtype(world, draw):
    world.writes_weights()
    world.model.to(draw.pick("dtype", *DTYPES.values()))
    world.cache = None


@operation(2)
def train_or_eval(world, draw):
    world.model.train(draw.pick("train", True, False))


@operation(2)
def freeze(world, draw):
    which, needed = draw.pick("which", "all", "norms", "matrices"), draw.pick("needs grad", False, True)
    for parameter in world.model.parameters():
        if which == "all" or (parameter.dim() == 1) == (which == "norms"):
            parameter.requires_grad_(needed)


@operation(2)
def deep_copy(world, draw):
    for handle in world.handles:  # Copies of hooks would tell this world too.
        handle.remove()
    world.handles, world.pending, world.cache = [], [], None
    world.model = copy.deepcopy(world.model)


@operation(1)
def load_state(world, draw):
    world.writes_weights()
    state = {name: 1.5 * v if v.is_floating_point() else v for name, v in world.model.state_dict().items()}
    world.model.load_state_dict(state, assign=draw.pick("assign", False, True))


class LoRA(nn.Module):
    def __init__(self, base, draw):
        super().__init__()
        self.base, rank = base, 2
        shapes = (rank, base.in_features), (base.out_features, rank)
        self.down, self.up = (nn.Parameter(draw.normal(*shape, dtype=base.weight.dtype)) for shape in shapes)

    def forward(self, x):
        return self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)


class Noisy(nn.Module):
    def forward(self, weight):
        return weight + torch.randn_like(weight)


class Detached(nn.Module):
    def forward(self, x):
        return x.detach()


class GeluMLP(LLAMA.LlamaMLP):
    def forward(self, x):
        return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))


class LouderMLP(LLAMA.LlamaMLP):
    def forward(self, x):
        return 2.0 * super().forward(x)


class LouderNorm(LLAMA.LlamaRMSNorm):
    def forward(self, hidden_states):
        return 2.0 * super().forward(hidden_states)


@operation(5)
def change_module(world, draw):
    how = draw.pick("how", "LoRA", "parametrized", "activation", "gelu MLP", "louder MLP", "louder norm", "tied", "tanh",
                    "detached", "function", "own forward", "dropout", "attribute")  # fmt: skip
    linear, norm, mlp = (world.part(draw, suffix) for suffix in ("proj", "norm", "mlp"))
    act_fn = draw.pick("act_fn", nn.SiLU, nn.GELU, nn.ReLU, nn.Tanh, type(ACT2FN["gelu_new"]), type(ACT2FN["silu"]))
    parents = {id(child): (parent, name) for parent in world.model.modules() for name, child in parent.named_children()}

    def replace(module, other):
        if id(module) in parents:
            parent, name = parents[id(module)]
            delattr(parent, name)  # Another's type may be that of no module.
            setattr(parent, name, other)

    if how == "LoRA" and type(linear) is nn.Linear:
        replace(linear, LoRA(linear, draw))
    elif how == "parametrized" and norm._parameters.get("weight") is not None:
        world.writes_weights()  # By `set_`.
        nn.utils.parametrize.register_parametrization(norm, "weight", Noisy())
    elif how == "activation" and hasattr(mlp, "act_fn"):
        mlp.act_fn = act_fn()
    elif how.endswith("MLP") and type(mlp) is LLAMA.LlamaMLP:
        mlp.__class__ = GeluMLP if how == "gelu MLP" else LouderMLP
    elif how == "louder norm" and type(norm) is LLAMA.LlamaRMSNorm:
        norm.__class__ = LouderNorm
    elif how == "tied":
        replace(world.part(draw, "norm"), norm)
    elif how in ("tanh", "detached"):
        replace(mlp, nn.Sequential(mlp, nn.Tanh() if how == "tanh" else Detached()))
    elif how == "function":
        replace(norm, lambda x: 2.0 * x)
    elif how == "own forward":
        original = type(norm).forward
        norm.forward = lambda *given, original=original: 3.0 * original(norm, *given)
    elif how == "dropout":
        for module in world.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
    elif how == "attribute":
        norm.something = draw.normal(3)


@operation(4, ours=True)
def kernelize_again(world, draw):
    """At another level, or back to the original layers."""
    world.kernelize(world.model, draw.pick("level", *LEVELS, None), draw.pick("mode", Mode.TRAINING, Mode.INFERENCE))


@operation(4, ours=True)
def recompute_products(world, draw):
    """The backward pass computes an MLP's product again, or no longer."""
    with contextlib.suppress(ValueError):  # There may be no MLP.
        world.kernelize.__self__.kernel.recompute_products(world.model, draw.pick("recompute", True, False))


@operation(5, decoder=False)
def transform(world, draw):
    """functorch, forward-mode AD, batched gradients."""
    model, func = world.model, torch.func
    kind = draw.pick("kind", "vmap", "functional_call", "grad", "vjp", "jvp", "dual", "vmap of grad", "batched")
    xs = tuple(draw.normal(4, HIDDEN, dtype=world.dtype()) for _ in range(world.subject.inputs))
    vs = tuple(map(draw.like, xs))
    if kind == "functional_call":
        return func.functional_call(model, {name: 1.5 * p.detach() for name, p in model.named_parameters()}, xs)
    if kind == "vjp":
        out, back = func.vjp(model, *xs)
        return out, back(torch.ones_like(out))
    if kind == "dual":
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(model(*map(forward_ad.make_dual, xs, vs))))
    if kind == "batched":
        out = model(*(x.requires_grad_() for x in xs))
        return torch.autograd.grad(out, xs, torch.stack([draw.like(out)] * 2), is_grads_batched=True)
    gradient = func.grad(lambda *xs: model(*xs).sum())
    calls = {"vmap": torch.vmap(model), "grad": gradient, "vmap of grad": torch.vmap(gradient)}
    return func.jvp(model, xs, vs) if kind == "jvp" else calls[kind](*xs)


# Comparison


class Difference(Exception):
    """What differs, as a sentence."""


class Nearly:
    """A second derivative: of eager's formula, added up in another order (docs/numerics.md)."""

    def __init__(self, tensor):
        self.tensor = tensor


def nearly(value):
    return Nearly(value) if isinstance(value, torch.Tensor) else value


def summary(value):
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(summary, value))}]"
    return f"tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def facts(tensor):
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.is_inference()


def compare(ours, theirs, where):
    """Raises Difference unless these are alike, tensors bit for bit."""
    if isinstance(theirs, (tuple, list)) and isinstance(ours, (tuple, list)) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs)):
            compare(*pair, f"{where}[{number}]")
    elif isinstance(theirs, Nearly) and isinstance(ours, Nearly) and ours.tensor.shape == theirs.tensor.shape:
        ours, theirs = ours.tensor.float(), theirs.tensor.float()
        # bf16 has 8 binary digits, and a sum's terms may be as large as its largest result.
        size = theirs.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if theirs.numel() else 0.0
        if not torch.allclose(ours, theirs, rtol=0.02, atol=0.02 * max(size, 1e-3), equal_nan=True):
            raise Difference(f"{where}: second derivatives {(ours - theirs).abs().max():.3g} apart, of {size:.3g}")
    elif isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        if facts(ours) != facts(theirs):
            raise Difference(f"{where}: {facts(ours)} instead of {facts(theirs)}")
        if not bits_equal(ours.detach(), theirs.detach()):
            a, b = ours.detach().double(), theirs.detach().double()
            far = f"{(a - b).abs().max():.3g} of {b.abs().max():.3g}"
            raise Difference(f"{where}: {(a != b).sum()} of {a.numel()} elements differ, by {far}")
    elif summary(ours) != summary(theirs):
        raise Difference(f"{where}: {summary(ours)} instead of {summary(theirs)}")


# Histories


class History:
    """A subject, a level, a seed and `(name, seed, plain draws)` for each operation."""

    def __init__(self, subject, level, seed, operations):
        self.subject, self.level, self.seed, self.operations = subject, level, seed, operations

    @classmethod
    def random(cls, seed, subjects=None, levels=None):
        chance, subjects = random.Random(seed), subjects or [*SUBJECTS]
        subject = chance.choices(subjects, [OFTEN.get(each, 1) for each in subjects])[0]
        wanted = (None, SUBJECTS[subject].is_decoder)
        weights = {name: weight for name, (_, weight, decoder, _) in OPERATIONS.items() if decoder in wanted}
        names = chance.choices([*weights], [*weights.values()], k=chance.randint(6, 14))
        operations = [(name, chance.randrange(10**6), ()) for name in names]
        return cls(subject, chance.choice(levels or LEVELS), seed, operations)

    def __str__(self):
        steps = (f"{name}={':'.join(map(str, (seed, *plain)))}" for name, seed, plain in self.operations)
        return " ".join((self.subject, self.level, str(self.seed), *steps))

    @classmethod
    def parse(cls, text):
        subject, level, seed, *steps = text.split()
        pairs = (step.split("=") for step in steps)
        numbers = ((name, [*map(int, found.split(":"))]) for name, found in pairs)
        return cls(subject, level, int(seed), [(name, first, tuple(plain)) for name, (first, *plain) in numbers])

    def replaced(self, operations):
        return History(self.subject, self.level, self.seed, operations)


class Runner:
    """Runs histories with one built kernel."""

    def __init__(self, kernel, options=""):
        self.kernel, self.options = kernel, options
        self.named, self.launched = set(), collections.Counter()
        gc.collect()
        gc.freeze()  # What is here now stays: what a history leaves behind is found sooner.

    def kernelize(self, model, level, mode):
        """At a level, or back to the original layers; what somebody put there himself stays."""
        own = {m: vars(m)["forward"] for m in model.modules() if isinstance(vars(m).get("forward"), FunctionType)}
        mapping = {}
        if level is not None:
            if level != "layer":
                self.named.update(type(m) for m in model.modules() if not hasattr(type(m), "kernel_layer_name"))
                self.kernel.name_layers(model)
            mapping = self.kernel.kernel_mapping(devices=("cpu",), level="decoder" if level == "decoder" else "layer")
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(model, mode=mode, device="cpu")
        # The loss of a causal language model is no layer.
        if level == "decoder" and any(hasattr(module, "loss_function") for module in model.modules()):
            self.kernel.attach_loss(model)
        for module in model.modules():
            if isinstance(module, Function):
                module.f = module.eager if level is None else getattr(self.kernel, module.name)
            if level is None and hasattr(module, "loss_function"):
                module.loss_function = ForCausalLMLoss
            if module in own:
                module.forward = own[module]
            elif getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
                del module.forward  # kernelize binds it where there is no kernel.

    def problem(self, history, told=None):
        """What is wrong with a history, None if nothing; `told` takes a line for each operation."""
        subject = SUBJECTS[history.subject]
        for owner, name in subject.names.items():
            replace_kernel_forward_from_hub(owner, name)
        self.named = {*subject.names}
        try:
            alive = self._run(history, subject, [] if told is None else told)
        except Difference as difference:
            return str(difference)
        finally:
            for owner in self.named:
                for name in {"kernel_layer_name", "kernel_condition"} & vars(owner).keys():
                    delattr(owner, name)
            self.named, owner = set(), None  # The class of a parametrized module keeps that alive.
        # What one collection frees in Python lets go of graphs in C++, which hold more.
        collected = True
        while collected:
            collected = gc.collect()
            theirs, ours = ([kind for kind, each in found.values() if each() is not None] for found in alive)
            if theirs or not ours:
                break
        # What a cycle of eager's keeps alive, ours may.
        return f"alive afterwards: {dict(collections.Counter(ours))}" if ours and not theirs else None

    def _run(self, history, subject, told):
        """Weak references to all modules and parameters that there were, of both models."""
        model = subject(history.seed)
        # A deep copy calls no rotary function that can be kernelized: it is the other one that is.
        worlds = World(subject, copy.deepcopy(model)), World(subject, model, self.kernelize)
        del model
        alive = {}, {}

        def begin(world, draw):
            self.kernelize(world.model, history.level, draw.pick("mode", Mode.TRAINING, Mode.INFERENCE))

        try:
            for number, (name, seed, plain) in enumerate([("begin", history.seed, ()), *history.operations]):
                operation, _, _, of_ours = OPERATIONS.get(name, (begin, None, None, True))
                results = []
                for world, references in zip(worlds, alive):
                    draw, result, raised = Draw(seed, plain), None, None
                    if world.kernelize or not of_ours:
                        result, raised = self._perform(operation, world, draw, seed)
                    results.append((raised and raised.split(":")[0], result, world.seen, torch.get_rng_state()))
                    world.seen = []
                    for each in (*world.model.modules(), *world.model.parameters()):
                        references[id(each)] = type(each).__name__, weakref.ref(each)
                    each = result = None
                told.append(f"{number}. {name}  {', '.join(draw.told)}".rstrip())
                if not of_ours or raised:
                    theirs, ours = results
                    compare(ours[:2], theirs[:2], f"{name}, {raised or 'result'}")
                    if theirs[0] is None:  # A graph that cannot be walked may be walked in any order.
                        compare(ours[2:], theirs[2:], f"{name}, seen by hooks, and random state")
                if raised:
                    for world in worlds:  # In any order: what a backward pass that raised has added to which gradient.
                        world.model.zero_grad()
                theirs = ours = results = None
        finally:
            # Hooks that hold a world, in a graph that it holds, are a cycle that Python does not see.
            for world in worlds:
                vars(world).clear()
            # autograd keeps the graph of a backward pass that raised until the next one.
            torch.ones((), requires_grad=True).mul(1.0).backward()
        return alive

    @staticmethod
    def _perform(operation, world, draw, seed):
        """The operation's result, and what it raised as text: an exception would keep its frames' tensors alive."""
        torch.manual_seed(seed)
        with world.at_work(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return operation(world, draw), None
            except Exception as error:
                return None, f"{type(error).__name__}: {error}"

    def shrink(self, history):
        """The history with as few operations and as plain draws as fail."""
        operations, before = history.operations, None
        while before != operations:
            before = operations
            for index in reversed(range(len(operations))):
                fewer = operations[:index] + operations[index + 1 :]
                operations = fewer if self.problem(history.replaced(fewer)) else operations
        for index, number in ((index, number) for index in range(len(operations)) for number in range(10)):
            name, seed, plain = operations[index]
            plainer = [*operations[:index], (name, seed, (*plain, number)), *operations[index + 1 :]]
            operations = plainer if self.problem(history.replaced(plainer)) else operations
        return history.replaced(operations)

    def report(self, history):
        """A failing history, shrunk, as text; None for one that does not fail."""
        problem = self.problem(history)
        if problem is None:
            return None
        small, told = self.shrink(history), []
        problem = self.problem(small, told) or f"{problem}: not again"
        return "\n    ".join([f'python tests/histories.py{self.options} --repeat "{small}"', *told, problem])


# From the command line


def start(arguments):
    """Makes this process's runner."""
    global runner
    if arguments.known:
        LEFT_OUT.clear()
    torch.set_num_threads(1)
    logging.getLogger("kernels").setLevel(logging.ERROR)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    kernel = get_local_kernel(arguments.build.absolute())
    runner = Runner(kernel, f" --arithmetic {arguments.arithmetic}{' --known' * arguments.known}")
    if arguments.arithmetic == "cpu":
        # As long as the process lasts: without a reference the arithmetic would end at once.
        runner.arithmetic = cpu_kernels.cpu_arithmetic(kernel.__name__)
        runner.launched = runner.arithmetic.__enter__()
        # A CPU takes seconds for as many as a GPU.
        python_module(kernel, "ops.group_norm_backward")._PROOF_ELEMENTS = 1
    else:  # What tells one order from all others takes the interpreter minutes to hours. The CPU's is told from CUDA's by less.
        python_module(kernel, "ops.group_norm")._PROOF_ELEMENTS = dict.fromkeys(DTYPES.values(), 1)
        python_module(kernel, "ops.layer_norm")._CANCELLED_ELEMENTS = 1


def work(task):
    """The report of a history, and how often it launched which kernel."""
    runner.launched.clear()
    report = runner.report(History.random(*task))
    return report, runner.launched.copy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=300)
    parser.add_argument("--seed", type=int, help="of the first history, others follow (default: a new one)")
    parser.add_argument("--level", choices=LEVELS, nargs="+", help="to kernelize at (default: any)")
    parser.add_argument("--subject", choices=[*SUBJECTS], nargs="+", help="to kernelize (default: any)")
    parser.add_argument("--arithmetic", choices=("cpu", "triton"), default="cpu")
    parser.add_argument("--known", action="store_true", help=f"leave nothing out: {'; '.join(LEFT_OUT.values())}")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--repeat", metavar="HISTORY", help="run this one, as a failure names it")
    parser.add_argument("--build", type=Path, default=Path(__file__).parent.parent / "build")
    arguments = parser.parse_args()
    if arguments.repeat:
        start(arguments)
        told = []
        problem = runner.problem(History.parse(arguments.repeat), told)
        print(*told, problem or "no difference", sep="\n")
        return int(problem is not None)
    from rich.progress import track

    first = random.randrange(1 << 30) if arguments.seed is None else arguments.seed
    print(f"--seed {first}", flush=True)
    tasks = [(seed, arguments.subject, arguments.level) for seed in range(first, first + arguments.histories)]
    failed, launched = 0, collections.Counter()
    with multiprocessing.get_context("spawn").Pool(arguments.processes, start, (arguments,)) as pool:
        for report, launches in track(pool.imap_unordered(work, tasks), "histories", len(tasks)):
            failed += report is not None
            launched += launches
            if report is not None:
                print(report, flush=True)
    if launched:
        print(*(f"{count} x {kernel}" for kernel, count in launched.most_common()), sep=", ")
    print(f"{len(tasks)} histories, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
