"""Batches of a Trainer are padded to a few lengths, unless that changes what a model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, T5Config

from poptorch.integrations._padding import Lengths, NamedBatch, Padding

PAD, VOCABULARY, WIDTH = 7, 20, 4


class Averaging(nn.Module):
    """The mean of embedded tokens, of all of them or of those that the mask keeps."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.config = BertConfig(pad_token_id=PAD, max_position_embeddings=30)
        self.embedding, self.masks = nn.Embedding(VOCABULARY, WIDTH), masks

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **rest: Any) -> Any:
        kept = attention_mask if self.masks else torch.ones_like(attention_mask)
        embedded = self.embedding(input_ids)
        mean = (embedded * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)
        return {"mean": mean, "tokens": embedded}


def batch(length: int, rows: int = 3, **entries: torch.Tensor) -> NamedBatch:
    tokens = torch.randint(0, VOCABULARY, (rows, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **entries}


def lengths_of(model: nn.Module, most: int = 8) -> Lengths:
    return Lengths(Padding.of(model, tokenizer=None), most, model)


def sizes(lengths: Lengths, given: list[int], rows: int = 3) -> list[int]:
    padded = [lengths.pad([batch(length, rows)])[0] for length in given]
    return [each["input_ids"].shape[1] for each in padded]


@pytest.fixture
def lengths() -> Lengths:
    """The results of this model do not depend on padding."""
    return lengths_of(Averaging(masks=True))


def test_a_batch_gets_the_next_of_two_sizes_for_each_power_of_two(lengths: Lengths) -> None:
    assert sizes(lengths, [5, 8, 9, 13, 17]) == [8, 8, 12, 16, 24]


def test_no_size_is_above_the_number_of_positions(lengths: Lengths) -> None:
    assert sizes(lengths, [29]) == [30]


@pytest.mark.parametrize(
    "name, value", [("input_ids", PAD), ("attention_mask", 0), ("labels", -100)]
)
def test_added_tokens_are_masked_and_have_no_labels(
    lengths: Lengths, name: str, value: int
) -> None:
    given = batch(5, labels=torch.zeros(3, 5, dtype=torch.long))

    (padded,) = lengths.pad([given])

    assert padded[name][:, 5:].unique().tolist() == [value]


@pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
def test_the_tokens_of_a_batch_stay(lengths: Lengths, name: str) -> None:
    given = batch(5)

    (padded,) = lengths.pad([given])

    assert torch.equal(padded[name][:, :5], given[name])


def test_one_label_for_each_sample_is_not_padded(lengths: Lengths) -> None:
    given = batch(5, labels=torch.tensor([0, 1, 0]))

    (padded,) = lengths.pad([given])

    assert padded["labels"].tolist() == [0, 1, 0]


def test_the_batches_of_one_update_get_one_size(lengths: Lengths) -> None:
    padded = lengths.pad([batch(5), batch(13), batch(9)])

    assert [each["input_ids"].shape[1] for each in padded] == [16, 16, 16]


def test_the_number_of_sizes_is_at_most_the_requested_number() -> None:
    lengths = lengths_of(Averaging(masks=True), most=2)

    assert sizes(lengths, [10, 5, 20, 14, 7]) == [12, 8, 24, 24, 8]


def test_a_batch_with_fewer_rows_takes_the_largest_size(lengths: Lengths) -> None:
    sizes(lengths, [20, 6])

    assert sizes(lengths, [6], rows=2) == [24]


def test_batches_without_a_mask_keep_their_lengths(lengths: Lengths) -> None:
    given = {"input_ids": torch.ones(3, 5, dtype=torch.long)}

    assert lengths.pad([given]) == [given]


def test_a_model_that_padding_changes_gets_batches_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lengths = lengths_of(Averaging(masks=False))

    assert sizes(lengths, [5, 9]) == [5, 9]
    assert "batches keep their lengths, because for this model padding changes its" in caplog.text


class Convolving(Averaging):
    """Tokens see their neighbours, so that the last one sees padding: a difference of 1e-6."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **rest: Any) -> Any:
        embedded = self.embedding(input_ids)
        return {"tokens": embedded + 1e-6 * embedded.roll(-1, 1)}


def test_a_difference_of_the_size_of_rounding_is_seen() -> None:
    lengths = lengths_of(Convolving(masks=True))

    assert sizes(lengths, [5, 9]) == [5, 9]


class Looking(Averaging):
    """Only the last real token of a row sees what follows it."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **rest: Any) -> Any:
        embedded = self.embedding(input_ids)
        seen = embedded + torch.cat([embedded[:, 1:], torch.zeros_like(embedded[:, :1])], 1)
        return {"sum": (seen * attention_mask[..., None]).sum(1)}


def test_the_longest_row_of_a_batch_is_compared() -> None:
    """The others are padded already, so that more padding changes nothing for them."""
    lengths = lengths_of(Looking(masks=True))
    given = batch(5, rows=4)
    given["attention_mask"][:3, 3:] = 0

    (kept,) = lengths.pad([given])

    assert kept["input_ids"].shape == (4, 5)


class Positions(Averaging):
    """Takes five tokens."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **rest: Any) -> Any:
        return input_ids * self.embedding.weight[0, 0].expand(5)


def test_a_model_that_fails_with_a_padded_batch_gets_batches_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lengths = lengths_of(Positions(masks=True))

    assert sizes(lengths, [5]) == [5]
    assert "a padded batch fails: RuntimeError" in caplog.text


def test_the_comparison_leaves_the_mode_of_the_model_alone() -> None:
    model = Averaging(masks=True).train()
    model.embedding.eval()

    sizes(lengths_of(model), [5])

    assert [module.training for module in model.modules()] == [True, False]


def test_the_comparison_draws_no_random_numbers(lengths: Lengths) -> None:
    given, before = batch(5), torch.random.get_rng_state()

    lengths.pad([given])

    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name, shape", [("mean", (3, WIDTH)), ("tokens", (3, 5, WIDTH))])
def test_results_are_cut_to_the_length_that_the_batch_had(
    lengths: Lengths, name: str, shape: tuple[int, ...]
) -> None:
    model, given = Averaging(masks=True), batch(5)
    (padded,) = lengths.pad([given])

    results = lengths.cut(model(**padded), given)

    assert results[name].shape == shape


class Translating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = T5Config(pad_token_id=PAD)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: Any) -> Any:
        read = (input_ids * attention_mask).sum(1, keepdim=True)
        return {"written": labels + read, "kept": input_ids * attention_mask}


@pytest.fixture
def translated() -> tuple[Lengths, NamedBatch]:
    """Both sequences have the same length, so that a size alone does not distinguish them."""
    return lengths_of(Translating()), batch(5, labels=torch.randint(0, 9, (3, 5)))


@pytest.mark.parametrize("name, length", [("input_ids", 8), ("labels", 12)])
def test_source_and_target_have_their_own_sizes(name: str, length: int) -> None:
    given = batch(5, labels=torch.randint(0, 9, (3, 9)))

    (padded,) = lengths_of(Translating()).pad([given])

    assert padded[name].shape == (3, length)


@pytest.mark.parametrize("name", ["written", "kept"])
def test_results_follow_the_sequence_that_they_belong_to(
    translated: tuple[Lengths, NamedBatch], name: str
) -> None:
    lengths, given = translated
    lengths.pad([given])
    other = batch(3, labels=torch.randint(0, 9, (3, 6)))
    (padded,) = lengths.pad([other])

    results = lengths.cut(Translating()(**padded), other)

    assert results[name].shape == Translating()(**other)[name].shape


class Normalizing(Averaging):
    """Normalizes over all tokens of a batch while it is trained."""

    def __init__(self) -> None:
        super().__init__(masks=True)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **rest: Any) -> Any:
        embedded = self.embedding(input_ids).transpose(1, 2)
        return {"tokens": self.norm(embedded).transpose(1, 2)}


@pytest.mark.parametrize("is_training, expected", [(True, [5, 9]), (False, [8, 12])])
def test_the_comparison_is_made_in_the_mode_that_the_model_is_in(
    is_training: bool, expected: list[int]
) -> None:
    """A batch norm sees padding in training only."""
    lengths = lengths_of(Normalizing().train(is_training))

    assert sizes(lengths, [5, 9]) == expected


def test_the_comparison_leaves_running_statistics_alone() -> None:
    model = Normalizing().train()

    sizes(lengths_of(model), [5])

    assert int(model.norm.num_batches_tracked) == 0
    assert torch.equal(model.norm.running_mean, torch.zeros(WIDTH))


class Attending(Averaging):
    """Drops attention and tokens at random, by functions that a mode of layers does not reach."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **rest: Any) -> Any:
        embedded = self.embedding(input_ids)[:, None]
        mask = attention_mask[:, None, None].bool()
        attended = nn.functional.scaled_dot_product_attention(
            embedded, embedded, embedded, mask, dropout_p=0.5
        )
        return {"tokens": nn.functional.dropout(attended, 0.5)[:, 0]}


def test_dropout_does_not_affect_the_sizes() -> None:
    lengths = lengths_of(Attending(masks=True).train())

    assert sizes(lengths, [5, 9]) == [8, 12]


class Counting(Averaging):
    def __init__(self) -> None:
        super().__init__(masks=True)
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


def test_the_comparison_is_made_once_for_each_size() -> None:
    model = Counting()
    lengths = lengths_of(model)
    sizes(lengths, [5, 6, 7])
    after_one_size = model.calls

    sizes(lengths, [9, 10])

    assert model.calls == after_one_size + 2  # the batch as it is, and padded
