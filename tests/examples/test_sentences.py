"""The example that fine-tunes a sentence encoder: classifier, data and exported program."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import BertConfig, BertModel

from helpers import programs

pytestmark = pytest.mark.slow

CHECK = """
import sys, torch
sys.path.insert(0, {folder!r})
import classifier
state, batch = classifier.load({weights!r})
torch.save(classifier.step(*state, *batch), {result!r})
print([name for name in ("poptorch", "transformers") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return importlib.import_module("sentences.train")


@pytest.fixture(scope="module")
def tokenizer(example: ModuleType) -> object:
    return example.pretrained()[1]


@pytest.fixture
def classifier(example: ModuleType) -> torch.nn.Module:
    """A classifier with a small encoder, in evaluation mode."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    return example.Classifier(BertModel(config, add_pooling_layer=False)).eval()


def test_padding_does_not_change_the_classification(classifier: torch.nn.Module) -> None:
    tokens = torch.randint(1, 1000, (4, 7))
    padded = torch.nn.functional.pad(tokens, (0, 5))

    short = classifier(tokens, torch.ones_like(tokens))
    long = classifier(padded, (padded > 0).long())

    torch.testing.assert_close(long["logits"], short["logits"])


def test_every_topic_has_at_least_a_hundred_sentences(example: ModuleType) -> None:
    labels = torch.tensor([label for _, label in example.sentences()])

    assert int(labels.bincount(minlength=len(example.TOPICS)).min()) >= 100


def test_the_exported_classifier_needs_neither_poptorch_nor_transformers(
    example: ModuleType, classifier: torch.nn.Module, tokenizer: object, tmp_path: Path
) -> None:
    samples = example.tokenized(example.sentences()[:32], tokenizer)
    example.accuracy(classifier, samples, tokenizer, tmp_path / "classifier.py")
    result = tmp_path / "result.pt"
    code = CHECK.format(
        folder=str(tmp_path), weights=str(tmp_path / "classifier.safetensors"), result=str(result)
    )

    run = programs.run("-c", code)

    assert run.stdout.strip() == "[]", run.stderr
    batch = example.DataCollatorWithPadding(
        tokenizer, padding="max_length", max_length=example.LONGEST
    )(samples)
    expected = classifier(batch["input_ids"], batch["attention_mask"])["logits"]
    got = torch.load(result)
    torch.testing.assert_close(got, expected)
