"""RMSNorm, alone and after a residual add."""

import importlib
from types import SimpleNamespace

from cases import AS_FASTEST, COMPILED, EPS, FASTEST, GRAPH, LIGER, QUACK, ROOFLINE, Op, Target

_STREAMING = (Target(1.03, ROOFLINE), Target(1.0, FASTEST))
_SMALL_ROWS = (Target(0.5, LIGER), Target(1.15, ROOFLINE, beyond_l2=True))
# With so few rows the launch is most of the time between the two events.
_DECODE = (Target(1.0, COMPILED, clock=GRAPH),)
_FORWARD = {
    **dict.fromkeys(((32768, 4096), (32768, 8192), (32768, 16384), (32768, 32768), (16384, 8192)), _STREAMING),
    **dict.fromkeys(((8192, 4096), (65536, 1024), (4096, 2048)), AS_FASTEST),
    **dict.fromkeys(((4096, 32, 128), (65536, 128), (65536, 64)), _SMALL_ROWS),
    **dict.fromkeys(((1, 4096), (4, 4096), (16, 4096)), _DECODE),
}
_BACKWARD = {
    (32768, 4096): (*AS_FASTEST, Target(1.0, QUACK, recorded_ms=0.2330)),
    (8192, 4096): (*AS_FASTEST, Target(1.0, QUACK, recorded_ms=0.1108)),
    (32768, 32768): (Target(0.9, QUACK, recorded_ms=2.4172),),
}
_ADD = dict.fromkeys(((32768, 4096), (32768, 32768)), _STREAMING)
_ADD_BACKWARD = {
    (8192, 4096): (Target(1.0, QUACK, recorded_ms=0.149),),
    (32768, 4096): (Target(1.0, QUACK, recorded_ms=0.2818),),
    (32768, 32768): (Target(1.0, QUACK, recorded_ms=2.508),),
}

OPS = {
    "rms_norm": Op("RMSNorm forward", _FORWARD, tensors=2, vectors=1),
    "rms_norm_backward": Op("RMSNorm backward (dx and dweight)", _BACKWARD, tensors=3, vectors=2, backward=True),
    "add_rms_norm": Op("Fused residual add + RMSNorm forward", _ADD, tensors=4, vectors=1, inputs=2, outputs=2),
    "add_rms_norm_backward": Op(
        "Fused residual add + RMSNorm backward", _ADD_BACKWARD, tensors=4, vectors=2, backward=True, inputs=2, outputs=2
    ),
}


def _with_add(rms_norm):
    def add_rms_norm(x, residual, weight):
        total = residual + x
        return rms_norm(total, weight), total

    return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm}


def eager():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return _with_add(lambda x, weight: LlamaRMSNorm.forward(SimpleNamespace(weight=weight, variance_epsilon=EPS), x))


def compiled():
    import torch

    def rms_norm(x, weight):
        h = x.to(torch.float32)
        return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    return _with_add(rms_norm)


def ours(kernel):
    return {
        "rms_norm": lambda x, weight: kernel.rms_norm(x, weight, EPS),
        "add_rms_norm": lambda x, residual, weight: kernel.fused_add_rms_norm(x, residual, weight, EPS),
    }


def native():
    from torch.nn import functional

    return {"rms_norm": lambda x, weight: functional.rms_norm(x, weight.shape, weight, EPS)}


# Liger's arguments after the tensors: eps, offset, casting mode, in place.
_LIKE_LLAMA = EPS, 0.0, "llama", False


def _liger(module):
    function = importlib.import_module(module).LigerRMSNormFunction
    return {"rms_norm": lambda x, weight: function.apply(x, weight, *_LIKE_LLAMA)}


def liger():
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as AddRMSNorm

    added = {"add_rms_norm": lambda x, residual, weight: AddRMSNorm.apply(x, residual, weight, *_LIKE_LLAMA)}
    return {**_liger("liger_kernel.ops.rms_norm"), **added}


def cutile():
    return _liger("liger_kernel.ops.cutile.ops.rms_norm")


def quack():
    from quack.rmsnorm import rmsnorm

    return {"rms_norm": lambda x, weight: rmsnorm(x, weight, eps=EPS)}
