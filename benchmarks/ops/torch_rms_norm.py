"""`torch.nn.RMSNorm`, which calls `F.rms_norm`."""

from cases import AS_FASTEST, EPS, Op

from .rms_norm import liger as liger_rms_norm

_CASES = dict.fromkeys(((8192, 4096), (32768, 768)), AS_FASTEST)

OPS = {
    "torch_rms_norm": Op("torch.nn.RMSNorm forward", _CASES, tensors=2, vectors=1),
    "torch_rms_norm_backward": Op(
        "torch.nn.RMSNorm backward (dx and dweight)", _CASES, tensors=3, vectors=2, backward=True
    ),
}


def eager():
    from torch.nn import functional

    return {"torch_rms_norm": lambda x, weight: functional.rms_norm(x, weight.shape, weight, EPS)}


def ours(kernel):
    import torch

    norm = torch.nn.RMSNorm(1, eps=EPS)

    def torch_rms_norm(x, weight):
        norm._parameters["weight"], norm.normalized_shape = weight, tuple(weight.shape)
        return kernel.layers.TorchRMSNorm.forward(norm, x)

    return {"torch_rms_norm": torch_rms_norm}


def liger():
    return {"torch_rms_norm": liger_rms_norm()["rms_norm"]}
