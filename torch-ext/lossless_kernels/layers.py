"""The layers that `kernels.kernelize` swaps into a model.

`kernelize` binds `forward` onto the module, so `type(self).forward` is the original: it runs wherever no kernel fits or
verification fails. One class serves every `Mode`: each call reads `torch.is_grad_enabled()` and `requires_grad`.
"""

import functools
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_dynamo_compiling

from .core import proof
from .core.domain import is_autocast, is_checkpointed
from .core.inspection import checkpoint_wrapper, is_checkpoint_wrapper, name_of_cache
from .core.torch_internals import MISSING, class_before_script
from .decoder import recompute, replay
from .decoder.attention import project
from .decoder.layer import formula_of as decoder_formula_of
from .decoder.layer import forward as decoder_forward
from .decoder.layer import fused_forward as fused_decoder_forward
from .decoder.mlp import activation_of, hooked_product, is_function, packed_formula, subject_of
from .ops.activation import FAST_GELU, GELU, GELU_TANH, NEW_GELU, QUICK_GELU, SILU
from .ops.activation import replacement as activation_replacement
from .ops.cohere_layer_norm import eager as cohere_layer_norm
from .ops.cohere_layer_norm import replacement as cohere_layer_norm_replacement
from .ops.complex_rotary import both_replaced as complex_rotary_replacement
from .ops.complex_rotary import eager as complex_rotary
from .ops.gated_activation import product as product_again
from .ops.gated_activation import replacement as product_replacement
from .ops.group_norm import layer_replacement as group_norm_replacement
from .ops.layer_norm import layer_replacement as layer_norm_replacement
from .ops.rms_norm.formulas import EAGER, LLAMA, ONE_PLUS_WEIGHT
from .ops.rms_norm.function import replacement as rms_norm_replacement
from .ops.rms_norm.gated import eager as gated_eager
from .ops.rms_norm.gated import replacement as gated_replacement
from .ops.rotary import FP32 as VISION_ROTARY
from .ops.rotary import PLAIN as ROTARY
from .ops.rotary import replacement as rotary_replacement
from .ops.rotary_tables import TABLES
from .ops.rotary_tables import replacement as rotary_tables_replacement
from .ops.softmax_callers import router, with_our_softmax

# `torch.jit.script` calls the forwards here without compiling them. A module scripted by itself has this class.
_SCRIPTED = torch.jit.RecursiveScriptModule


def _own_weight(state: dict):
    """The weight in a module's `__dict__`, or None. Only the original forward evaluates a parametrized weight."""
    weight = state["_parameters"].get("weight")
    if weight is None:
        weight = state["_buffers"].get("weight")
    return state.get("weight") if weight is None else weight


def _original(self, layer: type, *arguments, **named):
    """The original forward; the formula of `layer` where the class is used as a layer of its own."""
    forward = _FORMULAS[layer] if isinstance(self, layer) else type(self).forward
    return forward(self, *arguments, **named)


def _scripted(module, *arguments):
    """Runs the original forward of the class that the module had before it was scripted."""
    original = class_before_script(module)

    def attribute(_, name):
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"{original.__name__}.{name}: torch.jit.script drops it from a kernelized layer that is scripted by itself; "
                "script the model around the layer, or kernelize with an empty mapping first"
            ) from None

    view = type(original.__name__, (original,), {"__getattr__": attribute})
    return original.forward(object.__new__(view), *arguments)


class _Layer(nn.Module):
    """A layer that `kernels` may use in training and under torch.compile."""

    has_backward = True
    can_torch_compile = True


class LlamaRMSNorm(_Layer):
    """RMSNorm with `weight` and `variance_epsilon`; hidden_states: `[..., hidden_size]`.

    With `h = hidden_states.to(float32)` and `n = h * rsqrt(mean(h**2, -1) + variance_epsilon)` it replaces transformers'
    `LlamaRMSNorm`, `weight * n.to(dtype)`, and `(weight * n).to(dtype)`, as in Olmo2 and NemotronH.
    """

    @torch.jit.ignore
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        owner = type(self)
        if owner is _SCRIPTED:
            return _scripted(self, hidden_states)
        state = self.__dict__
        weight = self._parameters.get("weight")
        if weight is None:
            weight = _own_weight(state)
        try:
            eps = self.variance_epsilon
        except AttributeError:
            eps = None
        out = rms_norm_replacement(hidden_states, weight, eps, owner, state=state)
        return _original(self, LlamaRMSNorm, hidden_states) if out is None else out


class RMSNormZeroCentered(_Layer):
    """RMSNorm with `weight` around zero and `eps`: `((1 + weight.float()) * n).to(dtype)`, n as in `LlamaRMSNorm`.

    Replaces transformers' `Qwen3_5RMSNorm`, and Gemma's given the layer name. A layer without a weight (None or
    missing) is replaced if it returns `n.to(dtype)`.
    """

    @torch.jit.ignore
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owner = type(self)
        if owner is _SCRIPTED:
            return _scripted(self, x)
        state = self.__dict__
        out = rms_norm_replacement(x, _own_weight(state), getattr(self, "eps", None), owner, "eps", state=state)
        return _original(self, RMSNormZeroCentered, x) if out is None else out


class TorchRMSNorm(_Layer):
    """RMSNorm as `F.rms_norm` computes it, with `weight` (or None), `eps` (or None) and `normalized_shape`.

    Given the layer name, it replaces `torch.nn.RMSNorm` if that normalises the last dimension alone. ATen's own operator
    computes the gradient of the weight of more than 65,536 rows.
    """

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
            last = isinstance(x, torch.Tensor) and state.get("normalized_shape") == tuple(x.shape[-1:])
            reason = "autocast, which casts to fp32" if last else "normalized_shape is not the last dimension"
            proof.record_refusal(owner.forward, reason)
        return _original(self, TorchRMSNorm, x)


# PyTorch's default, for 16 bits too. It is one object since recorded calls compare eps by identity.
_TORCH_EPS = torch.finfo(torch.float32).eps


def _fused(x, weight, normalized_shape) -> bool:
    """Whether `F.rms_norm` normalises the last dimension alone and without casts.

    Autocast ignores it in torch 2.11 and casts to fp32 in 2.13. Under torch.compile rows must have eager's order.
    """
    if not isinstance(normalized_shape, tuple) or len(normalized_shape) != 1:
        return False
    if not isinstance(x, torch.Tensor) or not x.dim():
        return False
    if normalized_shape[0] != x.shape[-1] or (is_dynamo_compiling() and not x.is_contiguous()):
        return False
    fp32 = x.dtype == torch.float32 and (weight is None or weight.dtype == torch.float32)
    return fp32 or not is_autocast(x.device)


class TorchLayerNorm(_Layer):
    """LayerNorm as `F.layer_norm` computes it, with `normalized_shape`, `weight` and `bias` (or None) and `eps`.

    Given the layer name, it replaces `torch.nn.LayerNorm`. ATen's own operator computes the gradients of weight and bias of
    more than 65,536 rows. A layer with a bias and no weight keeps its forward.
    """

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        out = layer_norm_replacement(self, input)
        return _original(self, TorchLayerNorm, input) if out is None else out


class TorchGroupNorm(_Layer):
    """GroupNorm as `F.group_norm` computes it, with `num_groups`, `weight` and `bias` (or None) and `eps`.

    Given the layer name, it replaces `torch.nn.GroupNorm`. Where a channel has one position, ATen's own operator computes
    the gradients. A layer with a bias and no weight keeps its forward.
    """

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        out = group_norm_replacement(self, input)
        return _original(self, TorchGroupNorm, input) if out is None else out


class CohereLayerNorm(_Layer):
    """LayerNorm with `weight`, `[hidden_size]` or `[heads, head_dim]`, and `variance_epsilon`, composed of operations.

    `(weight.float() * ((h - mean) * rsqrt(mean((h - mean)**2) + variance_epsilon))).to(dtype)`, `h = hidden_states.float()`.
    Replaces transformers' `CohereLayerNorm` and classes that compute the same, named by `name_layers`.
    """

    @torch.jit.ignore
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        owner = type(self)
        if owner is _SCRIPTED:
            return _scripted(self, hidden_states)
        state = self.__dict__
        eps = getattr(self, "variance_epsilon", None)
        out = cohere_layer_norm_replacement(hidden_states, _own_weight(state), eps, owner, state)
        return _original(self, CohereLayerNorm, hidden_states) if out is None else out


class RMSNormGated(_Layer):
    """RMSNorm with `weight` and `variance_epsilon`, times `activation(gate)` in fp32, cast to the dtype of hidden_states.

    Both tensors are `[..., hidden_size]`. Replaces transformers' `Qwen3NextRMSNormGated`, `KimiLinearRMSNormGated` and
    classes that compute the same.
    """

    @torch.jit.ignore
    def forward(self, hidden_states: torch.Tensor, gate: Optional[torch.Tensor] = None) -> torch.Tensor:
        owner = type(self)
        if owner is _SCRIPTED:
            return _scripted(self, hidden_states, gate)
        if isinstance(self, RMSNormGated):
            return _original(self, RMSNormGated, hidden_states, gate)
        state = self.__dict__
        eps, activation = getattr(self, "variance_epsilon", None), getattr(self, "activation", None)
        out = gated_replacement(hidden_states, gate, _own_weight(state), eps, activation, owner, state)
        return owner.forward(self, hidden_states, gate) if out is None else out


class SiLUActivation(_Layer):
    """`input / (1 + exp(-input))`, any shape.

    Replaces transformers' `SiLUActivation`, and `torch.nn.SiLU` given the layer name.
    """

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
            proof.record_refusal(original, "inplace is set")
        return _original(self, SiLUActivation, input)


def _gelu(self, input, layer, activation):
    """The forward of `layer`: transformers' layers call `self.act`, `torch.nn.GELU` reads `self.approximate`."""
    if type(self) is _SCRIPTED:
        return _scripted(self, input)
    original, act = type(self).forward, self.__dict__.get("act")
    if act is None:
        subject, found, approximate = original, activation, self.__dict__.get("approximate")
        if approximate is not None:
            subject, found = (original, "approximate", approximate), GELU_TANH if approximate == "tanh" else GELU
        out = activation_replacement(input, subject, found)
    elif is_function(act):
        out = activation_replacement(input, (original, "act", act), activation)
    else:
        out = proof.record_refusal(original, f"act is {getattr(act, '__qualname__', act)}")
    return _original(self, layer, input) if out is None else out


class GELUActivation(_Layer):
    """`0.5 * input * (1 + erf(input / sqrt(2)))`, any shape.

    Replaces transformers' `GELUActivation` around `F.gelu` and, given the layer name, `torch.nn.GELU` of both kinds.
    """

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _gelu(self, input, GELUActivation, GELU)


class GELUTanh(_Layer):
    """`F.gelu(input, approximate="tanh")`, any shape. Replaces transformers' `GELUTanh` around that function."""

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _gelu(self, input, GELUTanh, GELU_TANH)


class NewGELUActivation(_Layer):
    """`0.5 * input * (1 + tanh(sqrt(2 / pi) * (input + 0.044715 * input**3)))`, operation by operation, any shape.

    Replaces transformers' `NewGELUActivation`.
    """

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        out = activation_replacement(input, type(self).forward, NEW_GELU)
        return _original(self, NewGELUActivation, input) if out is None else out


class FastGELUActivation(_Layer):
    """`0.5 * input * (1 + tanh(0.7978845608 * input * (1 + 0.044715 * input * input)))`, operation by operation.

    Any shape. Replaces transformers' `FastGELUActivation`.
    """

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        out = activation_replacement(input, type(self).forward, FAST_GELU)
        return _original(self, FastGELUActivation, input) if out is None else out


class QuickGELUActivation(_Layer):
    """`input * sigmoid(1.702 * input)`, operation by operation, any shape.

    Replaces transformers' `QuickGELUActivation`.
    """

    @torch.jit.ignore
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, input)
        out = activation_replacement(input, type(self).forward, QUICK_GELU)
        return _original(self, QuickGELUActivation, input) if out is None else out


def _activation_of(layer, act_fn, x):
    """The subject and formula of a gated MLP's activation, and whether its hooks run in a checkpoint; the formula or None."""
    subject, hooked = subject_of(act_fn), False
    if subject is None and not is_dynamo_compiling() and is_checkpointed():
        subject = subject_of(act_fn, whatever_hooks=True)
        hooked = subject is not None
    activation = None if subject is None else activation_of(type(layer), subject, x, layer.__dict__)
    return subject, activation, hooked


def _gated_mlp(self, layer, x):
    if type(self) is _SCRIPTED:
        return _scripted(self, x)
    modules = self._modules
    gate_proj, up_proj, down_proj = modules.get("gate_proj"), modules.get("up_proj"), modules.get("down_proj")
    act_fn = modules.get("act_fn")
    subject, activation, hooked = _activation_of(self, act_fn, x)
    if activation is None or gate_proj is None or up_proj is None or down_proj is None:
        return _original(self, layer, x)
    if hooked:
        return down_proj(hooked_product(act_fn, gate_proj(x), lambda: up_proj(x), subject, activation))
    gate, up = project(gate_proj, x), project(up_proj, x)
    product = product_replacement(gate, up, subject, activation)
    if product is None:
        product = act_fn(gate) * up
    elif not is_dynamo_compiling() and recompute.is_marked(self):
        compute = functools.partial(product_again, subject=subject, activation=activation)
        return recompute.project(down_proj, product, gate, up, compute)
    del gate, up  # Eager has freed both too when it projects.
    return project(down_proj, product)


class LlamaMLP(_Layer):
    """`down_proj(act_fn(gate_proj(x)) * up_proj(x))`, the product by one kernel; x: `[..., hidden_size]`.

    Given the layer name, it replaces transformers' `LlamaMLP` and classes that compute the same with SiLU or GELU. The
    projections are called as modules, with their own forward and hooks.
    """

    @torch.jit.ignore
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _gated_mlp(self, LlamaMLP, x)


class GeGLUMLP(_Layer):
    """`LlamaMLP` for the layer name "GeGLUMLP": both take the activation from the module."""

    @torch.jit.ignore
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _gated_mlp(self, GeGLUMLP, x)


class Phi3MLP(_Layer):
    """`down_proj(up * activation_fn(gate))` with `gate, up = gate_up_proj(hidden_states).chunk(2, dim=-1)`.

    The product is one kernel; hidden_states: `[..., hidden_size]`. Replaces transformers' `Phi3MLP` and classes that compute
    the same with SiLU or GELU, named by `name_layers`. The projections are called as modules, with their own forward and hooks.
    """

    @torch.jit.ignore
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if type(self) is _SCRIPTED:
            return _scripted(self, hidden_states)
        modules = self._modules
        gate_up_proj, down_proj, act_fn = map(modules.get, ("gate_up_proj", "down_proj", "activation_fn"))
        subject, activation, hooked = _activation_of(self, act_fn, hidden_states)
        if activation is None or gate_up_proj is None or down_proj is None:
            return _original(self, Phi3MLP, hidden_states)
        gate, up = project(gate_up_proj, hidden_states).chunk(2, dim=-1)
        if hooked:
            return down_proj(hooked_product(act_fn, gate, lambda up=up: up, subject, activation))
        product = product_replacement(gate, up, subject, activation)
        if product is None:
            product = up * act_fn(gate)
        elif not is_dynamo_compiling() and recompute.is_marked(self):
            compute = functools.partial(product_again, subject=subject, activation=activation)
            return recompute.project(down_proj, product, gate, up, compute)
        del gate, up
        return project(down_proj, product)


class SoftmaxTopKRouter(_Layer):
    """A router of experts: the forward of the module's class, which takes softmax alone from the kernel.

    hidden_states: `[..., hidden_size]`. Replaces transformers' `Qwen3_5MoeTopKRouter`, and routers named by `name_layers`
    whose forward calls `torch.nn.functional.softmax`; by itself it computes Qwen3.5's formula of `weight` and `top_k`.
    """

    @torch.jit.ignore
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        owner = type(self)
        if owner is _SCRIPTED:
            return _scripted(self, hidden_states)
        if isinstance(self, SoftmaxTopKRouter):
            return _original(self, SoftmaxTopKRouter, hidden_states)
        return with_our_softmax(owner.forward)(self, hidden_states)


class LlamaDecoderLayer(_Layer):
    """A decoder layer: `h = x + self_attn(input_layernorm(x))`, then `h + mlp(post_attention_layernorm(h))`, or a variant.

    hidden_states: `[batch, tokens, hidden_size]`. One kernel computes the residual add `h` and its norm. Norms,
    attention and MLP are called as modules, with their own forward, hooks, cache and attention function. Variants: norms or
    dropouts after the blocks too, or instead; outputs of the blocks multiplied; attention and MLP side by side.
    """

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
        arguments = {"position_ids": position_ids, "use_cache": use_cache, **kwargs}
        given = position_embeddings, attention_mask, past_key_values, arguments
        return _decoded(self, LlamaDecoderLayer, hidden_states, *given)


class MixtralDecoderLayer(_Layer):
    """`LlamaDecoderLayer` for forwards that take the arguments of transformers' `MixtralDecoderLayer`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Optional[tuple] = None,
        attention_mask: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.LongTensor] = None,
        past_key_values: Optional[object] = None,
        **kwargs,
    ) -> torch.Tensor:
        given = position_embeddings, attention_mask, past_key_values, {"position_ids": position_ids, **kwargs}
        return _decoded(self, MixtralDecoderLayer, hidden_states, *given)


class Qwen3VLTextDecoderLayer(_Layer):
    """`LlamaDecoderLayer` for forwards that take the arguments of transformers' `Qwen3VLTextDecoderLayer`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple,
        attention_mask: Optional[torch.Tensor] = None,
        position_ids: Optional[torch.LongTensor] = None,
        past_key_values: Optional[object] = None,
        use_cache: Optional[bool] = False,
        **kwargs,
    ) -> torch.Tensor:
        arguments = {"position_ids": position_ids, "use_cache": use_cache, **kwargs}
        given = position_embeddings, attention_mask, past_key_values, arguments
        return _decoded(self, Qwen3VLTextDecoderLayer, hidden_states, *given)


def _decoded(self, layer, hidden_states, position_embeddings, attention_mask, past_key_values, arguments):
    """The output of a decoder layer; `arguments` are those that its attention alone reads."""
    # Layers of transformers up to 5.22 checkpoint the whole call, later ones their forward.
    wrapper = type(self).forward
    checkpoints = self.training and getattr(self, "gradient_checkpointing", False) and is_checkpoint_wrapper(wrapper)
    if not is_dynamo_compiling() and not checkpoints:
        out = replay.replay(self, hidden_states, position_embeddings, attention_mask, past_key_values, arguments)
        if out is not None:
            return out
    arguments.update(attention_mask=attention_mask, position_embeddings=position_embeddings)
    # By position, or by its old name, a cache comes as `past_key_values` here.
    arguments.setdefault(name_of_cache(type(self)), past_key_values)
    formula = decoder_formula_of(type(self), hidden_states, self.__dict__)
    if formula is None or (checkpoints and is_dynamo_compiling()):
        return _original(self, layer, hidden_states, **arguments)
    if checkpoints:
        fused = functools.partial(_fused_decoder, formula)
        return checkpoint_wrapper(wrapper, fused)(self, hidden_states, **arguments)
    out = fused_decoder_forward(self, formula, hidden_states, arguments)
    if not is_dynamo_compiling():
        replay.record(self, hidden_states, position_embeddings)
    return out


def _fused_decoder(formula, layer, hidden_states, **arguments):
    return fused_decoder_forward(layer, formula, hidden_states, arguments)


class LlamaRotaryEmbedding(_Layer):
    """cos and sin of `position_ids * inv_freq`, times `attention_scaling`: `[batch, tokens, head_dim]`, in x's dtype.

    Replaces transformers' `LlamaRotaryEmbedding` and classes that compute the same, named by `name_layers`. The
    original runs if frequencies depend on the length ("dynamic", "longrope"), and under torch.compile.
    """

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = isinstance(self, LlamaRotaryEmbedding)
        out = None if own or is_dynamo_compiling() else rotary_tables_replacement(self, x, position_ids, type(self))
        return _original(self, LlamaRotaryEmbedding, x, position_ids) if out is None else out


class RotaryPosEmb(_Layer):
    """`x * cos + rotate_half(x) * sin` for x = q and x = k: `[batch, heads, tokens, head_dim]`, any strides.

    Replaces transformers' `apply_rotary_pos_emb` and its variants: of a part of the head, whose rest stays as it is; of
    neighbours instead of halves; of chunks, as in GPT-OSS; in fp32. `kernels` makes one module of it for each model file, shared
    by all models of the process. Functions that compute something else keep running.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        original = type(self).forward
        own = isinstance(self, RotaryPosEmb)
        out = None if own else rotary_replacement(q, k, cos, sin, unsqueeze_dim, original)
        return _original(self, RotaryPosEmb, q, k, cos, sin, unsqueeze_dim) if out is None else out


class RotaryPosEmbVision(_Layer):
    """`RotaryPosEmb` in fp32 for `[tokens, heads, head_dim]`, as in vision towers.

    Replaces transformers' `apply_rotary_pos_emb_vision`, named by `name_layers`.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = isinstance(self, RotaryPosEmbVision)
        out = None if own else rotary_replacement(q, k, cos, sin, -2, type(self).forward)
        return _original(self, RotaryPosEmbVision, q, k, cos, sin) if out is None else out


class RotaryEmb(_Layer):
    """Rotary embedding as a complex product, `x * freqs_cis` of pairs of neighbours in fp32, for x = xq and x = xk.

    Replaces `apply_rotary_emb` of transformers' Llama 4 (`[batch, tokens, heads, head_dim]`) and DeepSeek-V2 (heads before
    tokens), named by `name_layers`; by itself it computes Llama 4's.
    """

    def forward(self, xq: torch.Tensor, xk: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = isinstance(self, RotaryEmb)
        out = None if own else complex_rotary_replacement(xq, xk, freqs_cis, type(self).forward)
        return _original(self, RotaryEmb, xq, xk, freqs_cis) if out is None else out


# What a class computes that is used as a layer of its own.
_FORMULAS = {
    LlamaRMSNorm: EAGER[LLAMA].forward,
    RMSNormZeroCentered: lambda self, x: ONE_PLUS_WEIGHT.eager(x, self.weight, self.eps),
    TorchRMSNorm: lambda self, x: F.rms_norm(x, self.normalized_shape, self.weight, self.eps),
    TorchLayerNorm: lambda self, input: F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps),
    TorchGroupNorm: lambda self, input: F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps),
    CohereLayerNorm: lambda self, hidden_states: cohere_layer_norm(hidden_states, self.weight, self.variance_epsilon),
    RMSNormGated: lambda self, hidden_states, gate=None: gated_eager(
        LLAMA, self.activation, hidden_states, gate, self.weight, self.variance_epsilon
    ),
    SiLUActivation: SILU.forward,
    GELUActivation: GELU.forward,
    GELUTanh: GELU_TANH.forward,
    NewGELUActivation: NEW_GELU.forward,
    FastGELUActivation: FAST_GELU.forward,
    QuickGELUActivation: QUICK_GELU.forward,
    **dict.fromkeys(
        (LlamaMLP, GeGLUMLP), lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    ),
    Phi3MLP: lambda self, x: packed_formula(x, self.gate_up_proj, self.down_proj, self.activation_fn),
    SoftmaxTopKRouter: lambda self, hidden_states: router(hidden_states, self.weight, self.top_k),
    **dict.fromkeys(
        (LlamaDecoderLayer, MixtralDecoderLayer, Qwen3VLTextDecoderLayer),
        lambda self, hidden_states, **arguments: decoder_forward(self, hidden_states, arguments),
    ),
    LlamaRotaryEmbedding: lambda self, x, position_ids: TABLES.eager(
        x, position_ids, self.inv_freq, self.attention_scaling
    ),
    RotaryPosEmbVision: lambda self, q, k, cos, sin: VISION_ROTARY.eager(q, k, cos, sin, -2),
    RotaryEmb: lambda self, xq, xk, freqs_cis: tuple(complex_rotary(x, freqs_cis, 2) for x in (xq, xk)),
    RotaryPosEmb: lambda self, q, k, cos, sin, unsqueeze_dim=1: ROTARY.eager(q, k, cos, sin, unsqueeze_dim),
}


def _eager_forward(layer: type):
    @functools.wraps(layer.forward)
    def forward(self, *arguments, **named):
        if type(self) is _SCRIPTED:
            return _scripted(self, *arguments, **named)
        return _original(self, layer, *arguments, **named)

    return forward


if MISSING:  # The forwards above read what this torch may no longer have.
    for _layer in _FORMULAS:
        _layer.forward = _eager_forward(_layer)
