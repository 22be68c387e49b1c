"""`attach_loss`: transformers' models compute their loss by `causal_lm_loss`."""

import aten_model
import pytest
import torch
from bits import assert_bits_equal
from interpreter import multiply_add
from test_cross_entropy import numpy_exp, numpy_log
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
from transformers.loss.loss_utils import ForCausalLMLoss

# In Triton's interpreter the proof refuses the kernels, since a CPU adds in another order than CUDA, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:lossless-kernels:RuntimeWarning")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 200,
}


def make(seed, model_class=LlamaForCausalLM):
    torch.manual_seed(seed)
    return model_class(LlamaConfig(**SIZES))


def losses_of(model, seed, steps=20):
    """Of so many training steps, and the weights after them."""
    torch.manual_seed(seed)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(steps):
        tokens = torch.randint(SIZES["vocab_size"], (2, 9))
        labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.2, -100)
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return *losses, *(parameter.detach() for parameter in model.parameters())


def test_training_is_the_same(kernel, monkeypatch, seed):
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    expected = losses_of(make(seed), seed)
    model = make(seed)
    assert kernel.attach_loss(model) == [""]
    assert model.loss_function is kernel.causal_lm_loss
    for found, original in zip(losses_of(model, seed), expected, strict=True):
        assert_bits_equal(found, original)


class Transcribed(torch.autograd.Function):
    """The mean cross-entropy in CUDA's arithmetic, with the exponential, logarithm and FMA of Triton's interpreter."""

    @staticmethod
    def forward(ctx, logits, target):
        maximum, total = aten_model.softmax_statistics(logits, 0, numpy_exp)
        logp = (logits - maximum[:, None]) - numpy_log(total)[:, None]
        loss, ctx.count = torch.ops.aten.nll_loss_forward(logp, target, None, 1, -100)
        ctx.save_for_backward(logp, target)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        return aten_model.cross_entropy_backward(
            *ctx.saved_tensors, -100, d_loss, ctx.count, numpy_exp, multiply_add
        ), None


def transcribed_loss(logits, labels, vocab_size, **_):
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return Transcribed.apply(logits.reshape(-1, vocab_size), target)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU here, not interpreted")
def test_training_in_the_interpreter_is_that_of_the_transcription(kernel, nothing_known, proof_off, seed):
    expected_model, model = make(seed), make(seed)
    expected_model.loss_function = transcribed_loss
    kernel.attach_loss(model)
    found, expected = losses_of(model, seed), losses_of(expected_model, seed)
    assert len({float(loss) for loss in found[:20]}) > 10  # They change from step to step.
    for ours, theirs in zip(found, expected, strict=True):
        assert_bits_equal(ours, theirs)


def test_the_report_shows_the_loss(kernel, nothing_known, monkeypatch, seed):
    monkeypatch.setenv("LOSSLESS_PROOF", "on")
    model = make(seed)
    assert not [e for e in kernel.replacement_report(model, verbose=False).layers if e.layer == "loss_function"]
    kernel.attach_loss(model)
    tokens = torch.randint(200, (1, 5))
    model(tokens, labels=tokens).loss.backward()
    (entry,) = [e for e in kernel.replacement_report(model, verbose=False).layers if e.layer == "loss_function"]
    assert (entry.count, entry.path) == (1, "original") and entry.reasons, entry


def test_models_inside_of_others_and_a_second_call(kernel, seed):
    wrapper = torch.nn.ModuleDict({"student": make(seed), "teacher": make(seed)})
    assert kernel.attach_loss(wrapper) == ["student", "teacher"] == kernel.attach_loss(wrapper)
    wrapper["student"].loss_function = ForCausalLMLoss
    assert wrapper["student"].loss_function is ForCausalLMLoss
    assert wrapper["teacher"].state_dict().keys() == make(seed).state_dict().keys()


def test_what_has_another_loss_is_left_alone(kernel, seed):
    def smoothed(logits, labels, vocab_size, **kwargs):
        return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), label_smoothing=0.1)

    model = make(seed)
    model.loss_function = smoothed
    with pytest.raises(ValueError, match=r"with the loss ForCausalLMLoss, found the loss functions .*smoothed"):
        kernel.attach_loss(model)
    assert model.loss_function is smoothed
    for other in (make(seed, LlamaModel), make(seed, LlamaForSequenceClassification), torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="model: expected a causal language model"):
            kernel.attach_loss(other)
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, found type"):
        kernel.attach_loss(LlamaForCausalLM)


@pytest.mark.parametrize("change", ["smoothing", "unshifted", "mean of all", "parts of many"])
def test_a_function_of_the_same_name_is_not_taken_for_it(kernel, seed, change):
    """Another version of transformers may compute something else by this name."""

    def another(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
        if change == "unshifted" and shift_labels is None:
            shift_labels = labels
        if change == "parts of many" and labels.numel() > 512:
            parts = zip(logits.split(512, dim=-2), labels.split(512, dim=-1))
            return sum(ForCausalLMLoss(part, of_part, vocab_size) for part, of_part in parts)
        loss = ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        if change == "smoothing":
            return loss + 1e-7 * logits.float().logsumexp(-1).mean()
        return loss * 1.0000001 if change == "mean of all" else loss

    another.__module__, another.__name__ = ForCausalLMLoss.__module__, ForCausalLMLoss.__name__
    model = make(seed)
    model.loss_function = another
    with pytest.raises(ValueError):
        kernel.attach_loss(model)
    assert model.loss_function is another


def test_nothing_carries_the_name_of_the_loss_for_kernelize(seed):
    """Why this package has no layer for it (docs/losses.md): no module of a model, nor the function, has the layer name."""
    model = make(seed)
    assert not hasattr(ForCausalLMLoss, "kernel_layer_name") and not hasattr(ForCausalLMLoss, "use_kernel_layer")
    assert "ForCausalLMLoss" not in {getattr(type(module), "kernel_layer_name", None) for module in model.modules()}

    class Loss(torch.nn.Module):
        def forward(self, logits, labels, vocab_size, **kwargs):
            return ForCausalLMLoss(logits, labels, vocab_size, **kwargs)

    model.loss_function = Loss()
    assert model.loss_function is ForCausalLMLoss
