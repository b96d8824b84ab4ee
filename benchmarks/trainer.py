"""Compare Hugging Face's Trainer with and without ``torch_compile``, and our Trainer.

Usage: python benchmarks/trainer.py [--quick] [--processor-time]

Every contestant trains the same model on the same samples. Runs alternate, so that a noisy machine
affects all of them. The first steps of a run, which compile, are left out. The benchmark prints
medians per update. Use ``--processor-time`` if the machine is too busy for wall-clock times.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import poptorch
from harness import medians, table
from poptorch.integrations.transformers import Trainer

CONTESTANTS = ("plain Trainer", "torch_compile=True", "poptorch")
Case = tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]


def bert(layers: int, hidden: int, heads: int, count: int) -> Case:
    """Return Google's BERT-tiny, -mini or -small, with 128 tokens."""
    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config), [
        {"input_ids": torch.randint(1, 30000, (128,)), "labels": torch.tensor(at % 2)}
        for at in range(count)
    ]


def vit(hidden: int, heads: int, count: int) -> Case:
    """Return twelve layers for images of 96 x 96 in patches of 16, ViT-tiny or ViT-S wide."""
    config = ViTConfig(
        hidden_size=hidden, num_hidden_layers=12, num_attention_heads=heads, image_size=96,
        intermediate_size=4 * hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config), [
        {"pixel_values": torch.randn(3, 96, 96), "labels": torch.tensor(at % 2)}
        for at in range(count)
    ]


def gpt2(count: int) -> Case:
    """Return four layers of width 256, with 128 tokens of a vocabulary of 8,192."""
    config = GPT2Config(
        vocab_size=8192, n_positions=128, n_embd=256, n_layer=4, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, loss_type="ForCausalLM",
    )  # fmt: skip
    tokens = torch.randint(0, 8192, (count, 128))
    return GPT2LMHeadModel(config), [{"input_ids": row, "labels": row} for row in tokens]


def t5(count: int) -> Case:
    """Return four and four layers of width 256, as in T5-efficient-tiny, for 64 and 32 tokens."""
    config = T5Config(
        vocab_size=8192, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    given, expected = torch.randint(1, 8192, (count, 64)), torch.randint(1, 8192, (count, 32))
    pairs = zip(given, expected, strict=True)
    return T5ForConditionalGeneration(config), [
        {"input_ids": row, "labels": labels} for row, labels in pairs
    ]


MODELS: Mapping[str, Callable[[int], Case]] = {
    "bert-tiny": partial(bert, 2, 128, 2),
    "bert-mini": partial(bert, 4, 256, 4),
    "bert-small": partial(bert, 4, 512, 8),
    "vit-tiny": partial(vit, 192, 3),
    "vit-small": partial(vit, 384, 6),
    "gpt2-mini": gpt2,
    "t5-tiny": t5,
}


class Clock(transformers.TrainerCallback):
    """Records the seconds of each update."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: list[float] = []
        self._now = now

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Start the clock."""
        self._start = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop the clock."""
        self.seconds.append(self._now() - self._start)


def run(
    name: str, case: Case, now: Callable[[], float], **arguments: Any
) -> tuple[list[float], list[float]]:
    """Train once. Return the seconds of every update, and the losses."""
    model, samples = copy.deepcopy(case[0]), case[1]
    clock = Clock(now)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            num_train_epochs=1, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False, dataloader_drop_last=True,
            torch_compile=name == "torch_compile=True", **arguments,
        )  # fmt: skip
        kind, extra = transformers.Trainer, {}
        if name == "poptorch":
            options = poptorch.Options().backend("optimise").showCompilationProgressBar(False)
            kind, extra = Trainer, {"options": options}
        trainer = kind(model, settings, train_dataset=samples, **extra)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return clock.seconds, losses


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer updates, and one run of each")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure processor time instead of wall-clock time",
    )
    parser.add_argument("--rows", type=int, default=8, help="samples in a micro-batch")
    parser.add_argument(
        "--accumulation", type=int, default=1, help="micro-batches in an update (default: 1)"
    )
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument(
        "--models",
        nargs="*",
        choices=MODELS,
        default=list(MODELS),
        help="models to train (default: all)",
    )
    parser.add_argument("--out", type=Path, help="write the medians to this JSON file")
    chosen = parser.parse_args()
    updates, runs, first = (8, 1, 3) if chosen.quick else (16, 3, 4)
    now = time.process_time if chosen.processor_time else time.perf_counter
    arguments = {
        "per_device_train_batch_size": chosen.rows,
        "gradient_accumulation_steps": chosen.accumulation,
        "bf16": chosen.bf16,
    }
    results = {}
    for model in chosen.models:
        torch.manual_seed(0)
        case = MODELS[model](updates * chosen.rows * chosen.accumulation)
        times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        losses = {}
        for _ in range(runs):
            for name in CONTESTANTS:
                seconds, losses[name] = run(name, case, now, **arguments)
                times[name] += seconds[first:]
        title = f"{model}, {chosen.rows} samples x {chosen.accumulation}: an update"
        print(table(title, times, "plain Trainer"), flush=True)
        pairs = list(zip(losses["plain Trainer"], losses["poptorch"], strict=True))
        difference = max(abs(one - other) for one, other in pairs)
        print(
            f"  losses differ by at most {difference:.1e}, "
            f"mean {statistics.mean(p for p, _ in pairs):.3f}"
        )
        results[model] = {"ms": {name: 1e3 * each for name, each in medians(times).items()}}
        results[model] |= {"arguments": arguments, "apart": difference}
    if chosen.out:
        chosen.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
