"""Gradients along several paths that autograd's additions compute: always the bits of gradients that are sent one by one."""

import copy
import functools
import itertools
import operator
import pickle
import random

import pytest
import torch
from bits import assert_bits_equal
from torch.utils.checkpoint import checkpoint

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# numpy, which the interpreter computes with, warns of what overflows in fp16.
pytestmark = [pytest.mark.either, pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")]
ACTIVATIONS = {"new_gelu": 3, "fast_gelu": 4, "quick_gelu": 2}


class Sent:
    """`y = x`, for each of some inputs, whose gradients along path p are `dy * FACTORS[p]`; and how they were computed."""

    FACTORS = (0.3, 1.7, -0.9, 0.11)

    def __init__(self, module, paths, deferred):
        self.paths, self.computed = paths, []
        postponed = module("core.paths").deferred

        def parts(*dys):
            self.computed.append("parts")
            return tuple([tuple([dy * factor for factor in self.FACTORS[:paths]]) for dy in dys])

        def sums(*dys):
            self.computed.append("sums")
            return [functools.reduce(operator.add, [dy * factor for factor in self.FACTORS[:paths]]) for dy in dys]

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *xs):
                return tuple([x.clone() for x in xs[::paths]])

            @staticmethod
            def backward(ctx, *dys):
                layouts = [(dy.shape, dy.stride(), dy.dtype, dy.device) for dy in dys]
                found = postponed(paths, layouts, sums, parts, dys) if deferred else parts(*dys)
                return tuple(itertools.chain(*found))

        self.function = Function

    def __call__(self, *xs):
        return self.function.apply(*[x for x in xs for _ in range(self.paths)])


def numbers(generator, dtype):
    return torch.randn(5, 7, generator=generator, device=DEVICE).to(dtype)


@pytest.mark.parametrize("paths", (2, 3, 4))
def test_gradients_are_those_sent_one_by_one(module, seed, paths):
    """With and without other consumers of each input, called before the function and after it."""
    for before, after, same in itertools.product((False, True), repeat=3):
        found = []
        for deferred in (True, False):
            generator, sent = torch.Generator(DEVICE).manual_seed(seed), Sent(module, paths, deferred)
            leaves = [numbers(generator, torch.bfloat16).requires_grad_() for _ in range(2)]
            xs = [leaf * 1.5 for leaf in leaves]
            xs[1] = xs[0] if same else xs[1]
            consumers = [xs[0] * 0.7] if before else []
            consumers += sent(*xs)
            consumers += [xs[0] * 0.9] if after else []
            dys = [numbers(generator, torch.bfloat16) for _ in consumers]
            for _ in range(2):
                found.append(torch.autograd.grad(consumers, leaves[: 2 - same], dys, retain_graph=True))
            if deferred and not after:  # Nothing has arrived before, so that the sums are all that is needed.
                assert sent.computed == (["sums", "parts"] if same else ["sums"]) * 2
            if deferred and after:
                assert sent.computed == ["parts"] * 2
        for ours, others in zip(found[:2], found[2:]):
            for gradient, expected in zip(ours, others, strict=True):
                assert type(gradient) is torch.Tensor
                assert_bits_equal(gradient, expected, f"before {before}, after {after}, one tensor {same}")
        assert len(found) == 4


def test_a_sum_has_other_bits_where_a_gradient_arrived_before(module, seed):
    """What the test above would find."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    first, *parts = (numbers(generator, torch.bfloat16) for _ in range(3))
    assert any(((first + parts[0]) + parts[1] != first + (parts[0] + parts[1])).flatten())


def observed(hook, module, seed, deferred):
    """What a hook on the function's node sees or changes, and the gradient."""
    generator, sent, seen = torch.Generator(DEVICE).manual_seed(seed), Sent(module, 3, deferred), []
    x = numbers(generator, torch.float32).requires_grad_()
    (y,) = sent(x)
    y.grad_fn.register_hook(lambda found, _: hook(found, seen))
    y.backward(numbers(generator, torch.float32))
    return seen, x.grad


def added_twice(first, second, third):
    """Each sum is a tensor of its own."""
    (first + second + third).mul_(2.0)
    found = [(first + second + third).tolist()]
    partial = first + second
    return [*found, partial.mul_(2.0).tolist(), (partial + third).tolist()]


HOOKS = {
    "prints": lambda found, seen: seen.append([repr(each) for each in found]),
    "lists": lambda found, seen: seen.append([each.tolist() for each in found]),
    "measures": lambda found, seen: seen.append([each.norm().item() for each in found]),
    "stacks": lambda found, seen: seen.append(torch.stack(found).sum().item()),
    "scales one in place": lambda found, seen: seen.append(found[1].mul_(2.0).tolist()),
    "replaces all": lambda found, seen: tuple(each * 3.0 for each in found),
    "replaces one": lambda found, seen: (found[0], found[1] * 3.0, found[2]),
    "adds a later one first": lambda found, seen: seen.append((found[1] + found[0]).tolist()),
    "adds the later two": lambda found, seen: seen.append((found[1] + found[2]).tolist()),
    "leaves one out": lambda found, seen: seen.append((found[0] + found[2]).tolist()),
    "adds the first two": lambda found, seen: seen.append([(found[0] + found[1]).tolist(), repr(found[0] + found[1])]),
    "adds all": lambda found, seen: seen.append([(found[0] + found[1] + found[2]).tolist() for _ in range(2)]),
    "adds in place": lambda found, seen: seen.extend(added_twice(*found)),
    "returns a sum": lambda found, seen: ((found[0] + found[1]).mul_(2.0), None, found[2]),
    "sets data": lambda found, seen: setattr(found[1], "data", found[1] * 3.0),
    "copies": lambda found, seen: seen.append([copy.deepcopy(each).tolist() for each in found]),
    "pickles": lambda found, seen: seen.append([pickle.loads(pickle.dumps(each)).tolist() for each in found]),
    "shares": lambda found, seen: seen.append([torch.from_dlpack(each).tolist() for each in found]),
    "adds with a factor": lambda found, seen: seen.append(torch.add(found[0], found[1], alpha=2.0).tolist()),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_on_the_node_sees_gradients(module, seed, hook):
    found, expected = (observed(HOOKS[hook], module, seed, deferred) for deferred in (True, False))
    assert found[0] == expected[0]
    assert_bits_equal(found[1], expected[1], hook)


@pytest.mark.parametrize("crosswise", ("inputs", "calls"))
def test_a_hook_may_mix_the_gradients_of_inputs_or_calls(module, seed, crosswise):
    found = []
    for deferred in (True, False):
        generator, sent, kept = torch.Generator(DEVICE).manual_seed(seed), Sent(module, 2, deferred), []
        xs = [numbers(generator, torch.float32).requires_grad_() for _ in range(2)]

        def mix(gradients, _, kept=kept):
            kept.append(gradients)
            if len(kept) == 1:
                return None
            mixed = gradients[0] + gradients[3] if crosswise == "inputs" else kept[0][0] + kept[1][1]
            return (mixed, *gradients[1:])

        for _ in range(2):
            ys = sent(*xs)
            ys[0].grad_fn.register_hook(mix)
            found.append(torch.autograd.grad(ys, xs, [numbers(generator, torch.float32) for _ in ys]))
    for ours, expected in zip(itertools.chain(*found[:2]), itertools.chain(*found[2:]), strict=True):
        assert_bits_equal(ours, expected, "the gradient")


def test_a_gradient_is_not_computed_from_other_numbers(module, seed):
    """Those that a hook has kept, read and unread, when what they are computed from is modified."""
    generator, sent = torch.Generator(DEVICE).manual_seed(seed), Sent(module, 2, True)
    x, dy = (numbers(generator, torch.float32) for _ in range(2))
    x.requires_grad_()
    read, unread = [], []
    for kept in (read, unread):
        (y,) = sent(x)
        y.grad_fn.register_hook(lambda found, _, kept=kept: kept.extend(found))
        torch.autograd.grad(y, x, dy)
    expected = dy * Sent.FACTORS[0]
    assert_bits_equal(read[0], expected, "the gradient")
    dy.zero_()
    assert_bits_equal(read[0], expected, "the gradient")
    with pytest.raises(RuntimeError, match="modified in place"):
        unread[0].tolist()


@pytest.mark.skipif(GPU, reason="numpy arrays are of the CPU's memory")
def test_a_hook_on_the_node_may_take_arrays(module, seed):
    take = lambda found, seen: seen.append([each.numpy().sum() for each in found])  # noqa: E731
    assert observed(take, module, seed, True)[0] == observed(take, module, seed, False)[0]


def test_a_hook_on_the_node_may_take_addresses(module, seed):
    def take(found, seen):
        seen.extend(each.data_ptr() for each in found)
        assert seen == [each.data_ptr() for each in found]

    assert len(set(observed(take, module, seed, True)[0])) == 3


def test_checkpoints_and_anomaly_mode(module, seed):
    for deferred_first in (True, False):
        found = []
        for deferred in (deferred_first, not deferred_first):
            generator, sent = torch.Generator(DEVICE).manual_seed(seed), Sent(module, 2, deferred)
            x = numbers(generator, torch.float32).requires_grad_()
            with torch.autograd.set_detect_anomaly(True):
                y = checkpoint(lambda x, sent=sent: sent(x * 2.0)[0], x, use_reentrant=deferred_first)
                y.backward(numbers(generator, torch.float32))
            found.append(x.grad)
        assert_bits_equal(*found, "the gradient")


def test_compiled_autograd_traces_gradients_that_are_sent_one_by_one(module, seed):
    generator, sent = torch.Generator(DEVICE).manual_seed(seed), Sent(module, 2, True)
    x, dy = (numbers(generator, torch.float32) for _ in range(2))
    (y,) = sent(x.requires_grad_())
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        y.backward(dy)
    assert_bits_equal(x.grad, dy * Sent.FACTORS[0] + dy * Sent.FACTORS[1], "the gradient")


def test_without_tensors_of_ours_gradients_are_sent_one_by_one(module, seed, monkeypatch):
    monkeypatch.setattr(module("core.paths"), "wrapper_tensor", None)
    generator, sent = torch.Generator(DEVICE).manual_seed(seed), Sent(module, 2, True)
    x, dy = (numbers(generator, torch.float32) for _ in range(2))
    (y,) = sent(x.requires_grad_())
    y.backward(dy)
    assert sent.computed == ["parts"]
    assert_bits_equal(x.grad, dy * Sent.FACTORS[0] + dy * Sent.FACTORS[1], "the gradient")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_send_their_paths(module, proof_off, seed, name, monkeypatch):
    """Alone, a function's gradient takes one launch and no addition; behind another gradient, the kernel of the paths.

    The interpreter has no libdevice, so that its gradients are compared with themselves.
    """
    monkeypatch.setattr(module("core.paths"), "MIN_BYTES", 0)
    backward, computed = module("activation")._Backward, []
    for method in ("sums", "along_paths"):
        monkeypatch.setattr(backward, method, spied(backward, method, computed))
    choose, generator = random.Random(seed), torch.Generator(DEVICE).manual_seed(seed)
    activation = module("activation")._ACTIVATIONS[name]
    x = torch.randn(3, choose.randrange(1000, 1100), generator=generator, device=DEVICE).half().requires_grad_()
    dy, other = (torch.randn(x.shape, generator=generator, device=DEVICE).half() for _ in range(2))
    function = functools.partial(module("activation")._activate, activation=activation)
    torch.autograd.grad(function(x), x, dy)
    for others in (False, True):
        outs = (function(x), x * 1.0)[: 1 + others]
        computed.clear()
        (found,) = torch.autograd.grad(outs, x, (dy, other)[: 1 + others])
        assert computed == ["along_paths" if others else "sums"]
        parts = module("activation").gradients(activation, dy, x.detach())
        assert len(parts) == ACTIVATIONS[name]
        assert_bits_equal(found, functools.reduce(torch.add, (other, *parts) if others else parts), name)


@pytest.mark.parametrize("needed", ("q", "k", "qk", "one tensor"))
def test_rotary_embeddings_send_their_paths(module, proof_off, seed, needed, monkeypatch):
    """From MIN_BYTES on; smaller gradients are computed at once."""
    backward, computed = module("rotary")._Backward, []
    for method in ("sums", "along_paths"):
        monkeypatch.setattr(backward, method, spied(backward, method, computed))
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rotary, plain = module("rotary"), module("rotary").PLAIN
    q, k = (torch.randn(1, heads, 5, 16, generator=generator, device=DEVICE).half() for heads in (3, 2))
    cos, sin = torch.randn(2, 1, 5, 16, generator=generator, device=DEVICE).half()
    q.requires_grad_("q" in needed or needed == "one tensor")
    k = q if needed == "one tensor" else k.requires_grad_("k" in needed)
    leaves = [x for x in ((q,) if k is q else (q, k)) if x.requires_grad]
    size = sum(x.numel() * x.itemsize for x in (q, k) if x.requires_grad)
    for min_bytes, expected in ((size, ["sums"]), (size + 1, ["along_paths"])):
        monkeypatch.setattr(module("core.paths"), "MIN_BYTES", min_bytes)
        rotary._gradient_calls.clear()
        outs = [out for out in rotary.replacement(q, k, cos, sin, 1, plain.eager) if out.requires_grad]
        dys = [torch.randn(out.shape, generator=generator, device=DEVICE).half() for out in outs]
        computed.clear()
        found = torch.autograd.grad(outs, leaves, dys)
        assert computed == (["sums", "along_paths"] if k is q and expected == ["sums"] else expected)
        eagers = [out for out in plain.eager(q, k, cos, sin, 1) if out.requires_grad]
        for ours, eager in zip(found, torch.autograd.grad(eagers, leaves, dys), strict=True):
            assert_bits_equal(ours, eager, needed)


def spied(owner, method, computed):
    call = getattr(owner, method)

    def spy(self, *tensors):
        computed.append(method)
        return call(self, *tensors)

    return spy


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="streams are of GPUs")
def test_an_addition_on_another_stream_waits_and_keeps_its_tensors(module, seed, monkeypatch):
    """The input is made on a side stream, where autograd adds, and which is late. Meanwhile memory is used again."""
    monkeypatch.setattr(module("core.paths"), "MIN_BYTES", 0)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    activation = module("activation")._ACTIVATIONS["new_gelu"]
    x, weight, dy = (torch.randn(1 << 22, generator=generator, device=DEVICE).bfloat16() for _ in range(3))

    def gradient(activate):
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        # Its backward pass comes after that of the activation, on the main stream, in new tensors of the same size.
        later = functools.reduce(lambda each, _: each.sin(), range(4), other)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            h = leaf * 2.0
        torch.cuda.current_stream().wait_stream(side)
        out = activate(h) * weight
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1 << 25)
        found, _ = torch.autograd.grad((out, later), (leaf, other), (dy, dy))
        torch.cuda.synchronize()
        return found

    expected = gradient(functools.partial(activation.forward, None))
    ours = functools.partial(module("activation")._activate, activation=activation)
    for _ in range(5):
        assert_bits_equal(gradient(ours), expected, "the gradient")
