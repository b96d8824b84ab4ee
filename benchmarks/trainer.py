"""Hugging Face's Trainer: the plain one, the plain one with ``torch_compile``, and ours.

python benchmarks/trainer.py [--quick] [--processor-time]

Every contestant trains the same model on the same samples. Runs take turns, so that a noisy machine
hits all; of a run the first steps, which compile, are left out. Printed are medians per update, of
processor time of this process where the machine is too busy for a clock.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import poptorch
from harness import medians, table
from poptorch.integrations.transformers import Trainer

ROWS = 8
CONTESTANTS = ("plain Trainer", "torch_compile=True", "poptorch")
Case = tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]


def bert(count: int) -> Case:
    """Four layers of 512, 128 tokens."""
    config = BertConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    samples = [
        {"input_ids": torch.randint(1, 30000, (128,)), "labels": torch.tensor(at % 2)}
        for at in range(count)
    ]
    return BertForSequenceClassification(config), samples


def vit(count: int) -> Case:
    """Twelve layers of 384, images of 96 x 96 in patches of 16."""
    config = ViTConfig(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536,
        image_size=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    samples = [
        {"pixel_values": torch.randn(3, 96, 96), "labels": torch.tensor(at % 2)}
        for at in range(count)
    ]
    return ViTForImageClassification(config), samples


class Clock(transformers.TrainerCallback):
    """Seconds of each update."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: list[float] = []
        self._now = now

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start."""
        self._start = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop."""
        self.seconds.append(self._now() - self._start)


def run(
    name: str, case: Case, accumulation: int, now: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Train once; return the seconds of every update, and the losses."""
    model, samples = copy.deepcopy(case[0]), case[1]
    clock = Clock(now)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=ROWS, gradient_accumulation_steps=accumulation,
            num_train_epochs=1, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False, dataloader_drop_last=True,
            torch_compile=name == "torch_compile=True",
        )  # fmt: skip
        kind, extra = transformers.Trainer, {}
        if name == "poptorch":
            options = poptorch.Options().backend("optimise").showCompilationProgressBar(False)
            kind, extra = Trainer, {"options": options}
        trainer = kind(model, arguments, train_dataset=samples, **extra)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return clock.seconds, losses


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer updates, one run of each")
    parser.add_argument("--processor-time", action="store_true", help="instead of a clock's")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--models", nargs="*", default=["bert", "vit"])
    parser.add_argument("--out", type=Path, help="write the medians there as JSON")
    chosen = parser.parse_args()
    updates, runs, first = (8, 1, 3) if chosen.quick else (16, 3, 4)
    now = time.process_time if chosen.processor_time else time.perf_counter
    results = {}
    for model in chosen.models:
        torch.manual_seed(0)
        case = {"bert": bert, "vit": vit}[model](updates * ROWS * chosen.accumulation)
        times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        losses = {}
        for _ in range(runs):
            for name in CONTESTANTS:
                seconds, losses[name] = run(name, case, chosen.accumulation, now)
                times[name] += seconds[first:]
        title = f"{model}, {ROWS} samples x {chosen.accumulation}: an update"
        print(table(title, times, "plain Trainer"), flush=True)
        pairs = list(zip(losses["plain Trainer"], losses["poptorch"], strict=True))
        apart = max(abs(one - other) for one, other in pairs)
        print(
            f"  losses at most {apart:.1e} apart, mean {statistics.mean(p for p, _ in pairs):.3f}"
        )
        results[model] = {"ms": {name: 1e3 * each for name, each in medians(times).items()}}
        results[model] |= {"accumulation": chosen.accumulation, "apart": apart}
    if chosen.out:
        chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
