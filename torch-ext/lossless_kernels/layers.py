"""The layers that `kernels.kernelize` swaps into a model.

Their `forward` is bound onto the module it replaces, so `type(self).forward` is the original one: it runs wherever the
kernel cannot, or has not proved to return the same bits. One class serves every `Mode`: what a call needs is decided
by `torch.is_grad_enabled()` and `requires_grad`.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_dynamo_compiling

from .core import proof
from .core.domain import is_autocast, is_checkpointed
from .decoder import attention, mlp
from .decoder import layer as decoder
from .decoder import replay as decoder_call
from .ops import rotary_tables as rotary_embedding
from .ops.activation import FAST_GELU, GELU, GELU_TANH, NEW_GELU, QUICK_GELU, SILU
from .ops.activation import replacement as activation_replacement
from .ops.gated_activation import replacement as product_replacement
from .ops.rms_norm.formulas import EAGER, LLAMA, ONE_PLUS_WEIGHT
from .ops.rms_norm.function import replacement as rms_norm_replacement
from .ops.rms_norm.gated import eager as gated_eager
from .ops.rms_norm.gated import replacement as gated_replacement
from .ops.rotary import PLAIN as ROTARY
from .ops.rotary import replacement as rotary_replacement

# `torch.jit.script` compiles none of the forwards here but has them called. A module that is scripted by itself is of this class.
_SCRIPTED = torch.jit.RecursiveScriptModule


def _own_weight(state: dict):
    """The weight in the `__dict__` of a module, None without.

    Whatever computes one when it is asked for, as a parametrization does, is asked by the original forward alone.
    """
    weight = state["_parameters"].get("weight")
    if weight is None:
        weight = state["_buffers"].get("weight")
    return state.get("weight") if weight is None else weight


def _scripted(module, *arguments):
    """What the original forward returns, for the class of the module before it was scripted."""
    original = module._concrete_type.py_class

    def attribute(_, name):
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"{original.__name__}.{name}: torch.jit.script leaves it out of a kernelized layer that is scripted by itself; "
                "script the model around it, or kernelize with an empty mapping before"
            ) from None

    view = type(original.__name__, (original,), {"__getattr__": attribute})
    return original.forward(object.__new__(view), *arguments)


class LlamaRMSNorm(nn.Module):
    """RMSNorm with `weight` and `variance_epsilon`; hidden_states: `[..., hidden_size]`.

    With `h = hidden_states.to(float32)` and `n = h * rsqrt(mean(h**2, -1) + variance_epsilon)` it replaces transformers' `LlamaRMSNorm`,
    `weight * n.to(dtype)`, and the classes that compute `(weight * n).to(dtype)`, as Olmo2's and NemotronH's do.
    """

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        owner = type(self)
        if owner is _SCRIPTED:
            return _scripted(self, hidden_states)
        state = self.__dict__
        weight = state["_parameters"].get("weight")
        if weight is None:
            weight = _own_weight(state)
        try:
            eps = self.variance_epsilon
        except AttributeError:
            eps = None
        out = rms_norm_replacement(hidden_states, weight, eps, owner, state=state)
        if out is not None:
            return out
        # Somebody may have made a module of this class itself.
        return (EAGER[LLAMA] if isinstance(self, LlamaRMSNorm) else owner).forward(self, hidden_states)


class RMSNormZeroCentered(nn.Module):
    """RMSNorm with `weight` around zero and `eps`: `((1 + weight.float()) * n).to(dtype)`, n as in `LlamaRMSNorm`.

    Replaces transformers' `Qwen3_5RMSNorm` and, asked to, Gemma's. A layer without a weight (`weight` None or missing) is
    replaced where it returns `n.to(dtype)`.
    """

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owner = type(self)
        if owner is _SCRIPTED:
            return _scripted(self, x)
        state = self.__dict__
        out = rms_norm_replacement(x, _own_weight(state), getattr(self, "eps", None), owner, "eps", state=state)
        if out is not None:
            return out
        if isinstance(self, RMSNormZeroCentered):
            return ONE_PLUS_WEIGHT.eager(x, self.weight, self.eps)
        return owner.forward(self, x)


class TorchRMSNorm(nn.Module):
    """RMSNorm as `F.rms_norm` computes it, with `weight` (or None), `eps` (or None) and `normalized_shape`.

    Asked to, it replaces `torch.nn.RMSNorm` where that normalises the last dimension alone. ATen's own operator computes the
    gradients.
    """

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owner = type(self)
        if owner is _SCRIPTED:
            return _scripted(self, x)
        state = self.__dict__
        weight = _own_weight(state)
        if _fused(x, weight, state.get("normalized_shape")):
            eps = getattr(self, "eps", None)
            if eps is None and owner.forward is nn.RMSNorm.forward:
                eps = _TORCH_EPS
            out = rms_norm_replacement(x, weight, eps, owner, "eps", fused=True, state=state)
            if out is not None:
                return out
        elif not is_dynamo_compiling():
            proof.outside(owner.forward, "autocast, or a shape to normalise that is not the last dimension")
        if isinstance(self, TorchRMSNorm):
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return owner.forward(self, x)


# PyTorch's default, for 16 bits too. One object: calls are recognised by it.
_TORCH_EPS = torch.finfo(torch.float32).eps


def _fused(x, weight, normalized_shape) -> bool:
    """Whether `F.rms_norm` normalises the last dimension alone, in these very dtypes.

    Autocast leaves it alone in torch 2.11 and computes it in fp32 in 2.13. Compiled, rows must be in the order of eager's output.
    """
    if not isinstance(normalized_shape, tuple) or len(normalized_shape) != 1:
        return False
    if not isinstance(x, torch.Tensor) or not x.dim():
        return False
    if normalized_shape[0] != x.shape[-1] or (is_dynamo_compiling() and not x.is_contiguous()):
        return False
    fp32 = x.dtype == torch.float32 and (weight is None or weight.dtype == torch.float32)
    return fp32 or not is_autocast(x.device)


class RMSNormGated(nn.Module):
    """RMSNorm with `weight` and `variance_epsilon`, times `activation(gate)` in fp32, rounded to the dtype of hidden_states.

    Replaces transformers' `Qwen3NextRMSNormGated` and `KimiLinearRMSNormGated` and those that compute the same; both
    tensors are `[..., hidden_size]`.
    """

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, hidden_states: torch.Tensor, gate: Optional[torch.Tensor] = None) -> torch.Tensor:
        owner = type(self)
        if owner is _SCRIPTED:
            return _scripted(self, hidden_states, gate)
        if isinstance(self, RMSNormGated):
            return gated_eager(LLAMA, self.activation, hidden_states, gate, self.weight, self.variance_epsilon)
        state = self.__dict__
        eps, activation = getattr(self, "variance_epsilon", None), getattr(self, "activation", None)
        out = gated_replacement(hidden_states, gate, _own_weight(state), eps, activation, owner, state)
        return owner.forward(self, hidden_states, gate) if out is None else out


class SiLUActivation(nn.Module):
    """`input / (1 + exp(-input))`, any shape. Replaces transformers' `SiLUActivation` and, asked to, `torch.nn.SiLU`."""

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        original = type(self).forward
        inplace = self.__dict__.get("inplace")
        if not inplace:
            subject = original if inplace is None else (original, "inplace", inplace)
            out = activation_replacement(input, subject, SILU)
            if out is not None:
                return out
        elif not is_dynamo_compiling():
            proof.outside(original, "inplace is set")
        return (SILU.forward if isinstance(self, SiLUActivation) else original)(self, input)


def _gelu(self, input, activation):
    """The output of `activation` around `self.act` (transformers) or `self.approximate` (torch.nn.GELU), or None."""
    original = type(self).forward
    act = self.__dict__.get("act")
    if act is not None:
        if mlp.is_function(act):
            return activation_replacement(input, (original, "act", act), activation)
        proof.outside(original, f"act is {getattr(act, '__qualname__', act)}")
        return None
    approximate = self.__dict__.get("approximate")
    if approximate is not None:
        activation = GELU_TANH if approximate == "tanh" else GELU
        return activation_replacement(input, (original, "approximate", approximate), activation)
    return activation_replacement(input, original, activation)


class GELUActivation(nn.Module):
    """`0.5 * input * (1 + erf(input / sqrt(2)))`, any shape. Replaces transformers' `GELUActivation` around `F.gelu`.

    Asked to, it replaces `torch.nn.GELU` too, with either value of `approximate`.
    """

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        out = _gelu(self, input, GELU)
        if out is not None:
            return out
        return (GELU.forward if isinstance(self, GELUActivation) else type(self).forward)(self, input)


class GELUTanh(nn.Module):
    """`F.gelu(input, approximate="tanh")`, any shape. Replaces transformers' `GELUTanh` around that function."""

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        out = _gelu(self, input, GELU_TANH)
        if out is not None:
            return out
        return (GELU_TANH.forward if isinstance(self, GELUTanh) else type(self).forward)(self, input)


class NewGELUActivation(nn.Module):
    """`0.5 * input * (1 + tanh(sqrt(2 / pi) * (input + 0.044715 * input**3)))`, operation by operation, any shape.

    Replaces transformers' `NewGELUActivation`.
    """

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        original = type(self).forward
        out = activation_replacement(input, original, NEW_GELU)
        if out is not None:
            return out
        return (NEW_GELU.forward if isinstance(self, NewGELUActivation) else original)(self, input)


class FastGELUActivation(nn.Module):
    """`0.5 * input * (1 + tanh(0.7978845608 * input * (1 + 0.044715 * input * input)))`, operation by operation.

    Any shape. Replaces transformers' `FastGELUActivation`.
    """

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        original = type(self).forward
        out = activation_replacement(input, original, FAST_GELU)
        if out is not None:
            return out
        return (FAST_GELU.forward if isinstance(self, FastGELUActivation) else original)(self, input)


class QuickGELUActivation(nn.Module):
    """`input * sigmoid(1.702 * input)`, operation by operation, any shape. Replaces transformers' `QuickGELUActivation`."""

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        original = type(self).forward
        out = activation_replacement(input, original, QUICK_GELU)
        if out is not None:
            return out
        return (QUICK_GELU.forward if isinstance(self, QuickGELUActivation) else original)(self, input)


def _gated_mlp(self, x):
    modules = self._modules
    gate_proj, up_proj, down_proj = modules.get("gate_proj"), modules.get("up_proj"), modules.get("down_proj")
    act_fn = modules.get("act_fn")
    subject, hooked = mlp.subject_of(act_fn), False
    if subject is None and not is_dynamo_compiling() and is_checkpointed():
        subject = mlp.subject_of(act_fn, whatever_hooks=True)
        hooked = subject is not None
    activation = None if subject is None else mlp.activation_of(type(self), subject, x, self.__dict__)
    if activation is None or gate_proj is None or up_proj is None or down_proj is None:
        if isinstance(self, (LlamaMLP, GeGLUMLP)):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return type(self).forward(self, x)
    if hooked:
        return down_proj(mlp.hooked_product(act_fn, gate_proj(x), lambda: up_proj(x), subject, activation))
    gate, up = attention.project(gate_proj, x), attention.project(up_proj, x)
    product = product_replacement(gate, up, subject, activation)
    if product is None:
        product = act_fn(gate) * up
    del gate, up  # Eager, too, has none of them any more when it projects.
    return attention.project(down_proj, product)


class LlamaMLP(nn.Module):
    """`down_proj(act_fn(gate_proj(x)) * up_proj(x))`, the product by one kernel; x: `[..., hidden_size]`.

    Replaces transformers' `LlamaMLP` and those that compute the same with SiLU or GELU, given a layer name. The projections
    are called as the modules they are, whatever somebody made of them.
    """

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, x)
        return _gated_mlp(self, x)


class GeGLUMLP(nn.Module):
    """`LlamaMLP` for the layer name "GeGLUMLP": which activation it is decides the module."""

    has_backward = True
    can_torch_compile = True

    @torch.jit.ignore
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, x)
        return _gated_mlp(self, x)


class LlamaDecoderLayer(nn.Module):
    """A pre-norm decoder layer: `h = x + self_attn(input_layernorm(x))`, then `h + mlp(post_attention_layernorm(h))`.

    hidden_states: `[batch, tokens, hidden_size]`. The first sum and the norm after it come from one kernel. Norm, attention
    and MLP are called as the modules they are, with whatever forward, hooks, cache and attention function they have.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.LongTensor] = None,
        past_key_values: Optional[object] = None,
        use_cache: Optional[bool] = False,
        position_embeddings: Optional[tuple] = None,
        **kwargs,
    ) -> torch.Tensor:
        owner = type(self)
        arguments = {"position_ids": position_ids, "use_cache": use_cache, **kwargs}
        if not is_dynamo_compiling():
            out = decoder_call.again(
                self, hidden_states, position_embeddings, attention_mask, past_key_values, arguments
            )
            if out is not None:
                return out
        arguments.update(
            attention_mask=attention_mask, past_key_values=past_key_values, position_embeddings=position_embeddings
        )
        if decoder.admits(owner, hidden_states, self.__dict__):
            out = decoder.fused_forward(self, hidden_states, arguments)
            if not is_dynamo_compiling():
                decoder_call.note(self, hidden_states, position_embeddings)
            return out
        if isinstance(self, LlamaDecoderLayer):
            return decoder.forward(self, hidden_states, arguments)
        return owner.forward(self, hidden_states, **arguments)


class LlamaRotaryEmbedding(nn.Module):
    """cos and sin of `position_ids * inv_freq`, times `attention_scaling`: `[batch, tokens, head_dim]` of the dtype of x.

    Replaces transformers' `LlamaRotaryEmbedding` and those that compute the same, which `name_layers` gives a name. One whose
    frequencies depend on the length ("dynamic", "longrope") keeps its own forward.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        owner = type(self)
        if isinstance(self, LlamaRotaryEmbedding):
            return rotary_embedding.LLAMA.eager(x, position_ids, self.inv_freq, self.attention_scaling)
        out = rotary_embedding.replacement(self, x, position_ids, owner)
        return owner.forward(self, x, position_ids) if out is None else out


class RotaryPosEmb(nn.Module):
    """`x * cos + rotate_half(x) * sin` for x = q and x = k: `[batch, heads, tokens, head_dim]`, any strides.

    Replaces transformers' `apply_rotary_pos_emb`, of which kernels makes one module for each model file: for all models of
    the process at once. Functions that compute something else, as GPT-OSS's does, keep running themselves.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        original = type(self).forward
        if isinstance(self, RotaryPosEmb):
            return ROTARY.eager(q, k, cos, sin, unsqueeze_dim)
        out = rotary_replacement(q, k, cos, sin, unsqueeze_dim, original)
        return original(self, q, k, cos, sin, unsqueeze_dim) if out is None else out
