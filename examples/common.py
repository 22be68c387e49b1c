"""What the examples share: their options, loading the kernel, a tiny Llama, and comparisons of bits."""

import argparse
import contextlib
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kernelize_llama import DTYPES, DemoError, find_device, positive, seed
from kernelize_llama import load_kernel as load_local_kernel
from startup import allow_no_telemetry

__all__ = ["DemoError", "positive"]


def parser_of(description):
    """A parser with the options that all examples take."""
    allow_no_telemetry()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="ID", help="a causal language model of the Hub, or a folder (default: tiny)")
    model.add_argument("--dtype", choices=DTYPES, help="of the weights (default: bf16 on a GPU, fp32 on a CPU)")
    model.add_argument("--device", choices=("cuda", "cpu"), help="(default: cuda if there is one)")
    model.add_argument("--seed", type=seed, default=1, metavar="N", help="for random weights and data (default: 1)")
    kernel = parser.add_argument_group("kernel")
    kernel.add_argument("--hub", metavar="ORG/NAME", help="take the kernel from this repository of the Hub")
    kernel.add_argument("--version", type=positive, default=1, metavar="N", help="of --hub (default: 1)")
    kernel.add_argument("--build", type=Path, help="without --hub: folder with the built kernel (default: build/)")
    return parser


def load_kernel(options):
    """`get_kernel(repo_id, version=1)` with --hub, else `get_local_kernel(Path("build"))`, with errors of one line."""
    if not options.hub:
        return load_local_kernel(options.build)
    from kernels import get_kernel

    try:
        return get_kernel(options.hub, version=options.version, trust_remote_code=[options.hub])
    except Exception as error:
        # The Hub, the cache, the HTTP client and the trust in publishers each have exceptions of their own.
        raise DemoError(f"--hub {options.hub}: {' '.join(str(error).split())}") from error


def settle(options):
    """Fills in the defaults that depend on the machine."""
    import torch

    options.device = find_device(options.device)
    options.dtype = getattr(torch, DTYPES[options.dtype or ("bf16" if options.device.type == "cuda" else "fp32")])


def one_gpu(options):
    """Raises DemoError where transformers' Trainer would take several GPUs in one process."""
    import torch

    if options.device.type == "cuda" and torch.cuda.device_count() > 1 and "WORLD_SIZE" not in os.environ:
        raise DemoError(
            f"found {torch.cuda.device_count()} GPUs, which Trainer drives by torch.nn.DataParallel from one process, and whose "
            "replicas call the kernels of the first GPU: set CUDA_VISIBLE_DEVICES=0, or start a process for each GPU (torchrun)"
        )


def interpreted(options):
    """Whether the kernels run on the CPU, in Triton's interpreter: in a GPU's reduction order, which is not the CPU's."""
    in_interpreter = options.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return in_interpreter and os.environ.get("LOSSLESS_PROOF") == "off"


def describe(options):
    """One line about the machine, and which layers run there."""
    import torch

    if options.device.type == "cuda":
        return f"{torch.cuda.get_device_name()}: kernels replace the layers that pass verification."
    if interpreted(options):
        return (
            "CPU, Triton's interpreter: the kernels add in a GPU's reduction order. Results are close, not bit-equal."
        )
    return "CPU: the original layers run in both runs, because the kernels need a GPU."


def count_kernels(kernel, model, options):
    """How many modules and functions of the model run kernels now. Call it after a call of the model.

    Raises DemoError where kernels should run and none does.
    """
    with warnings.catch_warnings():
        # TRL binds a forward of its own onto the model, whose layers are replaced all the same.
        warnings.filterwarnings("ignore", message="lossless-kernels: .* runs another kernel")
        report = kernel.replacement_report(model, verbose=False)
    count = sum(each.count for each in report.layers if each.path in ("kernel", "kernel and original", "unproved"))
    if not count and (options.device.type == "cuda" or interpreted(options)):
        raise DemoError(f"no layer runs a kernel\n{report}")
    return count


def make_model(options, attention="eager"):
    """The model of --model, or a tiny Llama with random weights.

    Args:
        attention: transformers' attention function. Training takes "eager": the backward pass of fused attention adds in an
            order that changes from run to run.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if options.model:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                options.model, dtype=options.dtype, attn_implementation=attention
            )
        except (OSError, ValueError) as error:
            raise DemoError(f"--model {options.model}: {str(error).splitlines()[0]}") from error
        return model.to(options.device)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=257,
        max_position_embeddings=2048,
        attn_implementation=attention,
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=256,
    )
    torch.manual_seed(options.seed)
    return transformers.LlamaForCausalLM(config).to(options.device, options.dtype)


def make_tokenizer(options):
    """The tokenizer of --model; for the tiny Llama one token a byte."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if options.model:
        return AutoTokenizer.from_pretrained(options.model)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: index for index, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def same_bits(actual, expected):
    """Whether two tensors have the same dtype, shape and bits. Zeros of different sign differ, equal NaNs do not."""
    import torch

    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    return torch.equal(actual.contiguous().view(integer), expected.contiguous().view(integer))


def compare_training(options, original, replaced):
    """Prints the losses of two runs side by side. Returns the exit status: 0 if losses and weights are as promised.

    Args:
        original: losses and weights (by name) of the run with the original layers.
        replaced: the same of the run with kernels.
    """
    print("step  original layers  with kernels  same bits")
    for step, (before, after) in enumerate(zip(original[0], replaced[0], strict=True), 1):
        print(f"{step:4}  {before:15.9f}  {after:12.9f}  {'yes' if before == after else 'no'}")
    equal = sum(a == b for a, b in zip(original[0], replaced[0]))
    same = sum(same_bits(replaced[1][name], weight) for name, weight in original[1].items())
    steps, tensors = len(original[0]), len(original[1])
    print(f"Loss curves bit-equal: {'yes' if equal == steps else 'no'} ({equal} of {steps} steps)")
    print(f"Trained weights bit-equal: {'yes' if same == tensors else 'no'} ({same} of {tensors})")
    if (equal, same) == (steps, tensors) or not interpreted(options):
        return 0 if (equal, same) == (steps, tensors) else 1
    furthest = max(abs(a - b) for a, b in zip(original[0], replaced[0]))
    print(f"Largest difference of two losses: {furthest:.2g}")
    return 0 if furthest < 1e-3 else 1


def weights(model):
    """Copies of the weights that are trained."""
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


@contextlib.contextmanager
def one_line_errors(name, requirements="requirements.txt"):
    """Says in one line what cannot be tried (exit status 2) and which packages are missing; 130 where the user interrupts."""
    try:
        with warnings.catch_warnings():
            # `describe` says it.
            warnings.filterwarnings("ignore", message="lossless-kernels: apply replaced no layer .* on cpu")
            yield
    except DemoError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        print(f"{name}: error: {error}: pip install -r {requirements}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
