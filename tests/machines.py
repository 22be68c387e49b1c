"""Compiles every kernel of the package's own calls for GPUs that are not here.

A fresh interpreter, without Triton's own, makes the package's real calls on memory that nobody touches; instead of being
launched, every kernel is compiled with the constants and warps of that launch. `ptxas` is called by Triton itself.
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

from bits import fresh_seed
from filelock import FileLock

COMPILE = r"""
    import contextlib, io, itertools, json, os, random, re, sys, traceback
    from pathlib import Path

    os.environ["LOSSLESS_PROOF"] = "off"
    sys.stdout, report = sys.stderr, sys.stdout
    import torch, triton

    matrix, gpus, only, share, seed = map(json.loads, sys.argv[1:])
    rocm = isinstance(matrix[0][0], str)
    if rocm:  # Before the package is loaded: it chooses instructions then.
        torch.version.hip = "7.0"
    from op_families import FAMILIES, Machine
    from kernels import get_local_kernel
    from places import forget_calls, python_module
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = get_local_kernel(Path("build"))
    module = lambda name: python_module(kernel, name)
    domain, launch, backward = map(module, ("domain", "launch", "rms_norm_backward"))
    families = [family for family in FAMILIES if family.rocm or not rocm]
    POINTER = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64"}
    seen, seen_pairs, chance = set(), set(), random.Random(seed)
    compiled = []
    # Triton then prints what its own call of ptxas says of registers and spills.
    triton.knobs.nvidia.dump_ptxas_log = True

    def compile_instead(*launch):
        try:
            compile(*launch)
        except BaseException:
            # Whoever launches would compute by other means, and nobody would learn why.
            traceback.print_exc()
            os._exit(1)

    def compile(launcher, blocks, tensors, scalars):
        launcher.check(tensors)
        function = launcher.kernel
        if not function.__name__.startswith(only) or function.__name__.startswith(machine.left_out):
            return
        signature = {parameter.name: parameter.annotation_type for parameter in function.params}
        pointers = [name for name in function.arg_names if name.endswith("_ptr")]
        signature.update(dict.fromkeys(pointers, POINTER[torch.float32]))
        signature.update((name, POINTER[t.dtype]) for name, t in zip(pointers, tensors) if t is not None)
        signature.update(dict.fromkeys(launcher.constants, "constexpr"))
        options = launch.options(launcher.num_warps, launcher.max_registers, launcher.overlaps)
        key = (function, machine.arch, *(tuple(each.items()) for each in (options, signature, launcher.constants)))
        if key in seen:
            return
        seen.add(key)
        # What decides which instructions there are; the other constants are sizes. A kernel with a new pair of values is compiled.
        facts = {name: value for name, value in launcher.constants.items() if type(value) is not int or name in ("UNIT", "WIDTH")}
        least = {"AHEAD": 0, "PROGRAMS_PER_ROW": 1, "TILE": launcher.constants.get("WIDTH")}
        facts |= {name: launcher.constants[name] > of for name, of in least.items() if name in launcher.constants}
        facts |= {"dtype": machine.dtype, "one warp": launcher.num_warps == 1}
        pairs = {(function, machine.arch, *pair) for pair in itertools.combinations(facts.items(), 2)}
        if pairs <= seen_pairs and chance.random() >= share:
            return
        seen_pairs.update(pairs)
        # On ROCm Triton tells storages below 2 GB apart.
        for below_2_gb in (True, False) if rocm and function.__name__ == "rms_norm_forward" else (rocm,):
            compile_for(launcher, function, signature, tensors, len(pointers), below_2_gb)

    def compile_for(launcher, function, signature, tensors, pointers, below_2_gb):
        facts = [["tt.divisibility", 16], *([["tt.pointer_range", 32]] if below_2_gb else [])]
        with contextlib.redirect_stdout(io.StringIO()) as log:
            made = triton.compile(
                ASTSource(function, signature, launcher.constants, {(index,): facts for index in range(pointers)}),
                target=GPUTarget("hip" if rocm else "cuda", machine.arch, machine.gpu.build.warp_size),
                options=launch.options(launcher.num_warps, launcher.max_registers, launcher.overlaps),
            )
        assembly = made.asm["amdgcn" if rocm else "ptx"]
        spilled = re.findall(r"spill_count: +(\d+)", assembly) if rocm else re.findall(r"(\d+) bytes spill stores", log.getvalue())
        compiled.append({
            "kernel": function.__name__,
            "arch": machine.arch,
            "dtype": str(machine.dtype).removeprefix("torch."),
            "itemsize": machine.dtype.itemsize,
            "dtypes": [str(t.dtype) for t in tensors if t is not None],
            "num_warps": launcher.num_warps,
            "below_2_gb": below_2_gb,
            "shared": made.metadata.shared,
            "exchanged": backward._EXCHANGED_BYTES,
            "constants": launcher.constants,
            "assembly": assembly,
            "ttgir": made.asm["ttgir"],
            # What the compiler may join into one rounding, and what the kernel itself asks for, by elements.
            "relaxed": re.findall(r"\b(?:fast|contract|reassoc|afn|arcp)\b", re.sub('"[^"]*"', "", made.asm["llir"])),
            "written_fmas": elements("fma|fmuladd", made.asm["llir"]),
            "exponentials": elements("exp", made.asm["llir"]),
            # Bytes of a thread; registers on ROCm.
            "spilled": sum(map(int, spilled)) if spilled else None,
        })

    def elements(intrinsics, text):
        calls = re.findall(rf"call [^\n]*@llvm\.(?:{intrinsics})\.(?:v(\d+))?f32", text)
        return sum(int(width or 1) for width in calls)

    launch.Launcher.through_triton = compile_instead
    domain._KERNEL_DEVICE = "cpu"
    plans, reduction = module("plans"), module("reduce_config")
    plans.gpu = lambda device: machine.gpu
    launch.can_overlap = lambda device: not rocm and machine.arch >= 90
    for arch, hidden_sizes in matrix:
        # Calls keep the plans of the GPU before.
        forget_calls(module)
        multiprocessors, threads, shared_memory, wave = gpus[str(arch)]
        build = reduction.ROCM[wave] if rocm else reduction.CUDA
        gpu = plans.Gpu(None if rocm else arch // 10, shared_memory, multiprocessors, threads, build)
        machine = Machine(arch, hidden_sizes, gpu, module)
        for machine.dtype in (torch.bfloat16, torch.float32):
            for family in families:
                family.launches(kernel, machine)
    names = []
    for source in (module(f"kernels_src.{name}") for family in families for name in family.sources):
        names += [name for name, member in vars(source).items() if isinstance(member, triton.JITFunction)
                  and member.fn.__module__ == source.__name__ and name[0] != "_" and name.startswith(only)]
    json.dump((names, compiled), report)
"""
# SMs, threads of each, shared memory of a program and threads of a warp.
GPUS = {
    75: (40, 1024, 64 << 10, 32),  # T4
    80: (108, 2048, 163 << 10, 32),  # A100
    86: (72, 1536, 99 << 10, 32),  # A10
    89: (128, 1536, 99 << 10, 32),  # RTX 4090
    90: (132, 2048, 227 << 10, 32),  # H200
    100: (148, 2048, 227 << 10, 32),  # B200
    120: (170, 1536, 99 << 10, 32),  # RTX 5090
    "gfx90a": (110, 2048, 64 << 10, 64),  # MI250X
    "gfx942": (304, 2048, 64 << 10, 64),  # MI300X
    "gfx950": (256, 2048, 64 << 10, 64),  # MI355X
    "gfx1100": (96, 2048, 64 << 10, 32),  # RX 7900 XTX
    "gfx1201": (64, 2048, 64 << 10, 32),  # RX 9070 XT
}
# How many tensors as large as x they read and write.
ROWS_MOVED = {
    "rms_norm_forward": (1, 1),
    "add_rms_norm_forward": (2, 2),
    "rms_norm_backward": (2, 1),
    "rms_norm_backward_streamed": (4, 1),
    "rms_norm_sum_chains": (2, 0),
    "cohere_layer_norm_sum_chains": (2, 0),
    "activation_forward": (1, 1),
    "activation_backward": (2, 1),
    "gated_activation_forward": (2, 1),
    "gated_activation_backward": (3, 1),
}
# `make test-machines` compiles for all of them, `make test-versions` one hidden size for one.
ALL, ONE = (os.environ.get("LOSSLESS_MACHINES") == which for which in ("all", "one"))


class Compiled(dict):
    """One compiled kernel."""

    def __str__(self):
        constants = ", ".join(f"{name}={value}" for name, value in self["constants"].items())
        arch = self["arch"] if isinstance(self["arch"], str) else f"sm_{self['arch']}"
        return f"{self['kernel']} {arch} {self['dtype']} {self['num_warps']} warps, {constants}"

    @property
    def threads(self):
        return GPUS[self["arch"]][3] * self["num_warps"]

    @property
    def step(self):
        """Columns of a step of all of ATen's lanes."""
        constants = self["constants"]
        return (4 if constants.get("VECTORIZED", True) else 1) * constants["WIDTH"] * constants["HEIGHT"]

    @property
    def row(self):
        """Columns of a row's tile, or of the part of it that is this program's."""
        constants = self["constants"]
        return (self.step << constants["LOG2_STEPS"]) // constants.get("PROGRAMS_PER_ROW", 1)

    def count(self, instruction):
        """Elements on which a thread carries out the instruction, a regular expression: a packed one counts twice."""
        found = re.finditer(rf"(?:^|[;{{])\s*(?:@\S+ )?{instruction}\S*", self["assembly"], re.MULTILINE)
        return sum(2 if re.search(r"\dx2\b|_pk_", each[0]) else 1 for each in found)

    @property
    def exps(self):
        """Exponentials: how many a thread computes (four FMAs each), and how many it adds in the same step (five)."""
        found = [self.count(rf"{instruction}\.rn\.f32 \S+ t, e") for instruction in ("mul", "fma")]
        assert self.count(r"fma\.rm\.f32") == self.count(r"fma\.rn\.sat\.f32") == sum(found), str(self)
        return tuple(found)


def compile_all(run_python, tmp_path_factory, name, matrices, only="", share=1.0):
    """Every kernel whose name begins with `only`, for every GPU of the matrices: lists of `(arch, hidden sizes)`.

    Each matrix is compiled in a process of its own. Once for all workers of a run.

    Args:
        share: the part of the kernels without a new pair of values that is compiled, at random.
    """
    base = tmp_path_factory.getbasetemp()
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{name}.json"

    def compile_matrix(matrix, cache):
        settings = {"TRITON_CACHE_DIR": cache, "TRITON_DISABLE_LINE_INFO": 1}
        arguments = map(json.dumps, (matrix, GPUS, only, share, fresh_seed()))
        done = run_python(COMPILE, arguments=list(arguments), **settings)
        names, entries = json.loads(done.stdout)
        for arch, hidden_sizes in matrix:
            expected = set(names) - ({"rms_norm_backward_streamed"} if max(hidden_sizes) < 32768 else set())
            assert {entry["kernel"] for entry in entries if entry["arch"] == arch} == expected
        return entries

    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            matrices = [matrix for matrix in matrices if matrix]
            caches = [tmp_path_factory.mktemp("triton") for _ in matrices]
            with ThreadPoolExecutor(2) as both_cores:
                kept.write_text(json.dumps(sum(both_cores.map(compile_matrix, matrices, caches), [])))
        return [Compiled(entry) for entry in json.loads(kept.read_text())]
