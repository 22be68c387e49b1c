"""Classes that compute many rows in parts, whose gradients autograd adds up in other bits than one sum over all rows.

The rows of a comparison are one part: it does not tell such a class from its formula.
"""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

CPU = torch.device("cpu")


def whole(x):
    return [x]


def parts_of(rows, dim=-2):
    """The split of a tensor with more rows than any comparison has."""
    return lambda x: x.split(rows, dim) if x.shape[dim] > max(rows, 2048) else [x]


def slices(x):
    return [x[..., first : first + 4096, :] for first in range(0, x.shape[-2], 4096)] if x.shape[-2] > 4096 else [x]


def token_by_token(x):
    return x.split(1, dim=-2) if x.shape[-2] > 600 else [x]


def halves_of_many(x):
    return x.chunk(2, dim=-2) if x.numel() > 1 << 31 else [x]


SPLITS = {
    "256 of the last dimension": parts_of(256),
    "100,000 of the last dimension": parts_of(100_000),
    "4096 of the first dimension": parts_of(4096, 0),
    "halves of many": halves_of_many,
    "slices": slices,
}


def joined(parts):
    if len(parts) == 1:
        return parts[0]
    # Where the first dimension was split, the others are equal.
    return torch.cat(parts, dim=0 if parts[0].shape[0] == 4096 else -2)


def rms_norm(split):
    def forward(self, hidden_states):
        found = []
        for part in split(hidden_states):
            h = part.to(torch.float32)
            n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            found.append(self.weight * n.to(part.dtype))
        return joined(found)

    return type("Norm", (LlamaRMSNorm,), {"forward": forward})


def torch_rms_norm(split):
    def forward(self, x):
        found = []
        for part in split(x):
            found.append(functional.rms_norm(part, self.normalized_shape, self.weight, self.eps))
        return joined(found)

    return type("Norm", (nn.RMSNorm,), {"forward": forward})


def gated_norm(split):
    def forward(self, hidden_states, gate=None):
        found = []
        for part, of_gate in zip(split(hidden_states), split(gate)):
            h = part.to(torch.float32)
            n = self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(part.dtype)
            found.append((n * functional.silu(of_gate.to(torch.float32))).to(part.dtype))
        return joined(found)

    return type("Gated", (nn.Module,), {"forward": forward})


def layer_norm(split):
    def forward(self, hidden_states):
        found = []
        for part in split(hidden_states):
            h = part.to(torch.float32)
            mean = h.mean(-1, keepdim=True)
            variance = (h - mean).pow(2).mean(-1, keepdim=True)
            h = (h - mean) * torch.rsqrt(variance + self.variance_epsilon)
            found.append((self.weight.to(torch.float32) * h).to(part.dtype))
        return joined(found)

    return type("Norm", (CohereLayerNorm,), {"forward": forward})


def without_weight(split):
    def forward(self, x):
        found = []
        for part in split(x):
            h = part.to(torch.float32)
            found.append((h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(part.dtype))
        return joined(found)

    return type("Norm", (nn.Module,), {"forward": forward})


def statistics_in_parts(split):
    """The weight's gradient is one sum, but a part of few rows is summed in another order."""

    def forward(self, hidden_states):
        h = hidden_states.to(torch.float32)
        rstd = []
        for part in split(h):
            rstd.append(torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
        return self.weight * (h * joined(rstd)).to(hidden_states.dtype)

    return type("Norm", (LlamaRMSNorm,), {"forward": forward})


def gated_mlp(split):
    def forward(self, x):
        found = []
        for part in split(x):
            found.append(self.down_proj(self.act_fn(self.gate_proj(part)) * self.up_proj(part)))
        return joined(found)

    return type("MLP", (LlamaMLP,), {"forward": forward})


def packed_mlp(split):
    def forward(self, hidden_states):
        found = []
        for part in split(hidden_states):
            gate, up = self.gate_up_proj(part).chunk(2, dim=-1)
            found.append(self.down_proj(up * self.activation_fn(gate)))
        return joined(found)

    return type("MLP", (Phi3MLP,), {"forward": forward})


@pytest.fixture
def recognised(module):
    """Class -> whether it has a formula of a kernel, for a dtype."""
    functions_of, mlp = module("inspection").functions_of, module("mlp")

    def of_norm(eps_name, weighted=True):
        family = module("rms_norm_proof")
        return lambda owner, dtype: family.variant_of(owner, eps_name, dtype, dtype if weighted else None, CPU)

    def of_mlp(owner, dtype):
        return mlp.activation_of(owner, mlp.subject_of(nn.SiLU()), torch.ones(1, dtype=dtype))

    def of_gated(owner, dtype):
        return module("gated_rms_norm")._variant(owner, functions_of(owner), "silu", (dtype,) * 3, CPU)

    def of_layer_norm(owner, dtype):
        return module("ops.cohere_layer_norm").computes_formula(owner, dtype, dtype, CPU)

    return {
        rms_norm: of_norm("variance_epsilon"),
        torch_rms_norm: of_norm("eps"),
        without_weight: of_norm("eps", weighted=False),
        statistics_in_parts: of_norm("variance_epsilon"),
        gated_norm: of_gated,
        layer_norm: of_layer_norm,
        gated_mlp: of_mlp,
        packed_mlp: of_mlp,
    }


NORMS = rms_norm, torch_rms_norm, without_weight, statistics_in_parts, gated_norm, layer_norm


@pytest.mark.parametrize("make", [*NORMS, gated_mlp, packed_mlp])
def test_classes_that_compute_parts_are_not_recognised(nothing_known, recognised, monkeypatch, module, make, seed):
    dtype = random.Random(seed).choice((torch.float32, torch.bfloat16))
    assert recognised[make](make(whole), dtype), dtype
    for name, split in SPLITS.items():
        with pytest.warns(RuntimeWarning, match=r"it computes \[.*\] rows in parts, whose gradients autograd adds up"):
            assert not recognised[make](make(split), dtype), (name, dtype)
    # Comparisons alone let them pass.
    monkeypatch.setattr(module("proof"), "refuse_parts", lambda *_: None)
    for name, split in SPLITS.items():
        assert recognised[make](make(split), dtype), (name, dtype)


def test_a_split_by_tokens_takes_no_minutes(nothing_known, recognised):
    with pytest.warns(RuntimeWarning, match=r"it computes \[1024\] rows in parts"):
        assert not recognised[rms_norm](rms_norm(token_by_token), torch.bfloat16)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()


def of_a_function(self, hidden_states):
    h = hidden_states.to(torch.float32)
    n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return Doubled.apply(self.weight) * n.to(hidden_states.dtype)


def of_its_numbers(self, hidden_states):
    h = hidden_states.to(torch.float32)
    if h.isinf().all():
        return hidden_states
    n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return self.weight * n.to(hidden_states.dtype)


REASONS = {of_a_function: r"a torch\.autograd\.Function", of_its_numbers: "does not run in tensors without memory"}


@pytest.mark.parametrize("forward", REASONS, ids=lambda each: each.__name__)
def test_what_does_not_show_its_parts_is_not_recognised(nothing_known, recognised, forward):
    owner = type("Norm", (LlamaRMSNorm,), {"forward": forward})
    with pytest.warns(RuntimeWarning, match=REASONS[forward]):
        assert not recognised[rms_norm](owner, torch.float32)


def test_a_class_of_matrices_alone_is_recognised(nothing_known, recognised):
    def forward(self, x):
        tokens, _ = x.shape
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    assert recognised[gated_mlp](type("MLP", (LlamaMLP,), {"forward": forward}), torch.bfloat16)
