"""What the tests of training share: a small Llama, its layers replaced, evidence that the kernels ran, a training loop."""

import contextlib
import copy
import functools

import torch
from bits import assert_bits_equal, same_layout
from kernels import Mode, kernelize, use_kernel_mapping
from places import forget_calls, python_module, resolved
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = "cuda"
DEVICE_TYPE = "rocm" if torch.version.hip else DEVICE
VOCABULARY = 256
TOKENS = 118


def llama(seed, dtype, device=DEVICE, layers=4, hidden_size=256, intermediate_size=512, heads=4):
    """A Llama with random weights; those of the norms lie away from 1, where different formulas would agree."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        # The backward of the fused attention kernels adds in an order that changes from run to run.
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(device, dtype).train()


def random_batches(seed, steps, batch, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (steps, batch, TOKENS), generator=generator).to(device)


# Replaced, and at work


def replaceable(model):
    """Name -> module, of all layers that the kernel's mapping knows."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(type(module), "kernel_layer_name", None)
        in ("RMSNorm", "SiLU", "GeluTanh", "NewGELU", "TorchRMSNorm")
    }


def kernelized(model, kernel, mode=Mode.TRAINING):
    """A copy of `model` with every layer replaced that can be."""
    model = copy.deepcopy(model)
    with use_kernel_mapping(kernel.kernel_mapping(), inherit_mapping=False):
        kernelize(model, mode=mode, device=DEVICE_TYPE)
    layers = replaceable(model)
    assert layers
    for module in layers.values():
        assert module.forward.__func__.__module__.startswith(kernel.__name__)
    return model


def from_kernel(tensor, kernel):
    """Whether autograd knows the tensor as the output of one of the kernel's own functions."""
    function = getattr(type(tensor.grad_fn), "_forward_cls", None)
    return function is not None and function.__module__.startswith(kernel.__name__)


@contextlib.contextmanager
def kernels_at_work(model, kernel):
    """Fails unless every replaceable layer has entered autograd's graph as the kernel's, and kernels made its gradients.

    What runs instead of a kernel has the same bits, so a comparison of bits alone passes with nothing replaced.
    """
    found = set()

    def watch(name):
        def hook(module, arguments, output):
            if from_kernel(output, kernel):
                found.add(name)

        return hook

    layers = replaceable(model)
    handles = [module.register_forward_hook(watch(name)) for name, module in layers.items()]
    module = functools.partial(python_module, kernel)
    forget_calls(module)
    yield
    for handle in handles:
        handle.remove()
    assert found == set(layers)
    backward = [*resolved(module, "rms_norm_backward"), *module("activation")._gradient_calls.resolved.values()]
    calls = module("rms_norm_call").torch_calls.resolved.values()
    backward += [found for call in calls if hasattr(call, "kernels") for found in call.kernels.known.values()]
    # None is a call that the gradients' kernels were not fit for.
    assert backward and None not in backward


# Training


def language_model_loss(model, tokens):
    return model(tokens, labels=tokens, use_cache=False).loss


def plain_step(model, tokens):
    loss = language_model_loss(model, tokens)
    loss.backward()
    return loss.detach()


def whole(tensor):
    """The tensor itself, gathered from all ranks if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(model, batches, step=plain_step, eps=1e-8):
    """All that is left of training: losses, parameters, and AdamW's averages, which hear every bit of a gradient."""
    before = {name: whole(parameter).clone() for name, parameter in model.named_parameters()}
    # The least rate that still moves a weight near 1 in bf16, where numbers lie 2**-7 apart.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)
    left = {}
    for index, tokens in enumerate(batches):
        optimizer.zero_grad()
        left[f"loss {index}"] = step(model, tokens)
        optimizer.step()
    for name, parameter in model.named_parameters():
        left[name] = whole(parameter)
        for average in ("exp_avg", "exp_avg_sq"):
            left[f"{average} of {name}"] = whole(optimizer.state[parameter][average])
        assert not torch.equal(left[name], before[name]), f"{name} was not trained"
    for name, tensor in left.items():
        # A NaN equals any other, so that training which blew up would compare equal.
        assert tensor.isfinite().all(), f"{name} is not finite"
    return left


def forward_and_backward(module, x, dy):
    """The output and every gradient, for an input that is a leaf."""
    x = x.detach().clone().requires_grad_()
    out = module(x)
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(out, (x, *parameters.values()), dy)
    names = ("the input", *(name.removeprefix("_orig_mod.") for name in parameters))
    # Copies: a CUDA graph's own memory is written again by its next replay.
    return {"output": out.detach().clone()} | {f"gradient of {n}": g.clone() for n, g in zip(names, gradients)}


def assert_same(actual, expected, label):
    """Two dictionaries of tensors: the same bits and the same strides."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_bits_equal(actual[name], expected[name], f"{label}: {name}")
        assert same_layout(actual[name], expected[name]), f"{label}: strides of {name}"
