"""SiLU and SwiGLU, and other activation functions, which `beside_eager.py` times."""

from cases import ROOFLINE, Op, Target

_CASES = {(8192, 14336): (Target(1.03, ROOFLINE),)}

OPS = {
    "silu": Op("SiLU forward", _CASES, tensors=2),
    "silu_backward": Op("SiLU backward", _CASES, tensors=3, backward=True),
    "silu_and_mul": Op("SwiGLU forward", _CASES, tensors=3, inputs=2),
    "silu_and_mul_backward": Op("SwiGLU backward", _CASES, tensors=5, backward=True, inputs=2),
}
_OTHERS = {"gelu": "GELU", "new_gelu": "GELU (new)", "fast_gelu": "GELU (fast)", "quick_gelu": "GELU (quick)"}
for _name, _title in _OTHERS.items():
    OPS[_name] = Op(f"{_title} forward", {}, tensors=2)
    OPS[f"{_name}_backward"] = Op(f"{_title} backward", {}, tensors=3, backward=True)
OPS["gelu_tanh_and_mul"] = Op("GeGLU forward", {}, tensors=3, inputs=2)
OPS["gelu_tanh_and_mul_backward"] = Op("GeGLU backward", {}, tensors=5, backward=True, inputs=2)


def eager():
    from torch.nn import functional
    from transformers.activations import ACT2FN

    return {
        "silu": lambda x: functional.silu(x),
        "silu_and_mul": lambda gate, up: functional.silu(gate) * up,
        "gelu": lambda x: functional.gelu(x),
        "new_gelu": ACT2FN["gelu_new"],
        "fast_gelu": ACT2FN["gelu_fast"],
        "quick_gelu": ACT2FN["quick_gelu"],
        "gelu_tanh_and_mul": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    }


def ours(kernel):
    return {name: getattr(kernel, name) for name in ("silu", "silu_and_mul", *_OTHERS, "gelu_tanh_and_mul")}


def liger():
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def silu_and_mul(gate, up):
        if gate.requires_grad:  # The backward pass overwrites gate and up with their gradients.
            gate, up = gate.clone(), up.clone()
        return LigerSiLUMulFunction.apply(gate, up)

    return {"silu_and_mul": silu_and_mul}
