"""Where the package's Python modules are, by the names that tests call them."""

import importlib
from types import ModuleType
from typing import Union

PLACES = {
    **{name: f"core.{name}" for name in ("domain", "launch", "layout", "plans", "proof")},
    "reduce_config": "core.reduction",
    **{name: f"ops.{name}" for name in ("activation", "gated_activation", "rotary")},
    "rotary_embedding": "ops.rotary_tables",
    "variants": "ops.rms_norm.formulas",
    "rms_norm": "ops.rms_norm.function",
    "rms_norm_backward": "ops.rms_norm.backward",
    "add_rms_norm": "ops.rms_norm.add",
    "gated_rms_norm": "ops.rms_norm.gated",
    "decoder": "decoder.layer",
    "decoder_call": "decoder.replay",
    "attention": "decoder.attention",
    "mlp": "decoder.mlp",
    "warmup": "warm_up",
}


def python_module(kernel: Union[ModuleType, str], name: str) -> ModuleType:
    """A Python module of a kernel, which may be given by its name."""
    package = kernel if isinstance(kernel, str) else kernel.__name__
    return importlib.import_module(f"{package}.{PLACES.get(name, name)}")
