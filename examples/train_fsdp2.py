#!/usr/bin/env python3
"""Train a language model sharded over processes (FSDP2), without and with lossless kernels, and compare the losses.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py

The order: `kernel.apply(model)` first, then `fully_shard`. FSDP2 hooks the modules that it shards and keeps their forwards, so
that the kernels run on the gathered weights. Both runs start from the same weights and see the same random tokens,
other ones in each process. Losses and this process's shards of the trained weights are compared bit for bit.

On GPUs (one for each process, NCCL) the second run uses the kernels. On a CPU (gloo) the original layers run both times; with
TRITON_INTERPRET=1 LOSSLESS_PROOF=off the kernels run in Triton's interpreter, slowly, and their losses are close to the CPU's.
On two NVIDIA H200 losses and weights had the same bits (2026-11-28, torch 2.11.0, transformers 5.22.2, kernels 0.17.2).

Exit status: 0 if losses and weights are equal in every process (close in the interpreter); 1 if not; 2 if it could not
be tried.
"""

import os
import sys
from pathlib import Path

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import common

START = "torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py"


def start_processes(options):
    """Joins the processes that torchrun has started. Returns this one's rank."""
    import torch
    import torch.distributed as dist

    if "RANK" not in os.environ:
        raise common.DemoError(f"expected to be started by torchrun, one process for each GPU: {START}")
    local_rank = int(os.environ["LOCAL_RANK"])
    if options.device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise common.DemoError(
                f"--nproc-per-node: expected at most {torch.cuda.device_count()}, the number of GPUs, or --device cpu"
            )
        options.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(options.device)
    dist.init_process_group("nccl" if options.device.type == "cuda" else "gloo")
    return dist.get_rank()


def shard(model):
    """Every decoder layer is a unit that is gathered when it runs; the rest is one more."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(options, model, rank):
    """Losses of all steps, the mean over the processes, and this process's shards of the trained weights."""
    import torch
    import torch.distributed as dist

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(options.seed + rank)
    size, losses = (options.steps, options.batch, options.length), []
    for tokens in torch.randint(model.config.vocab_size, size, generator=generator).to(options.device):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0 and sys.stderr.isatty():
            print(f"\r\033[Kstep {len(losses)}/{options.steps}: loss {losses[-1]:.4f}", end="", file=sys.stderr)
    if rank == 0 and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return losses, {name: each.to_local() for name, each in common.weights(model).items()}


def main():
    parser = common.parser_of(__doc__)
    work = parser.add_argument_group("work")
    work.add_argument("--steps", type=common.positive, default=10, metavar="N", help="(default: 10)")
    work.add_argument("--batch", type=common.positive, default=2, metavar="N", help="sequences a process (default: 2)")
    work.add_argument("--length", type=common.positive, default=64, metavar="N", help="tokens of each (default: 64)")
    options = parser.parse_args()
    with common.one_line_errors("train_fsdp2"):
        import torch
        import torch.distributed as dist

        common.settle(options)
        rank = start_processes(options)
        # In your own program: kernel = kernels.get_kernel("ORG/NAME", version=1, trust_remote_code=["ORG/NAME"])
        kernel = common.load_kernel(options)

        model = shard(common.make_model(options).train())
        original = train(options, model, rank)

        model = common.make_model(options).train()
        kernel.apply(model)  # before fully_shard
        replaced = train(options, shard(model), rank)
        count = common.count_kernels(kernel, model, options)

        if rank:
            sys.stdout = open(os.devnull, "w")  # the first process prints
        print(f"{dist.get_world_size()} processes. {common.describe(options)} {count} layers run kernels.")
        failed = torch.tensor(common.compare_training(options, original, replaced), device=options.device)
        dist.all_reduce(failed)
        print(f"Equal as promised in every process: {'no' if failed else 'yes'}")
        dist.destroy_process_group()
        return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
