#!/usr/bin/env python3
"""Fine-tune a language model with TRL's SFTTrainer, without and with lossless kernels, and compare the loss curves.

    pip install -r examples/requirements-trl.txt
    python examples/train_trl.py

Two runs start from the same weights and see the same texts. `kernel.apply(model)` before the second one replaces the layers.
Losses and trained weights are compared bit for bit. SFTTrainer computes the loss itself, from the last hidden states, in
both runs: the loss function that `apply` attaches is not called.

On a GPU the second run uses the kernels; docs/performance.md has measured times and memory of training steps. On a CPU the
original layers run both times; with TRITON_INTERPRET=1 LOSSLESS_PROOF=off the kernels run in Triton's interpreter, slowly, and
their losses are close to the CPU's.
Run with TRL 1.16.0, datasets 5.2.0 and transformers 5.22.2: on a CPU with torch 2.13.0, and on an NVIDIA H200 with torch
2.11.0 and 2.15.0 (2026-11-29).

Exit status: 0 if losses and weights are equal (close in the interpreter); 1 if not; 2 if it could not be tried.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import common

REQUIREMENTS = "examples/requirements-trl.txt"


def additions(options):
    """The dataset: sums of two numbers, written out."""
    from datasets import Dataset

    chooser = random.Random(options.seed)
    pairs = [(chooser.randrange(1000), chooser.randrange(1000)) for _ in range(options.steps * options.batch)]
    return Dataset.from_list([{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in pairs])


def train(options, model, folder):
    """Losses of all steps and the trained weights."""
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
        bf16=False,
        gradient_checkpointing=options.checkpointing,
        use_cpu=options.device.type == "cpu",
        disable_tqdm=not sys.stderr.isatty(),
    )
    tokenizer = common.make_tokenizer(options)
    trainer = SFTTrainer(model=model, args=config, train_dataset=additions(options), processing_class=tokenizer)
    # The comparison prints the losses.
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each], common.weights(model)


def main():
    parser = common.parser_of(__doc__)
    work = parser.add_argument_group("work")
    work.add_argument("--steps", type=common.positive, default=10, metavar="N", help="(default: 10)")
    work.add_argument("--batch", type=common.positive, default=4, metavar="N", help="texts a step (default: 4)")
    work.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    options = parser.parse_args()
    with common.one_line_errors("train_trl", REQUIREMENTS), tempfile.TemporaryDirectory() as folder:
        import trl  # noqa: F401

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
        kernel.apply(model)
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
