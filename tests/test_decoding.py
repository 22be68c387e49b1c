"""`decoding_graph`: `generate` with the step of one token as a CUDA graph, against `generate` without it, bit by bit."""

import inspect
import warnings

import pytest
import torch
from bits import assert_bits_equal
from places import name_of_cache
from test_decoder import SIZES
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.streamers import BaseStreamer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS = {
    "Llama": (LlamaConfig, LlamaForCausalLM),
    "Qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "Gemma2": (Gemma2Config, Gemma2ForCausalLM),
}
STATIC = {"cache_implementation": "static", "disable_compile": True}
on_a_gpu = pytest.mark.gpu


def make(name, seed, dtype=torch.bfloat16):
    config, model = MODELS[name]
    torch.manual_seed(seed)
    return model(config(**{**SIZES, "vocab_size": 512})).eval().to(DEVICE, dtype)


def prompt(seed, batch=2, length=7):
    """Tokens, and a mask that leaves out the first of them in the first row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(512, (batch, length), generator=generator).to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def generate(model, inputs, seed, **settings):
    torch.manual_seed(seed)
    settings = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, **STATIC, **settings}
    out = model.generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True)
    return [out.sequences, *out.logits]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for step, pair in enumerate(zip(found, expected)):
        assert_bits_equal(*pair, f"tensor {step}")


@pytest.fixture
def replays(monkeypatch):
    """How many graphs were captured, and how many replays there were."""
    counts = {"captured": 0, "replayed": 0}

    class Counted(torch.cuda.CUDAGraph):
        def capture_begin(self, *args, **kwargs):
            counts["captured"] += 1
            return super().capture_begin(*args, **kwargs)

        def replay(self):
            counts["replayed"] += 1
            return super().replay()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Counted)
    return counts


@on_a_gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_and_logits(kernel, replays, seed, name, dtype):
    model, inputs = make(name, seed, dtype), prompt(seed)
    greedy, sampled = generate(model, inputs, seed), generate(model, inputs, seed, do_sample=True, temperature=1.5)
    for applied in (False, True):
        if applied:
            kernel.apply(model)
        with kernel.decoding_graph(model):
            assert_equal(generate(model, inputs, seed), greedy)
            assert_equal(generate(model, inputs, seed, do_sample=True, temperature=1.5), sampled)
        # The prompt and the first step come before each capture. Gemma2's cache counts tokens of its windows in Python.
        graphs = 0 if name == "Gemma2" else 2 * (1 + applied)
        assert replays == {"captured": graphs, "replayed": 10 * graphs}
    assert "forward" not in vars(model)


@on_a_gpu
def test_other_prompts_batches_and_weights(kernel, replays, seed):
    """A later call is never answered by an earlier one's graph; weights may be changed in place."""
    model = make("Llama", seed)
    kernel.apply(model)
    cases = [prompt(seed), prompt(seed + 1, batch=3, length=4), prompt(seed + 2, batch=1, length=9), prompt(seed + 3)]
    with kernel.decoding_graph(model):
        found = [generate(model, inputs, seed) for inputs in cases]
        weights = {name: each.clone() for name, each in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        after = generate(model, cases[0], seed)
    assert replays["captured"] == 5
    assert_equal(after, generate(model, cases[0], seed))
    model.load_state_dict(weights)
    for inputs, each in zip(cases, found):
        assert_equal(each, generate(model, inputs, seed))


@on_a_gpu
def test_one_cache_for_several_calls(kernel, replays, seed):
    """By hand: one cache, masks that grow by a token, a call of two tokens in between, inference mode."""
    from transformers import StaticCache

    model = make("Llama", seed)
    kernel.apply(model)
    tokens = prompt(seed, batch=1, length=20)["input_ids"]

    def logits():
        cache, found, start = StaticCache(config=model.config, max_cache_len=32), [], 0
        for count, inference in ((5, False), *[(1, False)] * 4, (2, False), *[(1, False)] * 3, *[(1, True)] * 3):
            with torch.inference_mode(inference), torch.no_grad():
                positions = torch.arange(start, start + count, device=DEVICE)[None]
                step = tokens[:, start : start + count]
                found.append(model(input_ids=step, position_ids=positions, **{name_of_cache(): cache}).logits.clone())
            start += count
        return found

    expected = logits()
    with kernel.decoding_graph(model):
        assert_equal(logits(), expected)
    assert replays == {"captured": 2, "replayed": 8}


@on_a_gpu
def test_streams_and_stops(kernel, replays, seed):
    """A streamer gets every token, and an end token ends the sequence where it does without a graph."""
    model, inputs = make("Llama", seed), prompt(seed, batch=1)
    kernel.apply(model)
    plain = generate(model, inputs, seed)[0][0, 7:].tolist()
    eos = plain[6]

    class Streamer(BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen += value.flatten().tolist()

        def end(self):
            self.seen.append("end")

    streamer = Streamer()
    with kernel.decoding_graph(model):
        found = generate(model, inputs, seed, eos_token_id=eos, streamer=streamer)
    expected = plain[: plain.index(eos) + 1]
    assert found[0][0, 7:].tolist() == expected
    assert streamer.seen == [*inputs["input_ids"][0].tolist(), *expected, "end"]


@on_a_gpu
def test_what_has_no_graph_runs_as_it_is(kernel, replays, seed):
    model, inputs = make("Llama", seed), prompt(seed)
    kernel.apply(model)
    growing = {"cache_implementation": None, "disable_compile": None}
    hidden = {"output_hidden_states": True}
    expected = [generate(model, inputs, seed, **each) for each in (growing, hidden)]
    with kernel.decoding_graph(model):
        assert_equal(generate(model, inputs, seed, **growing), expected[0])
        assert_equal(generate(model, inputs, seed, **hidden), expected[1])
        assert not replays["captured"]
        # After hidden states were asked for, transformers' own hooks stay.
        generate(model, inputs, seed)
        assert replays["captured"] == 1
        model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        with pytest.warns(RuntimeWarning, match=r"captures nothing, because model\.layers\.0\.mlp has a hook"):
            generate(model, inputs, seed)
        assert replays["captured"] == 1


@pytest.mark.either
def test_the_forward_comes_back(kernel, seed):
    model, inputs = make("Llama", seed, torch.float32), prompt(seed)
    expected, signature = generate(model, inputs, seed), inspect.signature(model.forward)
    with kernel.decoding_graph(model):
        assert inspect.signature(model.forward) == signature
        assert_equal(generate(model, inputs, seed), expected)
    assert "forward" not in vars(model)
    with pytest.raises(KeyError), kernel.decoding_graph(model):
        raise KeyError
    assert "forward" not in vars(model)
    vars(model)["forward"] = own = model.forward
    with kernel.decoding_graph(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.forward is not own
    assert vars(model)["forward"] is own


def test_arguments_come_back_as_they_were(module):
    """A mask may be a dictionary; an empty one stays one."""
    decoding = module("decoding")
    tensor = torch.zeros(1)
    arguments = {
        "input_ids": tensor,
        "attention_mask": {"full_attention": tensor, "sliding": None},
        "none": None,
        "empty": {},
    }
    places, leaves = decoding._flatten(arguments)
    assert decoding._unflatten(places, leaves) == arguments
    # What two calls cannot be compared by is no argument of a graph.
    assert not isinstance({}, decoding._LEAVES) and isinstance(tensor, decoding._LEAVES)


def test_bad_input(kernel, seed):
    model = make("Llama", seed)
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, found type"):
        with kernel.decoding_graph(LlamaForCausalLM):
            pass
    with kernel.decoding_graph(model):
        with pytest.raises(RuntimeError, match="no open context"):
            with kernel.decoding_graph(model):
                pass
