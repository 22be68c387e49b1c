"""Training on two GPUs, data parallel: the same bits with the kernels as without."""

import copy
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from bits import assert_bits_equal
from kernels import get_local_kernel
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import (
    DEVICE,
    assert_same,
    forward_and_backward,
    kernelized,
    kernels_at_work,
    llama,
    random_batches,
    train,
)
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytestmark = [pytest.mark.gpu2, pytest.mark.filterwarnings("error:lossless-kernels:RuntimeWarning")]

RANKS = 2
STEPS = 20
# A collective that one rank never enters waits for ever.
TIMEOUT_SECONDS = 120


def data_parallel(model, rank):
    return DistributedDataParallel(model, device_ids=[rank])


def fully_sharded(model, rank, **options):
    # A layer sharded on its own becomes an instance of a class made at run time, and must keep its kernel.
    for module in (*model.model.layers, model.model.norm):
        fully_shard(module, **options)
    return fully_shard(model, **options)


def fully_sharded_mixed_precision(model, rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_sharded(model, rank, mp_policy=policy)


def compare_training(rank, build, folder, seed, wrap, dtype):
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    kernel = get_local_kernel(build)
    device = f"{DEVICE}:{rank}"
    batches = random_batches(seed + rank, STEPS, batch=4, device=device)

    def trained(replaced):
        model = llama(seed, dtype, device)
        if not replaced:
            return train(wrap(model, rank), batches)
        model = wrap(kernelized(model, kernel), rank)
        with kernels_at_work(model, kernel):
            return train(model, batches)

    eager = trained(replaced=False)
    assert_same(trained(replaced=False), eager, f"rank {rank}, eager once more")
    assert_same(trained(replaced=True), eager, f"rank {rank}, kernelized")
    dist.destroy_process_group()


def run_on_all_ranks(function, *arguments):
    """function(rank, *arguments) in a process for each rank; what fails or hangs there fails here."""
    processes = torch.multiprocessing.spawn(function, arguments, nprocs=RANKS, join=False)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while not processes.join(timeout=1):
            assert time.monotonic() < deadline, f"not done after {TIMEOUT_SECONDS} seconds"
    finally:
        for process in processes.processes:
            process.kill()


@pytest.mark.parametrize(
    "wrap, dtype",
    [
        (data_parallel, torch.bfloat16),
        (data_parallel, torch.float32),
        (fully_sharded, torch.bfloat16),
        (fully_sharded, torch.float32),
        (fully_sharded_mixed_precision, torch.float32),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_training_is_the_same(build, tmp_path, seed, wrap, dtype):
    run_on_all_ranks(compare_training, build, tmp_path, seed, wrap, dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("current", range(RANKS))
def test_either_gpu_whichever_is_current(kernel, seed, current, dtype):
    torch.manual_seed(seed)
    norm = LlamaRMSNorm(1024)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    layers = torch.nn.Sequential(norm, SiLUActivation()).to(dtype)
    originals = [copy.deepcopy(layers).to(f"{DEVICE}:{rank}") for rank in range(RANKS)]
    replaced = [kernelized(original, kernel) for original in originals]
    with torch.cuda.device(current):
        for turn in range(3 * RANKS):
            rank = (current + 1 + turn) % RANKS
            x, dy = torch.randn(2, 4, 118, 1024).to(f"{DEVICE}:{rank}", dtype)
            with kernels_at_work(replaced[rank], kernel):
                actual = forward_and_backward(replaced[rank], x, dy)
            assert_same(actual, forward_and_backward(originals[rank], x, dy), f"turn {turn}, rank {rank}")
            with torch.no_grad():
                assert_bits_equal(replaced[rank](x), originals[rank](x), f"turn {turn}, rank {rank}, inference")
            assert torch.cuda.current_device() == current
