"""Classes that compute many rows in parts: autograd adds up the parts' gradients, in other bits than one sum over all rows.

They have the formula's bits for few rows, which are one part: no comparison tells them apart.
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


def of_256(x):
    return x.split(256, dim=-2)


def of_100_000(x):
    return x.split(100_000, dim=-2)


def token_by_token(x):
    return x.split(1, dim=-2) if x.shape[-2] > 1000 else [x]


def slices(x):
    return [x[..., first : first + 512, :] for first in range(0, x.shape[-2], 512)]


def halves_of_many(x):
    return x.chunk(2, dim=-2) if x.numel() > 1 << 24 else [x]


SPLITS = (of_256, of_100_000, token_by_token, slices, halves_of_many)


def joined(parts):
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


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

    def of_norm(eps_name):
        family = module("rms_norm_proof")
        return lambda owner, dtype: family.variant_of(owner, eps_name, dtype, dtype, CPU)

    def of_mlp(owner, dtype):
        return mlp.activation_of(owner, mlp.subject_of(nn.SiLU()), torch.ones(1, dtype=dtype))

    def of_gated(owner, dtype):
        return module("gated_rms_norm")._variant(owner, functions_of(owner), "silu", (dtype,) * 3, CPU)

    def of_layer_norm(owner, dtype):
        return module("ops.cohere_layer_norm").computes_formula(owner, dtype, dtype, CPU)

    return {
        rms_norm: of_norm("variance_epsilon"),
        torch_rms_norm: of_norm("eps"),
        gated_norm: of_gated,
        layer_norm: of_layer_norm,
        gated_mlp: of_mlp,
        packed_mlp: of_mlp,
    }


@pytest.mark.parametrize("make", [rms_norm, torch_rms_norm, gated_norm, layer_norm, gated_mlp, packed_mlp])
def test_classes_that_compute_parts_are_not_recognised(nothing_known, recognised, make, seed):
    dtype = random.Random(seed).choice((torch.float32, torch.bfloat16))
    assert recognised[make](make(whole), dtype), dtype
    for split in SPLITS:
        with pytest.warns(RuntimeWarning, match=r"tokens it adds \d+ gradients of a weight, the formula [12]"):
            assert not recognised[make](make(split), dtype), (split, dtype)
