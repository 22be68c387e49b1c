"""Which of ATen's softmax kernels a row's length and dtypes lead to: on both sides of every boundary."""

import aten_model
import pytest
import torch
import triton
import triton.language as tl
from bits import assert_bits_equal, bits_equal

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
WARP, REGISTERS, SHARED, LOOP = "warp", "registers", "shared", "loop"


@pytest.mark.parametrize(
    "size, dtype, fp32_output, aligned, kind, threads, vector",
    [
        (2, FP32, False, True, WARP, 2, 1),
        (3, FP32, False, True, WARP, 4, 1),
        (31, BF16, False, True, WARP, 32, 1),
        (33, FP32, False, True, WARP, 32, 1),
        (2048, FP32, False, True, WARP, 32, 1),
        (2049, FP32, False, True, REGISTERS, 1024, 1),
        (9216, FP32, False, True, REGISTERS, 1024, 1),
        (9217, FP32, False, True, LOOP, 1024, 4),
        (9220, FP32, False, True, SHARED, 1024, 4),
        (9220, FP32, False, False, LOOP, 1024, 4),
        (12252, FP32, False, True, SHARED, 1024, 4),
        (12256, FP32, False, True, LOOP, 1024, 4),
        (128256, FP32, False, True, LOOP, 1024, 4),
        (2048, FP16, False, True, WARP, 32, 1),
        (9216, BF16, False, True, REGISTERS, 1024, 1),
        (9220, BF16, False, True, LOOP, 1024, 8),
        (9224, BF16, False, True, SHARED, 1024, 8),
        (24504, FP16, False, True, SHARED, 1024, 8),
        (24512, FP16, False, True, LOOP, 1024, 8),
        # One kernel widens fp16; bf16 is converted before.
        (1024, FP16, True, True, WARP, 32, 1),
        (1025, FP16, True, True, LOOP, 1024, 8),
        (1032, FP16, True, True, SHARED, 1024, 8),
        (24512, FP16, True, True, LOOP, 1024, 8),
        (2048, BF16, True, True, WARP, 32, 1),
        (9216, BF16, True, True, REGISTERS, 1024, 1),
        (12252, BF16, True, True, SHARED, 1024, 4),
        (12256, BF16, True, True, LOOP, 1024, 4),
    ],
)
def test_forward(module, size, dtype, fp32_output, aligned, kind, threads, vector):
    softmax = module("softmax")
    assert softmax.softmax_forward(size, dtype, fp32_output, aligned) == softmax.Softmax(kind, threads, vector)
    # From torch 2.14 on a warp takes fp16 rows with fp32 results up to 2048 elements.
    order = softmax.softmax_forward(size, dtype, fp32_output, aligned, long_warps=True)
    is_warp = fp32_output and dtype == FP16 and size <= 2048
    assert order == softmax.Softmax(*((WARP, 32, 1) if is_warp else (kind, threads, vector)))


@pytest.mark.parametrize(
    "size, dtype, aligned, kind, threads, vector",
    [
        (1000, FP32, True, WARP, 32, 1),
        (1024, BF16, True, WARP, 32, 1),
        (1025, FP32, True, LOOP, 128, 4),
        (1028, FP32, True, SHARED, 128, 4),
        (1028, FP32, False, LOOP, 128, 4),
        (1031, FP32, True, LOOP, 128, 4),
        (1032, FP32, True, SHARED, 256, 4),
        (2052, FP32, True, SHARED, 256, 4),
        (2056, FP32, True, SHARED, 512, 4),
        (12268, FP32, True, SHARED, 512, 4),
        (12272, FP32, True, LOOP, 512, 4),
        (128256, FP32, True, LOOP, 512, 4),
        (1032, BF16, True, SHARED, 64, 8),
        (24536, BF16, True, SHARED, 512, 8),
        (24544, BF16, True, LOOP, 512, 8),
    ],
)
def test_backward(module, size, dtype, aligned, kind, threads, vector):
    softmax = module("softmax")
    expected = softmax.Softmax(kind, threads, vector, in_sequence=kind == LOOP)
    assert softmax.softmax_backward(size, dtype, aligned) == expected


@pytest.mark.parametrize("misaligned", [-1, 0, 1, 2, 3])
def test_the_model_takes_every_element_once(misaligned):
    for size in (2, 31, 33, 1000, 2048, 2049, 9216, 9217, 9220, 12252, 12256, 12259, 32000, 50257):
        taken = torch.cat(aten_model.softmax_steps(size, misaligned))
        assert torch.equal(taken[taken >= 0].sort().values, torch.arange(size))


@triton.jit
def sum_of_block(x_ptr, out_ptr, WARPS: tl.constexpr):
    lanes = tl.load(x_ptr + tl.arange(0, WARPS * 32))
    tl.store(out_ptr + tl.arange(0, 1), blocks_in_sequence(lanes, WARPS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs it")
@pytest.mark.parametrize("warps", [1, 4, 16])
def test_a_block_is_added_up_in_sequence(module, seed, warps):
    """First the lanes of each warp, then the warps: as the loop kernel for gradients does."""
    global blocks_in_sequence  # Triton finds functions among a kernel's globals.
    blocks_in_sequence = module("kernels_src.summation").blocks_in_sequence
    rows, generator = 8, torch.Generator().manual_seed(seed)
    x, found = torch.randn(rows, warps * 32, generator=generator), torch.empty(rows)
    for row in range(rows):
        sum_of_block[(1,)](x[row], found[row:], warps)
    by_warp = torch.zeros(rows, warps)
    for lane in range(32):
        by_warp = by_warp + x.view(rows, warps, 32)[:, :, lane]
    expected = torch.zeros(rows)
    for warp in range(warps):
        expected = expected + by_warp[:, warp]
    assert_bits_equal(found, expected)
    halved = aten_model._halving_sum(aten_model._halving_sum(x.view(rows, warps, 32), dim=2), dim=1)
    assert not bits_equal(found, halved)
