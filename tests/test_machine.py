"""What the compiler makes of the kernels, for three GPU generations and on none of them.

A fresh interpreter, without Triton's own, makes the package's real calls on memory that nobody touches; instead of being
launched, every kernel is compiled with the constants and warps of that launch.
"""

import itertools
import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from filelock import FileLock

COMPILE = """
    import dataclasses, importlib, json, os, sys, traceback
    from pathlib import Path

    os.environ["LOSSLESS_PROOF"] = "off"
    sys.stdout, report = sys.stderr, sys.stdout
    import torch, triton
    from kernels import get_local_kernel
    from places import python_module
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
        # Kernels that take columns are hardly different from one hidden size to the next.
        if hidden_size != 4096 and function.__name__.startswith(("rms_norm_sum", "rms_norm_combine")):
            return
        signature = {parameter.name: parameter.annotation_type for parameter in function.params}
        pointers = [name for name in function.arg_names if name.endswith("_ptr")]
        signature.update(dict.fromkeys(pointers, POINTER[torch.float32]))
        signature.update((name, POINTER[t.dtype]) for name, t in zip(pointers, tensors) if t is not None)
        signature.update(dict.fromkeys(launcher.constants, "constexpr"))
        aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(pointers))}
        key = (function, arch, launcher.num_warps, tuple(signature.items()), tuple(launcher.constants.items()))
        if key in seen:
            return
        seen.add(key)
        made = triton.compile(
            ASTSource(function, signature, launcher.constants, aligned),
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": launcher.num_warps, "enable_fp_fusion": False},
        )
        compiled.append({
            "kernel": function.__name__,
            "arch": arch,
            "dtype": str(dtype).removeprefix("torch."),
            "itemsize": dtype.itemsize,
            "dtypes": [str(t.dtype) for t in tensors if t is not None],
            "num_warps": launcher.num_warps,
            "shared": made.metadata.shared,
            "exchanged": backward._EXCHANGED_BYTES,
            "constants": launcher.constants,
            "ptx": made.asm["ptx"],
            "ttgir": made.asm["ttgir"],
        })

    launch.Launcher.through_triton = compile_instead
    domain._KERNEL_DEVICE = "cpu"
    plans = module("plans")
    plans.gpu = lambda device: plans.Gpu(arch // 10, json.loads(sys.argv[2])[str(arch)])
    for arch, hidden_sizes in json.loads(sys.argv[1]):
        for dtype in (torch.bfloat16, torch.float32):
            for hidden_size in hidden_sizes:
                weight = torch.empty(hidden_size, dtype=dtype)
                # Of a few rows programs share the columns, with the plans that are computed and with those of a file.
                for x in torch.empty(1, hidden_size, dtype=dtype), torch.empty(4, hidden_size, dtype=dtype):
                    if hidden_size in (4096, 32768):
                        kernel.rms_norm(x, weight, 1e-6)
                        add_rms_norm.replacement(x, x, weight, 1e-6, module("variants").EAGER[LLAMA])
                # The backward of few rows has a kernel for each gradient; that of many is fused, if the row is not too long.
                for rows in (16, (1 << 25) // hidden_size):
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
                        gpu, small = plans.gpu, dataclasses.replace(plans.gpu(None), multiprocessors=1)
                        plans.gpu = lambda device: small
                        for dx_mode in ("single", "accumulate"):
                            streamed = backward.resolve(LLAMA, x, x, weight, rstd, True, True, dx_mode)
                            streamed(x, x, weight, rstd, residual if dx_mode == "accumulate" else None)
                        plans.gpu = gpu
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
            # Each of ATen's kernels, and rows that begin anywhere.
            for vocab in (1000, 4100, 9220, 32000, 50257, 128256) if arch == 90 else (1000, 128256):
                logits, target = torch.empty(5, vocab, dtype=dtype), torch.empty(5, dtype=torch.int64)
                plan, (a, b, c) = cross_entropy.launch_plan(vocab, dtype.itemsize), torch.empty(3, 5)
                cross_entropy._forward(logits, -100, plan)(logits, target, a, b, c, target)
                for mean in (True, False):
                    backward_of = cross_entropy._backward(logits, -100, mean, plan)
                    backward_of(logits, target, a, b, c, c, logits)
            # One element, less than a warp, more, and rows that begin anywhere.
            for size, gap in ((1, 0), (40, 0), (128, 0), (1000, 0), (1000, 1)) if arch == 90 else ((1000, 0),):
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
    sources = [module(f"kernels_src.{name}") for name in
               ("rms_norm", "rms_norm_backward", "activation", "rotary", "cross_entropy", "softmax")]
    names = [name for source in sources for name, member in vars(source).items()
             if isinstance(member, triton.JITFunction) and member.fn.__module__ == source.__name__ and name[0] != "_"]
    json.dump((names, compiled), report)
"""
# bf16 numbers as 16 bits or as 32 bits with two of them.
MINUS_ZEROS = ("0x8000", "-32768", "-2147450880")
ONES = ("0x3F80", "16256", "1065369472", "0xBF80", "-16512", "-1082081408")
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
# FMAs on fp32 numbers of a forward kernel, and how many more the backward kernel has: CUDA's own in exp (three, the fourth
# rounds down), tanh (six) and erf (two polynomials of seven), and those that nvcc made of sums in ATen's kernels.
# A composition of operations has those of its functions only, and in fp32 one more in tanh's gradient. SiLU's forward of
# bf16 takes CUDA's instructions by themselves.
FMAS = {
    "silu": ({"bfloat16": 1, "float32": 3}, {"bfloat16": 3, "float32": 1}),
    "gelu": (7 + 7, 3 + 1),
    "gelu_tanh": (1 + 6, 3),
    "new_gelu": (6, {"bfloat16": 0, "float32": 1}),
    "fast_gelu": (6, {"bfloat16": 0, "float32": 1}),
    "quick_gelu": (3, 0),
}
PATHS = {"new_gelu": 3, "fast_gelu": 4, "quick_gelu": 2}
# Bytes that a thread spills, the most of the three generations with Triton 3.6.0 and 3.7.1. No other kernel spills any.
SPILLED = {
    ("rms_norm_forward", "bfloat16", 8192): 60,
    ("add_rms_norm_forward", "float32", 32768): 200,
    ("rms_norm_backward", "bfloat16", 32768): 364,
    ("rms_norm_backward", "float32", 32768): 1880,
    ("rms_norm_backward_streamed", "bfloat16", 32768): 32,
    ("cross_entropy_forward", "float32", 128256): 4,
    ("rotary_tables", "bfloat16", None): 8,
    ("rotary_tables", "float32", None): 8,
}
EVERY_SIZE = (64, 128, 4096, 8192, 16384, 32768)
# Bytes that a program can have.
SHARED_MEMORY = {90: 227 << 10, 80: 163 << 10, 100: 227 << 10}
EVERY_GENERATION = ((90, EVERY_SIZE), (80, (4096,)), (100, (4096,)))
# `make test-machines` compiles for all of them, `make test` for the first.
MATRIX = EVERY_GENERATION if os.environ.get("LOSSLESS_MACHINES") == "all" else EVERY_GENERATION[:1]


class Compiled(dict):
    def __str__(self):
        constants = ", ".join(f"{name}={value}" for name, value in self["constants"].items())
        return f"{self['kernel']} sm_{self['arch']} {self['dtype']} {self['num_warps']} warps, {constants}"

    @property
    def threads(self):
        return 32 * self["num_warps"]

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
        found = re.findall(rf"^\s*(?:@\S+ )?{instruction}\S*", self["ptx"], re.MULTILINE)
        return sum(2 if "x2" in opcode else 1 for opcode in found)


@pytest.fixture(scope="module")
def compiled(build, run_python, tmp_path_factory):
    """Every kernel for every generation: what is missing has not been compiled. Once for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    kept = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled.json"

    def compile_all(matrix, cache):
        settings = {"TRITON_CACHE_DIR": cache, "TRITON_DISABLE_LINE_INFO": 1}
        done = run_python(COMPILE, arguments=[json.dumps(matrix), json.dumps(SHARED_MEMORY)], **settings)
        names, entries = json.loads(done.stdout)
        for arch, hidden_sizes in matrix:
            expected = set(names) - ({"rms_norm_backward_streamed"} if max(hidden_sizes) < 32768 else set())
            assert {entry["kernel"] for entry in entries if entry["arch"] == arch} == expected
        return entries

    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            matrices = [each for each in (MATRIX[:1], MATRIX[1:]) if each]
            caches = [tmp_path_factory.mktemp("triton") for _ in matrices]
            with ThreadPoolExecutor() as both_cores:
                kept.write_text(json.dumps(sum(both_cores.map(compile_all, matrices, caches), [])))
        return [Compiled(entry) for entry in json.loads(kept.read_text())]


@pytest.fixture(scope="module")
def rms_norm(compiled):
    return [entry for entry in compiled if "rms_norm" in entry["kernel"]]


def activations(compiled, direction):
    """Every activation's kernel, and how many elements a thread has."""
    found = [entry for entry in compiled if entry["kernel"] == f"activation_{direction}"]
    return [(entry, entry["constants"]["BLOCK"] // entry.threads) for entry in found]


def test_backward_compiles_with_and_without_the_sum_of_chains(compiled):
    backward = [entry for entry in compiled if entry["kernel"] == "rms_norm_backward"]
    for arch, _ in MATRIX:
        for dtype in ("bfloat16", "float32"):
            here = [entry["constants"] for entry in backward if (entry["arch"], entry["dtype"]) == (arch, dtype)]
            assert {constants["SUM_CHAINS"] for constants in here} == {False, True}, (arch, dtype)


def test_rows_on_their_way_fit_into_shared_memory(compiled):
    for entry in compiled:
        assert entry["shared"] <= SHARED_MEMORY[entry["arch"]], str(entry)
        constants = entry["constants"]
        if entry["kernel"] == "rms_norm_backward" and constants["SUM_CHAINS"]:
            turn = constants["ROWS"] * (2 + constants["ADD"]) * entry["itemsize"] * entry.row
            buffers = constants["STAGES"] - 1
            assert 0 < buffers * turn <= entry["shared"] <= buffers * turn + entry["exchanged"], str(entry)


def test_rows_that_are_read_twice_exchange_their_lanes_sums_alone(compiled):
    """What a row's numbers are added up to is in the thread that loaded them."""
    streamed, by_lane = (
        [entry for entry in compiled if entry["constants"].get(way)] for way in ("STREAMED", "BY_LANE")
    )
    assert {entry["kernel"] for entry in streamed} == {"rms_norm_forward", "add_rms_norm_forward"}
    shared = {entry["kernel"] for entry in by_lane if entry["constants"]["PROGRAMS_PER_ROW"] > 1}
    assert shared == {"rms_norm_forward", "add_rms_norm_forward"}
    for entry in streamed + by_lane:
        constants = entry["constants"]
        assert entry["shared"] <= constants["ROWS"] * 4 * max(entry.threads, constants["WIDTH"] * constants["HEIGHT"])
    for entry in streamed:
        assert entry.count(r"ld\.global\S*L1::evict_last") and entry.count(r"ld\.global\S*L1::evict_first"), str(entry)


def test_later_rows_are_requested_where_a_plan_says_so(compiled):
    """One request for each row of each input, on GPUs that have such requests."""
    prefetching = {(entry["kernel"], entry["arch"]) for entry in compiled if entry["constants"].get("AHEAD")}
    assert prefetching == {("rms_norm_forward", 90), ("add_rms_norm_forward", 90)}
    for entry in compiled:
        constants = entry["constants"]
        expected = constants["ROWS"] * ROWS_MOVED[entry["kernel"]][0] if constants.get("AHEAD") else 0
        assert len(re.findall(r"cp\.async\.bulk\.prefetch\.L2", entry["ptx"])) == expected, str(entry)


def test_nothing_is_computed_in_double_precision(compiled):
    """But how often a large angle goes round, in CUDA's own cos and sin."""
    assert {entry["kernel"] for entry in compiled if re.search(r"\.f64\b", entry["ptx"])} == {"rotary_tables"}


def test_rows_move_16_bytes_at_a_time(compiled):
    for entry in compiled:
        constants = entry["constants"]
        if entry["kernel"] not in ROWS_MOVED or constants.get("STRIDE_UNIT") == 2:
            continue
        read, written = ROWS_MOVED[entry["kernel"]]
        read += constants.get("ADD", False)
        written *= 2 if constants.get("TWO_EDGES") else 1
        if entry["kernel"] == "activation_backward":
            written *= PATHS.get(constants["ACTIVATION"], 1)
        written += constants.get("D_UP", False)
        if "WIDTH" in constants:
            tile = constants.get("ROWS", 1) * entry.row
        else:
            tile = 4 * constants["THREADS"] * constants["COLUMNS"] if "COLUMNS" in constants else constants["BLOCK"]
        size = 16
        if entry["kernel"] == "rms_norm_backward_streamed":
            # Step by step, and of a long row of 16-bit numbers 16 warps have half as much each.
            size = min(16, 4 * constants["WIDTH"] * constants["HEIGHT"] * entry["itemsize"] // entry.threads)
            assert size == (8 if constants["ADD"] else 16), str(entry)
        # None where a thread has less than 16 bytes, as in the sum of few chains.
        accesses = tile * entry["itemsize"] // (size * entry.threads)
        # In a pipelined loop they go into shared memory: each in its turn and, for the turns before, ahead of the loop.
        turns = constants["STAGES"] if constants.get("SUM_CHAINS") else 1
        loads = entry.count(rf"ld\.global\S*\.v{size // 4}\.b32") + entry.count(r"cp\.async\.cg\.shared\.global")
        assert loads >= turns * read * accesses, str(entry)
        assert entry.count(rf"st\.global\S*\.v{size // 4}\.b32") >= written * accesses, str(entry)
        # But a weight of which a thread has one number, and a step that is loaded for a sum by lane.
        narrow = "WIDTH" in constants and entry.row <= entry.threads
        again = 0
        if constants.get("BY_LANE") and constants["ROWS"] * entry.step <= entry.threads:
            again = read << constants["LOG2_STEPS"]
        assert entry.count(r"(ld|st)\.global\S*\.[bu](8|16)\b") <= narrow + again, str(entry)


def test_heads_move_16_bytes_at_a_time(compiled):
    """And meet their cos and sin, if of the same dtype, in registers: nothing passes through shared memory, nobody waits.

    Two 16-bit numbers are multiplied and added as such: fp32 is so much longer that its rounding in between shows nowhere.
    """
    rotary = [entry for entry in compiled if entry["kernel"] == "rotary"]
    assert {entry["constants"]["STEP"] for entry in rotary} == {"forward", "gradient", "gradients"}
    for entry in rotary:
        for access in ("ld", "st"):
            assert entry.count(rf"{access}\.global") == entry.count(rf"{access}\.global\S*\.v4\.b32") > 0, str(entry)
        if len(set(entry["dtypes"])) == 1:
            assert not entry.count(r"((ld|st)\.shared|bar\.sync)"), str(entry)
        assert not entry.count(r"((fma|mad)\S*\.f32|\S*\.ftz)"), str(entry)
        assert_only_trivial_fmas_of_bf16(entry)


def assert_only_trivial_fmas_of_bf16(entry):
    """sm_80 has products and sums of bf16 as FMAs only: with an addend of -0, with a factor of 1 or -1."""
    constants = dict(re.findall(r"\bmov\.b(?:16|32)\s+(\S+), (\S+);", entry["ptx"]))
    for factor, addend in re.findall(r"\bfma\.rn\.bf16(?:x2)?\s\S+ \S+ (\S+), (\S+);", entry["ptx"]):
        assert constants.get(addend) in MINUS_ZEROS or constants.get(factor) in ONES, str(entry)


def test_logits_move_16_bytes_at_a_time(compiled):
    """Of a vocabulary whose rows begin at multiples of 16 bytes; else eager's vectors of four elements do."""
    for entry in compiled:
        constants, size = entry["constants"], entry["itemsize"]
        if entry["kernel"] == "cross_entropy_backward":
            assert constants["ACROSS_ROWS"] or constants["UNIT"] * size == 16, str(entry)
            accesses = constants["BLOCK"] * size // (16 * entry.threads)
            for access in ("ld", "st"):
                assert entry.count(rf"{access}\.global\S*\.v4\.b32") == accesses, str(entry)
        if entry["kernel"] == "cross_entropy_forward" and constants["KIND"] == "loop":
            aligned = constants["UNIT"] * size == 16
            rest = constants["VOCAB"] // 4096 % constants["UNROLL"] if aligned else constants["UNROLL"] - 1
            steps = constants["UNROLL"] + rest
            words = 4 if aligned else size
            # Twice: for the maximum and for the sum, from the L2 if they are still there.
            for policy in ("evict_last", "evict_first"):
                found = entry.count(rf"ld\.global\S*L1::{policy}\S*\.v{words}\.b32")
                assert found >= steps * 4096 * size // (4 * words * entry.threads), str(entry)


def test_cross_entropy_has_cudas_fmas_and_no_others(compiled):
    """Of a logarithm, and of the gradient; those of an exponential are libdevice's or in one piece of assembly."""
    kernels = [entry for entry in compiled if entry["kernel"].startswith("cross_entropy")]
    assert {entry["constants"].get("KIND") for entry in kernels} == {"loop", "shared", "registers", None}
    for entry in kernels:
        constants = entry["constants"]
        # Of a tensor's last block there is code of its own.
        blocks = 1 + constants.get("ACROSS_ROWS", False)
        expected = blocks * constants["BLOCK"] // entry.threads if "BLOCK" in constants else 11
        assert entry.count(r"fma\.rn\.f32") == expected, str(entry)
        assert not entry.count(r"mad\S*\.f32"), str(entry)
        # The mean's gradient is divided once.
        divisions = constants.get("MEAN", False)
        assert entry.count(r"\{? ?div\.rn\.f32") == entry.count(r"\{? ?(div|rcp)\S*\.f32") == divisions, str(entry)


def softmaxes(compiled, direction):
    """Every kernel of softmax, how many elements a thread has, and whether rows begin at multiples of 16 bytes."""
    for entry in compiled:
        if entry["kernel"] == f"softmax_{direction}":
            constants = entry["constants"]
            elements = (constants["ROWS"] << constants["LOG2_SIZE"]) // entry.threads
            yield entry, elements, constants["UNIT"] * entry["itemsize"] == 16


def test_softmax_moves_16_bytes_at_a_time(compiled):
    for direction, read in (("forward", 1), ("backward", 2)):
        found = list(softmaxes(compiled, direction))
        assert {entry["arch"] for entry, _, aligned in found if aligned} == {arch for arch, _ in MATRIX}
        for entry, elements, aligned in found:
            accesses = elements * entry["itemsize"] // 16 if aligned else 0
            assert entry.count(r"ld\.global\S*\.v4\.b32") == read * accesses, str(entry)
            assert entry.count(r"st\.global\S*\.v4\.b32") == accesses, str(entry)


def test_softmax_has_cudas_fmas_and_no_others(compiled):
    """An exponential's three beside the one that rounds down, and that of the gradient. Quotients are rounded correctly."""
    for entry, elements, _ in softmaxes(compiled, "forward"):
        assert entry.count(r"fma\.rn\.ftz\.f32") == 3 * elements, str(entry)
        assert entry.count(r"fma\.rm\.ftz\.f32") == elements, str(entry)
        assert entry.count(r"(?:fma|mad)\S*\.f32") == 4 * elements, str(entry)
        assert entry.count(r"\{? ?div\.rn\.f32") == entry.count(r"\{? ?(?:div|rcp)\S*\.f32") == elements, str(entry)
    for entry, elements, _ in softmaxes(compiled, "backward"):
        assert entry.count(r"fma\.rn\.f32") == entry.count(r"(?:fma|mad)\S*\.f32") == elements, str(entry)
        assert not entry.count(r"\S*\.ftz"), str(entry)
        assert_only_trivial_fmas_of_bf16(entry)


def test_ptxas_contracts_nothing(compiled):
    """It may make an FMA of a product and a sum unless both name their rounding."""
    for entry in compiled:
        assert entry.count(r"(mul|add)\.rn\.(f32|bf16)|fma\.rn\.bf16"), str(entry)
        assert not entry.count(r"(mul|add|sub)\.(sat\.|ftz\.)*(f32|bf16)"), str(entry)


def test_no_sum_crosses_warps_numbered_in_turn(rms_norm):
    """Triton 3.6 sums over such an axis wrongly: bits of the warps' number for one axis, then another, then the first."""
    reductions = r'"tt\.reduce".*?axis = (\d+).*?\) : \(tensor<[\dx]+xf32, (#\w+)>'
    across = 0
    for entry in rms_norm:
        layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", entry["ttgir"], re.MULTILINE))
        for axis, name in re.findall(reductions, entry["ttgir"], re.DOTALL):
            if "linear" not in layouts[name]:
                continue
            bits = json.loads(re.search(r"warp = (\[.*?\]), block", layouts[name])[1])
            axes = [next(i for i, step in enumerate(bit) if step) for bit in bits if any(bit)]
            runs = [found for found, _ in itertools.groupby(axes)]
            across += int(axis) in runs
            assert int(axis) not in runs or len(runs) == len(set(runs)), f"{entry}: {layouts[name]}"
    assert across


def test_rms_norm_has_no_fma_but_in_the_sum_of_torchs_own(rms_norm):
    for entry in rms_norm:
        constants, expected = entry["constants"], 0
        if constants.get("FUSED"):
            expected = constants["ROWS"] * entry.row // entry.threads
        assert entry.count(r"fma\.rn\.f32") == entry.count(r"(fma|mad)\S*\.f32") == expected, str(entry)
        assert_only_trivial_fmas_of_bf16(entry)


def test_rms_norm_flushes_no_subnormal_to_zero(rms_norm):
    for entry in rms_norm:
        assert not entry.count(r"\S*\.ftz\b"), str(entry)


def test_rms_norm_divides_with_correct_rounding(rms_norm):
    for entry in rms_norm:
        assert entry.count(r"div\S*\.f32") == entry.count(r"div\.rn\.f32"), str(entry)
        assert not entry.count(r"rcp\S*\.f32"), str(entry)


def test_activations_divide_with_correct_rounding(compiled):
    for direction in ("forward", "backward"):
        for entry, elements in activations(compiled, direction):
            name = entry["constants"]["ACTIVATION"]
            approximated = (name, direction, entry["dtype"]) == ("silu", "forward", "bfloat16")
            divisions = elements if (name, direction) == ("silu", "forward") and not approximated else 0
            assert entry.count(r"div\.rn\.f32") == entry.count(r"div\S*\.f32") == divisions, str(entry)
            # Of the sigmoid; CUDA's tanh is made of an approximate one, and SiLU of bf16.
            correct = elements if name == "quick_gelu" or (name, direction) == ("silu", "backward") else 0
            assert entry.count(r"rcp\.rn\.f32") == correct, str(entry)
            approximate = elements if name in ("gelu_tanh", "new_gelu", "fast_gelu") or approximated else 0
            assert entry.count(r"rcp\.approx\.ftz\.f32") == approximate, str(entry)
            assert entry.count(r"rcp\S*\.f32") == correct + approximate, str(entry)


def test_activations_have_cudas_fmas_and_no_others(compiled):
    assert {entry["constants"]["ACTIVATION"] for entry, _ in activations(compiled, "forward")} == set(FMAS)
    for direction in ("forward", "backward"):
        for entry, elements in activations(compiled, direction):
            forward, more = (
                each[entry["dtype"]] if isinstance(each, dict) else each
                for each in FMAS[entry["constants"]["ACTIVATION"]]
            )
            expected = forward + more * (direction == "backward")
            assert entry.count(r"fma\.rn(?:\.ftz)?\.f32") == expected * elements, str(entry)
            assert not entry.count(r"mad\S*\.f32"), str(entry)


def test_activations_flush_only_where_cuda_does(compiled):
    """Its approximations of 2**x and 1 / x: the instructions have no other form in `expf`, `tanhf` and `erff`.

    And inside libdevice's exponential, where nothing is lost: its last product is not flushed.
    """
    exponential = {"cvt.ftz.sat.f32.f32", "fma.rm.ftz.f32", "fma.rn.ftz.f32"}
    for direction in ("forward", "backward"):
        for entry, _ in activations(compiled, direction):
            found = set(re.findall(r"\S*\.ftz\S*", entry["ptx"]))
            if entry["constants"]["ACTIVATION"] in ("silu", "quick_gelu") or (
                (entry["constants"]["ACTIVATION"], direction) == ("gelu", "backward")
            ):
                found -= exponential
            assert found <= {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"}, f"{entry}: {found}"


def ptxas(entry, folder):
    import triton

    source = folder / "kernel.ptx"
    source.write_text(entry["ptx"])
    (target,) = re.findall(r"^\.target (sm_\w+)", entry["ptx"], re.MULTILINE)
    tool = triton.knobs.nvidia.ptxas if entry["arch"] < 100 else triton.knobs.nvidia.ptxas_blackwell
    command = [tool.path, "-v", "--fmad=false", f"-arch={target}", str(source), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_registers_hold_a_row(compiled, tmp_path):
    more = []
    for entry in compiled:
        (spilled,) = map(int, re.findall(r"(\d+) bytes spill stores", ptxas(entry, tmp_path)))
        size = entry["constants"].get("HIDDEN_SIZE", entry["constants"].get("VOCAB"))
        known = SPILLED.get((entry["kernel"], entry["dtype"], size), 0)
        if spilled > known:
            more.append(f"{entry} spills {spilled} bytes instead of {known}")
    assert not more, "\n".join(more)
