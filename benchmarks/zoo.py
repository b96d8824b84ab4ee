"""Train small models of other libraries, and compare three updates with eager PyTorch.

The models come from transformers, and from timm and diffusers if they are installed. (Install them
with ``pip install --no-deps``; a stand-in replaces what timm imports from torchvision.) They have
random weights, and each update has two micro-batches.

A model counts as equal if its weights end no further from those of eager PyTorch in float64 than
twice the distance of eager PyTorch in float32. The latter distance is the largest of three runs:
from the same weights, and from two sets of weights that differ by one ulp. Numbers that ``forward``
draws with NumPy, such as masks over time, are the same in each call. Models that eager PyTorch does
not train in this form, or trains to NaN or infinite weights, do not count.

Some models of transformers run once more, ``checkpointed``: with dropout and
``gradient_checkpointing_enable()``. Another run would not draw the same masks, so these count as
equal if ``checkAgainstEager("error")``, which gives eager PyTorch's random numbers to the program,
finds no difference.

Usage: python benchmarks/zoo.py [NAME ...]
"""

from __future__ import annotations

import argparse
import copy
import importlib.machinery
import importlib.util
import logging
import math
import re
import signal
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

import poptorch

UPDATES, MICRO_BATCHES, ROWS, LENGTH, CLASSES = 3, 2, 2, 16, 3
LIMIT_S = 90  # processor seconds, including the eager runs; other processes do not count
# Sizes by their names in configurations: 2 layers with 2 heads, 16 wide.
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
         "num_experts_per_tok", "num_block_records", "linear_num_heads"), 2),
    "vocab_size": 99, "max_position_embeddings": 64, "n_positions": 64, "head_dim": 8, "d_kv": 8,
    "linear_head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "image_size": 32, "patch_size": 8,
    "use_cache": False, "layerdrop": 0.0, "attention_window": 4,
}  # fmt: skip
KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    "rows": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    "translated": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "spoken": modeling_auto.MODEL_FOR_CTC_MAPPING,
}


CHECKPOINTED = (
    "BertForMaskedLM", "BertForSequenceClassification", "GPT2LMHeadModel", "OPTForCausalLM",
    "RobertaForMaskedLM", "T5ForConditionalGeneration", "BartForConditionalGeneration",
    "ViTForImageClassification", "DebertaV2ForSequenceClassification", "LlamaForCausalLM",
)  # fmt: skip
DROPOUT = 0.1

Batch = dict[str, torch.Tensor]


class TooSlow(BaseException):
    """A model takes longer than the time limit."""


def shrink(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value)
        elif name in SMALL and isinstance(value, (int, float)):
            setattr(config, name, SMALL[name])
        elif name == "image_size" and isinstance(value, (list, tuple)):
            setattr(config, name, (64, 64))
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def inputs(kind: str, config: Any) -> Batch:
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


def eager(model: nn.Module, batch: Batch, dtype: torch.dtype) -> nn.Module:
    model = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        for at in range(MICRO_BATCHES):
            part = {
                name: (x.to(dtype) if x.is_floating_point() else x).chunk(MICRO_BATCHES)[at]
                for name, x in batch.items()
            }
            (model(**part)["loss"] / MICRO_BATCHES).backward()
        optimizer.step()
    return model


def ours(model: nn.Module, batch: Batch, backend: str, check: str = "warn") -> nn.Module:
    options = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    options.checkAgainstEager(check)
    options.Training.gradientAccumulation(MICRO_BATCHES)
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    executor = poptorch.trainingModel(model, options, optimizer)
    for _ in range(UPDATES):
        executor(**batch)
    executor.copyWeightsToHost()
    return model


def nudged(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy in which each weight is unchanged or is the next number up or down."""
    model, draw = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            towards = torch.randint(-1, 2, each.shape, generator=draw) * torch.inf
            each.copy_(torch.where(towards.isnan(), each, torch.nextafter(each, towards)))
    return model


def distance(model: nn.Module, exact: nn.Module) -> float:
    """Return the largest difference between the weights of two models."""
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return max((a.double() - b).abs().max().item() for a, b in pairs if a.numel())


Make = Callable[[], tuple[nn.Module, Batch]]
Verdict = Callable[[Make, str], str | None]


def verdict(make: Make, backend: str) -> str | None:
    """Return the result for a model, or None if eager PyTorch does not train it in this form."""
    torch.manual_seed(0)
    try:
        model, batch = make()
        model.register_forward_pre_hook(lambda *_: np.random.seed(0))
        for part in model.train().modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = 0.0
        if sum(p.numel() for p in model.parameters()) > 20_000_000:
            return None
        exact, plain = (eager(model, batch, kind) for kind in (torch.float64, torch.float32))
    except Exception:  # a configuration may refuse these sizes with any error
        return None
    noise = distance(plain, exact)
    if not math.isfinite(noise):
        return None
    try:
        trained = ours(model, batch, backend)
    except Exception as error:  # the result that this table shows
        return f"refused: {type(error).__name__}: {str(error.args[0] if error.args else '')[:100]}"
    difference = distance(trained, exact)
    if difference > 2 * noise + 1e-9:
        others = (eager(nudged(model, seed), batch, torch.float32) for seed in range(3))
        noise = max(noise, *(distance(other, exact) for other in others))
    return (
        "equal"
        if difference <= 2 * noise + 1e-9
        else f"differ by {difference:.1e}, eager by {noise:.1e}"
    )


class Skipped(logging.Handler):
    """Stores the reason why a program was not compared with eager PyTorch."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.reason: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if "was not compared with eager" in record.getMessage():
            self.reason = record.getMessage().rpartition(": ")[2]


def checked(make: Make, backend: str) -> str | None:
    """Return the result of the check for a model that draws random numbers and recomputes, or None
    as ``verdict`` does.
    """
    torch.manual_seed(0)
    try:
        model, batch = make()
        model.train().gradient_checkpointing_enable()  # type: ignore[operator]
        for part in model.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.p = DROPOUT
        eager(model, batch, torch.float32)
    except Exception:  # a configuration may refuse these sizes with any error
        return None
    skipped, engine = Skipped(), logging.getLogger("poptorch:cpp")
    level = engine.level
    engine.addHandler(skipped)
    engine.setLevel(logging.INFO)
    try:
        ours(model, batch, backend, "error")
    except Exception as error:  # the result that this table shows
        return f"refused: {type(error).__name__}: {str(error.args[0] if error.args else '')[:200]}"
    finally:
        engine.removeHandler(skipped)
        engine.setLevel(level)
    return f"skipped: {skipped.reason}" if skipped.reason else "equal"


def of_transformers() -> Iterator[tuple[str, str, Make]]:
    for kind, mapping in KINDS.items():
        for config_class, model_class in mapping.items():
            several = model_class if isinstance(model_class, tuple) else (model_class,)
            for each in several:

                def make(kind: str = kind, config: Any = config_class, model: Any = each) -> Any:
                    small = shrink(config())
                    small.num_labels, small.pad_token_id = CLASSES, 0  # models need not list it
                    return model(small), inputs(kind, small)

                yield kind, each.__name__, make


class Graded(nn.Module):
    """A model with a loss on its results, which are classes or values."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, labels: torch.Tensor, **given: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(**given)
        out = out if isinstance(out, torch.Tensor) else out[0]
        if labels.is_floating_point():
            return {"loss": nn.functional.mse_loss(out, labels)}
        return {"loss": nn.functional.cross_entropy(out, labels)}


class _Named(type):
    def __getattr__(cls, name: str) -> str:
        return name


class _StandIn(types.ModuleType):
    """A module from which timm imports names that it does not use in training."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _StandIns:
    def find_spec(self, name: str, *_: Any) -> Any:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


LITTLE = re.compile(
    "test_|zepto|atto|femto|pico|nano|xxs|xx_small|tiny|_t[0-9_.]|_0[0-9]{2}|mini|18"
)


def of_timm() -> Iterator[tuple[str, str, Make]]:
    """Return, for each module of timm, the models of its tests or a small model."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_StandIns())  # type: ignore[arg-type]
    import timm

    for module in timm.list_modules():
        names = timm.list_models(module=module)
        tests = [name for name in names if name.startswith("test_")]
        for name in tests or [name for name in names if LITTLE.search(name)][:1] or names[:1]:

            def make(name: str = name) -> Any:
                try:
                    net = timm.create_model(name, num_classes=CLASSES, img_size=64)
                except TypeError:
                    net = timm.create_model(name, num_classes=CLASSES)
                rows = ROWS * MICRO_BATCHES
                draw = torch.Generator().manual_seed(0)
                images = torch.randn(rows, 3, 64, 64, generator=draw)
                return Graded(net), {"labels": torch.arange(rows) % CLASSES, "x": images}

            yield "timm", name, make


BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
DOWN_UP = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
           "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}  # fmt: skip
CROSS = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
         "attention_head_dim": 4, "cross_attention_dim": 8}  # fmt: skip
CODED = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
PATCHED = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8,
           "patch_size": 2, "in_channels": 4, "out_channels": 4}  # fmt: skip
# Settings, and the inputs besides images: the shapes of one sample.
DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "UNet2DModel": ({**BLOCKS, **DOWN_UP, "in_channels": 3, "out_channels": 3}, {}),
    "UNet2DConditionModel": (
        {**BLOCKS, **CROSS, "in_channels": 3, "out_channels": 3},
        {"encoder_hidden_states": (5, 8)},
    ),
    "AutoencoderKL": ({**BLOCKS, **CODED, "latent_channels": 2}, {}),
    "VQModel": ({**BLOCKS, **CODED, "latent_channels": 2, "num_vq_embeddings": 8}, {}),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1),
        },
        {},
    ),
    "DiTTransformer2DModel": ({**PATCHED, "norm_num_groups": 4}, {"class_labels": ()}),
    "PixArtTransformer2DModel": (
        {**PATCHED, "cross_attention_dim": 16, "caption_channels": 8},
        {"encoder_hidden_states": (5, 8)},
    ),
    "SD3Transformer2DModel": (
        {**PATCHED, "joint_attention_dim": 8, "caption_projection_dim": 16,
         "pooled_projection_dim": 8, "pos_embed_max_size": 8},
        {"encoder_hidden_states": (5, 8), "pooled_projections": (8,)},
    ),
    "AuraFlowTransformer2DModel": (
        {
            "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 8, "in_channels": 4,
            "out_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
            "joint_attention_dim": 8, "caption_projection_dim": 16, "pos_embed_max_size": 16,
        },
        {"encoder_hidden_states": (5, 8)},
    ),
    "SanaTransformer2DModel": (
        {**PATCHED, "patch_size": 1, "num_cross_attention_heads": 2,
         "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 8},
        {"encoder_hidden_states": (5, 8)},
    ),
}  # fmt: skip
TIMED = ("UNet", "Transformer")  # models that take a diffusion time step


def of_diffusers() -> Iterator[tuple[str, str, Make]]:
    import diffusers

    for name, (settings, beside) in DIFFUSERS.items():

        def make(name: str = name, settings: Any = settings, beside: Any = beside) -> Any:
            net = getattr(diffusers, name)(**settings)
            rows, draw = ROWS * MICRO_BATCHES, torch.Generator().manual_seed(0)
            shape = (rows, settings.get("in_channels", 3), 8, 8)
            first = "hidden_states" if "Transformer" in name else "sample"
            if name == "AutoencoderTiny":
                first = "sample"
            batch = {first: torch.randn(shape, generator=draw)}
            batch["labels"] = torch.randn(shape, generator=draw)
            if any(part in name for part in TIMED):
                batch["timestep"] = torch.arange(rows) * 7
            for key, own in beside.items():
                batch[key] = torch.randn(rows, *own, generator=draw) if own else torch.arange(rows)
            return Graded(net), batch

        yield "diffusers", name, make


def models(names: list[str]) -> Iterator[tuple[str, Make, Verdict]]:
    sources = [of_transformers]
    for library, source in (("timm", of_timm), ("diffusers", of_diffusers)):
        if importlib.util.find_spec(library) is not None:
            sources.append(source)
    for source in sources:
        for kind, name, make in source():
            if not names or name in names or kind in names:
                yield name, make, verdict
    for _, name, make in of_transformers():
        if name in CHECKPOINTED and (not names or "checkpointed" in names):
            yield f"{name}, checkpointed", make, checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="models, timm, diffusers, checkpointed, or " + ", ".join(KINDS)
    )
    parser.add_argument(
        "--backend", default="reference", help="backend that runs the programs (default: reference)"
    )
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()

    def end(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, end)
    counts = Counter[str]()
    for name, make, judge in models(chosen.names):
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            verdict = judge(make, chosen.backend)
        except TooSlow:
            verdict = f"slow: more than {LIMIT_S} seconds of processor"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if verdict is not None:
            counts[verdict.split()[0]] += 1
            print(f"{name}: {verdict}", flush=True)
    total = sum(counts.values())
    print(f"{counts['equal']} of {total} models that eager trains are equal: {dict(counts)}")
    sys.exit(counts["equal"] < 0.97 * total)


if __name__ == "__main__":
    main()
