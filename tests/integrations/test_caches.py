"""Caches of keys and values: results and arguments of models that generate text."""

import copy

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import poptorch
from helpers.wrapping import options

pytestmark = pytest.mark.slow
SIZES = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 32,
}  # fmt: skip


def tokens(*sizes: int) -> torch.Tensor:
    return torch.randint(1, 20, sizes)


def test_a_model_returns_its_cache_and_takes_it_back() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    ours = poptorch.inferenceModel(copy.deepcopy(model), options().programs(2))
    first, then = tokens(2, 5), tokens(2, 1)
    with torch.no_grad():
        expected = model(then, past_key_values=model(first).past_key_values)
    got = ours(first)
    assert type(got.past_key_values) is transformers.DynamicCache
    assert got.past_key_values.get_seq_length() == 5
    end = ours(then, past_key_values=got.past_key_values)
    assert got.past_key_values.get_seq_length() == 5  # what was passed is not changed
    assert end.past_key_values.get_seq_length() == 6
    torch.testing.assert_close(end.logits, expected.logits)


def test_a_static_cache_needs_one_program_for_all_steps() -> None:
    config = LlamaConfig(**SIZES)
    model = LlamaForCausalLM(config).eval()
    ours = poptorch.inferenceModel(copy.deepcopy(model), options().programs(2))
    given = StaticCache(config=config, max_cache_len=8)
    cache = StaticCache(config=config, max_cache_len=8)
    with torch.no_grad():
        for ids in (tokens(1, 3), *(tokens(1, 1) for _ in range(3))):
            expected = model(ids, past_key_values=given).logits
            result = ours(ids, past_key_values=cache)
            cache = result.past_key_values
            torch.testing.assert_close(result.logits, expected)
    assert int(cache.get_seq_length()) == 6


def test_decorators_that_add_arguments_see_a_call_as_it_was() -> None:
    model = transformers.LlamaModel(LlamaConfig(**SIZES)).eval()
    ids = tokens(2, 4)
    got = poptorch.inferenceModel(model, options())(input_ids=ids)
    torch.testing.assert_close(got.last_hidden_state, model(ids).last_hidden_state)


def test_a_mixture_of_experts_trains() -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    model = transformers.MixtralForCausalLM(config)
    twin = copy.deepcopy(model)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    ours = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        ids = tokens(2, 4)
        plain.zero_grad()
        expected = twin(ids, labels=ids).loss
        expected.backward()
        plain.step()
        torch.testing.assert_close(ours(input_ids=ids, labels=ids).loss, expected.detach())
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
