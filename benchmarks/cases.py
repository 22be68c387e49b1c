"""What is measured: ops, their cases and targets, the fewest bytes that a case must move, and who computes an op.

Each file in `ops/` declares a family of ops; this file has what they declare with, and gathers them.
"""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Callable, Optional

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
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ITEM_SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}

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


AS_FASTEST = (Target(1.0, FASTEST),)
AS_TORCH = (Target(1.0, EAGER), Target(1.0, COMPILED))


@dataclass(frozen=True)
class Op:
    """An op whose device time is measured.

    Attributes:
        title: its heading in tables and plots.
        cases: the shape of each case -> its targets, for bf16 on an H200.
        tensors: tensors of the input's size that are read or written once. Forward: x and y. Backward: x, dy and dx.
        vectors: vectors [hidden_size] that are read or written once: the weight and its gradient.
        moved: `moved(shape, item_size)`: the bytes that must move, where `tensors` and `vectors` do not tell them.
        backward: whether the timed call is the backward pass alone.
        step: the timed call is the forward and the backward pass.
        inputs: arguments of the input's size.
        outputs: results of the input's size.
        draw: `draw(case, op, random)`: the arguments, those that get gradients with `requires_grad`, and the gradient of the
            output. `random.normal(shape)` and `random.below(limit, shape)` are tensors. None: `inputs` tensors of the case's
            shape, and a weight if there are `vectors`.
        axes: what the sizes of a shape are, for plots.
    """

    title: str
    cases: Mapping[tuple[int, ...], tuple[Target, ...]]
    tensors: int = 0
    vectors: int = 0
    moved: Optional[Callable[[tuple[int, ...], int], int]] = None
    backward: bool = False
    step: bool = False
    inputs: int = 1
    outputs: int = 1
    draw: Optional[Callable] = None
    axes: str = "shape"


@dataclass(frozen=True)
class Case:
    op: str
    shape: tuple[int, ...]

    def __str__(self):
        return f"{self.op} {shape_text(self.shape)}"

    @property
    def function(self) -> str:
        """The name of what computes it, the same for the forward and the backward pass."""
        return self.op.removesuffix("_backward")

    @property
    def hidden_size(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    def bytes(self, dtype: str) -> int:
        """The fewest bytes that must move: each input is read once, each output written once."""
        op, item_size = OPS[self.op], ITEM_SIZES[dtype]
        if op.moved:
            return op.moved(self.shape, item_size)
        return (op.tensors * math.prod(self.shape) + op.vectors * self.hidden_size) * item_size

    def expect(self, sizes: str, found: bool) -> None:
        """Raises ValueError if the shape is not `[sizes]`."""
        if not found:
            raise ValueError(f"--cases: {self.op} expects {sizes}, found {list(self.shape)}")


def shape_text(shape) -> str:
    return "x".join(map(str, shape))


# Families

# Peers in the order of a table's columns, and the function of a family's file that imports one.
PEERS = {EAGER: "eager", COMPILED: "compiled", NATIVE: "native", LIGER: "liger", QUACK: "quack", CUT: "cut"}
PEERS[CUTILE] = "cutile"
# The order of families in a run and in tables. Others follow, by name.
_ORDER = "rms_norm torch_rms_norm activation layer_norm cohere_layer_norm group_norm softmax dyt losses rotary".split()
_NAMES = sorted(path.stem for path in Path(__file__).with_name("ops").glob("[!_]*.py"))
# They import what stands above.
FAMILIES = {name: importlib.import_module(f"ops.{name}") for name in dict.fromkeys([*_ORDER, *_NAMES])}
OPS: dict[str, Op] = {name: op for family in FAMILIES.values() for name, op in family.OPS.items()}


def functions(peer: str, *kernel, family: Optional[ModuleType] = None) -> dict[str, Callable]:
    """Imports a peer, OURS with the kernel: `Case.function` -> function, of one family or of all."""
    found = {}
    for each in [family] if family else FAMILIES.values():
        load = getattr(each, "ours" if peer == OURS else PEERS[peer], None)
        if peer == COMPILED:
            found |= _compiled((load or each.eager)())
        elif load:
            found |= load(*kernel)
    return found


def _compiled(formulas: dict[str, Callable]) -> dict[str, Callable]:
    import torch

    # One compiled function for each shape. Beyond the default limits torch.compile falls back to eager without an error.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 1024
    # With donated buffers `retain_graph=True` fails; timed calls repeat the backward pass of one graph.
    torch._functorch.config.donated_buffer = False
    return {name: torch.compile(formula, dynamic=False) for name, formula in formulas.items()}


# Cases

# Ops whose CPU time is measured -> whether the call is a training forward.
CPU_OPS = {"cpu_time_inference": False, "cpu_time_training": True}
CPU_TITLES = {"cpu_time_inference": "inference", "cpu_time_training": "training forward"}
CPU_SHAPE = (1, 4096)

TARGETS = {
    **{Case(name, shape): targets for name, op in OPS.items() for shape, targets in op.cases.items()},
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
