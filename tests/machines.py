"""Compiles every kernel of the package's own calls for GPUs that are not here.

A fresh interpreter, without Triton's own, makes the package's real calls on memory that nobody touches; instead of being
launched, every kernel is compiled with the constants and warps of that launch. `ptxas` is called by Triton itself.
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

from filelock import FileLock

COMPILE = r"""
    import contextlib, dataclasses, importlib, io, json, os, re, sys, traceback
    from pathlib import Path

    os.environ["LOSSLESS_PROOF"] = "off"
    sys.stdout, report = sys.stderr, sys.stdout
    import torch, triton

    matrix, gpus, only = map(json.loads, sys.argv[1:])
    rocm = isinstance(matrix[0][0], str)
    if rocm:  # Before the package is loaded: it chooses instructions then.
        torch.version.hip = "7.0"
    from kernels import get_local_kernel
    from places import forget_calls, python_module
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = get_local_kernel(Path("build"))
    module = lambda name: python_module(kernel, name)
    domain, launch, backward, rotary = map(module, ("domain", "launch", "rms_norm_backward", "rotary"))
    activation, gated, add_rms_norm = map(module, ("activation", "gated_activation", "add_rms_norm"))
    rotary_embedding, cross_entropy, softmax = map(module, ("rotary_embedding", "cross_entropy", "ops.softmax"))
    LLAMA, T5 = module("variants").LLAMA, module("variants").T5
    POINTER = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64"}
    seen = set()
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
        if not function.__name__.startswith(only):
            return
        # Kernels that take columns are hardly different from one hidden size to the next.
        if hidden_size != 4096 and function.__name__.startswith(("rms_norm_sum", "rms_norm_combine")):
            return
        signature = {parameter.name: parameter.annotation_type for parameter in function.params}
        pointers = [name for name in function.arg_names if name.endswith("_ptr")]
        signature.update(dict.fromkeys(pointers, POINTER[torch.float32]))
        signature.update((name, POINTER[t.dtype]) for name, t in zip(pointers, tensors) if t is not None)
        signature.update(dict.fromkeys(launcher.constants, "constexpr"))
        key = (function, arch, launcher.num_warps, tuple(signature.items()), tuple(launcher.constants.items()))
        if key in seen:
            return
        seen.add(key)
        # On ROCm Triton tells storages below 2 GB apart.
        for below_2_gb in (True, False) if rocm and function.__name__ == "rms_norm_forward" else (rocm,):
            compile_for(launcher, function, signature, tensors, len(pointers), below_2_gb)

    def compile_for(launcher, function, signature, tensors, pointers, below_2_gb):
        facts = [["tt.divisibility", 16], *([["tt.pointer_range", 32]] if below_2_gb else [])]
        with contextlib.redirect_stdout(io.StringIO()) as log:
            made = triton.compile(
                ASTSource(function, signature, launcher.constants, {(index,): facts for index in range(pointers)}),
                target=GPUTarget("hip" if rocm else "cuda", arch, gpu.build.warp_size),
                options={"num_warps": launcher.num_warps, "enable_fp_fusion": False},
            )
        assembly = made.asm["amdgcn" if rocm else "ptx"]
        spilled = re.findall(r"spill_count: +(\d+)", assembly) if rocm else re.findall(r"(\d+) bytes spill stores", log.getvalue())
        compiled.append({
            "kernel": function.__name__,
            "arch": arch,
            "dtype": str(dtype).removeprefix("torch."),
            "itemsize": dtype.itemsize,
            "dtypes": [str(t.dtype) for t in tensors if t is not None],
            "num_warps": launcher.num_warps,
            "below_2_gb": below_2_gb,
            "shared": made.metadata.shared,
            "exchanged": backward._EXCHANGED_BYTES,
            "constants": launcher.constants,
            "assembly": assembly,
            "ttgir": made.asm["ttgir"],
            # Bytes of a thread; registers on ROCm.
            "spilled": sum(map(int, spilled)) if spilled else None,
        })

    launch.Launcher.through_triton = compile_instead
    domain._KERNEL_DEVICE = "cpu"
    plans, reduction = module("plans"), module("reduce_config")
    plans.gpu = lambda device: gpu
    for arch, hidden_sizes in matrix:
        # Calls keep the plans of the GPU before.
        forget_calls(module)
        multiprocessors, threads, shared_memory, wave = gpus[str(arch)]
        build = reduction.ROCM[wave] if rocm else reduction.CUDA
        gpu = plans.Gpu(None if rocm else arch // 10, shared_memory, multiprocessors, threads, build)
        for dtype in (torch.bfloat16, torch.float32):
            for hidden_size in hidden_sizes:
                weight = torch.empty(hidden_size, dtype=dtype)
                # Of a few rows programs share the columns, with the plans that are computed and with those of a file.
                for x in torch.empty(1, hidden_size, dtype=dtype), torch.empty(4, hidden_size, dtype=dtype):
                    if hidden_size in (4096, 32768):
                        kernel.rms_norm(x, weight, 1e-6)
                        add_rms_norm.replacement(x, x, weight, 1e-6, module("variants").EAGER[LLAMA])
                # The backward of few rows has a kernel for each gradient; that of many is fused, if the row is not too long.
                # On few SMs it takes more rows.
                for rows in (16, (1 << 25 + (multiprocessors < 64)) // hidden_size):
                    # Rows of activations that lie apart are spread over the threads in another way.
                    for padding in (0, 2) if hidden_size == 4096 else (0,):
                        dy, x = torch.empty(2, rows, hidden_size + padding, dtype=dtype)
                        dy, x = dy.flatten()[:rows * hidden_size].view(rows, hidden_size), x[:, :hidden_size]
                        kernel.rms_norm(x, weight, 1e-6)
                        module("rms_norm").replacement(x, weight, 1e-6, torch.nn.RMSNorm, "eps", fused=True)
                        for variant in (LLAMA, T5)[: 1 + (hidden_size == 4096 and not padding)]:
                            backward.gradients(variant, dy, x, weight, torch.empty(rows, 1), True, True)
                    residual, x = torch.empty(2, rows, hidden_size, dtype=dtype)
                    rstd = torch.empty(rows, 1)
                    if rows > 16 and hidden_size in (64, 128, 4096, 8192, 32768):
                        add_rms_norm.replacement(x, residual, weight, 1e-6, module("variants").EAGER[LLAMA])
                        add_rms_norm._gradients(LLAMA, x, x, weight, rstd, True, True, residual)
                    if rows == 16 and hidden_size == 32768 and dtype == torch.bfloat16:
                        # Long rows are streamed if there are enough for all multiprocessors: here for fewer.
                        of_arch, gpu = gpu, dataclasses.replace(gpu, multiprocessors=1)
                        for dx_mode in ("single", "accumulate"):
                            streamed = backward.resolve(LLAMA, x, x, weight, rstd, True, True, dx_mode)
                            streamed(x, x, weight, rstd, residual if dx_mode == "accumulate" else None)
                        gpu = of_arch
            x, dy = torch.empty(2, 4096, dtype=dtype)
            for function in activation._ACTIVATIONS.values():
                activation._activate(x, function)
                activation.gradients(function, dy, x)
            dy, gate, up = torch.empty(3, 2, 4096, dtype=dtype)
            packed = torch.empty(2, 2 * 4096, dtype=dtype)
            for function in gated.ACTIVATIONS.values():
                for one, other in ((gate, up), packed.chunk(2, -1)):
                    gated.replacement(one, other, function.forward, function)
                    for with_up in (True, False):
                        gated.gradients(function, dy, one, other, with_up)
                gated.packed_replacement(packed, function)
                gated.packed_gradient(function, dy, packed)
            for variant in rotary_embedding._FORMULAS:
                positions, inv_freq = torch.empty(1, 7, dtype=torch.int64), torch.empty(64)
                rotary_embedding._TablesCall(variant, positions, inv_freq, dtype, 1.0)(positions, inv_freq)
            # Softmax and cross-entropy are refused on ROCm, and cross-entropy of 16 bits before sm_80. Each of ATen's kernels, and rows that begin anywhere.
            for vocab in (1000, 4100, 9220, 32000, 50257, 128256) if arch == 90 else () if rocm or (arch < 80 and dtype.itemsize == 2) else (1000, 128256):
                logits, target = torch.empty(5, vocab, dtype=dtype), torch.empty(5, dtype=torch.int64)
                plan, (a, b, c) = cross_entropy.launch_plan(vocab, dtype.itemsize), torch.empty(3, 5)
                cross_entropy._forward(logits, -100, plan)(logits, target, a, b, c, target)
                for mean in (True, False):
                    backward_of = cross_entropy._backward(logits, -100, mean, plan)
                    backward_of(logits, target, a, b, c, c, logits)
            # One element, less than a warp, more, and rows that begin anywhere.
            for size, gap in ((1, 0), (40, 0), (128, 0), (1000, 0), (1000, 1)) if arch == 90 else () if rocm else ((1000, 0),):
                x = torch.empty(3, size + gap, dtype=dtype)[:, :size]
                softmax.gradient(x, softmax.softmax(x))
            for head_dim in (64, 80, 128, 256) if arch == 90 else (80,):
                q, k = (torch.empty(2, 3, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (8, 2))
                for table_dtype in {dtype, torch.float32}:
                    cos, sin = torch.empty(2, 1, 3, head_dim, dtype=table_dtype)
                    for variant in rotary.FORMULAS.values():
                        outs = rotary.replacement(q, k, cos, sin, 1, variant.eager)
                        for apart in (False, True):
                            with torch.no_grad():
                                rotary.gradients(variant, *outs, cos, sin, 1, dtype, apart)
        if arch == 90:
            # Every tuned plan of two more kernels, of which some spill.
            dtype, hidden_size = torch.float16, 1024
            for rows in module("rms_norm_plan").rows_of_every_plan(hidden_size, dtype.itemsize, gpu):
                x, weight = torch.empty(rows, hidden_size, dtype=dtype), torch.empty(hidden_size, dtype=dtype)
                add_rms_norm.replacement(x, x, weight, 1e-6, module("variants").EAGER[LLAMA])
            dtype, hidden_size, fp32_output = torch.bfloat16, 4096, module("variants").BY_NAME["fp32_output"]
            for rows in module("rms_norm_plan").rows_of_every_plan(hidden_size, dtype.itemsize, gpu):
                x, weight = torch.empty(rows, hidden_size, dtype=dtype), torch.empty(hidden_size, dtype=dtype)
                module("rms_norm").replacement(x, weight, 1e-6, module("variants").EAGER[fp32_output])
    files = "rms_norm", "rms_norm_backward", "activation", "rotary", *(() if rocm else ("cross_entropy", "softmax"))
    sources = [module(f"kernels_src.{name}") for name in files]
    names = [name for source in sources for name, member in vars(source).items()
             if isinstance(member, triton.JITFunction) and member.fn.__module__ == source.__name__ and name[0] != "_" and name.startswith(only)]
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
    "activation_forward": (1, 1),
    "activation_backward": (2, 1),
    "gated_activation_forward": (2, 1),
    "gated_activation_backward": (3, 1),
}
# `make test-machines` compiles for all of them.
ALL = os.environ.get("LOSSLESS_MACHINES") == "all"


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
        found = re.findall(rf"^\s*(?:@\S+ )?{instruction}\S*", self["assembly"], re.MULTILINE)
        return sum(2 if "x2" in opcode or "_pk_" in opcode else 1 for opcode in found)


def compile_all(run_python, tmp_path_factory, name, matrices, only=""):
    """Every kernel whose name begins with `only`, for every GPU of the matrices: lists of `(arch, hidden sizes)`.

    Each matrix is compiled in a process of its own. Once for all workers of a run.
    """
    base = tmp_path_factory.getbasetemp()
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{name}.json"

    def compile_matrix(matrix, cache):
        settings = {"TRITON_CACHE_DIR": cache, "TRITON_DISABLE_LINE_INFO": 1}
        done = run_python(COMPILE, arguments=list(map(json.dumps, (matrix, GPUS, only))), **settings)
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
