"""SiLU and SwiGLU."""

from cases import ROOFLINE, Op, Target

_CASES = {(8192, 14336): (Target(1.03, ROOFLINE),)}

OPS = {
    "silu": Op("SiLU forward", _CASES, tensors=2),
    "silu_backward": Op("SiLU backward", _CASES, tensors=3, backward=True),
    "silu_and_mul": Op("SwiGLU forward", _CASES, tensors=3, inputs=2),
    "silu_and_mul_backward": Op("SwiGLU backward", _CASES, tensors=5, backward=True, inputs=2),
}


def eager():
    from torch.nn import functional

    return {"silu": lambda x: functional.silu(x), "silu_and_mul": lambda gate, up: functional.silu(gate) * up}


def ours(kernel):
    return {"silu": kernel.silu, "silu_and_mul": kernel.silu_and_mul}


def liger():
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def silu_and_mul(gate, up):
        if gate.requires_grad:  # The backward pass overwrites gate and up with their gradients.
            gate, up = gate.clone(), up.clone()
        return LigerSiLUMulFunction.apply(gate, up)

    return {"silu_and_mul": silu_and_mul}
