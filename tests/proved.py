"""Which kernels calls launch on an H200 that is not here, and which of them their proofs have launched.

A fresh Python makes calls at random (`drawn_calls.py`), and each call's proofs. No kernel runs: launches are recorded.
"""

import contextlib
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from drawn_calls import CALLS, Drawn
from kernels import get_local_kernel
from machines import GPUS
from op_families import FAMILIES
from places import forget_calls, python_module
from triton import JITFunction


class Record:
    """The kernels that calls launch, and those that proofs do: all that Triton compiles a kernel for.

    Attributes:
        empty: the proofs that have compared nothing.
        answers: which of two arithmetics eager has, by what was asked.
    """

    def __init__(self):
        self.called, self.proved, self.empty, self.answers = set(), set(), [], {}
        self.launched = self.called

    def clear(self) -> None:
        """Forgets a call."""
        for each in (self.called, self.proved, self.answers):
            each.clear()

    def launch(self, launcher, blocks, tensors, scalars):
        """In the place of `Launcher.through_triton`."""
        launcher.check(tensors)
        aligned = not any(tensor.data_ptr() % 16 for tensor in tensors)
        how = launcher.num_warps, launcher.max_registers, launcher.overlaps, launcher.dtypes
        self.launched.add((launcher.kernel.__name__, tuple(launcher.constants.items()), *how, aligned))
        for tensor in tensors:  # Eager may read as indices what kernels would have written.
            if tensor.dtype == torch.int64:
                tensor.zero_()

    @contextlib.contextmanager
    def of_a_proof(self):
        before, self.launched = self.launched, self.proved
        try:
            yield
        finally:
            self.launched = before

    def kernel_is_proved(self, key, subject, comparisons) -> bool:
        with self.of_a_proof(), torch.no_grad():
            if not [*comparisons()]:
                self.empty.append(key)
        return True


# Where eager on a GPU is asked which of two arithmetics it has.
_ARITHMETICS = ("group_norm", "group_norm_backward"), ("softmax", "masked_softmax")


@contextlib.contextmanager
def pretended(module, choose):
    """A GPU that records launches and passes all proofs. Yields the record."""
    domain, launch, proof, plans, reduction = map(module, ("domain", "launch", "proof", "plans", "reduce_config"))
    norm, layer_norm = module("rms_norm_backward"), module("ops.layer_norm_backward")
    group_norm, softmax = ([module(f"ops.{name}") for name in names] for names in _ARITHMETICS)
    multiprocessors, threads, shared_memory, _ = GPUS[90]
    gpu = plans.Gpu(9, shared_memory, multiprocessors, threads, reduction.CUDA)
    record, compare = Record(), norm._compare

    def find_out(key, *asked) -> bool:
        return record.answers.setdefault(key, choose.random() < 0.5)

    def takes_vectors(device) -> bool:
        return find_out("GroupNorm's vectors")

    def has_long_warps(dtype, device) -> bool:
        return dtype == torch.float16 and find_out("softmax's warps")

    def compared(*call):
        """RMSNorm's gradients in other layouts have a proof of their own."""
        with record.of_a_proof(), contextlib.suppress(proof.LosslessProofError):
            compare(*call)

    def eager_gradients(dy, input, shape, mean, rstd, weight, bias, needs):
        """A CPU's operator takes other statistics."""
        return layer_norm.Gradients(*(torch.zeros(size) for size in (input.shape, shape, shape)))

    replaced = {
        domain: {"_KERNEL_DEVICE": "cpu"},
        launch: {"can_overlap": lambda device: True},
        launch.Launcher: {"through_triton": lambda launcher, *launched: record.launch(launcher, *launched)},
        plans: {"gpu": lambda device: gpu},
        proof: {"kernel_is_proved": record.kernel_is_proved, "find_out": find_out},
        norm: {"_compare": compared},
        layer_norm: {"eager": eager_gradients},
        **dict.fromkeys(group_norm, {"takes_vectors": takes_vectors}),
        **dict.fromkeys(softmax, {"has_long_warps": has_long_warps}),
        # As many kernels, in less time.
        module("ops.full_sum"): {"_MOST_ELEMENTS": 1 << 17, "_PROOF_SUMS": 1},
    }
    with contextlib.ExitStack() as stack:
        for owner, names in replaced.items():
            stack.enter_context(mock.patch.multiple(owner, **names))
        yield record


def _anywhere(count, shape, device, dtype=torch.float32):
    return [torch.zeros(math.prod(shape) + 1, dtype=dtype)[1:].view(shape) for _ in range(count)]


def planted(module, error):
    """Replaces a part of the package by one with this error, which must be found."""
    layer_norm, group_norm = module("ops.layer_norm"), module("ops.group_norm")
    comparisons = layer_norm._comparisons

    def of_another_kind(kind, device):
        return comparisons(replace(kind, few=not kind.few), device)

    owner, name, wrong = {
        "outputs that begin anywhere": (module("proof"), "unwritten", _anywhere),
        "few rows for many": (layer_norm, "_comparisons", of_another_kind),
        "no shapes": (group_norm, "_proof_shapes", lambda *of: []),
    }[error]
    return mock.patch.object(owner, name, wrong)


def unproved(families, calls: int, seed: int, error=None) -> tuple[list, list]:
    """What is wrong: kernels that calls have launched without a proof, proofs without comparisons, and functions that have
    launched nothing; and the names of the families' kernels that no call has launched.

    Args:
        families: keys of `CALLS`.
        calls: of each function there.
        error: see `planted`.
    """
    kernel, choose = get_local_kernel(Path("build")), random.Random(seed)
    found, names = [], set()

    def module(name):
        return python_module(kernel, name)

    with planted(module, error) if error else contextlib.nullcontext(), pretended(module, choose) as record:
        for function in [each for family in families for each in CALLS[family]]:
            of_function = set()
            for _ in range(calls):
                forget_calls(module)
                record.clear()
                draw = Drawn(kernel, module, choose)
                draw.backward(function(draw))
                of_function |= record.called
                others = record.called - record.proved
                found += [f"{function.__name__}: {name}, {dict(of)}, {how}" for name, of, *how in others]
            names |= {name for name, *_ in of_function}
            found += [] if of_function else [f"{function.__name__} launched nothing"]
    sources = [module(f"kernels_src.{name}") for of in FAMILIES if of.sources[0] in families for name in of.sources]
    there = {
        name
        for source in sources
        for name, member in vars(source).items()
        if isinstance(member, JITFunction) and member.fn.__module__ == source.__name__ and name[0] != "_"
    }
    return found + [f"nothing compared: {key}" for key in record.empty], sorted(there - names)


def main() -> None:
    """Prints `unproved` of each case, as JSON.

    The program's arguments are JSON, too: the cases `[families, calls, error]`, and a seed.
    """
    (cases, seed), output = map(json.loads, sys.argv[1:]), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        found = [unproved(families, calls, seed, error) for families, calls, error in cases]
    json.dump(found, output)
