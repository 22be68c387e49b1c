"""The call that is kept for a decoder layer: what it computes is what the ordinary way does, and whatever changes ends it."""

import collections
import contextlib
import copy
import gc
import weakref
from types import MethodType

import pytest
import torch
from bits import assert_bits_equal
from cpu_kernels import cpu_arithmetic
from kernels import Mode, kernelize, use_kernel_mapping
from places import python_module
from test_decoder import MODELS, SIZES, kernelized, make, tokens
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_decoder_truth.py has it on a GPU"),
    pytest.mark.usefixtures("proof_off"),
]


@pytest.fixture(autouse=True)
def arithmetic(kernel):
    """Which call is kept has nothing to do with what computes: the interpreter would take minutes."""
    with cpu_arithmetic(kernel):
        yield


@pytest.fixture
def replay(kernel):
    return python_module(kernel, "replay")


@pytest.fixture
def run(replay, monkeypatch):
    """`run(model, ids, ordinary=False, **arguments)`: the logits, and for each layer whether its call was kept."""
    replay_call = replay.replay

    def run(model, ids, ordinary=False, **arguments):
        kept = []

        def recorded(*given):
            out = None if ordinary else replay_call(*given)
            kept.append(out is not None)
            return out

        with monkeypatch.context() as patch:
            patch.setattr(replay, "replay", recorded)
            if ordinary:
                patch.setattr(replay, "record", lambda *_: None)
            with torch.no_grad():
                return model(ids, use_cache=False, **arguments).logits, kept

    return run


def with_kept_calls(kernel, run, model, ids):
    ours = kernelized(kernel, model, "decoder")
    for kept in (False, False, True):
        assert run(ours, ids)[1] == [kept] * SIZES["num_hidden_layers"]
    return ours


def with_other_weights(model):
    """Biases and norms of fresh models are zeros and ones."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def recorded_attention(calls):
    def attention(module, *tensors_and_mask, **named):
        calls.append(([(t.clone(), t.stride()) for t in tensors_and_mask[:3]], tensors_and_mask[3], named))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *tensors_and_mask, **named)

    return attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_it_does_what_the_ordinary_way_does(kernel, run, seed, name, dtype):
    """The attention function is called with the same tensors, strides, mask and names, too."""
    model = with_other_weights(make(name, seed).to(dtype))
    for batch, length in ((1, 1), (2, 3)):
        ids, calls = tokens(seed, batch, length), []
        ours = with_kept_calls(kernel, run, model, ids)
        ALL_ATTENTION_FUNCTIONS.register("recorded", recorded_attention(calls))
        try:
            ours.set_attn_implementation("recorded")
            results = [run(ours, ids, ordinary, another=7) for ordinary in (False, True)]
        finally:
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop("recorded")
        assert [all(kept) for _, kept in results] == [True, False]
        assert_bits_equal(results[0][0], results[1][0], f"{batch}x{length}")
        layers = SIZES["num_hidden_layers"]
        assert len(calls) == 2 * layers
        for (found, mask, named), (expected, their_mask, their_named) in zip(
            calls[:layers], calls[layers:], strict=True
        ):
            for (a, strides), (b, their_strides) in zip(found, expected, strict=True):
                assert_bits_equal(a, b)
                assert strides == their_strides
            assert mask is their_mask or torch.equal(mask, their_mask)
            assert named.keys() == their_named.keys() and named["another"] == 7


@contextlib.contextmanager
def hooked(module, register, hook):
    handle = getattr(module, f"register_{register}")(hook)
    yield
    handle.remove()


@contextlib.contextmanager
def patched(owner, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value, raising=False)
        yield


@contextlib.contextmanager
def with_hooks_of_its_own(module, note):
    with patched(module, "_forward_hooks", type(module._forward_hooks)()):
        module.register_forward_hook(lambda *_: note("hook"))
        yield


# What somebody may do to a module, and whether it tells him of a call without gradients.
DEEDS = {
    "forward hook": lambda module, note: hooked(module, "forward_hook", lambda *_: note("hook")),
    "forward pre-hook": lambda module, note: hooked(module, "forward_pre_hook", lambda *_: note("hook")),
    "hooks of its own": with_hooks_of_its_own,
    "forward": lambda module, note: patched(module, "forward", louder(module, note)),
    "compiled": lambda module, note: patched(module, "_compiled_call_impl", louder(module, note)),
    "class": lambda module, note: patched(module, "__class__", type("Other", (type(module),), {})),
}
TELLING = ("forward hook", "forward pre-hook", "hooks of its own", "forward", "compiled")
MODULES = (
    "input_layernorm self_attn post_attention_layernorm mlp mlp.act_fn self_attn.q_proj self_attn.k_proj self_attn.v_proj "
    "self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj self_attn.q_norm self_attn.k_norm"
).split()


def louder(module, note):
    forward = module.forward

    def louder(*arguments, **named):
        note("forward")
        out = forward(*arguments, **named)
        return (2.0 * out[0], *out[1:]) if isinstance(out, tuple) else 2.0 * out

    return louder


@pytest.mark.parametrize("how", DEEDS)
def test_what_somebody_does_to_a_module_ends_it(kernel, run, replay, seed, how):
    ids = tokens(seed, 1, 2)
    ours, seen = with_kept_calls(kernel, run, with_other_weights(make("Qwen3", seed)), ids), []
    layer = ours.model.layers[1]
    call, given = replay._recordings[id(layer)].call, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.Call, "matches", lambda self, *a: given.append(a))
        patch.setattr(replay, "record", lambda *_: None)
        run(ours, ids)
    (given,) = (each for each in given if each[0] is layer)
    with torch.no_grad():
        for path in MODULES:
            assert call.matches(*given) is not None
            with DEEDS[how](layer.get_submodule(path), seen.append):
                refused = call.matches(*given) is None
            assert refused, path
        assert call.matches(*given) is not None
    for path in ("self_attn.o_proj", "mlp"):
        with DEEDS[how](layer.get_submodule(path), seen.append):
            (found, kept), (expected, _) = (run(ours, ids, ordinary) for ordinary in (False, True))
        assert kept == [True, False]
        assert_bits_equal(found, expected, path)
        # Twice: both ways tell whoever wants to know.
        assert len(seen) == 2 * (how in TELLING)
        seen.clear()
        for _ in range(2):
            run(ours, ids)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_a_backward_pass_are_not_called_without_gradients(kernel, run, seed, register):
    ids, told = tokens(seed, 1, 2), []
    ours = with_kept_calls(kernel, run, make("Llama", seed), ids)
    for module in ours.model.layers[1].modules():
        if module is not ours.model.layers[1]:
            getattr(module, register)(lambda *_: told.append(True))
    (found, kept), (expected, _) = (run(ours, ids, ordinary) for ordinary in (False, True))
    assert kept == [True, True] and not told
    assert_bits_equal(found, expected)
    ours(ids, labels=ids, use_cache=False).loss.backward()
    assert told


def change_eps(layer):
    layer.input_layernorm.variance_epsilon = 0.5


def change_second_eps(layer):
    layer.post_attention_layernorm.variance_epsilon = 0.5


def change_head_norm(layer):
    layer.self_attn.k_norm.variance_epsilon = 0.5


def replace_norm(layer):
    layer.input_layernorm = nn.LayerNorm(SIZES["hidden_size"])


def replace_attention_norm_by_function(layer):
    norm = layer.post_attention_layernorm
    del layer.post_attention_layernorm
    layer.post_attention_layernorm = lambda x: 2.0 * norm(x)


def replace_linear(layer):
    linear = layer.self_attn.v_proj
    layer.self_attn.v_proj = nn.Sequential(linear, nn.Tanh())


def replace_mlp(layer):
    layer.mlp = nn.Sequential(layer.mlp, nn.Tanh())


def other_activation(layer):
    layer.mlp.act_fn = nn.GELU()


class Doubled(torch.Tensor):
    """Of a subclass that means something else by its operations."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        out = super().__torch_function__(function, types, arguments, named or {})
        return out * 2.0 if function is torch.nn.functional.linear else out


def subclass(layer):
    weight = layer.mlp.up_proj.weight
    layer.mlp.up_proj.weight = nn.Parameter(weight.detach().as_subclass(Doubled), requires_grad=False)


def add_bias(layer):
    layer.self_attn.o_proj.bias = nn.Parameter(torch.ones(SIZES["hidden_size"]))


def other_norm_weight(layer):
    layer.input_layernorm.weight = nn.Parameter(torch.rand(SIZES["hidden_size"], dtype=torch.float16))


def attention_class(layer):
    class Louder(type(layer.self_attn)):
        def forward(self, *arguments, **named):
            out, *rest = super().forward(*arguments, **named)
            return 2.0 * out, *rest

    layer.self_attn.__class__ = Louder


CHANGES = (
    change_eps,
    change_second_eps,
    change_head_norm,
    replace_norm,
    replace_attention_norm_by_function,
    replace_linear,
    replace_mlp,
    other_activation,
    subclass,
    add_bias,
    other_norm_weight,
    attention_class,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_other_parts_end_it(kernel, run, seed, change):
    ids = tokens(seed, 1, 2)
    ours = with_kept_calls(kernel, run, with_other_weights(make("Qwen3", seed)), ids)
    before, _ = run(ours, ids)
    change(ours.model.layers[1])
    found, kept = run(ours, ids)
    assert kept == [True, False]
    assert not torch.equal(found, before)
    assert_bits_equal(found, run(ours, ids, ordinary=True)[0])


def test_other_values_are_read(kernel, run, seed):
    """Weights written to and weights exchanged for others of their kind, the scale and the implementation of the attention."""
    ids = tokens(seed, 1, 2)
    ours = with_kept_calls(kernel, run, with_other_weights(make("Qwen3", seed)), ids)
    layer = ours.model.layers[1]

    def exchange():
        for module in (layer.mlp.down_proj, layer.self_attn.q_norm):
            module.weight = nn.Parameter(torch.rand_like(module.weight))

    def write():
        with torch.no_grad():
            layer.post_attention_layernorm.weight.mul_(3.0)

    def scale():
        layer.self_attn.scaling = 2.0

    def implementation():
        ours.set_attn_implementation("eager")

    last, _ = run(ours, ids)
    for change in (exchange, write, scale, implementation):
        change()
        found, kept = run(ours, ids)
        assert kept == [True, True]
        assert change is implementation or not torch.equal(found, last)
        assert_bits_equal(found, run(ours, ids, ordinary=True)[0], change.__name__)
        last = found


@contextlib.contextmanager
def global_hook():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), named=None):
        return function(*arguments, **(named or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        return operator(*arguments, **(named or {}))


def modes():
    from transformers.models.llama import modeling_llama

    forward, call, project = nn.Linear.forward, nn.Module.__call__, functional.linear
    rotate = modeling_llama.apply_rotary_pos_emb
    return {
        "global hook": global_hook,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "function mode": Functions,
        "dispatch mode": Operators,
        "forward AD": torch.autograd.forward_ad.dual_level,
        "forward of all linear layers": lambda: patched(nn.Linear, "forward", lambda self, x: 2.0 * forward(self, x)),
        "call of all modules": lambda: patched(nn.Module, "__call__", lambda self, *a, **k: call(self, *a, **k)),
        "forward of a class": lambda: patched(modeling_llama.LlamaMLP, "forward", lambda self, x: 0.0 * x),
        "linear function": lambda: patched(functional, "linear", lambda *a: 2.0 * project(*a)),
        "rotary function": lambda: patched(modeling_llama, "apply_rotary_pos_emb", lambda *a, **k: rotate(*a, **k)),
    }


@pytest.mark.parametrize("mode", modes())
@pytest.mark.filterwarnings("ignore:lossless-kernels:RuntimeWarning")
def test_modes_and_what_all_share_end_it(kernel, run, seed, mode):
    ids = tokens(seed, 1, 2)
    ours = with_kept_calls(kernel, run, make("Llama", seed), ids)
    before, _ = run(ours, ids)
    with modes()[mode]():
        found, kept = run(ours, ids)
        expected, _ = run(ours, ids, ordinary=True)
        assert kept == [False] * 2
    assert_bits_equal(found, expected)
    # And afterwards it is back, at once or with the next call but one.
    for _ in range(3):
        found, kept = run(ours, ids)
        assert_bits_equal(found, before)
    assert kept == [True, True]


def test_gradients_end_it(kernel, run, seed):
    ids = tokens(seed, 1, 2)
    ours = with_kept_calls(kernel, run, make("Llama", seed), ids)
    ours(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_an_attention_function_that_returns_something_else(kernel, run, seed):
    """A subclass means something of its own by the projection after it."""
    ids = tokens(seed, 1, 2)
    ours = with_kept_calls(kernel, run, make("Llama", seed), ids)

    def attention(module, *arguments, **named):
        out, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *arguments, **named)
        return out.as_subclass(Doubled), weights

    before, _ = run(ours, ids)
    ALL_ATTENTION_FUNCTIONS.register("doubled", attention)
    try:
        ours.set_attn_implementation("doubled")
        found, kept = run(ours, ids)
        expected, _ = run(ours, ids, ordinary=True)
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("doubled")
    assert kept[0] and not torch.equal(found, before)
    assert_bits_equal(found.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.operators.append(operator)
        return operator(*arguments, **(named or {}))


def test_a_mode_sees_nothing_of_it(kernel, seed):
    ours, ids, seen = kernelized(kernel, make("Llama", seed), "decoder"), tokens(seed, 1, 2), []
    for _ in range(5):
        with torch.no_grad(), Counted() as counted:
            ours(ids, use_cache=False)
        seen.append(counted.operators)
    assert all(operators == seen[0] for operators in seen)


@pytest.fixture
def layer_and_arguments(kernel, seed):
    ours = kernelized(kernel, make("Llama", seed), "decoder")
    x = torch.randn(1, 2, SIZES["hidden_size"])
    return ours.model.layers[0], x, {"position_embeddings": ours.model.rotary_emb(x, torch.arange(2)[None])}


def test_transforms(layer_and_arguments, replay):
    layer, x, arguments = layer_and_arguments
    together = torch.stack([x, 2.0 * x])
    ensemble = {name: torch.stack([p.detach(), 2.0 * p.detach()]) for name, p in layer.named_parameters()}
    with torch.no_grad():
        expected = torch.stack([layer(each, **arguments) for each in together])
        replay._recordings.clear()
        for _ in range(4):
            # Batched products and sums add in another order: some roundings, of which fp32's defaults allow ten. Memory that
            # is read as what it is not would be off by as much as the values.
            found = torch.vmap(lambda y: layer(y, **arguments))(together)
            torch.testing.assert_close(found, expected)
            one, _ = torch.vmap(lambda p: torch.func.functional_call(layer, p, (x,), arguments))(ensemble)
            torch.testing.assert_close(one, expected[0])
        assert id(layer) not in replay._recordings


def test_lazily_negated_activations(layer_and_arguments):
    layer, x, arguments = layer_and_arguments
    with torch.no_grad():
        expected = layer(-x, **arguments)
        for _ in range(4):
            # torch's own norm runs for these, and a CPU adds in another order than CUDA: some roundings, of which fp32's
            # defaults allow ten. The sign is twice the values.
            torch.testing.assert_close(layer(torch._neg_view(x), **arguments), expected)


@pytest.mark.parametrize("deed", ["o_proj", "mlp", "weight"])
def test_an_attention_function_that_changes_what_comes_after_it(kernel, run, seed, deed):
    ids, told = tokens(seed, 1, 2), []
    ours = with_kept_calls(kernel, run, make("Llama", seed), ids)

    def attention(module, *arguments, **named):
        layer = ours.model.layers[module.layer_idx]
        if deed == "weight":
            layer.mlp.down_proj.weight = nn.Parameter(2.0 * layer.mlp.down_proj.weight)
        else:
            hooked = layer.mlp if deed == "mlp" else module.o_proj
            handle = hooked.register_forward_hook(lambda *_: (told.append(deed), handle.remove())[0])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *arguments, **named)

    twin = copy.deepcopy(ours.state_dict())
    ALL_ATTENTION_FUNCTIONS.register("busy", attention)
    try:
        ours.set_attn_implementation("busy")
        found, kept = run(ours, ids)
        ours.load_state_dict(twin)
        expected, _ = run(ours, ids, ordinary=True)
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("busy")
    assert kept == [True, True] and len(told) == (0 if deed == "weight" else 4)
    assert_bits_equal(found, expected)


def test_it_writes_into_nothing_that_others_have(kernel, run, seed):
    """What a layer is given and returns and what the attention function sees and returns stays as it was, in later calls too."""
    ours, seen = kernelized(kernel, make("Llama", seed), "decoder"), []

    def keep(*tensors):
        seen.extend((each, each.clone()) for each in tensors)

    def attention(module, *tensors_and_mask, **named):
        out, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *tensors_and_mask, **named)
        keep(*tensors_and_mask[:3], out)
        return out, weights

    for layer in ours.model.layers:
        layer.register_forward_pre_hook(lambda _, x, named: keep(*x, *named["position_embeddings"]), with_kwargs=True)
        layer.register_forward_hook(lambda _, __, out: keep(out))
    ALL_ATTENTION_FUNCTIONS.register("keeping", attention)
    try:
        ours.set_attn_implementation("keeping")
        for number in range(4):
            # Others each time: memory that is used once more gets other values.
            _, kept = run(ours, tokens(seed + number, 1, 2))
            assert kept == [number > 1] * 2
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("keeping")
    assert len(seen) == 4 * 2 * (3 + 4 + 1)
    for now, then in seen:
        assert_bits_equal(now, then)


def test_parts_of_a_sequence_have_strides_of_their_own(kernel, run, seed):
    """Their dimension of length 1 has the whole sequence's. What a layer returns is what the next one has seen before."""
    ours, ids = kernelized(kernel, make("Llama", seed), "decoder"), tokens(seed, 1, 12)
    embedded, outs = ours.model.embed_tokens(ids).detach(), []
    with hooked(ours.model.layers[-1], "forward_hook", lambda _, __, out: outs.append(out)):
        for number in range(6):
            part = embedded[:, 2 * number : 2 * number + 2]
            found, kept = run(ours, None, inputs_embeds=part)
            expected, _ = run(ours, None, ordinary=True, inputs_embeds=part)
            assert kept == [number > 1] * 2
            assert_bits_equal(found, expected)
            assert outs[-2].stride() == outs[-1].stride() != part.stride()


def test_no_more_is_alive_in_the_attention_than_in_the_ordinary_way(kernel, run, seed):
    ids, alive = tokens(seed, 1, 2), []
    ours = with_kept_calls(kernel, run, make("Qwen3", seed), ids)

    def attention(module, *arguments, **named):
        gc.collect()
        alive.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *arguments, **named)

    ALL_ATTENTION_FUNCTIONS.register("counting", attention)
    try:
        ours.set_attn_implementation("counting")
        for ordinary in (False, True):
            _, kept = run(ours, ids, ordinary)
            assert kept == [not ordinary] * 2
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("counting")
    assert all(ours <= ordinary for ours, ordinary in zip(alive[:2], alive[2:], strict=True))


def test_kernelized_for_something_else(kernel, run, seed):
    """Without the norms' kernels, which `kernelize` takes away from the same modules."""
    ids = tokens(seed, 1, 2)
    ours = with_kept_calls(kernel, run, with_other_weights(make("Llama", seed)), ids)
    mapping = kernel.kernel_mapping(devices=("cpu",), level="decoder")
    del mapping["RMSNorm"]
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(ours, mode=Mode.INFERENCE, device="cpu")
    for _ in range(4):
        found, kept = run(ours, ids)
        assert kept == [False, False]
    assert_bits_equal(found, run(ours, ids, ordinary=True)[0])


def test_only_what_comes_again_is_kept(kernel, run, replay, seed, monkeypatch):
    ours = kernelized(kernel, make("Llama", seed), "decoder")
    made = []
    known = replay._matching_or_new
    monkeypatch.setattr(replay, "_matching_or_new", lambda *a: made.append(a) or known(*a))
    # No other layer's call is there to be shared.
    monkeypatch.setattr(replay, "_shared", collections.deque(maxlen=0))
    for length in (3, 4, 5, 3, 4, 5):
        assert run(ours, tokens(seed, 1, length))[1] == [False, False]
    assert not made
    # A layer that is refused every time is tried after 1, 2, 4 and 8 calls.
    handle = ours.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    for _ in range(10):
        run(ours, tokens(seed, 1, 6))
    assert len([a for a in made if a[0] is ours.model.layers[0]]) == 4
    handle.remove()
    for _ in range(8):
        _, kept = run(ours, tokens(seed, 1, 6))
    assert kept == [True, True]


def test_layers_that_are_alike_share_a_call(kernel, run, replay, seed):
    ids = tokens(seed, 1, 2)
    ours = with_kept_calls(kernel, run, make("Llama", seed), ids)
    first, second = (replay._recordings[id(layer)].call for layer in ours.model.layers)
    assert first is second is not None


def test_it_keeps_neither_layers_nor_weights_alive(kernel, run, replay, seed):
    ids = tokens(seed, 1, 2)
    ours = with_kept_calls(kernel, run, make("Llama", seed), ids)
    numbers = [id(layer) for layer in ours.model.layers]
    assert replay._recordings.keys() >= {*numbers}
    layer = ours.model.layers[0]
    replaced = [
        weakref.ref(layer.mlp),
        weakref.ref(layer.mlp.up_proj.weight),
        weakref.ref(layer.input_layernorm.weight),
    ]
    layer.mlp, layer.input_layernorm.weight = nn.Identity(), nn.Parameter(torch.ones(SIZES["hidden_size"]))
    gc.collect()
    assert [each() for each in replaced] == [None] * 3
    alive = [weakref.ref(each) for each in (ours, layer, *layer.parameters())]
    del ours, layer
    gc.collect()
    assert [each() for each in alive] == [None] * len(alive)
    assert not replay._recordings.keys() & {*numbers}


def test_a_copy_has_its_own(kernel, run, seed):
    ids = tokens(seed, 1, 2)
    ours = with_kept_calls(kernel, run, make("Llama", seed), ids)
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    for layer in twin.model.layers:
        for module in layer.modules():
            if "forward" in vars(module):  # The copy's are bound to the original's modules.
                module.forward = MethodType(module.forward.__func__, module)
    for kept in (False, False, True):
        found, calls = run(twin, ids)
        assert calls == [kept] * 2
    assert_bits_equal(found, run(twin, ids, ordinary=True)[0])
