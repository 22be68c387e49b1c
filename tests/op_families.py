"""What each family of ops is tested with, one entry a family. Tests of all kernels and of all tables of calls read it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Callable
from unittest import mock

import torch


@dataclass
class Machine:
    """The GPU that `machines.py` compiles for, and what it compiles.

    Attributes:
        arch: a compute capability such as 90; on ROCm a name.
        hidden_sizes: of norms.
        gpu: what the package knows of the GPU.
        module: the package's modules by name.
        dtype: of the activations.
        left_out: beginnings of the names of kernels that are launched and not compiled.
    """

    arch: Any
    hidden_sizes: list
    gpu: Any
    module: Callable[[str], ModuleType]
    dtype: torch.dtype = torch.bfloat16
    left_out: tuple[str, ...] = ()

    @property
    def rocm(self) -> bool:
        return isinstance(self.arch, str)

    @property
    def every_case(self) -> bool:
        """Whether `make test` compiles for it: there a family has all of its cases, but for LayerNorm's longest rows."""
        return self.arch == 90

    def empty(self, *shape, dtype=None) -> torch.Tensor:
        """Memory that nobody touches."""
        return torch.empty(shape, dtype=dtype or self.dtype)


@dataclass(frozen=True)
class Family:
    """One family of ops.

    Attributes:
        sources: the files in `kernels_src` with its kernels.
        calls: `calls(module, chooser, given)`: the outputs of one call of each op, with arguments at random; an op that takes
            more than `given` adds what may require gradients to `given.leaves`.
        launches: `launches(kernel, machine)` makes the calls whose kernels are compiled, for `machine.dtype`.
        rocm: whether it has kernels for AMD GPUs.
        timed: `timed(module, given)`: name -> a call without arguments that `benchmarks/cpu_time.py` times, on the tensors of
            `timed_tensors`.
        operators: `operators(given)`: the arguments of a call of each of its operators for torch.compile, by the operator's
            name, on the same tensors.
    """

    sources: tuple[str, ...]
    calls: Callable
    launches: Callable
    rocm: bool = True
    timed: Callable = lambda module, given: {}
    operators: Callable = lambda given: {}


def timed_tensors() -> SimpleNamespace:
    """The tensors of calls whose CPU time is measured."""
    x, residual, dy = (torch.randn(1, 4, 64) for _ in range(3))
    weight = torch.randn(64)
    mean, rstd = torch.randn(1, 4, 1), torch.rand(1, 4, 1)
    parameter = torch.nn.Parameter(weight)
    return SimpleNamespace(x=x, residual=residual, dy=dy, weight=weight, parameter=parameter, mean=mean, rstd=rstd)


def with_grad(call: Callable) -> Callable:
    def run():
        with torch.enable_grad():
            call()

    return run


EPS_OF_CALLS = 1e-5, 0.5


def given(chooser, weights) -> SimpleNamespace:
    """Arguments at random, of which a family takes what it needs."""
    dtype, rows = chooser.choice((torch.float32, torch.float16)), chooser.choice((1, 3))
    x, residual, dy = (torch.randn(rows, 2, 64).to(dtype) for _ in range(3))
    if chooser.random() < 0.3:
        x, residual, dy = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (x, residual, dy))
    x.requires_grad_(chooser.random() < 0.7)
    residual.requires_grad_(chooser.random() < 0.3)
    weight = chooser.choice(weights)
    return SimpleNamespace(x=x, residual=residual, weight=weight, dtype=dtype, leaves=[x, residual, weight])


# Norms


def _norm_calls(module, chooser, given):
    from transformers.models.llama import modeling_llama

    x, weight, formulas, rms_norm = given.x, given.weight, module("variants"), module("rms_norm")
    eager, eps = formulas.EAGER, chooser.choice((*EPS_OF_CALLS, 1))
    owner = chooser.choice((eager[formulas.LLAMA], modeling_llama.LlamaRMSNorm, eager[formulas.ONE_PLUS_WEIGHT]))
    return [
        rms_norm.replacement(x, weight, eps, owner),
        rms_norm.replacement(x, None, eps, eager[formulas.UNWEIGHTED]),
        rms_norm.replacement(x, weight.to(given.dtype), 1e-6, torch.nn.RMSNorm, "eps", fused=True),
        *(module("add_rms_norm").replacement(x, given.residual, weight, eps, owner) or ()),
    ]


def _norm_timed(module, given):
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    norm, add, gated = map(module, ("rms_norm", "add_rms_norm", "gated_rms_norm"))
    llama, gradients = module("variants").LLAMA, module("rms_norm_backward").gradients
    owner, eps, x, residual, weight = norm.EAGER[llama], 1e-6, given.x, given.residual, given.weight
    saved = given.dy, x, weight, torch.randn(1, 4, 1), True, True

    def of(weight):
        return {
            "rms_norm": lambda: norm.replacement(x, weight, eps, owner),
            "add_rms_norm": lambda: add.replacement(x, residual, weight, eps, owner),
            "TorchRMSNorm": lambda: norm.replacement(x, weight, eps, torch.nn.RMSNorm, "eps", fused=True),
            "gated norm": lambda: gated.replacement(x, residual, weight, eps, "silu", Qwen3NextRMSNormGated),
        }

    return {
        **of(weight),
        **{f"{name}, with gradients": with_grad(call) for name, call in of(given.parameter).items()},
        "rms_norm backward": lambda: gradients(llama, *saved),
        "add_rms_norm backward": lambda: gradients(llama, *saved, True, residual),
    }


def _norm_operators(given):
    x, residual, weight, dy, rstd = given.x, given.residual, given.parameter, given.dy, given.rstd
    return {
        "rms_norm": (x, weight, 1e-6, "llama"),
        "rms_norm_with_rstd": (x, weight, None, 1e-6, "llama"),
        "rms_norm_backward": (dy, x, weight, rstd, True, True, "llama"),
        "add_rms_norm": (x, residual, weight, 1e-6, "llama"),
        "add_rms_norm_with_rstd": (x, residual, weight, 1e-6, "llama"),
        "add_rms_norm_backward": (dy, x, weight, rstd, residual, True, True, "llama"),
    }


def _norm_launches(kernel, machine):
    for hidden_size in machine.hidden_sizes:
        # Kernels that take columns are hardly different from one hidden size to the next.
        machine.left_out = () if hidden_size == 4096 else ("rms_norm_sum",)
        _norms_of(kernel, machine, hidden_size)
    machine.left_out = ()
    if machine.every_case and machine.dtype == torch.float32:
        # Every tuned plan of two more kernels, of which some spill.
        _tuned_norms(machine)


def _norms_of(kernel, machine, hidden_size):
    backward, add, variants = map(machine.module, ("rms_norm_backward", "add_rms_norm", "variants"))
    llama, t5, empty, gpu = variants.LLAMA, variants.T5, machine.empty, machine.gpu
    weight = empty(hidden_size)
    # Of a few rows programs share the columns, with the plans that are computed and with those of a file.
    for x in empty(1, hidden_size), empty(4, hidden_size):
        if hidden_size in (4096, 32768):
            kernel.rms_norm(x, weight, 1e-6)
            add.replacement(x, x, weight, 1e-6, variants.EAGER[llama])
    # The backward of few rows has a kernel for each gradient; that of many is fused, if the row is not too long.
    # On few SMs it takes more rows.
    for rows in (16, (1 << 25 + (gpu.multiprocessors < 64)) // hidden_size):
        # Rows of activations that lie apart are spread over the threads in another way.
        for padding in (0, 2) if hidden_size == 4096 else (0,):
            dy, x = empty(2, rows, hidden_size + padding)
            dy, x = dy.flatten()[: rows * hidden_size].view(rows, hidden_size), x[:, :hidden_size]
            kernel.rms_norm(x, weight, 1e-6)
            machine.module("rms_norm").replacement(x, weight, 1e-6, torch.nn.RMSNorm, "eps", fused=True)
            for variant in (llama, t5)[: 1 + (hidden_size == 4096 and not padding)]:
                backward.gradients(variant, dy, x, weight, torch.empty(rows, 1), True, True)
        residual, x = empty(2, rows, hidden_size)
        rstd = torch.empty(rows, 1)
        if rows > 16 and hidden_size in (64, 128, 4096, 8192, 32768):
            add.replacement(x, residual, weight, 1e-6, variants.EAGER[llama])
            backward.gradients(llama, x, x, weight, rstd, True, True, True, residual)
        if rows > 16 and hidden_size == 32768 and machine.dtype == torch.bfloat16:
            kernel.rms_norm(x, weight.float(), 1e-6)
        if rows == 16 and hidden_size == 32768 and machine.dtype == torch.bfloat16:
            # Long rows are streamed if there are enough for all multiprocessors: here for fewer.
            machine.gpu = dataclasses.replace(gpu, multiprocessors=1)
            for dx_mode in ("single", "accumulate"):
                streamed = backward.resolve(llama, x, x, weight, rstd, True, True, dx_mode)
                streamed(x, x, weight, rstd, residual if dx_mode == "accumulate" else None)
            machine.gpu = gpu


def _tuned_norms(machine):
    rms_norm, add, variants = map(machine.module, ("rms_norm", "add_rms_norm", "variants"))
    for dtype, hidden_size in ((torch.float16, 1024), (torch.bfloat16, 4096)):
        machine.dtype = dtype
        for rows in machine.module("rms_norm_plan").rows_of_every_plan(hidden_size, dtype.itemsize, machine.gpu):
            x, weight = machine.empty(rows, hidden_size), machine.empty(hidden_size)
            if dtype == torch.float16:
                add.replacement(x, x, weight, 1e-6, variants.EAGER[variants.LLAMA])
            else:
                rms_norm.replacement(x, weight, 1e-6, variants.EAGER[variants.BY_NAME["fp32_output"]])
    machine.dtype = torch.float32


# Activations and their products


def _activation_calls(module, chooser, given):
    activation, gated = module("activation"), module("gated_activation")
    which = chooser.choice((activation.SILU, activation.GELU, activation.GELU_TANH))
    subject = chooser.choice((which.forward, activation.SILU.forward))
    return [
        activation.replacement(given.x, subject, which),
        gated.replacement(given.x, given.residual, subject, which),
        gated.packed_replacement(given.x, which),
    ]


def _activation_timed(module, given):
    activation, gated, x, up, dy = module("activation"), module("gated_activation"), given.x, given.residual, given.dy
    silu, product, half = activation.SILU, gated.SILU, dy[..., :32].contiguous()
    return {
        "silu": lambda: activation.replacement(x, silu.forward, silu),
        "silu backward": lambda: activation.gradients(silu, dy, x),
        "silu_and_mul": lambda: gated.replacement(x, up, product.forward, product),
        "silu_and_mul backward": lambda: gated.gradients(product, dy, x, up, True),
        "silu_and_mul, packed": lambda: gated.packed_replacement(x, product),
        "silu_and_mul, packed, backward": lambda: gated.packed_gradient(product, half, x),
    }


def _activation_operators(given):
    x, up, dy = given.x, given.residual, given.dy
    return {
        "activation": ("silu", x),
        "activation_backward": ("silu", dy, x),
        "gated_activation": ("silu", up, x),
        "gated_activation_backward": ("silu", dy, up, x),
    }


def _activation_launches(kernel, machine):
    activation, gated = map(machine.module, ("activation", "gated_activation"))
    x, dy = machine.empty(2, 4096)
    for function in activation._ACTIVATIONS.values():
        activation._activate(x, function)
        activation.gradients(function, dy, x)
        activation._find_gradient(function.name, dy, x)(dy, x)
    # An odd number of elements.
    activation._activate(x.flatten()[:-1], activation.SILU)
    activation.gradients(activation.SILU, dy.flatten()[:-1], x.flatten()[:-1])
    dy, gate, up = machine.empty(3, 2, 4096)
    packed = machine.empty(2, 2 * 4096)
    for function in gated.ACTIVATIONS.values():
        for one, other in ((gate, up), packed.chunk(2, -1)):
            gated.replacement(one, other, function.forward, function)
            for with_up in (True, False):
                gated.gradients(function, dy, one, other, with_up)
        gated.packed_replacement(packed, function)
        gated.packed_gradient(function, dy, packed)
    # With the `erff` of CUDA 13.2.
    with contextlib.ExitStack() as stack:
        for each in (activation, gated):
            stack.enter_context(mock.patch.object(each, "constant_of", return_value="gelu_of_cuda_13_2"))
        kind = machine.dtype, dy.numel(), dy.device
        layout = gated.Layout.of(gate, up)
        gated._forward(gated.GELU, machine.dtype, layout, dy.device)(gate, dy, up)
        gated._backward(gated.GELU, machine.dtype, layout, dy.device, False)(dy, gate, up, up)
        activation._forward(activation.GELU, machine.dtype, activation.Layout.of(x, x), x.device)(x, dy)
        activation._backward(activation.GELU, *kind)(dy, gate, up)


# Rotary embeddings


def _rotary_calls(module, chooser, given):
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    rotary, needs_grad = module("rotary"), given.x.requires_grad
    heads = (2, chooser.choice((1, 2)))
    q, k = (torch.randn(2, count, 4, 16).to(given.dtype).requires_grad_(needs_grad) for count in heads)
    cos, sin = torch.randn(2, 2, 4, 16).to(chooser.choice((given.dtype, torch.float32)))
    unsqueeze_dim, sole = chooser.choice((1, -3)), chooser.random() < 0.5
    given.leaves += [q, k]
    embedding = LlamaRotaryEmbedding(LlamaConfig(hidden_size=16, num_attention_heads=1))
    embedding.attention_scaling = chooser.choice((1.0, 0.5, 2, 2.0))
    positions = torch.arange(chooser.choice((1, 3)))[None].expand(chooser.choice((1, 2)), -1)
    positions = positions.to(chooser.choice((torch.int64, torch.int32)))
    return [
        *(rotary.replacement(q, k, cos, sin, unsqueeze_dim, rotary.PLAIN.eager, sole) or ()),
        *(module("rotary_embedding").replacement(embedding, given.x, positions, type(embedding)) or ()),
    ]


def _rotary_timed(module, given):
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    rotary, tables, positions = module("rotary"), module("rotary_embedding"), torch.arange(4)[None]
    q, k, plain = torch.randn(1, 8, 4, 64), torch.randn(1, 2, 4, 64), rotary.PLAIN
    cos, sin = torch.randn(2, 1, 4, 64)
    embedding = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64))
    forward = plain.eager
    return {
        "rotary": lambda: rotary.replacement(q, k, cos, sin, 1, forward),
        "rotary backward": lambda: rotary.gradients(plain, q, k, cos, sin, 1, q.dtype, True),
        "rotary tables": lambda: tables.replacement(embedding, given.x, positions, LlamaRotaryEmbedding),
    }


def _rotary_operators(given):
    q, k = torch.randn(1, 4, 8, 64).transpose(1, 2), torch.randn(1, 4, 2, 64).transpose(1, 2)
    cos, sin = torch.randn(2, 1, 4, 64)
    return {
        "rotary": (q, k, cos, sin, 1, "plain"),
        "rotary_backward": (q.contiguous(), cos, sin, 1, "plain", torch.float32),
    }


def _rotary_launches(kernel, machine):
    rotary, tables, dtype = machine.module("rotary"), machine.module("rotary_embedding"), machine.dtype
    for variant in tables._FORMULAS:
        positions, inv_freq = torch.empty(1, 7, dtype=torch.int64), torch.empty(64)
        tables._TablesCall(variant, positions, inv_freq, dtype, 1.0)(positions, inv_freq)
    for head_dim in (64, 80, 128, 256) if machine.every_case else (80,):
        q, k = (machine.empty(2, 3, heads, head_dim).transpose(1, 2) for heads in (8, 2))
        for table_dtype in {dtype, torch.float32}:
            for variant in rotary.FORMULAS.values():
                usual = variant.layout == "halves" and not (variant.partial or variant.chunked)
                if not usual and (table_dtype != dtype or head_dim != 80):
                    continue
                size = head_dim - 16 * variant.partial
                size //= 2 if variant.table == "one_each" else 1
                cos, sin = machine.empty(2, 1, 3, size, dtype=table_dtype)
                outs = rotary.replacement(q, k, cos, sin, 1, variant.eager)
                for apart in (False, True)[: 2 - variant.has_one_edge(dtype)]:
                    with torch.no_grad():
                        rotary.gradients(variant, *outs, cos, sin, 1, dtype, apart)


# Rotary embeddings as complex products


def _complex_rotary_calls(module, chooser, given):
    x, unsqueeze_dim = torch.randn(2, 3, 3, 16).to(given.dtype), chooser.choice((1, 2))
    given.leaves.append(x.requires_grad_(given.x.requires_grad))
    freqs = torch.polar(torch.ones(chooser.choice((1, 2)), 3, 8), torch.randn(1, 3, 8))
    return [module("ops.complex_rotary").replacement(x, freqs, unsqueeze_dim)]


def _complex_rotary_timed(module, given):
    family, x = module("ops.complex_rotary"), torch.randn(1, 4, 8, 64)
    freqs = torch.polar(torch.ones(1, 4, 32), torch.randn(1, 4, 32))
    gradient = torch.no_grad()(family.gradient)
    return {
        "complex rotary": lambda: family.replacement(x, freqs, 2),
        "complex rotary backward": lambda: gradient(x, freqs, 2),
    }


def _complex_rotary_operators(given):
    x, freqs = torch.randn(1, 4, 8, 64), torch.polar(torch.ones(1, 4, 32), torch.randn(1, 4, 32))
    return {"complex_rotary": (x, freqs, 2), "complex_rotary_backward": (x, freqs, 2)}


def _complex_rotary_launches(kernel, machine):
    family = machine.module("ops.complex_rotary")
    for head_dim in (64, 80, 128) if machine.every_case else (128,):
        x, freqs = machine.empty(2, 3, 8, head_dim), torch.empty(1, 3, head_dim // 2, dtype=torch.complex64)
        family.rotated(x, freqs, 2)
        with torch.no_grad():
            family.gradient(x, freqs, 2)


# Losses


def _cross_entropy_calls(module, chooser, given):
    logits, target = torch.randn(5, 40).to(given.dtype), torch.randint(40, (5,))
    given.leaves.append(logits.requires_grad_(given.x.requires_grad))
    ignored, reduction = chooser.choice((-100, 3)), chooser.choice(("mean", "sum"))
    return [module("cross_entropy").replacement(logits, target, ignored, reduction)]


def _cross_entropy_launches(kernel, machine):
    cross_entropy, dtype = machine.module("cross_entropy"), machine.dtype
    if not machine.rocm and machine.arch < 80 and dtype.itemsize == 2:
        return  # Refused: ATen's kernels for 16 bits are others there.
    # Each of ATen's kernels, and rows that begin anywhere.
    for vocab in (1000, 4100, 9220, 32000, 50257, 128256) if machine.every_case else (1000, 4100, 9220, 128256):
        logits, target = machine.empty(5, vocab), torch.empty(5, dtype=torch.int64)
        plan, (a, b, c) = cross_entropy.launch_plan(vocab, dtype.itemsize), torch.empty(3, 5)
        cross_entropy._forward(logits, -100, plan)(logits, target, a, b, c, target)
        for mean in (True, False):
            backward_of = cross_entropy._backward(logits, -100, mean, plan)
            backward_of(logits, target, a, b, c, c, logits)


# Softmax


def _softmax_calls(module, chooser, given):
    return [module("ops.softmax").replacement(given.x, -1)]


def _softmax_timed(module, given):
    softmax = module("ops.softmax")
    return {
        "softmax": lambda: softmax.replacement(given.x, -1),
        "softmax backward": lambda: softmax.gradient(given.dy, given.x),
    }


def _softmax_operators(given):
    return {"softmax": (given.x, None), "softmax_backward": (given.dy, given.x, torch.float32)}


def _softmax_launches(kernel, machine):
    softmax = machine.module("ops.softmax")
    # One element, less than a warp, more, and rows that begin anywhere; a few rows and many.
    short = ((3, 1, 0), (3, 40, 0), (3, 128, 0), (3000, 128, 0), (3000, 100, 1), (3, 1000, 0), (3, 1000, 1))
    short += ((3000, 48, 0), (3000, 256, 0), (3, 256, 0), (3000, 197, 0))
    for rows, size, gap in short if machine.every_case else ((3000, 128, 0), (3, 1000, 0)):
        x = machine.empty(rows, size + gap)[:, :size]
        softmax.gradient(x, softmax.softmax(x))
    # Blocks that keep a row in registers, by elements and by vectors, and those that do not: aligned rows and others.
    sizes = (4096, 9224, 16384, 32768, 40000, 32001) if machine.every_case else (4096, 16384, 32001)
    for size in sizes:
        x = machine.empty(3, size)
        softmax.gradient(x, softmax.softmax(x))
    if machine.dtype.itemsize == 2 and machine.every_case:
        y = softmax.softmax(machine.empty(3, 4096), dtype=torch.float32)
        softmax.gradient(y, y, machine.dtype)
        for size in (1501, 8001):  # Rows with a head that are read once.
            softmax.softmax(machine.empty(3, size, dtype=torch.float16), dtype=torch.float32)


# Softmax of attention scores


def _masked_softmax_calls(module, chooser, given):
    mask, scale = torch.randn(64).to(given.dtype), chooser.choice((0.5, 1.0))
    return [
        module("ops.masked_softmax").replacement(given.x, chooser.choice((mask, mask.expand(2, 64).clone())), scale)
    ]


def _masked_softmax_timed(module, given):
    replacement, mask = module("ops.masked_softmax").replacement, torch.zeros(1, 4, 64)
    leaf = given.x.clone().requires_grad_()
    return {
        "masked softmax": lambda: replacement(given.x, mask, 0.5),
        "masked softmax, with gradients": with_grad(lambda: replacement(leaf, mask, 0.5)),
    }


def _masked_softmax_operators(given):
    tensors = given.x, torch.zeros(1, 4, 64)
    return {"masked_softmax": (*tensors, 0.5), "masked_softmax_backward": (given.dy, *tensors, 0.5)}


def _masked_softmax_launches(kernel, machine):
    """A warp's rows and blocks, read once and several times; with a mask, whose rows begin anywhere, and without."""
    family = machine.module("ops.masked_softmax")
    sizes = (1000, 4096, 4095, 32768, 40000)
    if machine.every_case:
        sizes += (40, 128, 256, 2048, 8192, 9224, 16384)
    for size in sizes:
        scores = machine.empty(2, 2, 3, size).requires_grad_()
        masks = (machine.empty(2, 1, 3, size), machine.empty(2, 1, 3, size + 1)[..., :size], None)
        for mask in masks if machine.every_case and size in (128, 4096, 9224) else masks[:1]:
            tensors = (scores,) if mask is None else (scores, mask)
            call = family._calls.find(family.eager_masked_softmax, (True, 0.5), tensors, True, 0.5)
            call.gradient_alone(scores.detach(), *tensors)
    if machine.dtype == torch.bfloat16 and machine.every_case:
        scores, mask = (torch.empty(2, heads, 3, 1500, dtype=torch.float16) for heads in (2, 1))
        family.masked_softmax(scores, mask)


# Divergences


def _divergence_calls(module, chooser, given):
    divergences = module("ops.divergences")
    form, reduction = chooser.choice(list(divergences._DIVERGENCES.values())), chooser.choice(("none", "mean"))
    return [divergences.replacement(form, given.x, given.residual, None, -100, reduction)]


def _divergence_operators(given):
    first, second = given.x.log_softmax(-1), given.residual.softmax(-1)
    return {
        "divergence": ("target", first, second, "none"),
        "divergence_backward": ("target", given.dy, first, second, "none"),
    }


def _divergence_launches(kernel, machine):
    """Sums without vectors, of a block of less than a warp, with single elements, and of full blocks; dtypes that differ."""
    divergences = machine.module("ops.divergences")
    shapes = ((5, 3), (5, 40), (5, 1001), (512, 1001), (512, 1000)) if machine.every_case else ((512, 1000),)
    forms = divergences._DIVERGENCES.values()
    dtypes = {machine.dtype, torch.float32}
    for form, shape, other, reduction in itertools.product(forms, shapes, dtypes, ("none", "mean")):
        first, second = machine.empty(*shape), torch.empty(shape, dtype=other)
        labels = torch.empty(shape[0], dtype=torch.int64) if form.name == "variation" else None
        call = divergences._Call(form, shape, (first.dtype, other), first.device, reduction, labels is not None)
        out = call(first, second, labels, -100, 5)
        call.gradients(out, first, second, labels, -100, 5, True, True)


# Jensen-Shannon divergence


def _jsd_calls(module, chooser, given):
    jsd, rows = module("ops.jsd"), chooser.choice((1, 2))
    logits = [torch.randn(rows, 2049).to(given.dtype) for _ in range(2)]
    mask = chooser.choice((None, torch.ones(rows, dtype=torch.bool)))
    for each in logits:
        each.requires_grad_(chooser.random() < 0.5)
    given.leaves += logits
    terms = jsd.replacement(
        jsd.divergence, *logits, mask, chooser.choice((0, 0.5, 1)), chooser.choice((1.0, 2.0)), False
    )
    return [terms]


def _jsd_launches(kernel, machine):
    """Elements and vectors, vectors in both passes, loops, loops with a head; each form."""
    jsd = machine.module("ops.jsd")
    vocabularies = (4096, 9224, 128256, 50257) if machine.every_case else (128256,)
    cases = [(vocabulary, 0.5, 1.0, False, (True, True)) for vocabulary in vocabularies]
    cases += [(128256, beta, 0.9, True, (True, False)) for beta in (0, 0.5, 1)]
    for vocabulary, beta, temperature, labels, wanted in cases:
        student, teacher = (machine.empty(3, vocabulary).requires_grad_(need) for need in wanted)
        mask = torch.empty(3, dtype=torch.bool) if labels else None
        call = jsd._resolve(student, teacher, *([mask] if labels else []), jsd.divergence, beta, temperature, wanted)
        place, d_logits = torch.empty(3, dtype=torch.int64), [machine.empty(3, vocabulary) for _ in range(2)]
        terms, statistics = call(student, teacher, place, 3)
        for dy in (terms, terms[:1, :1].expand(3, vocabulary))[: 2 if vocabulary == 128256 else 1]:
            call.gradients(dy, student, teacher, place, statistics, *d_logits)


# LayerNorm


def _layer_norm_calls(module, chooser, given):
    layer_norm, eps = module("ops.layer_norm").replacement, chooser.choice(EPS_OF_CALLS)
    # A call is recognised by its weight: the same one again, or none.
    outputs = [layer_norm(given.x, (64,), None, None, eps)]
    if given.weight is not None and given.weight.dtype == given.dtype:
        outputs.append(layer_norm(given.x, (64,), given.weight, chooser.choice((given.weight, None)), eps))
    return outputs


def _layer_norm_timed(module, given):
    replacement, shape, bias, eps = module("ops.layer_norm").replacement, (64,), torch.randn(64), 1e-5
    calls = [lambda of=of: replacement(given.x, shape, of, bias, eps) for of in (given.weight, given.parameter)]
    return {"layer_norm": calls[0], "layer_norm, with gradients": with_grad(calls[1])}


def _layer_norm_operators(given):
    x, weight, bias = given.x, given.parameter, torch.randn(64)
    return {
        "layer_norm": (x, [64], weight, bias, 1e-5),
        "layer_norm_backward": (given.dy, x, [64], given.mean, given.rstd, weight, bias, 1e-5, [True, True, True]),
    }


def _layer_norm_launches(kernel, machine):
    # Programs of several rows and of one, a part of a step, and one, two and four warps. Rows of 16384 elements compile for 50
    # seconds, which `make test` leaves out.
    longest = 12292 if machine.dtype == torch.float32 else 16384 if os.environ.get("LOSSLESS_MACHINES") else 8192
    sizes = ((64, 0), (256, 0), (768, 0), (1024, 2), (1280, 0), (4096, 0), (longest, 0))
    # Halves of lanes with different counts, of one set of warps and of four.
    for size in (64, 320) if machine.every_case else ():
        many = machine.module("ops.layer_norm")._fewest_rows(size)
        kernel.layer_norm(machine.empty(many, size), size, machine.empty(size), machine.empty(size))
    for size, gap in sizes if machine.every_case else ((4096, 0),):
        x, weight, bias = machine.empty(3, size + gap)[:, :size], machine.empty(size), machine.empty(size)
        for vectors in ((weight, bias), (weight, None), (None, None))[: 3 if size in (256, 4096) else 1]:
            kernel.layer_norm(x, size, *vectors)
        # Many rows.
        if size in (256, 768, 1024, 4096):
            many = machine.module("ops.layer_norm")._fewest_rows(size)
            kernel.layer_norm(machine.empty(many, size), size, weight, bias)
        # Gradients: rows of which one, eight and 32 of ATen's threads share a column, few and many.
        for rows in {768: (3, 100, 300, 600), 256: (), 1024: (), 1280: ()}.get(size, (600,)):
            leaves = [each.requires_grad_() for each in (machine.empty(rows, size), weight, bias)]
            kernel.layer_norm(leaves[0], size, *leaves[1:]).backward(machine.empty(rows, size))
        # Those of `F.rms_norm` are of the same kernels.
        for rows in {768: (3, 100, 600), 4096: (600,)}.get(size, ()):
            x, rms_norm = machine.empty(rows, size).requires_grad_(), machine.module("rms_norm").replacement
            for of in (weight.detach().requires_grad_(), None)[: 2 if rows == 600 else 1]:
                rms_norm(x, of, 1e-6, torch.nn.RMSNorm, "eps", fused=True).backward(machine.empty(rows, size))


# GroupNorm


def _group_norm_calls(module, chooser, given):
    family, eps = module("ops.group_norm").replacement, chooser.choice(EPS_OF_CALLS)
    # Two channels, of which a group has one or both, and no weight or one of its own.
    weight = chooser.choice((None, torch.randn(2).to(given.dtype)))
    return [family(given.x.contiguous(), groups, weight, chooser.choice((weight, None)), eps) for groups in (1, 2)]


def _group_norm_timed(module, given):
    replacement, x = module("ops.group_norm").replacement, torch.randn(1, 64, 4, 4)
    calls = [lambda of=of: replacement(x, 32, of, of, 1e-5) for of in (given.weight, given.parameter)]
    return {"group_norm": calls[0], "group_norm, with gradients": with_grad(calls[1])}


def _group_norm_operators(given):
    (x, dy), (mean, rstd) = torch.randn(2, 1, 64, 16), torch.rand(2, 1, 32)
    vectors = given.parameter, torch.randn(64)
    return {
        "group_norm": (x, 32, *vectors, 1e-5),
        "group_norm_backward": (dy, x, 32, mean, rstd, *vectors, 1e-5, [True, True, True]),
    }


def _group_norm_launches(kernel, machine):
    """Groups of a warp and of a block; of whole vectors and of single elements; of one position; and such that are split."""
    family, empty = machine.module("ops.group_norm"), machine.empty
    # Samples, channels, positions and groups.
    shapes = [(2, 64, 64, 32), (5, 320, 4096, 32), (1, 16, 1 << 17, 4)]
    # As from torch 2.15 on. Resolved calls would be found again.
    backward = machine.module("ops.group_norm_backward")
    with contextlib.ExitStack() as stack:
        for each in (family, backward):
            stack.enter_context(mock.patch.object(each, "takes_vectors", return_value=True))
        family._calls.clear()
        for samples, channels, positions, groups in [
            *shapes,
            *([(2, 64, 49, 8), (2, 4096, 1, 4), (2, 64, 512, 32)] * machine.every_case),
        ]:
            leaves = [
                empty(*size).requires_grad_() for size in ((samples, channels, positions), (channels,), (channels,))
            ]
            kernel.group_norm(leaves[0], groups, *leaves[1:]).backward(leaves[0].detach())
        family._calls.clear()
    if machine.every_case:
        shapes += [(2, 64, 1, 8), (2, 6, 49, 2), (2, 6, 1001, 2), (2, 4096, 1, 4)]
    for samples, channels, positions, groups in shapes:
        x, vector = empty(samples, channels, positions), empty(channels)
        kernel.group_norm(x, groups, vector, vector)
        if positions in (49, 4096, 1 << 17):
            leaves = [empty(*each.shape).requires_grad_() for each in (x, vector, vector)]
            kernel.group_norm(leaves[0], groups, *leaves[1:]).backward(x)
        if positions == 4096 and machine.every_case:
            kernel.group_norm(x, groups, vector)
            kernel.group_norm(x, groups)
            if machine.dtype == torch.bfloat16:  # With mean and rstd rounded, as torch 2.11 computes.
                shape = family.Shape(samples, groups, channels // groups, positions)
                kind = family.Kind.of(machine.dtype, shape, True, True, True, False)
                kind.launch(shape, x.device, 1e-5, True)(x, vector, vector, x, x, x)
    if machine.every_case:
        # More samples than ATen adds in sequence, long groups, and no weight.
        for samples, channels, positions in ((130, 4, 64), (150, 6, 9000)):
            leaves = [
                empty(*size).requires_grad_() for size in ((samples, channels, positions), (channels,), (channels,))
            ]
            kernel.group_norm(leaves[0], 2, *leaves[1:]).backward(leaves[0].detach())
        leaf = empty(2, 6, 1001).requires_grad_()
        kernel.group_norm(leaf, 2).backward(leaf.detach())


# Cohere's LayerNorm


def _cohere_layer_norm_calls(module, chooser, given):
    family, eps = module("ops.cohere_layer_norm"), chooser.choice(EPS_OF_CALLS)
    weight = given.weight if given.weight is not None else torch.randn(64)
    return [
        family.replacement(given.x, of, eps, family.Eager) for of in (weight, weight.detach().expand(2, 64).clone())
    ]


def _cohere_layer_norm_timed(module, given):
    family, eps = module("ops.cohere_layer_norm"), 1e-5
    calls = [lambda of=of: family.replacement(given.x, of, eps, family.Eager) for of in (given.weight, given.parameter)]
    return {"CohereLayerNorm": calls[0], "CohereLayerNorm, with gradients": with_grad(calls[1])}


def _cohere_layer_norm_operators(given):
    x, weight = given.x, given.parameter
    return {
        "cohere_layer_norm": (x, weight, x, x, 1e-5),
        "cohere_layer_norm_backward": (given.dy, x, weight, given.mean, given.rstd, 1e-5, True, True),
    }


def _cohere_layer_norm_launches(kernel, machine):
    family, empty = machine.module("ops.cohere_layer_norm"), machine.empty
    # Short rows, heads, a hidden size that fills no step, and the longest.
    for size in (64, 128, 4096, 5000, 12288, 16384) if machine.every_case else (4096,):
        for needs in ((True, True), (True, False), (False, True)) if size == 4096 else ((True, True),):
            for rows in (1, 64) if size == 4096 and all(needs) else (64,):
                x, weight = empty(2, rows, size), empty(*((rows, size) if size == 128 else (size,)))
                call = family._call_of(x, weight, 1e-5, family.Eager, needs)
                call.backward(x, x, weight, *call.with_statistics(x, weight)[1:])


# Dynamic tanh


def _dyt_calls(module, chooser, given):
    alpha, bias = torch.full((1,), 0.5, dtype=given.dtype), torch.randn(64).to(given.dtype)
    return [module("ops.dyt").replacement(given.x, alpha, given.weight.to(given.dtype), bias)]


def _dyt_timed(module, given):
    replacement, alpha, bias = module("ops.dyt").replacement, torch.full((1,), 0.5), torch.randn(64)
    calls = [lambda of=of: replacement(given.x, alpha, of, bias) for of in (given.weight, given.parameter)]
    return {"dyt": calls[0], "dyt, with gradients": with_grad(calls[1])}


def _dyt_operators(given):
    tensors = given.x, torch.full((1,), 0.5), given.parameter, torch.randn(64)
    return {"dyt": tensors, "dyt_backward": (given.dy, *tensors, [True, True, False, True])}


def _dyt_launches(kernel, machine):
    family = machine.module("ops.dyt")
    for size in (1024, 4096) if machine.every_case else (4096,):
        # With rows for one thread of a column, and for several.
        for rows in (3, 8192) if size == 4096 else (8192,):
            x, weight, alpha = machine.empty(rows, size), machine.empty(size), machine.empty(1)
            call = family._resolve(x, alpha, weight, weight, (True,) * 4)
            call.backward(call.output(x, alpha, weight, weight), x, alpha, weight)
    if machine.dtype is torch.bfloat16:
        # Of more than 2 GiB, whose second part begins within a vector; such tensors are not needed to compile.
        x, weight, alpha = machine.empty(3, 4099), machine.empty(4099), machine.empty(1)
        of_alpha = family.dyt_backward.OfInput(machine.dtype, 4099, False).sum(262147, x.device)
        of_alpha(x, x, alpha, weight, x)


FAMILIES = (
    Family(
        ("rms_norm", "rms_norm_backward", "column_sum"),
        _norm_calls,
        _norm_launches,
        timed=_norm_timed,
        operators=_norm_operators,
    ),
    Family(
        ("activation",),
        _activation_calls,
        _activation_launches,
        timed=_activation_timed,
        operators=_activation_operators,
    ),
    Family(
        ("complex_rotary",),
        _complex_rotary_calls,
        _complex_rotary_launches,
        rocm=False,
        timed=_complex_rotary_timed,
        operators=_complex_rotary_operators,
    ),
    Family(("rotary",), _rotary_calls, _rotary_launches, timed=_rotary_timed, operators=_rotary_operators),
    # Cross-entropy and divergences read what their kernels wrote, or are computed once a step: they are not timed.
    # Cross-entropy is traced as eager's operations.
    Family(("cross_entropy",), _cross_entropy_calls, _cross_entropy_launches, rocm=False),
    Family(
        ("layer_norm", "layer_norm_backward"),
        _layer_norm_calls,
        _layer_norm_launches,
        rocm=False,
        timed=_layer_norm_timed,
        operators=_layer_norm_operators,
    ),
    Family(
        ("group_norm", "group_norm_backward"),
        _group_norm_calls,
        _group_norm_launches,
        rocm=False,
        timed=_group_norm_timed,
        operators=_group_norm_operators,
    ),
    Family(
        ("cohere_layer_norm", "cohere_layer_norm_backward"),
        _cohere_layer_norm_calls,
        _cohere_layer_norm_launches,
        rocm=False,
        timed=_cohere_layer_norm_timed,
        operators=_cohere_layer_norm_operators,
    ),
    Family(("dyt", "dyt_backward"), _dyt_calls, _dyt_launches, rocm=False, timed=_dyt_timed, operators=_dyt_operators),
    Family(
        ("softmax", "softmax_long_rows"),
        _softmax_calls,
        _softmax_launches,
        rocm=False,
        timed=_softmax_timed,
        operators=_softmax_operators,
    ),
    Family(
        ("masked_softmax",),
        _masked_softmax_calls,
        _masked_softmax_launches,
        rocm=False,
        timed=_masked_softmax_timed,
        operators=_masked_softmax_operators,
    ),
    Family(
        ("divergences", "full_sum"),
        _divergence_calls,
        _divergence_launches,
        rocm=False,
        operators=_divergence_operators,
    ),
    # It is computed once a step and not timed, and traced as eager's operations.
    Family(("jsd",), _jsd_calls, _jsd_launches, rocm=False),
)
