"""Small models of transformers, random weights: three updates of two micro-batches beside eager.

A model is equal if it ends no further from eager in float64 than twice what eager in float32 does.
What eager does not train in this form is not counted. ``python benchmarks/zoo.py [NAME ...]``.
"""

from __future__ import annotations

import argparse
import copy
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

import poptorch

UPDATES, MICRO_BATCHES, ROWS, LENGTH, CLASSES, LIMIT_S = 3, 2, 2, 16, 3, 90
# Sizes by the names that configurations have for them; 2 layers of 2 heads, 16 wide.
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embedding_size", "projection_dim",
         "embed_dim", "word_embed_proj_dim", "hidden_dim"), 16),
    **dict.fromkeys(
        ("intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim",
         "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
         "decoder_layers", "num_decoder_layers", "num_attention_heads", "n_head", "n_heads",
         "num_heads", "num_key_value_heads", "encoder_attention_heads", "decoder_attention_heads",
         "num_experts_per_tok", "num_block_records"), 2),
    "vocab_size": 99, "max_position_embeddings": 64, "n_positions": 64, "head_dim": 8, "d_kv": 8,
    "num_experts": 4, "num_local_experts": 4, "image_size": 32, "patch_size": 8, "num_labels": 3,
    "pad_token_id": 0, "use_cache": False, "layerdrop": 0.0, "attention_window": 4,
}  # fmt: skip
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    "rows": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    "translated": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "spoken": modeling_auto.MODEL_FOR_CTC_MAPPING,
}


class TooSlow(BaseException):
    """A model takes more than its share of the time."""


def shrink(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value)
        elif name in SMALL and isinstance(value, (int, float)):
            setattr(config, name, SMALL[name])
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def inputs(kind: str, config: Any) -> dict[str, torch.Tensor]:
    rows = ROWS * MICRO_BATCHES
    draw = torch.Generator().manual_seed(0)
    if kind == "images":
        size = getattr(config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        images = torch.randn(
            rows, getattr(config, "num_channels", 3), height, width, generator=draw
        )
        return {"pixel_values": images, "labels": torch.arange(rows) % CLASSES}
    words = torch.randint(3, 99, (rows, LENGTH), generator=draw)
    if kind == "spoken":
        sound = torch.randn(rows, 4000, generator=draw)
        return {"input_values": sound, "labels": words[:, :3] % 20 + 1}
    return {"input_ids": words, "labels": torch.arange(rows) % CLASSES if kind == "rows" else words}


def eager(model: nn.Module, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Module:
    model = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        for at in range(MICRO_BATCHES):
            part = {
                name: (x.to(dtype) if x.is_floating_point() else x).chunk(MICRO_BATCHES)[at]
                for name, x in batch.items()
            }
            (model(**part).loss / MICRO_BATCHES).backward()
        optimizer.step()
    return model


def ours(model: nn.Module, batch: dict[str, torch.Tensor], backend: str) -> nn.Module:
    options = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    options.Training.gradientAccumulation(MICRO_BATCHES)
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    executor = poptorch.trainingModel(model, options, optimizer)
    for _ in range(UPDATES):
        executor(**batch)
    executor.copyWeightsToHost()
    return model


def distance(model: nn.Module, exact: nn.Module) -> float:
    """Between the weights: the largest of all tensors' differences."""
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return max((a.detach().double() - b.detach()).abs().max().item() for a, b in pairs)


def verdict(kind: str, config_class: Any, model_class: Any, backend: str) -> str | None:
    """Say what came of a model; None if eager does not train it in this form."""
    torch.manual_seed(0)
    try:
        config = shrink(config_class())
        model = model_class(config).train()
        for part in model.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = 0.0
        if sum(p.numel() for p in model.parameters()) > 20_000_000:
            return None
        batch = inputs(kind, config)
        exact, plain = (eager(model, batch, kind) for kind in (torch.float64, torch.float32))
    except Exception:  # whatever a configuration does not like about these sizes
        return None
    try:
        trained = ours(model, batch, backend)
    except Exception as error:  # which is what the table is about
        return f"refused: {type(error).__name__}: {str(error.args[0] if error.args else '')[:100]}"
    noise, apart = distance(plain, exact), distance(trained, exact)
    return "equal" if apart <= 2 * noise + 1e-9 else f"apart by {apart:.1e}, eager by {noise:.1e}"


def models(names: list[str]) -> Iterator[tuple[str, str, Any, Any]]:
    for kind, mapping in KINDS.items():
        for config_class, model_class in mapping.items():
            several = model_class if isinstance(model_class, tuple) else (model_class,)
            for each in several:
                if not names or each.__name__ in names or kind in names:
                    yield kind, each.__name__, config_class, each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="classes, or kinds: " + ", ".join(KINDS))
    parser.add_argument("--backend", default="reference")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()

    def end(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, end)
    counts = Counter[str]()
    for kind, name, config_class, model_class in models(chosen.names):
        signal.alarm(LIMIT_S)
        try:
            said = verdict(kind, config_class, model_class, chosen.backend)
        except TooSlow:
            said = None
        finally:
            signal.alarm(0)
        if said is not None:
            counts[said.split()[0]] += 1
            print(f"{name}: {said}", flush=True)
    total = sum(counts.values())
    print(f"{counts['equal']} of {total} models that eager trains are equal: {dict(counts)}")
    sys.exit(counts["equal"] < 0.97 * total)


if __name__ == "__main__":
    main()
