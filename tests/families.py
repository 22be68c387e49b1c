"""A small model of every model file in docs/decoders.md, with random weights."""

import importlib
import inspect
import re
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
LAYER = re.compile(r"\w+DecoderLayer")
# Fields that a configuration does not have are left out.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_GROUPS = {"num_key_value_heads": 4}
CODECS = ("NeuCodecDecoderLayer", "Xcodec2DecoderLayer")


def rope(*sections, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections], **more}}


TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
# Decoder layer -> sizes that its model needs beside these.
MORE = {
    "AXK2DecoderLayer": NO_GROUPS,
    "Cosmos3EdgeTextDecoderLayer": rope(4, 6, 6),
    "DeepseekOcr2TextDecoderLayer": {"mlp_layer_types": ["dense", "sparse"]},
    "DeepseekV32DecoderLayer": NO_GROUPS,
    "Dots1DecoderLayer": {"n_shared_experts": 1},
    "Glm4vMoeTextDecoderLayer": rope(1, 1, 2),
    **dict.fromkeys(("Glm4vTextDecoderLayer", "GlmImageTextDecoderLayer", "GlmOcrTextDecoderLayer"), rope(2, 3, 3)),
    "GradiumPhononTTSDecoderLayer": {"flow_head_config": {"condition_dim": 64}},
    "HeliumDecoderLayer": {"head_dim": 16, **NO_GROUPS},
    "HunYuanVLDenseV1DecoderLayer": rope(4, 4, 4, 4),
    **dict.fromkeys(CODECS, NO_GROUPS),
    "OlmoHybridAttentionDecoderLayer": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", *["full_attention"] * 2],
    },
    "PaddleOCRDecoderLayer": rope(4, 6, 6),
    # Its own image and audio towers have 1.8 billion parameters.
    "Phi4MultimodalDecoderLayer": {
        "vision_config": {**TOWER, "num_hidden_layers": 2, "crop_size": 28, "image_size": 28},
        "audio_config": {**TOWER, "num_blocks": 1},
    },
    "PocketTTSDecoderLayer": {"flow_head_config": {"condition_dim": 64}},
    "Qwen2_5OmniDecoderLayer": rope(2, 3, 3),
    "Qwen2_5_VLDecoderLayer": rope(2, 3, 3),
    "Qwen2VLDecoderLayer": rope(2, 3, 3),
    "Qwen3OmniMoeTalkerDecoderLayer": {"shared_expert_intermediate_size": 32},
    "Step3p7DecoderLayer": {"sliding_window": 8},
}
# No model makes it: the text model is Exaone4's.
UNUSED = ("Exaone4_5_DecoderLayer",)


def decoder_layers():
    """(model file, decoder layer) of each row in docs/decoders.md that a model makes."""
    recognised, _, _ = (ROOT / "docs/decoders.md").read_text(encoding="utf-8").partition("These decoder layers keep")
    for line in recognised.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 2:
            yield from ((cells[1], layer) for layer in LAYER.findall(cells[2]) if layer not in UNUSED)


# Layers that another module makes for the model.
OWNERS = {"HrmTextDecoderLayer": "HrmTextStack"}
TAKE_EMBEDDINGS = ("Qwen3OmniMoeTalkerCodePredictorModel", "Qwen3OmniMoeTalkerModel")


class Stack(torch.nn.Module):
    """Decoder layers, as the two codecs have them inside a model of audio."""

    def __init__(self, config, layer, rotary):
        super().__init__()
        self.layers = torch.nn.ModuleList(layer(config, index) for index in range(config.num_hidden_layers))
        self.rotary, self.heads = rotary(config), config.num_attention_heads

    def forward(self, hidden_states):
        # They rotate each head by its number.
        tables = self.rotary(hidden_states, torch.arange(self.heads, device=hidden_states.device)[None])
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=tables)
        return hidden_states


def make(name, layer):
    """A model of the file with such layers, in evaluation mode."""
    (path,) = Path(transformers.__file__).parent.glob(f"models/*/modeling_{name}.py")
    file = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
    models = [
        each
        for each in vars(file).values()
        if isinstance(each, type) and issubclass(each, PreTrainedModel) and each.__module__ == file.__name__
    ]
    owner = OWNERS.get(layer, layer)
    model = next((each for each in models if re.search(rf"\b{owner}\(", inspect.getsource(each))), models[-1])
    fields = inspect.signature(model.config_class).parameters
    sizes = {field: value for field, value in SIZES.items() if field in fields}
    config = model.config_class(**{**sizes, **MORE.get(layer, {})})
    if layer in CODECS:
        config._attn_implementation = "sdpa"
        made = Stack(config, vars(file)[layer], vars(file)[layer.replace("DecoderLayer", "RotaryEmbedding")])
    else:
        made = model(config)
    # Some leave a router as its memory was.
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return made.eval()


def call(model):
    """The last hidden states of 14 tokens."""
    tokens = torch.arange(1, 15, device=next(model.parameters()).device).view(2, 7)
    with torch.no_grad():
        if isinstance(model, Stack):
            return model(embedded(tokens))
        takes_tokens = type(model).__name__ not in TAKE_EMBEDDINGS
        return (model(tokens) if takes_tokens else model(inputs_embeds=embedded(tokens))).last_hidden_state


def embedded(tokens):
    return torch.sin(tokens[..., None] * torch.arange(1.0, SIZES["hidden_size"] + 1, device=tokens.device))
