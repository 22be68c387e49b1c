"""The CPU's own arithmetic in place of compiled kernels: whoever launches one gets what the original layer computes, and as fast.

All that surrounds the kernels can so be held to the unkernelized model on the CPU, bit for bit, without Triton's interpreter. The
formulas are the package's own; the proof, if it is on, compares them with the layers as it does with kernels.
"""

import collections
import contextlib
import functools
from unittest import mock

import torch
from places import python_module
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes


def cpu_kernels(package):
    """By its name what each kernel writes, from the formulas of eager that the package names: `kernel(constants, scalars, *tensors)`."""

    def module(name):
        return python_module(package, name)

    backward, activation, gated = module("rms_norm_backward"), module("activation"), module("gated_activation")
    rotary, variants, products = module("rotary_formulas"), module("variants").BY_NAME.values(), []
    divergences, cohere = module("ops.divergences")._DIVERGENCES, module("ops.cohere_layer_norm")
    cohere_backward = module("ops.cohere_layer_norm_backward")
    dyt, dyt_gradients = module("ops.dyt"), module("ops.dyt_backward")
    complex_family = module("ops.complex_rotary")
    masked = module("ops.masked_softmax")
    tables, softmax, cross_entropy = module("rotary_embedding"), module("ops.softmax"), module("cross_entropy")

    def variant_of(constants, x, weight, out):
        scale, fused = constants["SCALE"], constants.get("FUSED", False)
        # Both gradients of 16-bit activations are T5's; forward its formula has LLAMA's bits.
        two_edges = constants.get("TWO_EDGES", False) and x.dtype != torch.float32
        found = (v for v in variants if (v.scale, v.fused, v.two_edges) == (scale, fused, two_edges))
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
            d_normalized = variant.grad_of_product(dy) * (1.0 if variant.scale == "none" else variant.factor(weight))
            if variant.scale == "after_cast":
                d_normalized = d_normalized.to(x.dtype).to(torch.float32)
            write(d_rstd, (d_normalized * h).sum(-1, keepdim=True))
        if constants.get("SUM_CHAINS", True):
            rms_norm_sum_chains(constants, scalars, dy, x, rstd, blocks)

    def rms_norm_sum_chains(constants, scalars, dy, x, rstd, blocks):
        variant = next(v for v in variants if v.scale == constants["SCALE"] and not v.fused)
        products[:] = [backward.weight_products(variant, dy, x.to(torch.float32), rstd, x.dtype)]

    def column_sum_blocks(constants, scalars, blocks, totals, *outs):
        for product, out, total in zip(products, outs, [totals] if len(outs) == 1 else totals):
            write(out, product.sum_to_size(out.shape))
            if scalars[-1]:
                write(total, product.sum(tuple(range(product.dim() - out.dim())), dtype=torch.float32))

    def layer_norm_forward(constants, scalars, x, weight, bias, *outs):
        size = constants["SIZE"]
        vectors = (
            each.reshape(size) if constants[name] else None for name, each in (("WEIGHT", weight), ("BIAS", bias))
        )
        for into, values in zip(outs, torch.native_layer_norm(x.reshape(-1, size), (size,), *vectors, scalars[-1])):
            write(into, values)

    def layer_norm_gradients(constants, dy, x, weight, mean, rstd):
        size = constants["SIZE"]
        dy, x = dy.reshape(-1, size), x.reshape(-1, size)
        if not constants["CENTRED"]:  # A CPU composes `F.rms_norm` of operations.
            formula = module("variants").UNWEIGHTED if weight is None else module("variants").FP32_PRODUCT
            weight = torch.ones(size, dtype=x.dtype) if weight is None else weight.reshape(size)
            found = backward.formula(formula, dy, x, weight, rstd.reshape(-1, 1), True, True)
            return found.dx if found.dx_mean is None else found.dx + found.dx_mean, found.dweight, None
        weight = torch.ones(size, dtype=x.dtype) if weight is None else weight.reshape(size)
        # The CPU's operator wants statistics of the dtype that its forward pass returns.
        dtype = torch.native_layer_norm(x, (size,), weight, weight, 1.0)[1].dtype
        mean, rstd = (each.reshape(-1, 1).to(dtype) for each in (mean, rstd))
        return torch.ops.aten.native_layer_norm_backward(dy, x, (size,), mean, rstd, weight, weight, [True] * 3)

    def layer_norm_backward(constants, scalars, dy, x, weight, mean, rstd, dx):
        weight = weight if constants["WEIGHT"] else None
        write(dx, layer_norm_gradients(constants, dy, x, weight, mean, rstd)[0])

    def layer_norm_sum_rows(constants, scalars, dy, x, mean, rstd, *outs):
        products[:] = layer_norm_gradients(constants, dy, x, None, mean, rstd)[1:]
        if constants["TAKEN"] == constants["THREADS"]:
            layer_norm_sum_threads(constants, scalars, None, None, *outs)

    def layer_norm_sum_threads(constants, scalars, dweight_sums, dbias_sums, *outs):
        for name, into, values in zip(("DWEIGHT", "DBIAS"), outs, products):
            if constants[name]:
                write(into, values)

    def group_norm_forward(constants, scalars, x, weight, bias, out, mean, rstd):
        rows, groups = scalars[:2]
        samples, channels = rows // groups, scalars[2] * groups
        if constants["SINGLE"] or not constants["WEIGHT"]:
            # As ATen, which takes the positions of one channel for the channels of one position.
            channels = x.numel() // samples if constants["SINGLE"] else channels
        vectors = (
            each.reshape(channels) if constants[name] else None for name, each in (("WEIGHT", weight), ("BIAS", bias))
        )
        sizes = samples, channels, x.numel() // (samples * channels)
        # Unlike CUDA's the CPU's kernel does not round eps to the dtype: those of the proof, of layers that tests make, and of histories.
        known = (eps for eps in (1e-5, 1e-6, 0.3, 0.01) if float(torch.tensor(eps, dtype=x.dtype)) == scalars[-1])
        eps = next(known, scalars[-1])
        found = torch.native_group_norm(x.contiguous(), *vectors, *sizes, groups, eps)
        for into, values in zip((out, mean, rstd)[: 1 + 2 * scalars[-2]], found):
            write(into, values)

    def group_norm_statistics(constants, scalars, x, statistics):
        statistics.eps = scalars[-1]  # All is computed at once, by the next launch.

    def group_norm_output(constants, scalars, x, weight, bias, out, mean, rstd, statistics):
        constants = {**constants, "SINGLE": False}
        group_norm_forward(constants, (*scalars[:4], scalars[-1], statistics.eps), x, weight, bias, out, mean, rstd)

    def group_norm_gradients(samples, channels, groups, weight, mean, rstd):
        dy, x = products
        sizes = samples, channels, x.numel() // (samples * channels)
        # The CPU's operator wants statistics of the dtype that its forward pass returns: not those rounded to the input's.
        for eps in (1e-5, 1e-6, 0.5):
            _, *statistics = torch.native_group_norm(x.contiguous(), weight, None, *sizes, groups, eps)
            if torch.equal(statistics[1].to(rstd.dtype), rstd.reshape(samples, groups)):
                break
        else:
            statistics = mean, rstd
        given = dy.contiguous(), x.contiguous(), *statistics, weight
        return torch.ops.aten.native_group_norm_backward(*given, *sizes, groups, [True] * 3)

    def group_norm_backward(constants, scalars, dy, x, weight, mean, rstd, sums, dx):
        products[:] = dy.detach(), x.detach()
        rows, groups, channels = scalars[:3]
        weight = weight.reshape(-1) if constants["WEIGHT"] else torch.ones(groups * channels, dtype=x.dtype)
        found = group_norm_gradients(rows // groups, groups * channels, groups, weight, mean, rstd)
        write(dx, found[0].view(dx.shape))

    def group_norm_channel_sums(constants, scalars, dy, x, sums):
        products[:] = dy.detach(), x.detach()  # All is computed at once, by the next launch.

    def group_norm_vector_gradients(constants, scalars, mean, rstd, sums, *outs):
        samples, channels, of_group = scalars
        weight = torch.ones(channels, dtype=mean.dtype)
        found = group_norm_gradients(samples, channels, channels // of_group, weight, mean, rstd)
        for name, into, values in zip(("DWEIGHT", "DBIAS"), outs, found[1:]):
            if constants[name]:
                write(into, values)

    def cohere_layer_norm_forward(constants, scalars, x, weight, out, *moments):
        write(out, cohere.eager(x, weight, scalars[-1]))
        for into, values in zip(moments, cohere.statistics(x, scalars[-1])):
            write(into, values)

    def cohere_layer_norm_backward(constants, scalars, dy, x, weight, mean, rstd, dx, dx_variance, dx_mean, *of_rows):
        sums = []
        found = cohere_backward.formula(dy, x, weight, mean, rstd, True, False, sums)
        for into, values in zip(of_rows, sums):
            write(into, values)
        for into, values in zip((dx, dx_variance, dx_mean), found):
            if values is not None:
                write(into, values)

    def cohere_layer_norm_sum_chains(constants, scalars, dy, x, mean, rstd, blocks):
        products[:] = [dy.detach().float() * ((x.detach().float() - mean) * rstd)]

    def activation_forward(constants, scalars, x, out):
        write(out, activation._ACTIVATIONS[constants["ACTIVATION"]].forward(None, x))

    def activation_backward(constants, scalars, dy, x, *dxs):
        found = activation._ACTIVATIONS[constants["ACTIVATION"]].gradients(dy, x)
        for dx, values in zip(dxs, [functools.reduce(torch.add, found)] if constants["SUM"] else found, strict=True):
            write(dx, values)

    def gated_activation_forward(constants, scalars, gate, out, up=None):
        gate, up = gated._halves(gate) if constants["PACKED"] else (gate, up)
        write(out, gated._eager(gated.ACTIVATIONS[constants["ACTIVATION"]], gate, up))

    def gated_activation_backward(constants, scalars, dy, gate, d_gate, up=None, d_up=None):
        if constants["PACKED"]:
            write(d_gate, gated._packed_eager_gradient(gated.ACTIVATIONS[constants["ACTIVATION"]], dy, gate))
            return
        found = gated._eager_gradients(gated.ACTIVATIONS[constants["ACTIVATION"]], dy, gate, up)
        for into, values in zip((d_gate, d_up), found):
            if into is not None:
                write(into, values)

    def rotate(constants, scalars, q, k, cos, sin, q_out, k_out, *straight):
        tokens, *_, q_heads, k_heads = scalars[:7]
        steps = scalars[7:]
        size, unit = 2 * constants["HALF"], constants["UNIT"]
        dim = size + constants["PASSED"]
        batch = q_out.numel() // (tokens * q_heads * dim)
        # Formulas that pass a part of the head on, or that chunk it, have one gradient.
        forward, halved = constants["STEP"] == "forward", constants["TABLE"] == "first_half"
        keeps_dtype = constants["FP32_COMPUTE"]
        variant = next(
            v
            for v in rotary.FORMULAS.values()
            if v.layout == constants["LAYOUT"]
            and (v.table in ("first_half", "one_each")) == halved
            and v.chunked != constants["PADDED"]
            and (v.partial or not constants["PASSED"])  # A formula of a part of the head may rotate the whole.
            and (v.keeps_dtype == keeps_dtype if forward else (v.one_edge or not keeps_dtype))
        )

        def heads(tensor, count, at):
            return tensor.as_strided((batch, tokens, count, dim), (*(step * unit for step in steps[at]), 1))

        size //= 2 if variant.table == "one_each" else 1
        cos, sin = (
            table.as_strided((batch, tokens, 1, size), (*(step * unit for step in steps[at : at + 2]), 0, 1))
            for table, at in ((cos, 12), (sin, 14))
        )
        tensors = [(q, q_out, q_heads, 0), (k, k_out, k_heads, 3)]
        for number, (x, out, count, at) in enumerate(tensors if k_heads else tensors[:1]):
            x, into = heads(x, count, slice(at, at + 3)), slice(at + 6, at + 9)
            if forward:
                heads(out, count, into).copy_(variant.rotate(x, cos, sin))
                continue
            if not straight:
                heads(out, count, into).copy_(variant.gradient(x, cos, sin, out.dtype))
                continue
            halves, through_cos = variant.gradients(x, cos, sin, out.dtype)
            heads(out, count, into).copy_(halves)
            heads(straight[number], count, into).copy_(through_cos)

    def complex_rotary(constants, scalars, x, freqs, out):
        tokens, _, _, _, heads, *steps = scalars
        dim, unit = 2 * constants["HALF"], constants["UNIT"]
        batch = out.numel() // (tokens * heads * dim)
        x, out = (
            each.as_strided((batch, tokens, heads, dim), (*(step * unit for step in steps[at : at + 3]), 1))
            for each, at in ((x, 0), (out, 3))
        )
        steps = [step * constants["FREQS_UNIT"] // 2 for step in steps[6:]]
        freqs = torch.view_as_complex(freqs).as_strided((batch, tokens, dim // 2), (*steps, 1))
        out.copy_(complex_family.eager(x, freqs.conj() if constants["CONJUGATE"] else freqs, 2))

    def rotary_tables(constants, scalars, position_ids, inv_freq, cos, sin):
        for into, values in zip((cos, sin), tables.TABLES.eager(cos, position_ids, inv_freq, scalars[-1])):
            write(into, values)

    def dyt_forward(constants, scalars, x, alpha, weight, bias, out):
        write(out, dyt.eager(x, alpha, weight, bias))

    def dyt_backward(constants, scalars, dy, x, alpha, weight, dx, sums):
        found, of_alpha, _ = dyt_gradients.terms(dy, x, alpha, weight)
        write(dx, found)
        products[:] = [of_alpha]
        if constants["STORED"]:
            write(sums, of_alpha.flatten())

    def full_sum_last_block(constants, scalars, blocks, total, out):
        (product,) = products
        write(total, product.sum(dtype=torch.float32))
        write(out, product.sum())

    def dyt_sum_chains(constants, scalars, dy, x, alpha, blocks):
        products[:] = [dy * torch.tanh(x * alpha), dy]

    def softmax_forward(constants, scalars, x, y):
        write(y, functional.softmax(x, -1, dtype=y.dtype))

    def softmax_backward(constants, scalars, dy, y, dx):
        write(dx, softmax._formula(dy, y, dx.dtype))

    def masked_softmax_forward(constants, scalars, scores, y, statistics, mask=None):
        write(y, masked.eager_masked_softmax(scores, mask, scalars[-1]))

    def masked_softmax_backward(constants, scalars, dy, scores, statistics, dx, mask=None):
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_()
            y = masked.eager_masked_softmax(leaf, mask, scalars[-1])
        write(dx, torch.autograd.grad(y, leaf, dy)[0])

    def cross_entropy_forward(constants, scalars, logits, target, maxima, log_sums, logp, checked):
        h, ignored, valid = logits.float(), target == scalars[2], (target >= 0) & (target < logits.shape[1])
        of_classes = functional.log_softmax(h, -1)
        largest = h.argmax(-1, keepdim=True)
        maxima.copy_(h.gather(1, largest)[:, 0])
        # There the row's maximum is subtracted from itself.
        log_sums.copy_(0.0 - of_classes.gather(1, largest)[:, 0])
        logp.copy_(of_classes.gather(1, torch.where(valid, target, 0)[:, None])[:, 0]).masked_fill_(ignored, 0.0)
        checked.copy_(torch.where(ignored, -100, torch.where(valid, 0, 1)))

    def cross_entropy_backward(constants, scalars, logits, target, maxima, log_sums, d_loss, count, dx):
        reduction = "mean" if constants["MEAN"] else "sum"
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = cross_entropy.eager(leaf, target, scalars[2], reduction)
        write(dx, torch.autograd.grad(loss, leaf, d_loss)[0])

    def divergence_forward(constants, scalars, first, second, labels, out):
        write(
            out,
            divergences[constants["FORM"]].eager(first, second, labels_of(constants, labels), scalars[1], "none", None),
        )

    def divergence_backward(constants, scalars, dy, first, second, labels, d_first, *d_second):
        assert not constants["REDUCED"], "the CPU has no sum in the kernels' order"
        labels = labels_of(constants, labels)
        found = divergences[constants["FORM"]].gradients(dy, first, second, labels, scalars[1])
        wanted = [d_first] * constants["WITH_FIRST"], [*d_second] * constants["WITH_SECOND"]
        for into, values in zip(wanted[0] + wanted[1], found[0 if wanted[0] else 1 :]):
            write(into, values)

    def labels_of(constants, labels):
        return labels if constants["SIZE"] else None

    kernels = (rms_norm_forward, add_rms_norm_forward, rms_norm_backward, rms_norm_sum_chains, column_sum_blocks)
    kernels += (activation_forward, activation_backward, gated_activation_forward, gated_activation_backward)
    kernels += (divergence_forward, divergence_backward, layer_norm_forward)
    kernels += (layer_norm_backward, layer_norm_sum_rows, layer_norm_sum_threads)
    kernels += (group_norm_forward, group_norm_statistics, group_norm_output)
    kernels += (group_norm_backward, group_norm_channel_sums, group_norm_vector_gradients)
    kernels += (cohere_layer_norm_forward, cohere_layer_norm_backward, cohere_layer_norm_sum_chains)
    kernels += (complex_rotary, dyt_forward, dyt_backward, dyt_sum_chains, full_sum_last_block)
    kernels += (rotary_tables, softmax_forward, softmax_backward, cross_entropy_forward, cross_entropy_backward)
    kernels += (masked_softmax_forward, masked_softmax_backward)
    return {each.__name__: each for each in kernels} | {
        "rotary": rotate,
        "cross_entropy_forward_short": cross_entropy_forward,
        "softmax_forward_of_block": softmax_forward,
        "softmax_forward_of_long_rows": softmax_forward,
        "softmax_backward_of_block": softmax_backward,
        "softmax_backward_of_long_rows": softmax_backward,
        "rms_norm_backward_streamed": rms_norm_backward,
        "group_norm_input_gradient": group_norm_backward,
    }


@contextlib.contextmanager
def cpu_arithmetic(package, changes=None):
    """While it lasts, launches compute what the original layers do on the CPU. Yields how often each kernel ran.

    Args:
        changes: other kernels, by name.
    """
    kernels, launched = {**cpu_kernels(package), **(changes or {})}, collections.Counter()

    def launch(self, blocks, tensors, scalars):
        self.check(tensors)
        # As a kernel, which nobody sees.
        with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            kernels[self.kernel.__name__](self.constants, scalars, *tensors)
        # One that raised has not run: a verification takes that as a refusal.
        launched[self.kernel.__name__] += 1

    with mock.patch.object(python_module(package, "launch").Launcher, "through_triton", launch):
        yield launched
