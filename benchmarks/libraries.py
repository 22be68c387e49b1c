"""What `peers.py` measures beside this package: each peer loads as a dictionary, family of ops -> function of its arguments."""

import functools
import importlib

from cases import COMPILED, CUT, CUTILE, EAGER, EPS, GROUPS, LIGER, NATIVE, QUACK, compiled, eager


def native():
    from torch.nn import functional

    def rms_norm(x, weight):
        return functional.rms_norm(x, weight.shape, weight, EPS)

    return {"rms_norm": rms_norm}


def liger(module, swiglu=None):
    function = importlib.import_module(module).LigerRMSNormFunction

    def rms_norm(x, weight):
        offset, casting_mode, in_place = 0.0, "llama", False
        return function.apply(x, weight, EPS, offset, casting_mode, in_place)

    families = {"rms_norm": rms_norm}
    if swiglu is not None:
        product = importlib.import_module(swiglu).LigerSiLUMulFunction

        def silu_and_mul(gate, up):
            if gate.requires_grad:  # The backward pass overwrites gate and up with their gradients.
                gate, up = gate.clone(), up.clone()
            return product.apply(gate, up)

        families["silu_and_mul"] = silu_and_mul
    if module.startswith("liger_kernel.ops.rms"):
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.rope import LigerRopeFunction

        def rotary(q, k, cos, sin):
            return LigerRopeFunction.apply(q, k, cos, sin)

        # Timed calls overwrite their inputs; the comparison of bits passes copies.
        rotary.in_place = True
        families["rotary"] = rotary

        def add_rms_norm(x, residual, weight):
            offset, casting_mode, in_place = 0.0, "llama", False
            return LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS, offset, casting_mode, in_place)

        def softmax(x):
            from liger_kernel.ops.softmax import LigerSoftmaxFunction

            return LigerSoftmaxFunction.apply(x)

        def dyt(x, alpha, weight, bias):
            from liger_kernel.ops.dyt import LigerDyTFunction

            return LigerDyTFunction.apply(x, alpha, weight, bias)

        def rotary_complex(q, k, freqs_cis):
            from liger_kernel.ops.llama4_rope import LigerLlama4RopeFunction

            return LigerLlama4RopeFunction.apply(q, k, freqs_cis)

        rotary_complex.in_place = True

        def group_norm(x, weight, bias):
            from liger_kernel.ops.group_norm import LigerGroupNormFunction

            return LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], GROUPS, EPS)

        families["group_norm"] = group_norm
        families |= {"add_rms_norm": add_rms_norm, "softmax": softmax, "dyt": dyt, "rotary_complex": rotary_complex}
        families |= liger_losses()
    return families


def liger_losses():
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction
    from liger_kernel.ops.tvd import LigerTVDLossFunction

    def cross_entropy(logits, target):
        return LigerCrossEntropyFunction.apply(logits, target, None)[0]

    # The forward pass overwrites the logits with their gradient.
    cross_entropy.in_place = True

    def linear_cross_entropy(hidden_states, weight, target):
        return LigerFusedLinearCrossEntropyFunction.apply(hidden_states, weight, target)[0]

    def kl_div(input, target):
        return LigerKLDivLossFunction.apply(input, target, "batchmean")

    def tvd(p, q):
        return LigerTVDLossFunction.apply(p, q, None, "batchmean")

    def jsd(student, teacher):
        from liger_kernel.ops.jsd import LigerJSDFunction

        return LigerJSDFunction.apply(student.log_softmax(-1), teacher.log_softmax(-1))

    def linear_jsd(student, student_weight, teacher, teacher_weight):
        from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

        return LigerFusedLinearJSDFunction.apply(student, student_weight, teacher, teacher_weight)

    return {each.__name__: each for each in (cross_entropy, linear_cross_entropy, kl_div, tvd, jsd, linear_jsd)}


def quack():
    from quack.rmsnorm import rmsnorm

    def rms_norm(x, weight):
        return rmsnorm(x, weight, eps=EPS)

    def cross_entropy(logits, target):
        from quack.cross_entropy import cross_entropy

        return cross_entropy(logits, target, reduction="mean")

    def softmax(x):
        from quack.softmax import softmax

        return softmax(x.view(-1, x.shape[-1])).view(x.shape)

    return {"rms_norm": rms_norm, "cross_entropy": cross_entropy, "softmax": softmax}


def cut():
    from cut_cross_entropy import linear_cross_entropy

    return {"linear_cross_entropy": linear_cross_entropy}


PEERS = {
    EAGER: eager,
    COMPILED: compiled,
    NATIVE: native,
    LIGER: functools.partial(liger, "liger_kernel.ops.rms_norm", swiglu="liger_kernel.ops.swiglu"),
    QUACK: quack,
    CUT: cut,
    CUTILE: functools.partial(liger, "liger_kernel.ops.cutile.ops.rms_norm"),
}
