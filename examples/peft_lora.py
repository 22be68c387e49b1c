#!/usr/bin/env python3
"""Train a LoRA adapter with PEFT, without and with lossless kernels, and compare losses and adapters.

    pip install -r examples/requirements-peft.txt
    python examples/peft_lora.py

The order: `get_peft_model` first, then `kernel.apply(model)`. PEFT wraps linear layers, which stay modules that the kernels call;
norms, activations, rotary embeddings and the loss around them are replaced. Losses, the adapter's weights and the logits
after `restore` are compared bit for bit.

On a GPU the second run uses the kernels; docs/performance.md has measured times and memory of training steps. On a CPU the
original layers run both times; with TRITON_INTERPRET=1 LOSSLESS_PROOF=off the kernels run in Triton's interpreter, slowly, and
their losses are close to the CPU's.
Run on a CPU with PEFT 0.21.2, transformers 5.22.2 and torch 2.13.0, and on an NVIDIA H200 with torch 2.11.0 (2026-11-28).

Exit status: 0 if losses and weights are equal (close in the interpreter); 1 if not; 2 if it could not be tried.
"""

import sys
from pathlib import Path

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import common

REQUIREMENTS = "examples/requirements-peft.txt"


def with_adapter(options):
    """The model, and LoRA beside its projections."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = common.make_model(options)
    # The adapter's first weights are random.
    torch.manual_seed(options.seed)
    config = LoraConfig(r=options.rank, target_modules=options.target_modules, task_type="CAUSAL_LM")
    return get_peft_model(model, config).train()


def random_tokens(options, model):
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    size = (options.steps, options.batch, options.length)
    return torch.randint(model.config.vocab_size, size, generator=generator).to(options.device)


def train(options, model, label):
    """Losses of all steps and the adapter's weights."""
    import torch

    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for tokens in random_tokens(options, model):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if sys.stderr.isatty():
            print(f"\r\033[K{label}: step {len(losses)}/{options.steps}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return losses, common.weights(model)


def logits(options, model):
    import torch

    with torch.no_grad():
        return model.eval()(input_ids=random_tokens(options, model)[0], use_cache=False).logits


def main():
    parser = common.parser_of(__doc__)
    work = parser.add_argument_group("work")
    work.add_argument("--steps", type=common.positive, default=10, metavar="N", help="(default: 10)")
    work.add_argument("--batch", type=common.positive, default=4, metavar="N", help="sequences a step (default: 4)")
    work.add_argument("--length", type=common.positive, default=64, metavar="N", help="tokens of each (default: 64)")
    work.add_argument("--rank", type=common.positive, default=8, metavar="N", help="of the adapter (default: 8)")
    work.add_argument("--target-modules", nargs="+", default=["q_proj", "v_proj", "down_proj"], metavar="NAME")
    options = parser.parse_args()
    with common.one_line_errors("peft_lora", REQUIREMENTS):
        import peft  # noqa: F401

        common.settle(options)
        # In your own program: kernel = kernels.get_kernel("ORG/NAME", version=1, trust_remote_code=["ORG/NAME"])
        kernel = common.load_kernel(options)
        print(common.describe(options))

        model = with_adapter(options)
        original = train(options, model, "original layers")
        expected = logits(options, model)

        model = with_adapter(options)
        kernel.apply(model)  # after get_peft_model
        replaced = train(options, model, "with kernels")
        print(f"{common.count_kernels(kernel, model, options)} layers run kernels")
        kernel.restore(model)  # the original layers are back, with the trained adapter

        status = common.compare_training(options, original, replaced)
        equal = common.same_bits(logits(options, model), expected)
        print(f"Logits after restore bit-equal: {'yes' if equal else 'no'}")
        return status if equal or common.interpreted(options) else 1


if __name__ == "__main__":
    sys.exit(main())
