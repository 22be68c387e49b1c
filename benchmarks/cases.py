"""The measured families of ops: their cases, the fewest bytes that each must move, its targets, and what computes it.

A family's key finds its functions in `eager`, `compiled` and `ours`; `libraries.py` loads other libraries' functions.
"""

import functools
import math
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Optional

OURS = "lossless-kernels"
EAGER = "eager"
COMPILED = "torch.compile"
NATIVE = "F.rms_norm"
NATIVE_BARE = "F.rms_norm, no module"
LIGER = "Liger"
QUACK = "quack"
CUTILE = "cuTile (Liger)"
CUT = "cut-cross-entropy"

EPS = 1e-5
# Of a GroupNorm, as in diffusion models.
GROUPS = 32
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Op:
    """An op whose device time is measured.

    Attributes:
        title: its heading in tables and plots.
        family: the key of its function in the dictionary that a peer loads as.
        tensors: tensors of the input's size that are read or written once. Forward: x and y. Backward: x, dy and dx.
        vectors: vectors [hidden_size] that are read or written once: the weight and its gradient.
        backward: whether the timed call is the backward pass alone.
        inputs: arguments of the input's size.
        outputs: results of the input's size.
        tables: tensors [tokens, head_dim] that are read once, cos and sin; inputs are then
            [batch, tokens, heads, head_dim].
        table_size: elements of a row of cos and of sin, as a part of head_dim.
        step: the timed call is the forward and the backward pass.
        drawn: what the inputs are: "rows" of the case's shape, "heads" of queries and keys, "complex heads" (queries, keys and
            complex frequencies), "scores" of attention and their mask, "tanh" (rows, alpha, weight and bias), "logits" with
            targets, "two logits" of student and teacher, "distributions" (log-probabilities and probabilities), "layer" (hidden
            states, a weight and targets of a shape [tokens, hidden_size, vocabulary]), "two layers" of student and teacher,
            "images" (of a shape [samples, channels, positions], with weight and bias of the channels).
    """

    title: str
    family: str
    tensors: int
    vectors: int
    backward: bool = False
    inputs: int = 1
    outputs: int = 1
    tables: int = 0
    table_size: float = 1.0
    step: bool = False
    drawn: str = "rows"


# Family -> the model whose file has the function, what it rotates, and how much of a head a row of cos covers.
ROTARY_FILES = {
    "partial": ("gpt_neox", "of half of the head", 0.5),
    "neighbours": ("cohere", "of neighbours in fp32", 1.0),
    "chunked": ("gpt_oss", "of chunks", 0.5),
    "vision": ("qwen2_vl", "of vision towers", 1.0),
}

OPS = {
    "rms_norm": Op("RMSNorm forward", "rms_norm", tensors=2, vectors=1),
    "rms_norm_backward": Op("RMSNorm backward (dx and dweight)", "rms_norm", tensors=3, vectors=2, backward=True),
    "add_rms_norm": Op(
        "Fused residual add + RMSNorm forward", "add_rms_norm", tensors=4, vectors=1, inputs=2, outputs=2
    ),
    "add_rms_norm_backward": Op(
        "Fused residual add + RMSNorm backward",
        "add_rms_norm",
        tensors=4,
        vectors=2,
        backward=True,
        inputs=2,
        outputs=2,
    ),
    "silu": Op("SiLU forward", "silu", tensors=2, vectors=0),
    "silu_backward": Op("SiLU backward", "silu", tensors=3, vectors=0, backward=True),
    "silu_and_mul": Op("SwiGLU forward", "silu_and_mul", tensors=3, vectors=0, inputs=2),
    "silu_and_mul_backward": Op("SwiGLU backward", "silu_and_mul", tensors=5, vectors=0, backward=True, inputs=2),
    # The weight is the bias, too.
    "layer_norm": Op("LayerNorm forward", "layer_norm", tensors=2, vectors=1),
    "cohere_layer_norm": Op("Cohere's LayerNorm forward", "cohere_layer_norm", tensors=2, vectors=1),
    "cohere_layer_norm_backward": Op(
        "Cohere's LayerNorm backward (dx and dweight)", "cohere_layer_norm", tensors=3, vectors=2, backward=True
    ),
    "group_norm": Op("GroupNorm forward", "group_norm", tensors=2, vectors=0, drawn="images"),
    "group_norm_backward": Op(
        "GroupNorm backward (dx, dweight and dbias)", "group_norm", tensors=3, vectors=0, backward=True, drawn="images"
    ),
    "softmax": Op("Softmax forward", "softmax", tensors=2, vectors=0),
    # Reads y and dy, writes dx.
    "softmax_backward": Op("Softmax backward", "softmax", tensors=3, vectors=0, backward=True),
    # Adds the mask, which all heads share, computes softmax in fp32 and rounds it to the scores' dtype.
    "masked_softmax": Op("Softmax of masked attention scores", "masked_softmax", tensors=2, vectors=0, drawn="scores"),
    "masked_softmax_backward": Op(
        "Softmax of masked attention scores, backward",
        "masked_softmax",
        tensors=3,
        vectors=0,
        backward=True,
        drawn="scores",
    ),
    # weight and bias; and the gradient of each, without the bias itself.
    "dyt": Op("Dynamic tanh forward", "dyt", tensors=2, vectors=2, drawn="tanh"),
    "dyt_backward": Op(
        "Dynamic tanh backward (all gradients)", "dyt", tensors=3, vectors=3, backward=True, drawn="tanh"
    ),
    # Reads the logits once forward and once backward, writes their gradient. Targets and statistics are O(tokens).
    "cross_entropy": Op(
        "Cross-entropy forward and backward",
        "cross_entropy",
        tensors=3,
        vectors=0,
        backward=True,
        step=True,
        drawn="logits",
    ),
    # Reads both in each pass and writes the student's gradient.
    "jsd": Op(
        "Generalized Jensen-Shannon divergence forward and backward",
        "jsd",
        tensors=5,
        vectors=0,
        backward=True,
        step=True,
        drawn="two logits",
    ),
    # Both models' hidden states and weights are read, the student's gradients written. Products of matrices take most of
    # the time.
    "linear_jsd": Op(
        "Two linear layers and their divergence forward and backward",
        "linear_jsd",
        tensors=3,
        vectors=0,
        backward=True,
        step=True,
        drawn="two layers",
    ),
    # Read both forward, and the target backward; the gradient of the log-probabilities is written.
    "kl_div": Op(
        "KL divergence (batchmean) forward and backward",
        "kl_div",
        tensors=4,
        vectors=0,
        backward=True,
        step=True,
        drawn="distributions",
    ),
    # Reads both in each pass and writes one gradient.
    "tvd": Op(
        "Total variation distance (batchmean) forward and backward",
        "tvd",
        tensors=5,
        vectors=0,
        backward=True,
        step=True,
        drawn="distributions",
    ),
    # Hidden states and weight are read, their gradients written. Products of matrices take most of the time.
    "linear_cross_entropy": Op(
        "Linear layer and cross-entropy forward and backward",
        "linear_cross_entropy",
        tensors=2,
        vectors=0,
        backward=True,
        step=True,
        drawn="layer",
    ),
    # Four query heads for each key head. The backward pass need not read q and k: tensors=2 are dy and dx.
    "rotary": Op("Rotary embedding of queries and keys", "rotary", tensors=2, vectors=0, tables=2, drawn="heads"),
    "rotary_backward": Op(
        "Rotary embedding backward", "rotary", tensors=2, vectors=0, backward=True, tables=2, drawn="heads"
    ),
    **{
        f"rotary_{family}{'_backward' * backward}": Op(
            f"Rotary embedding{' backward' * backward}, {title}",
            f"rotary_{family}",
            tensors=2,
            vectors=0,
            backward=backward,
            tables=2,
            table_size=table_size,
            drawn="heads",
        )
        for family, (_, title, table_size) in ROTARY_FILES.items()
        for backward in (False, True)
    },
    # Of Llama 4: frequencies are 8 bytes for two elements of a head.
    "rotary_complex": Op("Rotary embedding, complex", "rotary_complex", tensors=2, vectors=0, drawn="complex heads"),
    "rotary_complex_backward": Op(
        "Rotary embedding backward, complex",
        "rotary_complex",
        tensors=2,
        vectors=0,
        backward=True,
        drawn="complex heads",
    ),
}

# What computes a family, each a dictionary: family -> function of its arguments


def eager():
    from torch.nn import functional
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def layer_norm(x, weight):
        return functional.layer_norm(x, weight.shape, weight, weight, EPS)

    def group_norm(x, weight, bias):
        return functional.group_norm(x, GROUPS, weight, bias, EPS)

    def cohere_layer_norm(x, weight):
        return CohereLayerNorm.forward(SimpleNamespace(weight=weight, variance_epsilon=EPS), x)

    def rms_norm(x, weight):
        return LlamaRMSNorm.forward(SimpleNamespace(weight=weight, variance_epsilon=EPS), x)

    def add_rms_norm(x, residual, weight):
        total = residual + x
        return rms_norm(total, weight), total

    def silu_and_mul(gate, up):
        return functional.silu(gate) * up

    def softmax(x):
        return functional.softmax(x, -1)

    families = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "silu": functional.silu, "softmax": softmax}
    families |= {"layer_norm": layer_norm, "group_norm": group_norm, "cohere_layer_norm": cohere_layer_norm, **rest()}
    return {**families, **losses(), "silu_and_mul": silu_and_mul, "rotary": plain_rotary(), **rotary_variants()}


def rest():
    import torch

    def masked_softmax(scores, mask):
        return torch.nn.functional.softmax(scores + mask, dim=-1, dtype=torch.float32).to(scores.dtype)

    def dyt(x, alpha, weight, bias):
        return weight * torch.tanh(x * alpha) + bias

    return {each.__name__: each for each in (masked_softmax, dyt)}


def rotary_variants():
    """Family -> transformers' function, without a module that stands for it."""
    from importlib import import_module

    from torch import nn

    def of_file(folder, name):
        function = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
        return functools.partial(type(function).forward, None) if isinstance(function, nn.Module) else function

    functions = {
        f"rotary_{family}": of_file(folder, "apply_rotary_pos_emb")
        for family, (folder, *_) in ROTARY_FILES.items()
        if family != "vision"
    }
    of_tower = of_file(ROTARY_FILES["vision"][0], "apply_rotary_pos_emb_vision")
    return {
        **functions,
        "rotary_vision": as_in_towers(of_tower),
        "rotary_complex": of_file("llama4", "apply_rotary_emb"),
    }


def as_in_towers(function):
    """The function, of `[tokens, heads, head_dim]`, called with one sequence of `[batch, heads, tokens, head_dim]`."""

    def rotary_vision(q, k, cos, sin):
        # The gradient of an index would be a copy; that of `squeeze` is a view.
        out = function(q.squeeze(0).transpose(0, 1), k.squeeze(0).transpose(0, 1), cos[0], sin[0])
        return tuple(x.transpose(0, 1)[None] for x in out)

    return rotary_vision


def losses():
    import torch
    from torch.nn import functional

    def cross_entropy(logits, target):
        return functional.cross_entropy(logits.float(), target)

    def linear_cross_entropy(hidden_states, weight, target):
        return functional.cross_entropy(functional.linear(hidden_states, weight).float(), target)

    def kl_div(input, target):
        return functional.kl_div(input, target, reduction="batchmean")

    def tvd(p, q):
        return ((p - q).abs() / 2.0).sum() / p.shape[0]

    def jsd(student, teacher):
        """TRL's, for beta 0.5 and the temperature 1."""
        s, t = (functional.log_softmax(logits / 1.0, dim=-1) for logits in (student, teacher))
        beta = torch.tensor(0.5, dtype=s.dtype, device=s.device)
        mixture = torch.logsumexp(torch.stack([s + torch.log1p(-beta), t + torch.log(beta)]), dim=0)
        of_teacher, of_student = (
            functional.kl_div(mixture, each, reduction="none", log_target=True) for each in (t, s)
        )
        terms = beta * of_teacher + (1 - beta) * of_student
        return terms.sum() / terms.size(0)

    def linear_jsd(student, student_weight, teacher, teacher_weight):
        return jsd(functional.linear(student, student_weight), functional.linear(teacher, teacher_weight))

    return {each.__name__: each for each in (cross_entropy, linear_cross_entropy, kl_div, tvd, jsd, linear_jsd)}


def plain_rotary():
    """transformers' `apply_rotary_pos_emb`, even after `kernelize` has bound another forward to its module."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return functools.partial(type(apply_rotary_pos_emb).forward, None)


def compiled():
    import torch

    # One compiled function for each shape. Beyond the default limits torch.compile falls back to eager without an error.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 1024
    # With donated buffers `retain_graph=True` fails; timed calls repeat the backward pass of one graph.
    torch._functorch.config.donated_buffer = False

    def layer_norm(x, weight):
        return torch.nn.functional.layer_norm(x, weight.shape, weight, weight, EPS)

    def group_norm(x, weight, bias):
        return torch.nn.functional.group_norm(x, GROUPS, weight, bias, EPS)

    def cohere_layer_norm(x, weight):
        h = x.to(torch.float32)
        mean = h.mean(-1, keepdim=True)
        variance = (h - mean).pow(2).mean(-1, keepdim=True)
        return (weight.to(torch.float32) * ((h - mean) * torch.rsqrt(variance + EPS))).to(x.dtype)

    def rms_norm(x, weight):
        h = x.to(torch.float32)
        return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)

    def add_rms_norm(x, residual, weight):
        total = residual + x
        return rms_norm(total, weight), total

    def silu(x):
        return torch.nn.functional.silu(x)

    def silu_and_mul(gate, up):
        return torch.nn.functional.silu(gate) * up

    def softmax(x):
        return torch.nn.functional.softmax(x, -1)

    def rotary(q, k, cos, sin):
        def rotate(x):
            first, second = x.chunk(2, dim=-1)
            return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

        return rotate(q), rotate(k)

    functions = (
        rms_norm,
        add_rms_norm,
        layer_norm,
        group_norm,
        cohere_layer_norm,
        silu,
        silu_and_mul,
        softmax,
        *losses().values(),
        *rest().values(),
        rotary,
    )
    named = {**{function.__name__: function for function in functions}, **rotary_variants()}
    return {name: torch.compile(function, dynamic=False) for name, function in named.items()}


def ours(kernel):
    import torch
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm

    norm = CohereLayerNorm(1, eps=EPS)
    del norm.weight
    norm.forward = MethodType(kernel.layers.CohereLayerNorm.forward, norm)

    def layer_norm(x, weight):
        return kernel.layer_norm(x, weight.shape, weight, weight, EPS)

    def group_norm(x, weight, bias):
        return kernel.group_norm(x, GROUPS, weight, bias, EPS)

    def cohere_layer_norm(x, weight):
        norm.weight = weight
        return norm(x)

    def masked_softmax(scores, mask):
        return kernel.softmax(scores + mask, -1, torch.float32).to(scores.dtype)

    def rms_norm(x, weight):
        return kernel.rms_norm(x, weight, EPS)

    def add_rms_norm(x, residual, weight):
        return kernel.fused_add_rms_norm(x, residual, weight, EPS)

    families = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "silu": kernel.silu, "softmax": kernel.softmax}
    families |= {"layer_norm": layer_norm, "group_norm": group_norm, "cohere_layer_norm": cohere_layer_norm}
    families |= {"silu_and_mul": kernel.silu_and_mul, "cross_entropy": kernel.cross_entropy, "tvd": kernel.tvd}
    families |= {"linear_cross_entropy": kernel.linear_cross_entropy}
    families["kl_div"] = functools.partial(kernel.kl_div, reduction="batchmean")
    families |= {"jsd": kernel.generalized_jsd_loss, "linear_jsd": kernel.linear_jsd_loss, "dyt": kernel.dyt}
    families |= {"masked_softmax": masked_softmax, "rotary_complex": kernel.apply_rotary_emb}
    families["rotary_vision"] = as_in_towers(kernel.apply_rotary_pos_emb_vision)
    variants = {name: function for name, function in rotary_variants().items() if name not in families}
    families |= {name: in_place_of(function, kernel.layers.RotaryPosEmb) for name, function in variants.items()}
    return {**families, "rotary": kernel.apply_rotary_pos_emb}


def in_place_of(function, layer):
    """The module that `kernels` makes of a function, with the layer's forward, as `kernelize` binds it."""
    from kernels import use_kernel_forward_from_hub

    def rotary(*arguments, **named):
        return function(*arguments, **named)

    made = use_kernel_forward_from_hub("rotary_pos_emb")(
        rotary if isinstance(function, functools.partial) else function
    )
    made.forward = MethodType(layer.forward, made)
    return made


# Ops whose CPU time is measured -> whether the call is a training forward.
CPU_OPS = {"cpu_time_inference": False, "cpu_time_training": True}
CPU_TITLES = {"cpu_time_inference": "inference", "cpu_time_training": "training forward"}
CPU_SHAPE = (1, 4096)


@dataclass(frozen=True)
class Case:
    op: str
    shape: tuple[int, ...]

    def __str__(self):
        return f"{self.op} {shape_text(self.shape)}"

    @property
    def hidden_size(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    def bytes(self, dtype: str) -> int:
        """The fewest bytes that must move: each input is read once, each output written once."""
        op = OPS[self.op]
        if op.drawn in ("layer", "two layers"):
            tokens, hidden_size, vocabulary = self.shape
            return op.tensors * hidden_size * (tokens + vocabulary) * ITEM_SIZES[dtype]
        elements = op.tensors * math.prod(self.shape) + op.vectors * self.hidden_size
        if op.tables:
            elements += op.tables * self.shape[1] * int(self.hidden_size * op.table_size)
        if op.drawn == "scores":
            elements += math.prod(self.shape) // self.shape[1] * (not op.backward)
        frequencies = 4 * self.shape[1] * self.hidden_size if op.drawn == "complex heads" else 0
        return elements * ITEM_SIZES[dtype] + frequencies


def shape_text(shape) -> str:
    return "x".join(map(str, shape))


# What a target's factor multiplies, besides the time of a named peer.
ROOFLINE = "roofline"
FASTEST = "fastest peer"
# Clocks.
EVENTS = "CUDA-event timing"
GRAPH = "device time in a CUDA graph"
CPU = "CPU time"


@dataclass(frozen=True)
class Target:
    """lossless-kernels may take at most `factor` times the time of `of`.

    Attributes:
        factor: 1 for "not slower than `of`".
        of: ROOFLINE, FASTEST or the name of a peer.
        clock: the only clock that the target is for; None: each clock of the case.
        beyond_l2: the target is only for cases whose bytes do not fit into the L2 cache.
        recorded_ms: the peer's time on an H200 in an earlier run, used in a run without that peer.
    """

    factor: float
    of: str
    clock: Optional[str] = None
    beyond_l2: bool = False
    recorded_ms: Optional[float] = None

    def __str__(self):
        return self.of if self.factor == 1 else f"{self.factor:g} x {self.of}"


_STREAMING = (Target(1.03, ROOFLINE), Target(1.0, FASTEST))
_FASTEST = (Target(1.0, FASTEST),)
_SMALL_ROWS = (Target(0.5, LIGER), Target(1.15, ROOFLINE, beyond_l2=True))
# With so few rows the launch is most of the time between the two events.
_DECODE = (Target(1.0, COMPILED, clock=GRAPH),)

# For bf16 on an H200.
TARGETS = {
    **{Case("rms_norm", (32768, hidden_size)): _STREAMING for hidden_size in (4096, 8192, 16384, 32768)},
    Case("rms_norm", (16384, 8192)): _STREAMING,
    **{Case("rms_norm", shape): _FASTEST for shape in ((8192, 4096), (65536, 1024), (4096, 2048))},
    **{Case("rms_norm", shape): _SMALL_ROWS for shape in ((4096, 32, 128), (65536, 128), (65536, 64))},
    **{Case("rms_norm", (rows, 4096)): _DECODE for rows in (1, 4, 16)},
    Case("rms_norm_backward", (32768, 4096)): (*_FASTEST, Target(1.0, QUACK, recorded_ms=0.2330)),
    Case("rms_norm_backward", (8192, 4096)): (*_FASTEST, Target(1.0, QUACK, recorded_ms=0.1108)),
    Case("rms_norm_backward", (32768, 32768)): (Target(0.9, QUACK, recorded_ms=2.4172),),
    **{Case("add_rms_norm", (32768, hidden_size)): _STREAMING for hidden_size in (4096, 32768)},
    Case("add_rms_norm_backward", (8192, 4096)): (Target(1.0, QUACK, recorded_ms=0.149),),
    Case("add_rms_norm_backward", (32768, 4096)): (Target(1.0, QUACK, recorded_ms=0.2818),),
    Case("add_rms_norm_backward", (32768, 32768)): (Target(1.0, QUACK, recorded_ms=2.508),),
    Case("silu", (8192, 14336)): (Target(1.03, ROOFLINE),),
    Case("silu_backward", (8192, 14336)): (Target(1.03, ROOFLINE),),
    Case("silu_and_mul", (8192, 14336)): (Target(1.03, ROOFLINE),),
    Case("silu_and_mul_backward", (8192, 14336)): (Target(1.03, ROOFLINE),),
    **{Case("layer_norm", shape): _FASTEST for shape in ((8192, 4096), (32768, 1024))},
    Case("cohere_layer_norm", (8192, 4096)): _FASTEST,
    Case("cohere_layer_norm_backward", (8192, 4096)): _FASTEST,
    # The backward pass is ATen's own operator.
    Case("group_norm", (128, 512, 4096)): _FASTEST,
    Case("group_norm_backward", (128, 512, 4096)): (Target(1.05, EAGER),),
    # Logits of a router over 128 experts; attention scores over 1024 and 4096 keys, of 2 and of 32 heads.
    **{
        Case(op, shape): (Target(1.0, EAGER), Target(1.0, COMPILED))
        for op in ("softmax", "softmax_backward")
        for shape in ((65536, 128), (65536, 1024), (8192, 4096), (1, 32, 4096, 4096))
    },
    **{Case(op, (1, 32, 4096, 4096)): _FASTEST for op in ("masked_softmax", "masked_softmax_backward")},
    **{Case(op, (8192, 4096)): _FASTEST for op in ("dyt", "dyt_backward")},
    # [tokens, vocabulary]
    Case("jsd", (4096, 128256)): (Target(0.2, EAGER),),
    Case("linear_jsd", (4096, 2048, 128256)): (Target(1.0, EAGER),),
    Case("cross_entropy", (4096, 128256)): (Target(1.15, ROOFLINE), Target(1.0, QUACK, recorded_ms=0.863)),
    **{Case("cross_entropy", shape): _FASTEST for shape in ((8192, 32000), (16384, 151936))},
    **{Case(op, (4096, 32000)): _FASTEST for op in ("kl_div", "tvd")},
    Case("linear_cross_entropy", (4096, 2048, 128256)): (Target(1.0, EAGER),),
    Case("rotary", (8, 2048, 40, 128)): (Target(1.15, ROOFLINE), *_FASTEST),
    Case("rotary_backward", (8, 2048, 40, 128)): (Target(1.0, EAGER), Target(1.0, COMPILED)),
    **{
        Case(f"rotary_{family}{backward}", shape): (Target(1.0, EAGER), Target(1.0, COMPILED))
        for family, shape in {
            **dict.fromkeys(("partial", "neighbours", "chunked", "complex"), (8, 2048, 40, 128)),
            "vision": (1, 16384, 20, 80),
        }.items()
        for backward in ("", "_backward")
    },
    Case("cpu_time_inference", CPU_SHAPE): (Target(1.0, NATIVE_BARE),),
    Case("cpu_time_training", CPU_SHAPE): (Target(1.5, NATIVE_BARE),),
}

CASES = tuple(case for case in TARGETS if case.op in OPS)
QUICK_SHAPES = ((1, 4096), (8192, 4096), (65536, 128), (8192, 14336), (8, 2048, 40, 128))


def select(ops, shapes=None) -> list[Case]:
    """The cases of these ops with these shapes; without shapes, the cases that have targets."""
    if shapes is None:
        return [case for case in CASES if case.op in ops]
    return [Case(op, shape) for op in OPS if op in ops for shape in shapes]
