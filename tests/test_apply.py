"""`apply` and `restore`: one call replaces what `kernelize` would, and another leaves nothing behind."""

import contextlib
import copy
import functools
import gc
import importlib.util
import logging
import statistics
import sys
import time
import warnings
from types import MethodType, SimpleNamespace

import families
import pytest
import torch
from bits import assert_bits_equal
from cpu_kernels import cpu_arithmetic
from kernels import Mode, kernelize, use_kernel_mapping
from places import modeling
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    KernelConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForTokenClassification,
)
from transformers.models.llama import modeling_llama

# In Triton's interpreter verification fails, since a CPU adds in another order than CUDA, and says so.
pytestmark = [
    pytest.mark.either,
    pytest.mark.filterwarnings("ignore:lossless-kernels.*keeps its original:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
}
EXPERTS = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32) | {
    "num_experts": 2,
    "num_experts_per_tok": 2,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_classifier": (LlamaForSequenceClassification, LlamaConfig, {"num_labels": 3, "pad_token_id": 0}),
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {"head_dim": 32, **LINEAR}),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, {"head_dim": 32, **LINEAR, **EXPERTS}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 32}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 32}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "t5": (T5ForTokenClassification, T5Config, {"d_kv": 32, "d_ff": 96, "num_labels": 5, "dropout_rate": 0.0}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {"n_layer": 2, "n_embd": 64, "n_head": 2}),
}
MODES = [Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING | Mode.TORCH_COMPILE]


def make(name="llama", seed=0, **more):
    model_class, config_class, sizes = MODELS[name]
    torch.manual_seed(seed)
    return model_class(config_class(**{**SIZES, **sizes, **more})).to(DEVICE).eval()


def tokens(seed=0):
    torch.manual_seed(seed)
    return torch.randint(1, SIZES["vocab_size"], (2, 7), device=DEVICE)


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


def functions(model):
    found = [each for module in model.modules() for each in vars(module).get("_kernel_funcs", {}).values()]
    return list({id(each): each for each in found}.values())


def state_of(model):
    """Everything that `apply` could change: the modules' dictionaries, and those of their functions and classes."""
    modules = [*model.modules(), *functions(model)]
    instances = [
        {name: copy.copy(value) if type(value) is dict else value for name, value in vars(m).items()} for m in modules
    ]
    return instances, [dict(vars(type(module))) for module in modules]


def assert_unchanged(model, before):
    """Names what differs."""
    for found, expected in zip(state_of(model), before, strict=True):
        for one, other in zip(found, expected, strict=True):
            changed = [name for name in {**one, **other} if one.get(name, "absent") != other.get(name, "absent")]
            assert not changed, [(name, other.get(name, "absent"), one.get(name, "absent")) for name in changed]


def bound(model):
    """The function that is bound onto each module."""
    modules = [*model.modules(), *functions(model)]
    return [getattr(vars(module).get("forward"), "__func__", None) for module in modules]


def ours(kernel, model):
    return [function for function in bound(model) if getattr(function, "__module__", "").startswith(kernel.__name__)]


@pytest.fixture(autouse=True)
def exact(kernel, module, monkeypatch):
    """On a CPU launches return the CPU's own bits. What other tests' models call is theirs no longer."""
    monkeypatch.setenv("LOSSLESS_PROOF", "off" if DEVICE == "cpu" else "on")
    forget_callers(module("replace"))
    with cpu_arithmetic(kernel) if DEVICE == "cpu" else contextlib.nullcontext():
        yield
    forget_callers(module("replace"))


def forget_callers(replace):
    for function in list(replace._callers):
        vars(function).pop(replace._BEFORE, None)
    replace._callers.clear()


@pytest.mark.parametrize("name", MODELS)
def test_restore_leaves_nothing_behind(kernel, name, seed):
    model = make(name, seed)
    expected, parameters = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    handle = model.register_forward_hook(lambda *_: None)
    before = state_of(model)
    report = kernel.apply(model)
    assert ours(kernel, model) and len({entry.layer for entry in report.layers}) == len(report.layers)
    assert_bits_equal(logits(model), expected)
    kernel.restore(model)
    assert_unchanged(model, before)
    assert_bits_equal(logits(model), expected)
    for name, value in model.state_dict().items():
        assert_bits_equal(value, parameters.pop(name))
    assert not parameters
    handle.remove()


@pytest.mark.long
@pytest.mark.parametrize("name, layer", list(families.decoder_layers()), ids=lambda value: value)
def test_restore_of_every_decoder_family(kernel, nothing_known, name, layer, seed):
    """The models of docs/decoders.md: state, forwards, hooks and bits are those before `apply`."""
    torch.manual_seed(seed)
    model = families.make(name, layer).to(DEVICE)
    handle = model.register_forward_hook(lambda *_: None)
    expected = families.call(model)
    before, parameters = state_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    report = kernel.apply(model)
    (entry,) = [each for each in report.layers if each.layer == layer]
    assert entry.count >= 2 and entry.path in ("not called yet", "unproved"), entry
    assert_bits_equal(families.call(model), expected)
    kernel.restore(model)
    assert_unchanged(model, before)
    assert_bits_equal(families.call(model), expected)
    assert model.state_dict().keys() == parameters.keys()
    for name, value in model.state_dict().items():
        assert_bits_equal(value, parameters[name])
    handle.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_t5_trains_with_equal_bits(kernel, monkeypatch, dtype, seed):
    """Its norms multiply activations that they have not cast: 16-bit ones get two gradients of each norm."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    model = make("t5", seed).to(dtype)
    for name, parameter in model.named_parameters():
        # Away from 1, where formulas agree. transformers keeps wo in fp32.
        parameter.data = (torch.rand_like(parameter) + 0.5 if "layer_norm" in name else parameter).to(dtype)
    norms = [module for module in model.modules() if type(module).__name__ == "T5LayerNorm"]

    def step():
        model.zero_grad()
        out = model(tokens(), labels=tokens() % 5)
        out.loss.backward()
        return {"logits": out.logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}

    expected = step()
    kernel.apply(model.train(), Mode.TRAINING)
    assert len(norms) == 5
    assert all(norm.forward.__func__ is kernel.layers.LlamaRMSNorm.forward for norm in norms)
    for name, found in step().items():
        assert_bits_equal(found, expected[name], name)
    (entry,) = [each for each in kernel.replacement_report(model).layers if each.layer == "T5LayerNorm"]
    assert entry.path == "kernel"


T5S = "T5", "MT5", "UMT5", "LongT5", "Pix2Struct", "Udop", "SwitchTransformers", "Pop2Piano"


@pytest.mark.parametrize("name", T5S)
def test_norms_of_t5s_kind_are_known(kernel, module, name):
    folder = {"SwitchTransformers": "switch_transformers"}.get(name, name.lower())
    file = modeling(folder)
    norm = vars(file)[f"{name}LayerNorm"]
    assert kernel.name_layers(norm(64)) == {norm.__name__: "RMSNorm"}
    for dtype, formula in ((torch.bfloat16, "t5"), (torch.float16, "t5"), (torch.float32, "llama")):
        variant = module("rms_norm_proof").variant_of(norm, "variance_epsilon", dtype, dtype, torch.device("cpu"))
        assert variant.name == formula


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("level", ["layer", "decoder"])
def test_the_forwards_are_those_of_kernelize(kernel, level, mode):
    """The very functions, so that a call takes the same time."""
    by_hand, model = make(), make()
    devices = ("cuda", "rocm", "cpu")
    if level == "decoder":
        kernel.name_layers(by_hand)
    with use_kernel_mapping(kernel.kernel_mapping(level=level, devices=devices), inherit_mapping=False):
        kernelize(by_hand, mode=mode)
    expected = bound(by_hand)
    kernel.restore(by_hand)
    assert not ours(kernel, by_hand)
    kernel.apply(model, mode, level)
    assert bound(model) == expected and len(ours(kernel, model)) > 6
    assert (vars(model).get("_loss_function") is not None) == (level == "decoder" and Mode.TRAINING in mode)


def calls_of(model, x):
    """How many Python and C functions a call of the model enters."""
    calls = []
    for _ in range(3):
        model(x)
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        model(x)
    finally:
        sys.setprofile(None)
    return calls.count("call") + calls.count("c_call")


@torch.no_grad()
def test_a_call_costs_what_it_costs_without_apply(kernel):
    """Beside `kernelize` by hand, and after `restore` beside a model that was never changed."""
    by_hand, model, never, x = make(), make(), make(), tokens()
    kernel.name_layers(by_hand)
    mapping = kernel.kernel_mapping(level="decoder", devices=("cuda", "rocm", "cpu"))
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(by_hand, mode=Mode.INFERENCE)
    kernel.apply(model)
    count = calls_of(model, x)
    assert count == calls_of(by_hand, x)
    times = [[], []]
    for _ in range(200):
        for each, found in zip((by_hand, model), times):
            start = time.thread_time()
            each(x)
            found.append((time.thread_time() - start) * 1e6)
    by_hands, applied = (f"{statistics.median(found):.0f} us (least {min(found):.0f})" for found in times)
    print(f"{count} function calls each; CPU time after kernelize {by_hands}, after apply {applied}")
    kernel.restore(model), kernel.restore(by_hand)
    assert calls_of(model, x) == calls_of(never, x)


def test_mode_and_loss_by_default(kernel):
    for training in (False, True):
        model = make().train(training)
        kernel.apply(model)
        assert (model.loss_function is kernel.causal_lm_loss) == training
        kernel.apply(model, loss=not training)
        assert (model.loss_function is kernel.causal_lm_loss) != training
        kernel.restore(model)
        assert "_loss_function" not in vars(model)
    classifier = make("llama_classifier").train()
    kernel.apply(classifier)
    with pytest.raises(ValueError, match="model: expected a causal language model"):
        kernel.apply(classifier, loss=True)
    assert not ours(kernel, classifier), "what raised left the originals"


def test_again_and_otherwise(kernel):
    model = make().train()
    before = state_of(model)
    kernel.apply(model)
    once = state_of(model)
    kernel.apply(model)
    assert_unchanged(model, once)
    whole = bound(model)
    kernel.apply(model, Mode.INFERENCE, "layer")
    assert len(ours(kernel, model)) < len([each for each in whole if each]) and "_loss_function" not in vars(model)
    kernel.apply(model)
    assert bound(model) == whole
    kernel.restore(model)
    kernel.restore(model)
    assert_unchanged(model, before)


@pytest.mark.parametrize("loss", [False, True])
def test_in_the_middle_of_training(kernel, loss, seed):
    """Gradients that were accumulated, an optimizer's state, hooks and a graph that is not used yet: all as without."""
    results = []
    for applied in (False, True):
        model, seen = make(seed=seed).train(), []
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        model.model.norm.weight.register_hook(lambda grad, seen=seen: seen.append(grad.clone()))
        model.model.layers[0].register_forward_hook(lambda *_, seen=seen: seen.append(_[-1].detach()))
        model(tokens(1), labels=tokens(1)).loss.backward()
        optimizer.step()
        pending = model(tokens(2), labels=tokens(2)).loss
        gradients = [parameter.grad for parameter in model.parameters()]
        if applied:
            kernel.apply(model, loss=loss)
            assert (model.loss_function is kernel.causal_lm_loss) == loss
        assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), gradients))
        pending.backward()
        model(tokens(3), labels=tokens(3)).loss.backward()
        if applied:
            kernel.restore(model)
        optimizer.step()
        results.append([*seen, *(each for p in model.parameters() for each in (p.detach(), p.grad))])
    for found, expected in zip(*results, strict=True):
        assert_bits_equal(found, expected)


@pytest.mark.parametrize("condition", [lambda module: True, None])
def test_a_class_keeps_the_condition_of_a_name_that_it_had(kernel, condition):
    """`name_layers` gives both; a program may have taken the name back alone."""
    norm_class = type(make("gemma").model.norm)
    norm_class.kernel_condition = condition
    try:
        model = make("gemma")
        before = state_of(model)
        kernel.apply(model)
        kernel.restore(model)
        assert_unchanged(model, before)
        assert vars(norm_class)["kernel_condition"] is condition
    finally:
        del norm_class.kernel_condition


def test_two_models_share_a_function(kernel):
    """The rotary function is every Llama's: the last model's `restore` puts it back."""
    first, second = make(), make()
    function = modeling_llama.apply_rotary_pos_emb
    kernel.apply(first), kernel.apply(second)
    kernel.restore(first)
    assert "forward" in vars(function) and not [m for m in first.modules() if "forward" in vars(m)]
    kernel.restore(second)
    assert "forward" not in vars(function)
    # A model that is gone holds nothing.
    kernel.apply(first), kernel.apply(second)
    del first
    gc.collect()
    kernel.restore(second)
    assert "forward" not in vars(function)


def test_copies_parts_and_wrappers(kernel):
    model = make()
    before, expected = state_of(model), logits(model)
    kernel.apply(model)
    twin = copy.deepcopy(model)
    assert ours(kernel, twin)
    assert_bits_equal(logits(twin), expected)
    kernel.restore(twin)
    assert not [module for module in twin.modules() if "forward" in vars(module)]
    assert_bits_equal(logits(twin), expected)
    kernel.restore(model.model.layers[0])
    assert not [module for module in model.model.layers[0].modules() if "forward" in vars(module)] and ours(
        kernel, model
    )
    kernel.restore(torch.nn.ModuleList([model]))
    assert_unchanged(model, before)
    # What a copy calls is the function of the file, and not the copy that hangs on its modules.
    del model
    gc.collect()
    kernel.apply(twin)
    assert "forward" in vars(modeling_llama.apply_rotary_pos_emb)
    kernel.restore(twin)
    assert "forward" not in vars(modeling_llama.apply_rotary_pos_emb)


def test_what_kernelize_bound_goes_too_and_nothing_is_logged(kernel, caplog):
    model = make()
    before, attached = state_of(model), make().train()
    with use_kernel_mapping(kernel.kernel_mapping(devices=("cuda", "rocm", "cpu")), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE)
    kernel.attach_loss(attached)
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.restore(model)
        kernel.restore(attached)
    assert_unchanged(model, before) and not caplog.records and "_loss_function" not in vars(attached)


def test_names_of_other_repositories_are_left_alone(kernel, caplog):
    """transformers has names for which this package has no kernel: `kernelize` logs each, and binds the class's forward."""
    model = make("qwen3_next")
    names = {getattr(type(module), "kernel_layer_name", None) for module in (*model.modules(), *functions(model))}
    assert names - {None} - {*kernel.kernel_mapping()}, "nothing to test"
    with caplog.at_level(logging.WARNING):
        kernel.apply(model)
    assert not [record for record in caplog.records if record.name.startswith("kernels")]
    for module in (*model.modules(), *functions(model)):
        if "forward" in vars(module):
            assert vars(module)["forward"].__func__.__module__.startswith(kernel.__name__)


class Mine(torch.nn.Module):
    def forward(self, hidden_states):
        return hidden_states * 2


def _wrapper(norm):
    original = type(norm).forward
    return MethodType(functools.wraps(original)(lambda self, hidden_states: original(self, hidden_states) * 2), norm)


@pytest.mark.parametrize(
    "forward",
    [lambda _: Mine().forward, lambda norm: MethodType(Mine.forward, norm), _wrapper, lambda _: lambda x: x * 2],
)
def test_forwards_of_a_users_own_stay(kernel, forward):
    model = make()
    norm = model.model.norm
    mine = norm.forward = forward(norm)
    report = kernel.apply(model)
    assert norm.forward is mine
    (entry,) = [each for each in report.layers if "the module has a forward of its own" in each.reasons]
    assert (entry.layer, entry.count) == ("LlamaRMSNorm", 1) and "delete" in entry.reasons[0].step
    kernel.restore(model)
    assert norm.forward is mine


def test_another_packages_kernel_is_taken_over_and_given_back(kernel, monkeypatch):
    model = make()
    norm = model.model.norm

    class Theirs(torch.nn.Module):
        def forward(self, hidden_states): ...

    # As `kernels` loads them: a package with `layers`.
    monkeypatch.setitem(sys.modules, "_their_kernels_0", SimpleNamespace(layers=SimpleNamespace(Theirs=Theirs)))
    Theirs.forward.__module__ = "_their_kernels_0.layers"
    norm.forward = theirs = MethodType(Theirs.forward, norm)
    kernel.apply(model)
    assert norm.forward.__func__ is kernel.layers.LlamaRMSNorm.forward
    kernel.restore(model)
    assert norm.forward is theirs


def test_what_changed_since_is_left_alone(kernel):
    model = make()
    kernel.apply(model)
    inside = model.model.norm.forward
    wrapper = model.model.norm.forward = lambda hidden_states: inside(hidden_states)
    kernel.restore(model)
    assert model.model.norm.forward is wrapper and not ours(kernel, model)


@pytest.mark.parametrize("hooked_first", [True, False])
def test_accelerates_hooks_stay(kernel, hooked_first):
    """As `device_map` puts them onto every module: they move inputs, and load weights that are offloaded."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")

    class Counting(hooks.ModelHook):
        def __init__(self):
            self.calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    model = make()
    expected, counts = logits(model), []

    def hook():
        for module in (*model.model.layers, model.model.norm, model.model.layers[0].mlp):
            counts.append(Counting())
            hooks.add_hook_to_module(module, counts[-1])

    if hooked_first:
        hook()
    before = state_of(model)
    report = kernel.apply(model)
    if not hooked_first:
        hook()
    (entry,) = [entry for entry in report.layers if entry.layer == "LlamaDecoderLayer"]
    assert entry.count == 2 and entry.path != "original", entry
    assert model.model.norm._old_forward.__func__ is kernel.layers.LlamaRMSNorm.forward
    assert_bits_equal(logits(model), expected)
    assert [each.calls for each in counts] == [1] * 4
    kernel.restore(model)
    if hooked_first:
        assert_unchanged(model, before)
    hooks.remove_hook_from_module(model, recurse=True)
    assert not ours(kernel, model)
    assert_bits_equal(logits(model), expected)


def test_offloaded_weights(kernel):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = make().cpu()
    expected = model(tokens().cpu()).logits
    accelerate.cpu_offload(model, torch.device(DEVICE))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    before = state_of(model)
    kernel.apply(model)
    found = model(tokens()).logits
    if DEVICE == "cpu":
        assert_bits_equal(found, expected)
    kernel.restore(model)
    assert state_of(model)[1] == before[1] and not ours(kernel, model)


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="peft is not installed")
def test_peft(kernel):
    import peft

    model = make()
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    before, expected = state_of(adapted.eval()), logits(adapted)
    kernel.apply(adapted, Mode.TRAINING)
    assert model.loss_function is kernel.causal_lm_loss and ours(kernel, adapted)
    assert_bits_equal(logits(adapted), expected)
    kernel.restore(adapted)
    assert_unchanged(adapted, before)


def test_after_set_use_kernels(kernel, build):
    """transformers kernelizes such a model under its own mapping whenever it changes between training and evaluation."""
    model = make()
    backend = "rocm" if torch.version.hip else "cuda"
    model.set_use_kernels(True, KernelConfig({"RMSNorm": {backend: f"{build}:LlamaRMSNorm"}}, use_local_kernel=True))
    given = bound(model)
    kernel.apply(model)
    whole = bound(model)
    assert len(ours(kernel, model)) > 5
    model.train(), model.eval()
    assert bound(model) == whole
    kernel.restore(model)
    assert model.use_kernels and (DEVICE == "cuda" or bound(model) == given)


def test_without_transformers_decorators(interpreted):
    """As with a version of kernels that transformers does not take: no class has a name, and `name_layers` has them all."""
    code = """
        import torch
        from pathlib import Path
        from kernels import get_local_kernel
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        from transformers.activations import SiLUActivation

        assert not hasattr(LlamaRMSNorm, "kernel_layer_name")
        kernel = get_local_kernel(Path("build").absolute())
        sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
        model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        ids = torch.arange(7)[None]
        expected = model(ids).logits
        found = {entry.layer: str(entry.reasons[0]) for entry in kernel.replacement_report(model, verbose=False).layers}
        assert found["LlamaRMSNorm"] == "RMSNorm would fit" and found["SiLUActivation"] == "SiLU would fit", found
        report = kernel.apply(model)
        assert torch.equal(model(ids).logits, expected)
        print({entry.layer: entry.count for entry in report.layers if entry.path == "not called yet"})
        kernel.restore(model)
        assert not any("forward" in vars(module) for module in model.modules())
        assert not hasattr(LlamaRMSNorm, "kernel_layer_name")
        print(kernel.name_layers(model)["LlamaRMSNorm"])
    """
    printed = interpreted(code, USE_HUB_KERNELS="0").stdout.splitlines()
    expected = {
        "LlamaDecoderLayer": 2,
        "apply_rotary_pos_emb": 2,
        "LlamaMLP": 2,
        "SiLUActivation": 2,
        "LlamaRMSNorm": 5,
        "LlamaRotaryEmbedding": 1,
    }
    assert printed == [str(expected), "RMSNorm"]


def nothing_replaced(kernel, model, **arguments):
    before = state_of(model)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        report = kernel.apply(model, **arguments)
    assert_unchanged(model, before)
    (message,) = [str(each.message) for each in warned if "lossless" in str(each.message)]
    return message, report


def test_a_model_without_a_gpu_says_so_once(kernel, module, monkeypatch):
    monkeypatch.setattr(module("domain"), "_KERNEL_DEVICE", "cuda")
    message, report = nothing_replaced(kernel, make().cpu().train())
    assert "apply replaced no layer of LlamaForCausalLM: the model is on cpu. Next: " in message
    assert {str(reason) for entry in report.layers for reason in entry.reasons} == {"the model is on cpu"}
    assert {entry.layer for entry in report.layers} >= {"LlamaRMSNorm", "LlamaDecoderLayer", "LlamaMLP"}
    assert "GPU" in str(report).splitlines()[-2]


LEVELS = "layer", "decoder"


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_without_such_layers_says_so_once(kernel, level):
    message, report = nothing_replaced(kernel, torch.nn.Linear(2, 2, device=DEVICE), level=level)
    assert "no layer that a kernel of this package takes" in message and not report.layers
    assert message.endswith(
        "Next: nothing: kernel.kernel_mapping(level='decoder') has the names of the layers with kernels"
    )
    layers = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Linear(2, 2, device=DEVICE))
    message, report = nothing_replaced(kernel, layers, level=level)
    (entry,) = report.layers
    assert 'kernels.replace_kernel_forward_from_hub(torch.nn.SiLU, "SiLU")' in entry.reasons[0].step
    assert f"no layer name (SiLU would fit). Next: {entry.reasons[0].step}" in message
    message, report = nothing_replaced(kernel, torch.nn.Sequential(*layers, torch.nn.LayerNorm(64)), level=level)
    assert len(report.layers) == 2 and "several reasons. Next: print(kernel.replacement_report(model))" in message


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_of_another_dtype_says_so_once(kernel, name, level):
    model = make(name).double()
    message, report = nothing_replaced(kernel, model, level=level)
    reason, step = "the model's weights are torch.float64", "use float32, float16 or bfloat16"
    assert message.endswith(f"apply replaced no layer of {type(model).__name__}: {reason}. Next: {step}")
    reasons = {(each.kind, str(each), each.step) for entry in report.layers for each in entry.reasons}
    assert reasons == {("no kernel for", reason, step)}
    # Mixed: the layers whose weights are no float64 may have kernels.
    model.model.norm.float() if name == "llama" else model.transformer.ln_f.float()
    kernel.apply(model, level=level)
    assert ours(kernel, model)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_whose_forwards_are_a_users_own_says_so_once(kernel, level):
    model = torch.nn.Sequential(modeling_llama.LlamaRMSNorm(64), modeling_llama.LlamaRMSNorm(64)).to(DEVICE)
    for norm in model:
        norm.forward = lambda hidden_states: hidden_states
    message, report = nothing_replaced(kernel, model, level=level)
    (entry,) = report.layers
    assert "Sequential: another forward (the module has a forward of its own). Next: delete the module's" in message
    assert entry.count == 2 and entry.reasons[0].kind == "another forward"


def test_kernels_own_switch_is_named_with_its_remedy(interpreted):
    """kernels reads it at its import: one warning, and the same reason and step for every layer of the report."""
    code = """
        import warnings
        from pathlib import Path
        from kernels import get_local_kernel
        from transformers import LlamaConfig, LlamaForCausalLM

        kernel = get_local_kernel(Path("build").absolute())
        sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            report = kernel.apply(LlamaForCausalLM(LlamaConfig(**sizes)).eval())
        print([str(each.message) for each in warned if "lossless" in str(each.message)])
        print({(str(reason), reason.step) for entry in report.layers for reason in entry.reasons})
    """
    message, reasons = interpreted(code, DISABLE_KERNEL_MAPPING="1").stdout.splitlines()
    expected = "DISABLE_KERNEL_MAPPING is set", "unset it, and start Python anew"
    assert message == str(
        [f"lossless-kernels: apply replaced no layer of LlamaForCausalLM: {expected[0]}. Next: {expected[1]}"]
    )
    assert reasons == str({expected})


@pytest.mark.parametrize("replace", ["apply", "kernelize"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_model_of_unknown_formulas_alone_warns_once(kernel, monkeypatch, level, replace):
    """At its first call, which verifies: neither `apply` nor `kernelize` can know. The report has the reason and the step."""
    monkeypatch.setenv("LOSSLESS_PROOF", "on")

    class OddRMSNorm(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            scale = torch.rsqrt(1.5 * hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * (hidden_states * scale)

    model = torch.nn.Sequential(OddRMSNorm(64), OddRMSNorm(64)).to(DEVICE)
    x = torch.randn(16, 64, device=DEVICE)
    expected = model(x)
    mapping = kernel.kernel_mapping(devices=("cuda", "rocm", "cpu"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if replace == "apply":
            kernel.apply(model, level=level)
        else:
            if level == "decoder":
                kernel.name_layers(model)
            with use_kernel_mapping(mapping, inherit_mapping=False):
                kernelize(model, mode=Mode.INFERENCE)
        for _ in range(2):
            assert_bits_equal(model(x), expected)
    (message,) = [str(each.message) for each in warned if "lossless" in str(each.message)]
    assert "OddRMSNorm" in message and "none of the known formulas" in message
    (entry,) = kernel.replacement_report(model, verbose=False).layers
    assert (entry.count, entry.path, {reason.kind for reason in entry.reasons}) == (2, "original", {"another formula"})
    assert all("does" in reason.step for reason in entry.reasons)


def test_a_model_that_accelerate_has_dispatched(kernel):
    """As `from_pretrained(device_map=...)` does: hooks on every module, which stay."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = make()
    expected = logits(model)
    places = dict.fromkeys((f"model.{name}" for name, _ in model.model.named_children()), DEVICE)
    accelerate.dispatch_model(model, {**places, "lm_head": DEVICE}, force_hooks=True)
    before = state_of(model)
    assert "_hf_hook" in vars(model.model.norm)
    kernel.apply(model)
    assert model.model.norm._old_forward.__func__ is kernel.layers.LlamaRMSNorm.forward
    assert_bits_equal(logits(model), expected)
    kernel.restore(model)
    assert_unchanged(model, before)
    assert_bits_equal(logits(model), expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU of this test is not there, and kernels keeps its capability")
def test_a_model_that_is_split_over_a_gpu_and_a_cpu(kernel, module, monkeypatch):
    """The first layer says that it computes on a GPU, as accelerate's hook does. Layers that get CPU tensors compute their
    original operations."""
    monkeypatch.setattr(module("domain"), "_KERNEL_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    model = make().cpu()
    expected = model(tokens().cpu()).logits
    vars(model.model.layers[0])["_hf_hook"] = SimpleNamespace(execution_device="cuda:0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.apply(model)
        assert model.model.norm.forward.__func__ is kernel.layers.LlamaRMSNorm.forward
        assert_bits_equal(model(tokens().cpu()).logits, expected)
    kernel.restore(model)
    assert not ours(kernel, model)


def test_modules_of_torch_jit_stay(kernel, module):
    """Traced and scripted ones have no forward in their class. The layers beside them are replaced."""
    norm = modeling_llama.LlamaRMSNorm(64).to(DEVICE)
    x = torch.randn(3, 64, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(torch.nn.Sequential(torch.nn.SiLU(), modeling_llama.LlamaRMSNorm(64)).to(DEVICE), x)
        model = torch.nn.Sequential(traced, torch.jit.script(torch.nn.Linear(64, 64).to(DEVICE)), norm)
    expected = model(x)
    kernel.apply(model)
    assert list(module("report").replaced_modules(model)) == [norm]
    assert_bits_equal(model(x), expected)
    (entry,) = kernel.replacement_report(model, verbose=False).layers
    assert (entry.layer, entry.count) == ("LlamaRMSNorm", 1)
    kernel.restore(model)
    assert "forward" not in vars(norm)
    message, report = nothing_replaced(kernel, traced)
    assert "no layer that a kernel of this package takes" in message and not report.layers


def test_what_fails_on_the_way_leaves_the_originals(kernel, module, monkeypatch):
    model = make().train()
    before = state_of(model)

    def fail(model):
        raise RuntimeError("no loss")

    monkeypatch.setattr(module("loss"), "attach_loss", fail)
    with pytest.raises(RuntimeError, match="no loss"):
        kernel.apply(model)
    assert_unchanged(model, before)


def test_a_mapping_of_decoders_still_warns_without_names(kernel):
    """`apply` does not: it gives the names itself, and takes them back."""
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.apply(model)
    with pytest.warns(RuntimeWarning, match="unless name_layers\\(model\\) is called before kernelize"):
        kernel.kernel_mapping(level="decoder")


@pytest.mark.parametrize(
    "error, arguments, message",
    [
        (TypeError, {"model": "llama"}, "model: expected a torch.nn.Module, found str"),
        (
            TypeError,
            {"model": LlamaForCausalLM},
            "model: expected .*, found type LlamaForCausalLM, a class: make",
        ),
        (ValueError, {"level": "all"}, "level: expected one of layer, decoder, found 'all'"),
        (ValueError, {"level": None}, "level: expected one of layer, decoder, found None"),
        (TypeError, {"mode": "train"}, "mode: expected kernels.Mode.INFERENCE or TRAINING.*, found 'train'"),
        (
            ValueError,
            {"mode": Mode.FALLBACK},
            "mode: expected kernels.Mode.INFERENCE or TRAINING.*, found Mode.FALLBACK",
        ),
        (ValueError, {"mode": Mode.TORCH_COMPILE}, "mode: expected kernels.Mode.INFERENCE.*, found Mode.TORCH_COMPILE"),
        (TypeError, {"loss": "yes"}, "loss: expected True, False or None, found 'yes'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_named(kernel, error, arguments, message):
    with pytest.raises(error, match=message):
        kernel.apply(**{"model": torch.nn.Linear(2, 2), **arguments})


def test_models_that_cannot_be_replaced_are_named(kernel):
    model = make()
    for wrapped in (torch.compile(model), torch.nn.ModuleDict({"part": torch.compile(model)})):
        with pytest.raises(
            ValueError, match="model: expected a model that is not compiled, found .* compiled: apply, then"
        ):
            kernel.apply(wrapped)
    model.model.norm.compile()
    with pytest.raises(ValueError, match="found the module 'model.norm' compiled"):
        kernel.apply(model)
    whole, part, buffer = (make() for _ in range(3))
    whole.to("meta"), part.model.layers[1].mlp.to("meta"), buffer.model.rotary_emb.to("meta")
    for model, found in (
        (whole, "23 on meta, model.embed_tokens.weight first"),
        (part, "3 on meta, model.layers.1.mlp.gate_proj.weight first"),
        (buffer, "2 on meta, model.rotary_emb.inv_freq first"),
    ):
        with pytest.raises(ValueError, match=f"model: expected tensors on a device, found {found}: load the model"):
            kernel.apply(model)
        assert not ours(kernel, model)
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, found NoneType"):
        kernel.restore(None)


def test_the_version_is_that_of_the_build(kernel):
    import build_kernel

    general = build_kernel.tomllib.loads((build_kernel.ROOT / "build.toml").read_text())["general"]
    assert kernel.__version__ == str(general["version"])
