"""What the compiler makes of the kernels, for seven GPU generations and on none of them. `machines.py` compiles."""

import itertools
import json
import re

import pytest
import triton
from machines import ALL, GPUS, ONE, ROWS_MOVED, compile_all

# bf16 numbers as 16 bits or as 32 bits with two of them.
MINUS_ZEROS = ("0x8000", "-32768", "-2147450880")
ONES = ("0x3F80", "16256", "1065369472", "0xBF80", "-16512", "-1082081408")
# FMAs on fp32 numbers of a forward kernel, and how many more the backward kernel has: CUDA's own in exp (three, the fourth
# rounds down), tanh (six) and erf (two polynomials of seven), and those that nvcc made of sums in ATen's kernels.
# A composition of operations has those of its functions only, and in fp32 one more in tanh's gradient. SiLU's forward of
# bf16 takes CUDA's instructions by themselves, and so does the reciprocal in its gradient: one more scales, two are Newton's.
FMAS = {
    "silu": ({"bfloat16": 1, "float32": 3}, {"bfloat16": 6, "float32": 1}),
    "gelu": (7 + 7, 3 + 1),
    "gelu_of_cuda_13_2": (7 + 7, 3 + 1),
    "gelu_tanh": (1 + 6, 3),
    "new_gelu": (6, {"bfloat16": 0, "float32": 1}),
    "fast_gelu": (6, {"bfloat16": 0, "float32": 1}),
    "quick_gelu": (3, 0),
}
# What CUDA's own functions approximate and flush in the steps that the kernels repeat; a norm's root is `rsqrtf`. No other
# kernel has an approximate instruction or one that flushes subnormals to zero.
_EXP, _RECIPROCAL = "ex2.approx.ftz.f32", "rcp.approx.ftz.f32"
_COS = {"abs.ftz.f32", "cvt.rni.ftz.s32.f32", "fma.rn.ftz.f32", "mul.rn.ftz.f32"}
APPROXIMATE = {
    **dict.fromkeys(
        ("rms_norm_forward", "add_rms_norm_forward", "cohere_layer_norm_forward", "layer_norm_forward"),
        {"rsqrt.approx.f32"},
    ),
    **dict.fromkeys(("group_norm_forward", "group_norm_statistics"), {"rsqrt.approx.f32", _RECIPROCAL}),
    **dict.fromkeys(("activation_forward", "activation_backward"), {_EXP, _RECIPROCAL}),
    **dict.fromkeys(("dyt_forward", "dyt_backward", "dyt_sum_chains"), {_EXP, _RECIPROCAL}),
    **dict.fromkeys(("gated_activation_forward", "gated_activation_backward"), {_EXP, _RECIPROCAL}),
    **dict.fromkeys(("cross_entropy_forward", "cross_entropy_forward_short", "cross_entropy_backward"), {_EXP}),
    **dict.fromkeys(
        ("softmax_forward", "softmax_forward_of_block", "softmax_forward_of_long_rows"), {_EXP, _RECIPROCAL}
    ),
    **{
        f"masked_softmax_{direction}{rows}": {_EXP, _RECIPROCAL}
        for direction in ("forward", "backward")
        for rows in ("", "_of_block", "_of_long_rows")
    },
    **dict.fromkeys(("divergence_blocks", "divergence_forward", "divergence_backward"), {_EXP}),
    **dict.fromkeys(("jsd_forward", "jsd_backward"), {_EXP}),
    "rotary_tables": _COS,
}
GROUP_NORM_VECTORS = ("group_norm_vector_gradients",)
PATHS = {"new_gelu": 3, "fast_gelu": 4, "quick_gelu": 2}
# Bytes that a thread spills on sm_90, the most with Triton 3.6.0 and 3.7.1. No other kernel spills any.
SPILLED = {
    # With an output of fp32 and the tuned plan of one warp.
    ("rms_norm_forward", "bfloat16", 4096): 22,
    ("rms_norm_forward", "bfloat16", 8192): 60,
    ("add_rms_norm_forward", "float16", 1024): 8,
    ("add_rms_norm_forward", "float32", 32768): 200,
    ("rms_norm_backward", "bfloat16", 32768): 364,
    ("rms_norm_backward", "float32", 32768): 1880,
    ("rms_norm_backward_streamed", "bfloat16", 32768): 32,
    ("cross_entropy_forward", "float32", 128256): 4,
    ("rotary_tables", "bfloat16", None): 8,
    ("rotary_tables", "float32", None): 8,
    # Of rows of 128256 with both gradients, from one for each term; the second with Triton 3.6 alone.
    ("jsd_backward", "bfloat16", None): 16,
    ("jsd_backward", "float32", None): 4,
    ("jsd_forward", "bfloat16", None): 32,
    ("jsd_forward", "float32", None): 20,
    ("masked_softmax_forward_of_block", "bfloat16", None): 4,
    # Rows of 12288 keys that are not read by vectors.
    ("masked_softmax_forward_of_block", "float32", None): 28,
    # Gradients of 32768 elements, which a loop would compute in more time; those of 16384 spill 56 bytes, of 8192 20.
    ("softmax_backward_of_block", "float32", None): 88,
    ("masked_softmax_backward_of_block", "bfloat16", None): 304,
    ("masked_softmax_backward_of_block", "float32", None): 516,
    # Groups that a lane reads in two steps, with 64 registers.
    ("group_norm_forward", "bfloat16", None): 236,
    ("group_norm_forward", "float32", None): 236,
    # Of vectors, as torch 2.15 reads them.
    ("group_norm_backward", "bfloat16", None): 20,
}
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
if TRITON < (3, 7):
    # torch 2.15 alone computes GroupNorm's gradients by vectors. It runs with Triton 3.9.
    SPILLED |= {("group_norm_vector_gradients", dtype, None): 8 for dtype in ("bfloat16", "float32")}
if TRITON >= (3, 9):
    # Gradients of 32768 elements, some bytes more of masked scores, jsd and GroupNorm.
    SPILLED |= {("softmax_backward_of_block", "float32", None): 124}
    SPILLED |= {("masked_softmax_forward_of_block", "bfloat16", None): 8}
    SPILLED |= {("jsd_forward", "float32", None): 28}
    SPILLED |= {("jsd_backward", "bfloat16", None): 32}
    SPILLED |= {("group_norm_forward", "bfloat16", None): 244}
    SPILLED |= {("group_norm_backward", "bfloat16", None): 4}
# The same on the other generations: rows of 32768 elements spill more there.
SPILLED_ELSEWHERE = {
    **SPILLED,
    ("add_rms_norm_forward", "bfloat16", 32768): 100,
    ("add_rms_norm_forward", "float32", 32768): 320,
    ("rms_norm_backward", "float32", 32768): 2400,
    ("rms_norm_backward_streamed", "bfloat16", 32768): 476,
    # sm_100 and sm_120.
    ("dyt_backward", "bfloat16", None): 8,
    ("jsd_forward", "float32", None): 20,
    ("jsd_backward", "bfloat16", None): 44,
    ("jsd_backward", "float32", None): 36,
    ("cross_entropy_forward", "bfloat16", 128256): 4,
    ("cross_entropy_forward", "float16", 128256): 4,
    ("cross_entropy_forward", "float32", 32000): 48,
    ("softmax_forward_of_long_rows", "float32", None): 4,
    ("softmax_forward_of_block", "float32", None): 4,
    ("masked_softmax_forward_of_block", "bfloat16", None): 12,
    ("masked_softmax_backward_of_block", "bfloat16", None): 364,
    ("masked_softmax_backward_of_block", "float32", None): 600,
}
EVERY_SIZE = (64, 128, 4096, 8192, 16384, 32768)
# `make test` compiles for the first, and a share of the kernels without a new pair of values. `make test-machines` compiles all.
# Two processes take about as long.
MATRICES = [
    [(90, (4096,) if ONE else EVERY_SIZE)],
    [(arch, (4096, 32768)) for arch in (75, 80, 86, 89, 100, 120)] if ALL else [],
]
SHARE = 1.0 if ALL or ONE else 0.1
ARCHS = [arch for matrix in MATRICES for arch, _ in matrix]


@pytest.fixture(scope="module")
def compiled(build, run_python, tmp_path_factory):
    """Every kernel for every generation."""
    return compile_all(run_python, tmp_path_factory, "compiled", MATRICES, share=SHARE)


@pytest.fixture(scope="module")
def rms_norm(compiled):
    return [entry for entry in compiled if "rms_norm" in entry["kernel"]]


def activations(compiled, direction):
    """Every activation's kernel, and how many elements a thread has."""
    found = [entry for entry in compiled if entry["kernel"] == f"activation_{direction}"]
    return [(entry, entry["constants"]["BLOCK"] // entry.threads) for entry in found]


def test_backward_compiles_with_and_without_the_sum_of_chains(compiled):
    backward = [entry for entry in compiled if entry["kernel"] == "rms_norm_backward"]
    for arch in ARCHS:
        for dtype in ("bfloat16", "float32"):
            here = [entry["constants"] for entry in backward if (entry["arch"], entry["dtype"]) == (arch, dtype)]
            assert {constants["SUM_CHAINS"] for constants in here} == {False, True}, (arch, dtype)


def test_rows_on_their_way_fit_into_shared_memory(compiled):
    for entry in compiled:
        assert entry["shared"] <= GPUS[entry["arch"]][2], str(entry)
        constants = entry["constants"]
        # Copies into shared memory that nobody waits for came with sm_80.
        if entry["kernel"] == "rms_norm_backward" and constants["SUM_CHAINS"] and entry["arch"] >= 80:
            turn = constants["ROWS"] * (2 + constants["ADD"]) * entry["itemsize"] * entry.row
            buffers = constants["STAGES"] - 1
            assert 0 < buffers * turn <= entry["shared"] <= buffers * turn + entry["exchanged"], str(entry)


@pytest.mark.skipif(ONE, reason="rows of other hidden sizes are read twice")
def test_rows_that_are_read_twice_exchange_their_lanes_sums_alone(rms_norm):
    """What a row's numbers are added up to is in the thread that loaded them."""
    streamed, by_lane = (
        [entry for entry in rms_norm if entry["constants"].get(way)] for way in ("STREAMED", "BY_LANE")
    )
    assert {entry["kernel"] for entry in streamed} == {"rms_norm_forward", "add_rms_norm_forward"}
    shared = {entry["kernel"] for entry in by_lane if entry["constants"]["PROGRAMS_PER_ROW"] > 1}
    assert shared == {"rms_norm_forward", "add_rms_norm_forward"}
    for entry in streamed + by_lane:
        constants = entry["constants"]
        # An output of fp32 is exchanged too: a thread stores half as many numbers at once.
        if constants["SCALE"] == "fp32" or entry["itemsize"] == 2 and "torch.float32" in entry["dtypes"][:3]:
            continue
        assert entry["shared"] <= constants["ROWS"] * 4 * max(entry.threads, constants["WIDTH"] * constants["HEIGHT"])
    for entry in streamed:
        assert entry.count(r"ld\.global\S*L1::evict_last") and entry.count(r"ld\.global\S*L1::evict_first"), str(entry)


def test_later_rows_are_requested_where_a_plan_says_so(compiled):
    """One request for each row of each input, on GPUs that have such requests."""
    prefetching = {(entry["kernel"], entry["arch"]) for entry in compiled if entry["constants"].get("AHEAD")}
    kernels = "rms_norm_forward", "add_rms_norm_forward"
    assert prefetching == set(itertools.product(kernels, [arch for arch in ARCHS if arch >= 90]))
    for entry in compiled:
        constants = entry["constants"]
        expected = constants["ROWS"] * ROWS_MOVED[entry["kernel"]][0] if constants.get("AHEAD") else 0
        assert len(re.findall(r"cp\.async\.bulk\.prefetch\.L2", entry["assembly"])) == expected, str(entry)


def test_nothing_is_computed_in_double_precision(compiled):
    """But how often a large angle goes round, in CUDA's own cos and sin."""
    assert {entry["kernel"] for entry in compiled if re.search(r"\.f64\b", entry["assembly"])} == {"rotary_tables"}


def test_rows_move_16_bytes_at_a_time(compiled):
    for entry in compiled:
        constants = entry["constants"]
        if entry["kernel"] not in ROWS_MOVED or constants.get("STRIDE_UNIT") == 2:
            continue
        if constants.get("UNIT") == 1 and entry["itemsize"] == 4:  # An odd number of fp32 elements, one by one.
            continue
        read, written = ROWS_MOVED[entry["kernel"]]
        read += constants.get("ADD", False)
        written *= 2 if constants.get("TWO_EDGES") else 1
        if entry["kernel"] == "activation_backward" and not constants["SUM"]:
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
        turns = constants["STAGES"] if constants.get("SUM_CHAINS") and entry["arch"] >= 80 else 1
        loads = entry.count(rf"ld\.global\S*\.v{size // 4}\.b32") + entry.count(r"cp\.async\.cg\.shared\.global")
        assert loads >= turns * read * accesses, str(entry)
        assert entry.count(rf"st\.global\S*\.v{size // 4}\.b32") >= written * accesses, str(entry)
        # But a weight of which a thread has one number, and a step that is loaded for a sum by lane.
        narrow = "WIDTH" in constants and entry.row <= entry.threads
        again = 0
        if constants.get("BY_LANE") and constants["ROWS"] * entry.step <= entry.threads:
            again = read << constants["LOG2_STEPS"]
        if constants.get("UNIT") == 1:  # The last block of an odd number of elements.
            again = (read + written) * tile // entry.threads
        assert entry.count(r"(ld|st)\.global\S*\.[bu](8|16)\b") <= narrow + again, str(entry)


def test_heads_move_16_bytes_at_a_time(compiled):
    """And meet their cos and sin, if of the same dtype, in registers: nothing passes through shared memory, nobody waits.

    Two 16-bit numbers are multiplied and added as such: fp32 is so much longer that its rounding in between shows nowhere.
    """
    rotary = [entry for entry in compiled if entry["kernel"] == "rotary"]
    assert {entry["constants"]["STEP"] for entry in rotary} == {"forward", "gradient", "gradients"}
    for entry in rotary:
        constants, usual = entry["constants"], entry["constants"]["TABLE"] != "first_half"
        # The few elements that are passed on may be less than 16 bytes of a thread.
        if not constants["PASSED"]:
            for access in ("ld", "st"):
                assert entry.count(rf"{access}\.global") == entry.count(rf"{access}\.global\S*\.v4\.b32") > 0, str(
                    entry
                )
        # The one number of two neighbours in cos and sin may pass through shared memory.
        if len(set(entry["dtypes"])) == 1 and usual:
            assert not entry.count(r"((ld|st)\.shared|bar\.sync)"), str(entry)
        assert not entry.count(r"((fma|mad)\S*\.f32|\S*\.ftz)"), str(entry)
        assert_only_trivial_fmas_of_bf16(entry)


def assert_only_trivial_fmas_of_bf16(entry):
    """sm_80 has products and sums of bf16 as FMAs only: with an addend of -0, with a factor of 1 or -1."""
    constants = dict(re.findall(r"\bmov\.b(?:16|32)\s+(\S+), (\S+);", entry["assembly"]))
    for factor, addend in re.findall(r"\bfma\.rn\.bf16(?:x2)?\s\S+ \S+ (\S+), (\S+);", entry["assembly"]):
        assert constants.get(addend) in MINUS_ZEROS or constants.get(factor) in ONES, str(entry)


def test_logits_move_16_bytes_at_a_time(compiled):
    """Of a vocabulary whose rows begin at multiples of 16 bytes; else eager's vectors of four elements do."""
    for entry in compiled:
        constants, size = entry["constants"], entry["itemsize"]
        if entry["kernel"] == "cross_entropy_backward":
            assert constants["ACROSS_ROWS"] or constants["UNIT"] * size == 16, str(entry)
            accesses = constants["BLOCK"] * size // (16 * entry.threads)
            assert entry.count(r"ld\.global\S*\.v4\.b32") == accesses, str(entry)
            # An ignored row, the block with the target, and the others have code of their own.
            kinds = 1 if constants["ACROSS_ROWS"] else 3
            assert entry.count(r"st\.global\S*\.v4\.b32") == kinds * accesses, str(entry)
        if entry["kernel"] == "cross_entropy_forward" and constants["KIND"] == "registers":
            # 1024 lanes at once, of which a thread has four or fewer; each row is read for the maximum and for the sum.
            steps, words = -(-constants["VOCAB"] // 1024), 1024 * size // (4 * entry.threads)
            assert entry.count(rf"ld\.global\S*\.v{words}\.b32") == 2 * steps, str(entry)
        if entry["kernel"] == "cross_entropy_forward" and constants["KIND"] == "shared":
            # Vectors of four elements, of which the last step has fewer.
            steps, words = -(-constants["VOCAB"] // 4096), min(4, constants["UNIT"] * size // 4)
            accesses = steps * 4096 * size // (4 * words * entry.threads)
            assert entry.count(rf"ld\.global\S*\.v{words}\.b32") == 2 * accesses, str(entry)
        if entry["kernel"] == "cross_entropy_forward" and constants["KIND"] == "loop":
            aligned = constants["UNIT"] * size == 16
            unroll, held = constants["UNROLL"], constants["HELD"]
            rest = (constants["VOCAB"] // 4096 - held) % unroll if aligned else unroll - 1
            words = 4 if aligned else size
            # Twice: for the maximum and for the sum, from the L2 if they are still there; but those that are held once.
            for policy, steps in (("evict_last", unroll + rest), ("evict_first", unroll + rest + held)):
                found = entry.count(rf"ld\.global\S*L1::{policy}\S*\.v{words}\.b32")
                assert found >= steps * 4096 * size // (4 * words * entry.threads), str(entry)


def test_cross_entropy_has_cudas_fmas_and_no_others(compiled):
    """Of exponentials, of a logarithm, and of the gradient."""
    kernels = [entry for entry in compiled if entry["kernel"].startswith("cross_entropy")]
    for arch in ARCHS:
        kinds = {entry["constants"].get("KIND") for entry in kernels if entry["arch"] == arch}
        assert kinds == {"loop", "shared", "registers", None}, arch
    for entry in kernels:
        constants = entry["constants"]
        # There is code of its own for a tensor's last block, or for the block of a row that has the target.
        expected = 2 * constants["BLOCK"] // entry.threads if "BLOCK" in constants else 11
        computed, added = entry.exps
        adds = entry["kernel"] == "cross_entropy_forward"
        assert bool(computed) is not adds and bool(added) is adds, str(entry)
        assert entry.count(r"(?:fma|mad)\S*\.f32") == expected + 4 * computed + 5 * added, str(entry)
        # The mean's gradient is divided once.
        divisions = constants.get("MEAN", False)
        assert entry.count(r"\{? ?div\.rn\.f32") == entry.count(r"\{? ?(div|rcp)\S*\.f32") == divisions, str(entry)


def test_layer_norm_moves_16_bytes_at_a_time_and_has_cudas_fmas(compiled):
    """Two for each element's mean and M2 (one is trivial for a lane's first), two for each level that combines lanes or warps
    with elements, and that of the bias."""
    seen = set()
    for entry in compiled:
        if entry["kernel"] != "layer_norm_forward":
            continue
        constants = entry["constants"]
        seen.add((constants["FEW"], constants["HALVES"]))
        size, rows = constants["SIZE"], constants["ROWS"]
        lanes = 128 >> (size <= 128) + (size <= 256)
        parts = 2 if constants["HALVES"] else 1
        # All warps of a set, two of four or one, have the same elements.
        in_sets = constants["HALVES"] and size % 64 == 0 and size % 512 and size <= 1024
        sets = (2 if size % 256 == 0 else 1 if constants["FEW"] else lanes // 32) if in_sets else 1
        columns = 4 * lanes // (parts * sets)
        of_tile = rows * columns // (32 * entry["num_warps"])
        # A tile has every `parts * sets`-th part of 32 // parts vectors, those of a set's warps beside each other.
        firsts = [
            step * lanes + of_set * (lanes // sets) + part * (32 // parts)
            for step in range(-(-size // (4 * lanes)))
            for of_set in range(sets)
            for part in range(parts)
        ]
        tiles = sum(4 * first < size for first in firsts)
        accesses = tiles * max(of_tile * entry["itemsize"] // 16, 1)
        width = min(of_tile * entry["itemsize"], 16)
        of_width = {16: r"\.v4\.b32", 8: r"\.v2\.b32", 4: r"\.b32"}[width]
        reads = accesses * (constants["STRIDE_UNIT"] * entry["itemsize"] == 16)
        vectors = accesses * (constants["WEIGHT"] + constants["BIAS"])
        assert entry.count(rf"ld\.global\S*{of_width}") == reads + vectors, str(entry)
        # The mean and rstd are 4 bytes each.
        assert entry.count(rf"st\.global\S*{of_width}") == accesses + 2 * (width == 4), str(entry)
        elements = rows * size // (32 * entry["num_warps"])
        first = rows * lanes // (32 * entry["num_warps"]) or 1
        levels = lanes.bit_length() - 1 - (size == 64)
        fmas = elements * (2 + constants["BIAS"]) - first + 2 * levels
        assert entry.count(r"fma\.rn\.f32") >= fmas, str(entry)
        assert entry.count(r"(?:fma|mad)\S*\.f32") == entry.count(r"fma\.rn\.f32"), str(entry)
        assert entry.count(r"\S*\.ftz") == entry.count(r"rcp\S*\.f32") == 0, str(entry)
    assert seen == set(itertools.product((True, False), repeat=2))


def test_layer_norms_gradients_have_cudas_fmas(compiled):
    """dx: one of each element's product in the row's second sum, one in the output. Rows: one of each row in a run of eight, in
    the loop and behind it."""
    seen, overlaps = set(), set()
    for entry in compiled:
        constants, threads, itemsize = entry["constants"], 32 * entry["num_warps"], entry["itemsize"]
        if not entry["kernel"].startswith("layer_norm_") or entry["kernel"] == "layer_norm_forward":
            continue
        seen.add((entry["kernel"], constants.get("CENTRED")))
        least, most, size = 0, 0, constants["SIZE"]
        if entry["kernel"] == "layer_norm_backward":
            rows, lanes = constants["ROWS"], 128 >> (size <= 128) + (size <= 256)
            tile = rows * 4 * lanes * -(-size // (4 * lanes))
            # Behind a row's end some outputs are left out.
            least, most = 2 * rows * size // threads, 2 * tile // threads
            width = min(rows * 4 * lanes // threads * itemsize, 16)
            if constants["STRIDE_UNIT"] * itemsize == 16 and width == 16:
                # A weight once, or twice if it is not kept. Of dy and x two steps are not read again.
                of_row, weight = tile * itemsize // (16 * threads), constants["WEIGHT"]
                of_step = rows * 4 * lanes * itemsize // (16 * threads)
                least_read = (2 + weight) * of_row + 2 * constants["AGAIN"] * (of_row - 2 * of_step)
                assert least_read <= entry.count(r"ld\.global\S*\.v4\.b32") <= least_read + weight * of_row, str(entry)
                assert entry.count(r"st\.global\S*\.v4\.b32") == of_row, str(entry)
        elif entry["kernel"] == "layer_norm_sum_rows":
            taken, columns = constants["TAKEN"], constants["COLUMNS"]
            least = most = 2 * 8 * taken * columns // threads
            if taken < constants["THREADS"] and constants["STRIDE_UNIT"] * itemsize == 16 and entry["arch"] >= 80:
                # dy and x pass through shared memory by 16 bytes.
                of_step = 2 * 8 * taken * columns * itemsize // (16 * threads)
                assert entry.count(r"cp\.async\.cg\.shared\.global") >= of_step * (constants["STAGES"] - 1), str(entry)
        fmas = entry.count(r"fma\.rn\.f32")
        assert least <= fmas <= most and entry.count(r"(?:fma|mad)\S*\.f32") == fmas, str(entry)
        assert not entry.count(r"\S*\.ftz"), str(entry)
        if "OVERLAPS" in constants:
            waits, begins = (entry.count(rf"griddepcontrol\.{each}") for each in ("wait", "launch_dependents"))
            of_dx = entry["kernel"] == "layer_norm_backward"
            assert (waits, begins) == (constants["OVERLAPS"] * of_dx, constants["OVERLAPS"] * (not of_dx)), str(entry)
            overlaps.add((entry["arch"] >= 90, constants["OVERLAPS"]))
    assert overlaps <= {(True, True), (True, False), (False, False)} and (True, True) in overlaps
    of_rows = {
        (kernel, centred) for kernel in ("layer_norm_backward", "layer_norm_sum_rows") for centred in (True, False)
    }
    assert seen == of_rows | {("layer_norm_sum_threads", None)}
    backward = [entry["constants"] for entry in compiled if entry["kernel"] == "layer_norm_backward"]
    assert {(of["AGAIN"], of["KEPT"]) for of in backward} == {(False, False), (False, True), (True, True)}


def test_group_norm_divides_by_three_instructions(compiled):
    """A quotient's product and two FMAs, and that of M2, for whole blocks of steps and for the rest; M2's for a step by division.
    Two for each combination of lanes, which divides its counts; and those of the output."""
    for entry in compiled:
        if entry["kernel"] not in ("group_norm_forward", "group_norm_statistics", "group_norm_output"):
            continue
        constants, output = entry["constants"], 0
        if "WEIGHT" in constants:
            elements = max(constants["CHANNELS"] * constants["POSITIONS"] // entry.threads, 1)
            output = elements * (constants["WEIGHT"] and (constants["BIAS"] or not constants.get("SINGLE")))
            if constants["UNIT"] * entry["itemsize"] == 16 and elements * entry["itemsize"] >= 16:
                assert entry.count(r"st\.global\S*\.v4\.b32") == elements * entry["itemsize"] // 16, str(entry)
        fmas = entry.count(r"fma\.rn\.f32")
        assert entry.count(r"(?:fma|mad)\S*\.f32") == fmas, str(entry)
        if "LANES" not in constants:
            assert fmas == output, str(entry)
            continue
        lanes, levels = constants["LANES"] // entry.threads, 5 if constants["LANES"] == 32 else 9
        of_vectors = 2 * constants["VECTOR"] * lanes
        assert entry.count(r"\{? ?rcp\.approx\.ftz\.f32") == 2 * constants["STEPS"] * constants["VECTOR"], str(entry)
        combined, rest = divmod(fmas - 3 * constants["STEPS"] * of_vectors - of_vectors - output, 2)
        # A thread may combine two or three pairs of lanes of a level, and two pairs of the same counts by one division.
        assert rest == 0 and levels <= combined <= max(2, 1 + lanes // 2) * levels, str(entry)
        divisions = entry.count(r"\{? ?div\.rn\.f32") - of_vectors - 1
        assert max(levels, combined - 1) <= divisions <= combined, str(entry)


def test_group_norms_gradients_have_cudas_fmas(compiled):
    """One of each product with x, in whole blocks of steps and in the rest; two of the weights of a lane's channels, and two of the
    coefficients; one of each element of dx. Two of each sample that a thread adds."""
    seen = set()
    for entry in compiled:
        name, constants, itemsize = entry["kernel"], entry["constants"], entry["itemsize"]
        if (
            name
            not in ("group_norm_backward", "group_norm_channel_sums", "group_norm_input_gradient") + GROUP_NORM_VECTORS
        ):
            continue
        seen.add(name)
        if name in GROUP_NORM_VECTORS:
            of_thread = max(constants["THREADS"] * constants["COLUMNS"] // entry.threads, 1)
            expected = 2 * constants["RUN"] * of_thread * constants["DWEIGHT"]
        else:
            of_thread = max(constants["CHANNELS"] * constants["LANES"] // entry.threads, 1) * constants["VECTOR"]
            elements, passes = constants["STEPS"] * of_thread, 0
            passes += 2 * (name != "group_norm_input_gradient")
            expected = passes * elements
            if name != "group_norm_channel_sums":
                passes += 1
                channels = max(constants["CHANNEL_LANES"] // entry.threads, 1)
                expected += 2 * channels * constants["WEIGHT"] + 2 + elements
                if constants["UNIT"] * itemsize == 16 and of_thread * itemsize == 16:
                    assert entry.count(r"st\.global\S*\.v4\.b32") == constants["STEPS"], str(entry)
            if constants["UNIT"] * itemsize == 16 and of_thread * itemsize == 16:
                assert entry.count(r"ld\.global\S*\.v4\.b32") == 2 * passes * constants["STEPS"], str(entry)
        fmas = entry.count(r"fma\.rn\.f32")
        assert fmas == expected and entry.count(r"(?:fma|mad)\S*\.f32") == fmas, (expected, fmas, str(entry))
        assert not entry.count(r"\S*\.ftz"), str(entry)
    assert len(seen) == 4


def test_cohere_layer_norm_rounds_each_operation(compiled):
    """No FMA, and nothing flushed: eager runs an operation after the other."""
    kernels = [entry for entry in compiled if entry["kernel"].startswith("cohere_layer_norm")]
    assert len(kernels) > 2 * len(ARCHS)
    for entry in kernels:
        assert not entry.count(r"((fma|mad)\S*\.f32|\S*\.ftz)"), str(entry)


def test_cohere_layer_norm_exchanges_totals_alone(compiled):
    """A row's elements stay in the threads that load them: the row itself would pass through shared memory in a hundred parts."""
    one_warp = 0
    for entry in compiled:
        if entry["kernel"] not in ("cohere_layer_norm_forward", "cohere_layer_norm_backward"):
            continue
        sums = 2 if entry["kernel"] == "cohere_layer_norm_forward" else 3
        assert entry.count(r"bar\.sync") <= 4 * sums, str(entry)
        if entry["num_warps"] == 1:
            one_warp += 1
            assert not entry.count(r"((ld|st)\.shared|bar\.sync)"), str(entry)
    assert one_warp >= len(ARCHS)


def test_dyt_moves_16_bytes_at_a_time_and_has_the_fmas_of_tanh(compiled):
    """Of tanh six, of a bf16 number three, and in fp32 that of its gradient; alpha is a single number."""
    # Of a sum that begins within a vector, too.
    assert any(entry["kernel"] == "dyt_backward" and entry["constants"]["HEAD"] for entry in compiled)
    for entry in compiled:
        if not entry["kernel"].startswith("dyt"):
            continue
        constants, name = entry["constants"], entry["kernel"]
        size = {"dyt_forward": "BLOCK", "dyt_backward": "WIDTH", "dyt_sum_chains": "COLUMNS"}[name]
        of_each = constants.get("VECTOR") or 4 * constants.get("THREADS", 0) or constants["ROWS"]
        elements = constants[size] * of_each // entry.threads
        read, written = {"dyt_forward": (3, 1), "dyt_backward": (3, 1), "dyt_sum_chains": (2, 0)}[name]
        written += constants.get("STORED", False)
        # A thread has less than 16 bytes in the sums of few chains alone.
        accesses = elements * entry["itemsize"] // 16
        assert accesses or (name == "dyt_sum_chains" and constants["THREADS"] == 1), str(entry)
        if constants["SIZE"] % 2 == 0:
            assert entry.count(r"ld\.global\S*\.v4\.b32") == read * accesses, str(entry)
            assert entry.count(r"st\.global\S*\.v4\.b32") == written * accesses, str(entry)
        fmas = 3 if entry["dtype"] == "bfloat16" else 6
        fmas += name == "dyt_backward" and entry["itemsize"] == 4
        fmas *= 1 + constants.get("HEAD", False) + constants.get("TAIL", False)
        assert entry.count(r"(?:fma|mad)\S*\.f32") == fmas * elements, str(entry)
        assert_only_trivial_fmas_of_bf16(entry)


def softmaxes(compiled, direction):
    """Every kernel of softmax, how many elements a thread has, and whether rows begin at multiples of 16 bytes."""
    for entry in compiled:
        if entry["kernel"] == f"softmax_{direction}":
            constants = entry["constants"]
            elements = (constants["ROWS"] << constants["LOG2_SIZE"]) // entry.threads
            yield entry, elements, constants["UNIT"] * entry["itemsize"] == 16


def test_softmax_moves_16_bytes_at_a_time(compiled):
    """Or all that it has of a tile, which is less in programs for few rows. A forward kernel stores in two branches."""
    for direction, read, written in (("forward", 1, 2), ("backward", 2, 1)):
        found, widths = list(softmaxes(compiled, direction)), set()
        for entry, elements, aligned in found:
            of_tile = entry["constants"]["ROWS"] * entry["constants"]["TILE"] // entry.threads * entry["itemsize"]
            width = min(of_tile, 16) if aligned else 0
            for of_width, name in {16: r"\.v4\.b32", 8: r"\.v2\.b32", 4: r"\.b32"}.items():
                if width == of_width or of_width == 16:
                    accesses = elements * entry["itemsize"] // width if width == of_width else 0
                    assert entry.count(rf"ld\.global\S*{name}") == read * accesses, str(entry)
                    assert entry.count(rf"st\.global\S*{name}") == written * accesses, str(entry)
            widths.add((entry["arch"], width))
        assert {arch for arch, width in widths if width == 16} == set(ARCHS)
        assert SHARE < 1 or {(90, 8), (90, 4)} <= widths


def test_softmax_has_cudas_fmas_and_no_others(compiled):
    """An exponential's four, that of the gradient, and those of quotients."""
    for entry, elements, _ in softmaxes(compiled, "forward"):
        assert entry.exps == (elements, 0), str(entry)
        of_reciprocals = 2 * reciprocals(entry, elements)
        assert entry.count(r"(?:fma|mad)\S*\.f32") == (4 + sum(QUOTIENT)) * elements + of_reciprocals, str(entry)
    for entry, elements, _ in softmaxes(compiled, "backward"):
        assert entry.count(r"fma\.rn\.f32") == entry.count(r"(?:fma|mad)\S*\.f32") == elements, str(entry)
        assert not entry.count(r"\S*\.ftz"), str(entry)
        assert_only_trivial_fmas_of_bf16(entry)


# FMAs of a quotient by the reciprocal, and of one of a row with small terms.
QUOTIENT = (2, 3)


def reciprocals(entry, most):
    """How many reciprocals of sums a thread computes, an approximation and two FMAs each. There is no other division."""
    found = entry.count(r"rcp\.approx\.ftz\.f32")
    assert 1 <= found <= most, str(entry)
    assert len(re.findall(r"\b(?:div|rcp)\.\S*f32", entry["assembly"])) == found, str(entry)
    return found


def of_small_terms(entry, elements):
    """Elements that a thread adds, and that it divides, where a row has a small term: in loops, which may be unrolled."""
    (computed, added), divided = entry.exps, len(re.findall("0f5F800000", entry["assembly"]))
    of_tile = elements // entry["constants"]["STEPS"]
    wider = entry["dtypes"][1] == "torch.float32" != entry["dtypes"][0]
    of_part = entry["constants"]["THREADS"] // entry.threads if wider else of_tile
    assert of_tile <= added <= elements and of_part <= divided <= elements, str(entry)
    exponentials = {elements + divided}
    if triton.__version__.startswith("3.6."):
        # It computes the terms again for the quotients, and for each part of a vector, where both have other layouts.
        exponentials.add(elements * (1 + entry["constants"]["VECTOR"]) + divided)
    assert computed in exponentials, str(entry)
    of_quotients = QUOTIENT[0] * elements + QUOTIENT[1] * divided + 2 * reciprocals(entry, 2)
    assert entry.count(r"(?:fma|mad)\S*\.f32") == 4 * computed + 5 * added + of_quotients, str(entry)
    return added, divided


def test_softmax_of_blocks(compiled):
    """Rows at multiples of 16 bytes are read and written once, 16 bytes at a time, and again where they have small terms."""
    seen = set()
    for entry in compiled:
        constants, forward = entry["constants"], entry["kernel"] == "softmax_forward_of_block"
        if forward or entry["kernel"] == "softmax_backward_of_block":
            elements = constants["STEPS"] * constants["THREADS"] * constants["VECTOR"] // entry.threads
            sizes = [4 if dtype == "torch.float32" else 2 for dtype in entry["dtypes"]]
            added, divided = of_small_terms(entry, elements) if forward else (0, 0)
            if constants.get("HEAD") and constants["UNIT"] == 1:
                # Single elements.
                assert entry.count(r"ld\.global\S*\.b16") == elements + added + divided, str(entry)
                assert entry.count(r"st\.global\S*\.b32") == elements + divided, str(entry)
                continue
            read = sum((elements + added + divided) * size // 16 for size in sizes[:-1])
            assert constants["UNIT"] * sizes[0] == 16
            assert entry.count(r"ld\.global\S*\.v4\.b32") == entry.count(r"ld\.global") == read, str(entry)
            written = (elements + divided) * sizes[-1] // 16
            if sizes[-1] >= sizes[0]:
                assert entry.count(r"st\.global\S*\.v4\.b32") == entry.count(r"st\.global") == written, str(entry)
            assert forward or entry.count(r"(?:fma|mad)\S*\.f32") == elements, str(entry)
            seen.add((entry["kernel"], entry["arch"]))
    assert {arch for _, arch in seen} == set(ARCHS) and len(seen) == 2 * len(ARCHS)


def test_masked_softmax_reads_rows_once_and_rounds_each_operation(compiled):
    """Scores, mask, and the output's gradient, 16 bytes at a time where a thread has as many of a tile.

    A forward kernel of blocks reads and divides rows with small terms again. FMAs are those of softmax: an exponential's
    four, that of the gradient, and `QUOTIENT`. The sum of scores and mask is rounded by itself; of bf16 the compiler makes
    an FMA with one, or an addition, of 16 bits.
    """
    seen = set()
    for entry in compiled:
        constants, backward = entry["constants"], entry["kernel"].startswith("masked_softmax_backward")
        if not entry["kernel"].startswith("masked_softmax") or entry["kernel"].endswith("long_rows"):
            continue
        if "STEPS" in constants:
            tile, tiles = constants["THREADS"] * constants["VECTOR"], constants["STEPS"]
        else:
            tile, tiles = constants["ROWS"] * constants["TILE"], (1 << constants["LOG2_SIZE"]) // constants["TILE"]
        elements = tiles * tile // entry.threads
        if entry["kernel"] == "masked_softmax_forward_of_block":
            added, divided = of_small_terms(entry, elements)
            again = added + divided
        else:
            # Rows of one of ATen's warps stay in registers, and a forward kernel stores them in two branches.
            again, divided = 0, 0 if backward else elements
            assert entry.exps == (elements, 0), str(entry)
            fmas = (4 + backward + sum(QUOTIENT)) * elements + 2 * reciprocals(entry, elements)
            assert entry.count(r"(?:fma|mad)\S*\.f32") == fmas, str(entry)
        assert_only_trivial_fmas_of_bf16(entry)
        read = (1 + backward + constants["MASKED"]) * (elements + again) * entry["itemsize"]
        bytes_of_thread = min(tile // entry.threads * entry["itemsize"], 16) if constants["UNIT"] > 1 else 0
        if bytes_of_thread == 16:
            assert entry.count(r"ld\.global\S*\.v4\.b32") == read // 16, str(entry)
            written = (elements + divided) * entry["itemsize"]
            assert entry.count(r"st\.global\S*\.v4\.b32") == written // 16, str(entry)
            seen.add((entry["kernel"], entry["arch"]))
        elif bytes_of_thread == 8:
            assert entry.count(r"ld\.global\S*\.v2\.b32") == read // 8, str(entry)
        # Beside its elements there are the statistics alone.
        loads = len(re.findall(r"^\s*(?:@\S+ )?ld\.global", entry["assembly"], re.MULTILINE))
        if bytes_of_thread and "STEPS" in constants:
            assert loads == read // bytes_of_thread + 2 * backward, str(entry)
    assert {arch for _, arch in seen} == set(ARCHS) and len(seen) == 4 * len(ARCHS)


def jsds(compiled, direction):
    """Every kernel of the Jensen-Shannon divergence whose rows begin at multiples of 16 bytes and are read by vectors; the
    elements that a thread has of a step, and of a block of what has no order."""
    for entry in compiled:
        constants = entry["constants"]
        if entry["kernel"] == f"jsd_{direction}" and constants["UNIT"] * entry["itemsize"] == 16:
            if constants["VECTOR"] > 1:
                step = constants["THREADS"] * constants["VECTOR"] // entry.threads
                yield entry, step, constants["BLOCK"] // entry.threads


def test_jsd_moves_16_bytes_at_a_time(compiled):
    """Forward each row is read for its maximum (steps, and the last part), its sum and the terms, backward for the sum and
    the gradient."""
    for direction in ("forward", "backward"):
        found = list(jsds(compiled, direction))
        assert {entry["arch"] for entry, _, _ in found} == set(ARCHS)
        for entry, step, block in found:
            constants = entry["constants"]
            if direction == "forward":
                read, written = 6 * step + 2 * block + 2 * constants["BY_VECTORS"] * step, block
            else:
                tensors = constants["WITH_STUDENT"] + constants["WITH_TEACHER"]
                # The gradient of kl_div's input does not depend on the input.
                of_one = constants["FORM"] == "teacher" and not constants["WITH_TEACHER"]
                read = (2 - of_one + constants["DENSE"]) * step + 2 * tensors * block
                written = tensors * (step + block)
            for access, elements in (("ld", read), ("st", written)):
                accesses = elements * entry["itemsize"] // 16
                assert entry.count(rf"{access}\.global\S*\.v4\.b32") == accesses, str(entry)


def test_jsd_has_cudas_fmas_and_no_others(compiled):
    """Those of exponentials, of the mixture's logarithm, and one of each gradient of logits."""
    for entry, step, block in jsds(compiled, "backward"):
        constants = entry["constants"]
        tensors, mixture = constants["WITH_STUDENT"] + constants["WITH_TEACHER"], constants["FORM"] == "mixture"
        single = 0 if constants["BY_VECTORS"] else constants["THREADS"] // entry.threads
        exponentials = (3 + tensors if mixture else 1) * (step + single) + tensors * block
        assert entry.exps == (exponentials, 0), str(entry)
        fmas = 11 * mixture * (step + single) + tensors * block
        assert entry.count(r"(?:fma|mad)\S*\.f32") == fmas + 4 * exponentials, str(entry)
        assert not entry.count(r"\{? ?(?:div|rcp)\S*\.f32"), str(entry)
        assert_only_trivial_fmas_of_bf16(entry)
    for entry, _, block in jsds(compiled, "forward"):
        exponentials = 3 if entry["constants"]["FORM"] == "mixture" else 1
        computed, added = entry.exps
        assert computed == exponentials * block and added, str(entry)
        assert not entry.count(r"mad\S*\.f32") and not entry.count(r"\{? ?(?:div|rcp)\S*\.f32"), str(entry)


def divergences(compiled, kernel):
    """Every kernel of divergences of one dtype without single elements, and how many elements a thread has."""
    for entry in compiled:
        if entry["kernel"] == f"divergence_{kernel}":
            constants, (first, second) = entry["constants"], entry["dtypes"][kernel == "backward" :][:2]
            elements = constants["WIDTH"] * constants["VECTOR"] if kernel == "blocks" else constants["BLOCK"]
            if first == second and not constants.get("TAIL"):
                yield entry, max(elements // entry.threads, 1)


def test_divergences_move_16_bytes_at_a_time(compiled):
    """Labels apart; a sum's vectors have 16 bytes, as ATen's have."""
    moved = {"blocks": (2, 0), "forward": (2, 1), "backward": (3, 4)}
    for kernel, (read, written) in moved.items():
        wide = set()
        for entry, elements in divergences(compiled, kernel):
            constants = entry["constants"]
            if constants.get("WIDTH", 512) != 512 or constants.get("UNIT", 8) != 8:
                continue
            wide.add(entry["arch"])
            accesses = elements * entry["itemsize"] // 16
            reads = read - constants.get("REDUCED", False)
            writes = min(written, {"target": 4, "log_target": 3, "variation": 2}[constants["FORM"]])
            assert entry.count(r"ld\.global\S*\.v4\.b32") == reads * accesses, str(entry)
            assert entry.count(r"st\.global\S*\.v4\.b32") == writes * accesses, str(entry)
            assert not entry.count(r"(?:ld|st)\.global\S*\.v2"), str(entry)
        assert wide == set(ARCHS)


def test_divergences_have_cudas_fmas_and_no_others(compiled):
    """Four of an exponential, eleven of a logarithm, of which one has a part in each; sums and products stay apart."""
    for kernel in ("blocks", "forward"):
        for entry, elements in divergences(compiled, kernel):
            form = entry["constants"]["FORM"]
            assert entry.exps == (elements if form == "log_target" else 0, 0), str(entry)
            assert (
                entry.count(r"(?:fma|mad)\S*\.f32") == {"log_target": 4, "target": 11, "variation": 0}[form] * elements
            )
            assert_only_trivial_fmas_of_bf16(entry)


def test_ptxas_contracts_nothing(compiled):
    """It may make an FMA of a product and a sum unless both name their rounding."""
    for entry in compiled:
        assert entry.count(r"(mul|add)\.rn\.(f32|bf16)|fma\.rn\.bf16"), str(entry)
        assert not entry.count(r"(mul|add|sub)\.(sat\.|ftz\.)*(f32|bf16|f16)"), str(entry)


def test_nothing_else_is_approximate_or_flushed(compiled):
    """The text of every kernel, whatever its family."""
    found = {}
    for entry in compiled:
        approximate = set(re.findall(r"(?:^|\s)(\w+\S*\.(?:approx|ftz|full)\b\S*?)[;\s]", entry["assembly"]))
        assert approximate <= APPROXIMATE.get(entry["kernel"], set()), f"{entry}: {approximate}"
        found.setdefault(entry["kernel"], set()).update(approximate)
        # Roots, logarithms and so on have no instruction of fp32 that is rounded correctly but these three.
        rounded = set(re.findall(r"\b(?:div|rcp|sqrt|rsqrt|lg2|ex2|sin|cos|tanh)\.\S*f32\b", entry["assembly"]))
        assert rounded - approximate <= {"div.rn.f32", "rcp.rn.f32"}, f"{entry}: {rounded}"
    assert {kernel: names for kernel, names in found.items() if names} == APPROXIMATE, (
        "the table names no more than needed"
    )


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


@pytest.mark.skipif(not ALL, reason="`make test-machines` compiles for sm_100")
def test_gradients_of_sm_100_are_computed_in_pairs(rms_norm):
    packed = [entry for entry in rms_norm if entry["constants"].get("PACKED")]
    assert {entry["arch"] for entry in packed} == {100} and {entry["dtype"] for entry in packed} == {
        "bfloat16",
        "float32",
    }
    for entry in packed:
        # Of each element: with rstd twice, with the weight's product, by two, and with the gradient of its square.
        elements = entry["constants"]["ROWS"] * entry.row // entry.threads
        assert len(re.findall(r"\bmul\.rn\.f32x2", entry["assembly"])) >= 5 * elements // 2, str(entry)


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
            approximated = (name, entry["dtype"]) == ("silu", "bfloat16")
            divisions = elements if (name, direction) == ("silu", "forward") and not approximated else 0
            assert entry.count(r"div\.rn\.f32") == entry.count(r"div\S*\.f32") == divisions, str(entry)
            # Of the sigmoid; CUDA's tanh is made of an approximate one, and SiLU of bf16.
            of_silu = (name, direction) == ("silu", "backward") and not approximated
            correct = elements if name == "quick_gelu" or of_silu else 0
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
            assert entry.count(r"fma\.rn(?:\.sat)?\.f32") == expected * elements, str(entry)
            assert not entry.count(r"mad\S*\.f32"), str(entry)


def test_gated_activations_have_the_fmas_of_their_activation(compiled):
    gated = [entry for entry in compiled if entry["kernel"].startswith("gated_activation")]
    assert {entry["constants"]["ACTIVATION"] for entry in gated} < set(FMAS)
    for entry in gated:
        constants, elements = entry["constants"], entry["constants"]["BLOCK"] // entry.threads
        name, dtype, is_backward = constants["ACTIVATION"], entry["dtype"], entry["kernel"].endswith("backward")
        forward, more = (each[dtype] if isinstance(each, dict) else each for each in FMAS[name])
        expected = forward + more * is_backward
        assert entry.count(r"fma\.rn(?:\.sat)?\.f32") == expected * elements, str(entry)
        assert not entry.count(r"mad\S*\.f32"), str(entry)
        assert_only_trivial_fmas_of_bf16(entry)


def test_activations_flush_only_where_cuda_does(compiled):
    """Its approximations of 2**x and 1 / x: the instructions have no other form in `expf`, `tanhf` and `erff`."""
    for direction in ("forward", "backward"):
        for entry, _ in activations(compiled, direction):
            found = set(re.findall(r"\S*\.ftz\S*", entry["assembly"]))
            assert found <= {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"}, f"{entry}: {found}"


def test_registers_hold_a_row(compiled):
    more = []
    for entry in compiled:
        size = entry["constants"].get("HIDDEN_SIZE", entry["constants"].get("VOCAB"))
        known = (SPILLED if entry["arch"] == 90 else SPILLED_ELSEWHERE).get((entry["kernel"], entry["dtype"], size), 0)
        if entry["spilled"] is None or entry["spilled"] > known:
            more.append(f"{entry} spills {entry['spilled']} bytes instead of {known}")
    assert not more, "\n".join(more)
