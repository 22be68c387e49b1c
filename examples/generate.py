#!/usr/bin/env python3
"""Chat with a language model, with the original layers and with lossless kernels, and compare every answer bit for bit.

Without --model a tiny Llama with random weights answers noise, so that the program runs anywhere. Each prompt is answered
twice by greedy decoding: by the original layers and by the kernels. The program prints the answer, tokens per second of
both, and how many tokens and how many steps' logits are equal bit for bit.

    python examples/generate.py --prompt "Hello"
    python examples/generate.py --model meta-llama/Llama-3.2-1B-Instruct --static-cache
    python examples/generate.py --model meta-llama/Llama-3.2-1B-Instruct --graph

On a GPU the kernels replace whole decoder layers; docs/inference.md has measured times. On a CPU the original layers run both times;
with TRITON_INTERPRET=1 LOSSLESS_PROOF=off the kernels run in Triton's interpreter, slowly, and their logits are close to the
CPU's. On an NVIDIA H200 tokens and logits were equal (2026-11-28, torch 2.11.0, transformers 5.22.2, kernels 0.17.2).

Exit status: 0 if all tokens and logits are equal (close in the interpreter); 1 if not; 2 if it could not be tried.
"""

import contextlib
import sys
import time
from pathlib import Path

# PYTHONSAFEPATH leaves out the folder of the script.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import common


class Progress:
    """A streamer for `generate`: counts tokens, and shows count and rate on a terminal."""

    def __init__(self, label, total):
        self.label, self.total, self.tokens, self.start = label, total, -1, None

    def put(self, tokens):
        # The prompt comes first.
        self.tokens += 1
        self.start = self.start or time.perf_counter()
        if sys.stderr.isatty():
            rate = self.tokens / (time.perf_counter() - self.start)
            print(f"\r{self.label}: {self.tokens}/{self.total} tokens, {rate:.0f} tokens/s", end="", file=sys.stderr)

    def end(self):
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)


def answer(model, inputs, options, label):
    """The new tokens, the logits of every step, and tokens per second, the prompt's time included."""
    settings = {
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "cache_implementation": "static" if options.static_cache or options.graph else None,
        # transformers compiles the model for a static cache, and Inductor's arithmetic is not eager's.
        "disable_compile": True,
    }
    # The first call of each shape compiles and verifies kernels.
    model.generate(**inputs, **settings, max_new_tokens=2)
    progress = Progress(label, options.new_tokens)
    start = time.perf_counter()
    out = model.generate(**inputs, **settings, max_new_tokens=options.new_tokens, streamer=progress)
    tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens, out.logits, len(tokens) / (time.perf_counter() - start)


def encode(tokenizer, conversation, device):
    """The prompt's tokens: by the model's chat template if it has one."""
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer("\n".join(each["content"] for each in conversation), return_tensors="pt")
    return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


def take_turn(model, kernel, tokenizer, conversation, options):
    """Answers a conversation twice and compares. Returns the answer, and whether it is as promised."""
    inputs = encode(tokenizer, conversation, options.device)
    expected, expected_logits, rate = answer(model, inputs, options, "original layers")
    kernel.apply(model)
    with kernel.decoding_graph(model) if options.graph else contextlib.nullcontext():
        found, logits, kernel_rate = answer(model, inputs, options, "with kernels")
    count = common.count_kernels(kernel, model, options)
    if options.report:
        kernel.replacement_report(model)
    kernel.restore(model)
    text = tokenizer.decode(found, skip_special_tokens=True)
    print(f"answer: {text if options.model else ascii(text)}")
    pairs = list(zip(logits, expected_logits))
    equal = sum(common.same_bits(*pair) for pair in pairs)
    print(f"original layers: {len(expected)} tokens, {rate:.1f} tokens/s")
    print(f"with kernels:    {len(found)} tokens, {kernel_rate:.1f} tokens/s ({count} layers run kernels)")
    print(f"tokens equal: {'yes' if found == expected else 'no'}; logits bit-equal: {equal} of {len(pairs)} steps")
    if common.interpreted(options):
        furthest = (logits[0].float() - expected_logits[0].float()).abs().max().item()
        print(f"largest difference of the first logits: {furthest:.2g}")
        return text, furthest < 1e-2
    return text, found == expected and equal == len(pairs)


def main():
    parser = common.parser_of(__doc__)
    work = parser.add_argument_group("work")
    work.add_argument("--prompt", metavar="TEXT", help="answer this and end (default: chat until an empty line)")
    work.add_argument("--new-tokens", type=common.positive, default=32, metavar="N", help="at most (default: 32)")
    work.add_argument("--static-cache", action="store_true", help="allocate keys and values once, at full length")
    work.add_argument(
        "--graph", action="store_true", help="decode in a CUDA graph with kernels, and with a static cache in both runs"
    )
    work.add_argument("--report", action="store_true", help="print which layers ran kernels, and why others did not")
    options = parser.parse_args()
    with common.one_line_errors("generate"):
        common.settle(options)
        # In your own program: kernel = kernels.get_kernel("ORG/NAME", version=1, trust_remote_code=["ORG/NAME"])
        kernel = common.load_kernel(options)
        model, tokenizer = common.make_model(options, attention="sdpa").eval(), common.make_tokenizer(options)
        print(common.describe(options))
        as_promised, conversation = True, []
        while True:
            try:
                prompt = options.prompt or input("you: ")
            except EOFError:
                print()
                break
            if not prompt:
                break
            conversation.append({"role": "user", "content": prompt})
            text, equal = take_turn(model, kernel, tokenizer, conversation, options)
            conversation.append({"role": "assistant", "content": text})
            as_promised &= equal
            if options.prompt:
                break
    return 0 if as_promised else 1


if __name__ == "__main__":
    sys.exit(main())
