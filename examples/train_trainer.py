#!/usr/bin/env python3
"""Train a language model with transformers' Trainer, without and with lossless kernels, and compare the loss curves.

Two runs start from the same weights and see the same batches of random tokens. `kernel.apply(model)` before the second one
replaces the layers and the loss function. Losses and trained weights are compared bit for bit.

    python examples/train_trainer.py
    python examples/train_trainer.py --model meta-llama/Llama-3.2-1B --steps 20 --length 512

On a GPU the second run uses the kernels; docs/performance.md has measured times and memory of training steps. On a CPU the
original layers run both times; with TRITON_INTERPRET=1 LOSSLESS_PROOF=off the kernels run in Triton's interpreter, slowly, and
their losses are close to the CPU's. On an NVIDIA H200 losses and weights had the same bits (2026-11-28, torch 2.11.0,
transformers 5.22.2, kernels 0.17.2).

Attention is transformers' "eager": the backward pass of fused attention adds in an order that changes from run to run, unless
`torch.use_deterministic_algorithms(True)` is set.

Exit status: 0 if losses and weights are equal (close in the interpreter); 1 if not; 2 if it could not be tried.
"""

import sys
import tempfile
import time
from pathlib import Path

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import common


def random_tokens(options, vocab_size):
    """The dataset: rows of random tokens, whose labels are the tokens themselves."""
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    rows = torch.randint(vocab_size, (options.steps * options.batch, options.length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(options, model, folder):
    """Losses of all steps and the trained weights."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
        use_cpu=options.device.type == "cpu",
        disable_tqdm=not sys.stderr.isatty(),
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=random_tokens(options, model.config.vocab_size))
    # The comparison prints the losses.
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], common.weights(model)


def main():
    parser = common.parser_of(__doc__)
    work = parser.add_argument_group("work")
    work.add_argument("--steps", type=common.positive, default=10, metavar="N", help="(default: 10)")
    work.add_argument("--batch", type=common.positive, default=4, metavar="N", help="sequences a step (default: 4)")
    work.add_argument("--length", type=common.positive, default=64, metavar="N", help="tokens of each (default: 64)")
    options = parser.parse_args()
    with common.one_line_errors("train_trainer"), tempfile.TemporaryDirectory() as folder:
        common.settle(options)
        common.one_gpu(options)
        # In your own program: kernel = kernels.get_kernel("ORG/NAME", version=1, trust_remote_code=["ORG/NAME"])
        kernel = common.load_kernel(options)
        print(common.describe(options))

        model = common.make_model(options).train()
        start = time.perf_counter()
        original = train(options, model, folder)
        print(f"original layers: {time.perf_counter() - start:.1f} s")

        model = common.make_model(options).train()
        kernel.apply(model)  # mode TRAINING, because model.training; it attaches the loss, too
        start = time.perf_counter()
        replaced = train(options, model, folder)
        count = common.count_kernels(kernel, model, options)
        print(
            f"with kernels:    {time.perf_counter() - start:.1f} s with the first call's compilation, {count} layers run kernels"
        )
        kernel.restore(model)  # the original layers are back, with the trained weights
        return common.compare_training(options, original, replaced)


if __name__ == "__main__":
    sys.exit(main())
