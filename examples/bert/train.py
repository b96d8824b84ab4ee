"""Train BERT with Hugging Face's Trainer, plain and in PopTorch: which licence is a passage from?

python examples/bert/train.py
"""

from __future__ import annotations

import copy
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import side_by_side
from poptorch.integrations.transformers import Trainer

FOLDER = Path("/usr/share/common-licenses")  # from the Debian package base-files
NAMES = ("Apache-2.0", "Artistic", "GPL-2", "MPL-2.0")
LENGTH, WORDS = 24, 512


def passages() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Return passages for training and testing, as word numbers, and the licence of each."""
    samples = []
    for label, name in enumerate(NAMES):
        words = re.findall(r"\w+", (FOLDER / name).read_text().lower())
        numbers = torch.tensor([1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words])
        for row in numbers.unfold(0, LENGTH, LENGTH // 2)[:120]:
            samples.append({"input_ids": row, "labels": torch.tensor(label)})
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    cut, end = 64, len(order) // 16 * 16
    return [samples[at] for at in order[cut:end]], [samples[at] for at in order[:cut]]


def main(words: Sequence[str] | None = None) -> list[side_by_side.Run]:
    """Train both versions and return their results."""
    arguments = side_by_side.parser(__doc__).parse_args(words)
    training, testing = passages()
    if arguments.small:
        training, testing = training[:32], testing[:32]
    config = BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=len(NAMES),
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    runs = []
    for name, kind in (("plain Trainer", transformers.Trainer), ("poptorch", Trainer)):
        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(
                folder, per_device_train_batch_size=8, gradient_accumulation_steps=2,
                num_train_epochs=1 if arguments.small else 6, learning_rate=1e-3, logging_steps=1,
                eval_strategy="epoch", save_strategy="no", report_to=[], use_cpu=True,
                disable_tqdm=True, dataloader_drop_last=True, dataloader_pin_memory=False,
            )  # fmt: skip
            trainer = kind(
                copy.deepcopy(model), settings, train_dataset=training, eval_dataset=testing,
                compute_metrics=lambda seen: {
                    "right": float((seen.predictions.argmax(1) == seen.label_ids).mean())
                },
            )  # fmt: skip
            trainer.remove_callback(transformers.PrinterCallback)
            clock = _Clock()
            trainer.add_callback(clock)
            trainer.train()
        history = trainer.state.log_history
        losses = [entry["loss"] for entry in history if "loss" in entry]
        runs.append(side_by_side.Run(name, trainer.model, losses, clock.speeds))
        print(f"{name}: {history[-2]['eval_right']:.1%} of {len(testing)} unseen passages right")
    side_by_side.finish(runs, arguments, f"BERT by the Trainer, {len(training)} passages")
    return runs


class _Clock(transformers.TrainerCallback):
    """Micro-batches per second of each epoch, without the time of evaluation."""

    def __init__(self) -> None:
        self.speeds: list[float] = []

    def on_epoch_begin(self, args, state, control, **more):
        self._before, self._start = state.global_step, time.perf_counter()

    def on_epoch_end(self, args, state, control, **more):
        count = (state.global_step - self._before) * args.gradient_accumulation_steps
        self.speeds.append(count / (time.perf_counter() - self._start))


if __name__ == "__main__":
    main()
