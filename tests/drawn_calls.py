"""One call of each family of ops at random: shapes, strides, dtypes and arguments, and which gradients are needed."""

import random
from types import ModuleType
from typing import Callable

import torch
from places import modeling

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HIDDEN_SIZES = (64, 128, 256, 512, 768, 1024, 2048, 4096, 5120, 8192, 16384, 32768)


class Drawn:
    """What calls are made of. Tensors are zeros: nobody computes with them.

    Args:
        kernel: the package.
        module: its modules by name.
    """

    def __init__(self, kernel: ModuleType, module: Callable[[str], ModuleType], choose: random.Random):
        self.kernel, self.module, self.choose = kernel, module, choose

    def is_so(self, share: float = 0.5) -> bool:
        return self.choose.random() < share

    def dtype(self) -> torch.dtype:
        return self.choose.choice(DTYPES)

    def one_of(self, *each):
        return self.choose.choice(each)

    def size(self, least: int, most: int, step: int = 1, usual=HIDDEN_SIZES) -> int:
        """Elements of a row: of a usual size, or any multiple of `step`."""
        within = [each for each in usual if least <= each <= most]
        return self.one_of(step * self.choose.randint(-(-least // step), most // step), self.choose.choice(within))

    def rows(self, size: int, most_elements: int = 1 << 21) -> int:
        """One, few or many."""
        rows = self.one_of(1, *(self.choose.randint(*each) for each in ((2, 40), (41, 2000), (2000, 70000))))
        return max(min(rows, most_elements // size), 1)

    def zeros(self, *shape: int, dtype: torch.dtype, gap: int = 0, leaf: float = 0.7) -> torch.Tensor:
        """Zeros in rows with `gap` elements between them. They require gradients with the probability `leaf`."""
        tensor = torch.zeros(*shape[:-1], shape[-1] + gap, dtype=dtype)[..., : shape[-1]]
        return tensor.requires_grad_() if self.is_so(leaf) else tensor

    def gap(self) -> int:
        return self.one_of(0, 0, 0, 1, 2, 4, 8)

    def backward(self, outputs) -> None:
        """The gradients of those outputs that have some, dense or expanded."""
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        outputs = [each for each in outputs or () if each.requires_grad]
        if outputs:
            dense = self.is_so(0.8)
            dy = [torch.zeros(each.shape if dense else (), dtype=each.dtype).expand(each.shape) for each in outputs]
            torch.autograd.backward(outputs, dy)


def _rms_norm(draw: Drawn):
    formulas, dtype = draw.module("variants"), draw.dtype()
    variant = draw.one_of(*(each for each in formulas.EAGER if not each.fused))
    size = draw.size(1, 32768)
    x = draw.zeros(draw.rows(size), size, dtype=dtype, gap=draw.gap())
    weight = None if variant.scale == "none" else draw.zeros(size, dtype=draw.dtype())
    return draw.module("rms_norm").replacement(x, weight, 1e-5, formulas.EAGER[variant])


def _torch_rms_norm(draw: Drawn):
    dtype, size = draw.dtype(), draw.size(1, 32768)
    x = draw.zeros(draw.rows(size), size, dtype=dtype, gap=draw.gap())
    weight = draw.one_of(None, draw.zeros(size, dtype=dtype))
    return draw.module("rms_norm").replacement(x, weight, 1e-5, torch.nn.RMSNorm, "eps", fused=True)


def _add_rms_norm(draw: Drawn):
    formulas, dtype, size = draw.module("variants"), draw.dtype(), draw.size(1, 32768)
    variant = draw.one_of(*(each for each in formulas.EAGER if not each.fused and each.scale != "none"))
    rows = draw.rows(size)
    tensors = [draw.zeros(rows, size, dtype=dtype) for _ in range(2)]
    weight = draw.zeros(size, dtype=draw.dtype())
    outputs = draw.module("add_rms_norm").replacement(*tensors, weight, 1e-5, formulas.EAGER[variant])
    return outputs and outputs[: draw.one_of(1, 2)]


def _gated_rms_norm(draw: Drawn):
    dtype, size = draw.dtype(), draw.one_of(16, 64, 100, 128, 256, 512)
    rows = draw.rows(size)
    tensors = [draw.zeros(rows, size, dtype=dtype) for _ in range(2)]
    weight = draw.zeros(size, dtype=draw.dtype())
    owner = modeling("qwen3_next").Qwen3NextRMSNormGated
    return draw.module("gated_rms_norm").replacement(*tensors, weight, 1e-5, "silu", owner)


def _activation(draw: Drawn):
    activation = draw.module("activation")
    function = draw.one_of(*activation._ACTIVATIONS.values())
    x = draw.zeros(draw.one_of(1, 300), draw.choose.randint(1, 3000), dtype=draw.dtype())
    return activation.replacement(draw.one_of(x, x.detach().T.requires_grad_()), function.forward, function)


def _gated_activation(draw: Drawn):
    gated, dtype = draw.module("gated_activation"), draw.dtype()
    function = draw.one_of(*gated.ACTIVATIONS.values())
    rows, size = draw.choose.randint(1, 500), draw.one_of(draw.choose.randint(1, 3000), 8 * draw.choose.randint(1, 400))
    if draw.is_so(0.3):
        return gated.packed_replacement(draw.zeros(rows, 2 * size, dtype=dtype), function)
    gap = draw.gap()
    gate, up = (draw.zeros(rows, size, dtype=dtype, gap=gap) for _ in range(2))
    return gated.replacement(gate, up, function.forward, function)


def _rotary(draw: Drawn):
    rotary, dtype = draw.module("rotary"), draw.dtype()
    variant = draw.one_of(*rotary.FORMULAS.values())
    head_dim = draw.one_of(32, 48, 64, 80, 96, 128, 256, 2 * draw.choose.randint(9, 70))
    batch, tokens = draw.one_of(1, 2, 3), draw.choose.randint(1, 200)

    def heads(*counts):
        sizes = batch, tokens, draw.one_of(*counts), head_dim
        states = draw.zeros(*sizes, dtype=dtype, leaf=0)
        return draw.one_of(states.transpose(1, 2), states.transpose(1, 2).contiguous()).requires_grad_(draw.is_so(0.7))

    size = (head_dim - 16 * variant.partial) // (2 if variant.table == "one_each" else 1)
    samples, table = draw.one_of(1, batch), draw.one_of(dtype, torch.float32)
    cos, sin = (draw.zeros(samples, tokens, size, dtype=table, leaf=0) for _ in range(2))
    return rotary.replacement(heads(1, 2, 8, 12, 40), heads(1, 2, 8), cos, sin, 1, variant.eager)


def _rotary_tables(draw: Drawn):
    llama, head_dim = modeling("llama"), draw.one_of(16, 64, 80, 128)
    config = llama.LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim)
    embedding = llama.LlamaRotaryEmbedding(config)
    embedding.attention_scaling = draw.one_of(1.0, 0.5)
    positions = torch.zeros(
        draw.one_of(1, 2), draw.choose.randint(1, 3000), dtype=draw.one_of(torch.int64, torch.int32)
    )
    x = draw.zeros(1, 1, head_dim, dtype=draw.dtype(), leaf=0)
    return draw.module("rotary_embedding").replacement(embedding, x, positions, type(embedding))


def _complex_rotary(draw: Drawn):
    head_dim = draw.one_of(64, 128, 2 * draw.choose.randint(1, 80))
    x = draw.zeros(
        draw.one_of(1, 2), draw.choose.randint(1, 60), draw.one_of(1, 3, 8, 40), head_dim, dtype=draw.dtype()
    )
    dim = draw.one_of(1, 2)
    freqs = torch.zeros(1, x.shape[3 - dim], head_dim // 2, dtype=torch.complex64)
    return draw.module("ops.complex_rotary").replacement(x, freqs, dim)


def _cross_entropy(draw: Drawn):
    vocabulary = draw.size(2, 20000, usual=(1000, 4100, 9220, 16000))
    logits = draw.zeros(min(draw.rows(vocabulary), 300), vocabulary, dtype=draw.dtype(), leaf=0.8)
    target = torch.zeros(len(logits), dtype=torch.int64)
    return draw.module("cross_entropy").replacement(logits, target, -100, draw.one_of("mean", "sum"))


def _linear_cross_entropy(draw: Drawn):
    """In chunks of tokens, of a head that needs no gradient."""
    dtype, vocabulary = draw.dtype(), draw.choose.randint(2, 3000)
    hidden = draw.zeros(draw.choose.randint(17, 100), 64, dtype=dtype)
    weight, target = draw.zeros(vocabulary, 64, dtype=dtype, leaf=0), torch.zeros(len(hidden), dtype=torch.int64)
    return draw.kernel.linear_cross_entropy(hidden, weight, target, chunk_size=16)


def _softmax(draw: Drawn):
    size = draw.size(1, 16384)
    x = draw.zeros(draw.rows(size, 1 << 19), size, dtype=draw.dtype(), gap=draw.gap())
    return draw.module("ops.softmax").softmax(x, -1, dtype=draw.one_of(None, None, torch.float32))


def _masked_softmax(draw: Drawn):
    dtype, size = draw.dtype(), draw.size(1, 16384)
    batch, heads, queries = draw.one_of(1, 2), draw.one_of(1, 2, 3), draw.choose.randint(1, max((1 << 17) // size, 1))
    scores = draw.zeros(batch, heads, queries, size, dtype=dtype)
    mask = draw.one_of(None, draw.zeros(batch, 1, queries, size, dtype=dtype, gap=draw.one_of(0, 1, 8), leaf=0))
    return draw.module("ops.masked_softmax").masked_softmax(scores, mask, draw.one_of(1.0, 0.5))


def _divergence(draw: Drawn):
    divergences = draw.module("ops.divergences")
    form = draw.one_of(*divergences._DIVERGENCES.values())
    shape = draw.choose.randint(1, 60), draw.choose.randint(1, 1000)
    first, second = (draw.zeros(*shape, dtype=draw.dtype()) for _ in range(2))
    labels = torch.zeros(shape[0], dtype=torch.int64) if form.name == "variation" and draw.is_so() else None
    reduction = draw.one_of("none", "mean", "sum", "batchmean")
    return divergences.replacement(form, first, second, labels, -100, reduction, None if labels is None else shape[0])


def _jsd(draw: Drawn):
    jsd, dtype = draw.module("ops.jsd"), draw.dtype()
    shape = draw.choose.randint(1, 40), draw.size(2, 12000, usual=(4096, 9224))
    student, teacher = (draw.zeros(*shape, dtype=dtype) for _ in range(2))
    mask, beta = draw.one_of(None, torch.ones(shape[0], dtype=torch.bool)), draw.one_of(0, 0.3, 0.5, 1)
    return jsd.replacement(jsd.divergence, student, teacher, mask, beta, draw.one_of(1.0, 2.0), draw.is_so())


def _layer_norm(draw: Drawn):
    dtype, size = draw.dtype(), draw.size(64, 16384, step=4)
    x = draw.zeros(draw.rows(size, 1 << 22), size, dtype=dtype, gap=draw.gap())
    weight, bias = (draw.zeros(size, dtype=dtype) for _ in range(2))
    return draw.kernel.layer_norm(x, size, *draw.one_of((weight, bias), (weight, None), (None, None)))


def _group_norm(draw: Drawn):
    dtype, groups, channels = draw.dtype(), draw.one_of(1, 2, 8, 32), draw.one_of(1, 2, 3, 10, 16, 64)
    positions = draw.one_of(1, 2, 7, 49, 64, 100, 1024, 1 << 14, draw.choose.randint(1, 3000))
    samples = draw.choose.randint(1, max(min(200, (1 << 19) // (groups * channels * positions)), 1))
    x = draw.zeros(samples, groups * channels, positions, dtype=dtype)
    weight, bias = (draw.zeros(groups * channels, dtype=dtype) for _ in range(2))
    return draw.kernel.group_norm(x, groups, *draw.one_of((weight, bias), (weight, None), (None, None)))


def _cohere_layer_norm(draw: Drawn):
    family, dtype = draw.module("ops.cohere_layer_norm"), draw.dtype()
    size = draw.size(2, 12288, step=draw.one_of(1, 4))
    x = draw.zeros(draw.one_of(1, 2, 3), draw.rows(size, 1 << 20), size, dtype=dtype)
    of = draw.one_of(dtype, torch.float32)
    weight = draw.zeros(*draw.one_of((size,), x.shape[1:]), dtype=of)
    return family.replacement(x, weight, 1e-5, family.Eager)


def _dyt(draw: Drawn):
    dtype, size = draw.dtype(), draw.size(1, 3000)
    x, alpha = draw.zeros(draw.rows(size, 1 << 19), size, dtype=dtype), draw.zeros(1, dtype=dtype)
    return draw.kernel.dyt(x, alpha, *(draw.zeros(size, dtype=dtype) for _ in range(2)))


# By the first source file of a family in `op_families.py`.
CALLS = {
    "rms_norm": (_rms_norm, _torch_rms_norm, _add_rms_norm, _gated_rms_norm),
    "activation": (_activation, _gated_activation),
    "complex_rotary": (_complex_rotary,),
    "rotary": (_rotary, _rotary_tables),
    "cross_entropy": (_cross_entropy, _linear_cross_entropy),
    "layer_norm": (_layer_norm,),
    "group_norm": (_group_norm,),
    "cohere_layer_norm": (_cohere_layer_norm,),
    "dyt": (_dyt,),
    "softmax": (_softmax,),
    "masked_softmax": (_masked_softmax,),
    "divergences": (_divergence,),
    "jsd": (_jsd,),
}
