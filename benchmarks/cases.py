"""What is measured, how many bytes each case must move, and the bars its time is held against."""

import math
from dataclasses import dataclass
from typing import Optional

OURS = "lossless-kernels"
EAGER = "eager"
COMPILED = "torch.compile"
NATIVE = "F.rms_norm"
NATIVE_BARE = "F.rms_norm, no module"
LIGER = "Liger"
QUACK = "quack"
CUTILE = "cuTile (Liger)"

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Op:
    """An operation whose device time is measured."""

    title: str
    # Which function of a peer computes it.
    family: str
    # Tensors of the input's size that must move: read x, write y; or read x and dy, write dx; with gate and up one more each.
    tensors: int
    # Vectors of the hidden size that must move: the weight, and its gradient.
    vectors: int
    backward: bool = False
    # Arguments of the input's size.
    inputs: int = 1
    # Results of the input's size.
    outputs: int = 1
    # Tensors [tokens, head_dim] that must move, for inputs [batch, tokens, heads, head_dim]: cos and sin.
    tables: int = 0


OPS = {
    "rms_norm": Op("RMSNorm forward", "rms_norm", tensors=2, vectors=1),
    "rms_norm_backward": Op("RMSNorm backward (dx and dweight)", "rms_norm", tensors=3, vectors=2, backward=True),
    "add_rms_norm": Op("Residual + RMSNorm forward", "add_rms_norm", tensors=4, vectors=1, inputs=2, outputs=2),
    "add_rms_norm_backward": Op(
        "Residual + RMSNorm backward", "add_rms_norm", tensors=4, vectors=2, backward=True, inputs=2, outputs=2
    ),
    "silu": Op("SiLU forward", "silu", tensors=2, vectors=0),
    "silu_backward": Op("SiLU backward", "silu", tensors=3, vectors=0, backward=True),
    "silu_and_mul": Op("SwiGLU forward", "silu_and_mul", tensors=3, vectors=0, inputs=2),
    "silu_and_mul_backward": Op("SwiGLU backward", "silu_and_mul", tensors=5, vectors=0, backward=True, inputs=2),
    "softmax": Op("Softmax forward", "softmax", tensors=2, vectors=0),
    # Read y and dy, write dx.
    "softmax_backward": Op("Softmax backward", "softmax", tensors=3, vectors=0, backward=True),
    # Heads of queries and keys, four to one. The least that the gradients need is dy and dx.
    "rotary": Op("Rotary embedding of queries and keys", "rotary", tensors=2, vectors=0, tables=2),
    "rotary_backward": Op("Rotary embedding backward", "rotary", tensors=2, vectors=0, backward=True, tables=2),
}
# Whether the host time is that of a training forward.
HOST_OPS = {"host_inference": False, "host_training": True}
HOST_TITLES = {"host_inference": "inference", "host_training": "training forward"}
HOST_SHAPE = (1, 4096)


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
        """The fewest bytes that must move: every input read once, every output written once."""
        op = OPS[self.op]
        elements = op.tensors * math.prod(self.shape) + op.vectors * self.hidden_size
        if op.tables:
            elements += op.tables * self.shape[1] * self.hidden_size
        return elements * ITEM_SIZES[dtype]


def shape_text(shape) -> str:
    return "x".join(map(str, shape))


FLOOR = "floor"
FASTEST = "fastest peer"
EVENTS = "events"
GRAPH = "graph"


@dataclass(frozen=True)
class Bar:
    """Ours may take at most `factor` times what `of` takes: the floor, the fastest peer or a peer by name."""

    factor: float
    of: str
    # The clock that it is for; None for either.
    clock: Optional[str] = None
    # Only where the case's bytes do not fit into the L2.
    beyond_l2: bool = False
    # The peer's time on an H200 in an earlier run, for a run where it is not installed.
    recorded_ms: Optional[float] = None

    def __str__(self):
        return self.of if self.factor == 1 else f"{self.factor:g} x {self.of}"


_STREAMING = (Bar(1.03, FLOOR), Bar(1.0, FASTEST))
_FASTEST = (Bar(1.0, FASTEST),)
_SMALL_ROWS = (Bar(0.5, LIGER), Bar(1.15, FLOOR, beyond_l2=True))
# Of so few rows the launch is most of an event's time.
_DECODE = (Bar(1.0, COMPILED, clock=GRAPH),)

# Bars are set for bf16 on an H200.
BARS = {
    **{Case("rms_norm", (32768, hidden_size)): _STREAMING for hidden_size in (4096, 8192, 16384, 32768)},
    Case("rms_norm", (16384, 8192)): _STREAMING,
    **{Case("rms_norm", shape): _FASTEST for shape in ((8192, 4096), (65536, 1024), (4096, 2048))},
    **{Case("rms_norm", shape): _SMALL_ROWS for shape in ((4096, 32, 128), (65536, 128), (65536, 64))},
    **{Case("rms_norm", (rows, 4096)): _DECODE for rows in (1, 4, 16)},
    Case("rms_norm_backward", (32768, 4096)): (*_FASTEST, Bar(1.0, QUACK, recorded_ms=0.2330)),
    Case("rms_norm_backward", (8192, 4096)): (*_FASTEST, Bar(1.0, QUACK, recorded_ms=0.1108)),
    Case("rms_norm_backward", (32768, 32768)): (Bar(0.9, QUACK, recorded_ms=2.4172),),
    **{Case("add_rms_norm", (32768, hidden_size)): _STREAMING for hidden_size in (4096, 32768)},
    Case("add_rms_norm_backward", (8192, 4096)): (Bar(1.0, QUACK, recorded_ms=0.149),),
    Case("add_rms_norm_backward", (32768, 4096)): (Bar(1.0, QUACK, recorded_ms=0.2818),),
    Case("add_rms_norm_backward", (32768, 32768)): (Bar(1.0, QUACK, recorded_ms=2.508),),
    Case("silu", (8192, 14336)): (Bar(1.03, FLOOR),),
    Case("silu_backward", (8192, 14336)): (Bar(1.03, FLOOR),),
    Case("silu_and_mul", (8192, 14336)): (Bar(1.03, FLOOR),),
    Case("silu_and_mul_backward", (8192, 14336)): (Bar(1.03, FLOOR),),
    # A router's experts, and attention scores.
    **{
        Case(op, shape): (Bar(1.0, EAGER), Bar(1.0, COMPILED))
        for op in ("softmax", "softmax_backward")
        for shape in ((65536, 128), (65536, 1024))
    },
    Case("rotary", (8, 2048, 40, 128)): (Bar(1.15, FLOOR), *_FASTEST),
    Case("rotary_backward", (8, 2048, 40, 128)): (Bar(1.0, EAGER), Bar(1.0, COMPILED)),
    Case("host_inference", HOST_SHAPE): (Bar(1.0, NATIVE_BARE),),
    Case("host_training", HOST_SHAPE): (Bar(1.5, NATIVE_BARE),),
}

CASES = tuple(case for case in BARS if case.op in OPS)
QUICK_SHAPES = ((1, 4096), (8192, 4096), (65536, 128), (8192, 14336), (8, 2048, 40, 128))


def select(ops, shapes=None) -> list[Case]:
    """The cases of these ops, of the shapes given; without shapes those that have bars."""
    if shapes is None:
        return [case for case in CASES if case.op in ops]
    return [Case(op, shape) for op in OPS if op in ops for shape in shapes]
