"""Small models of transformers against eager PyTorch, with the code of ``benchmarks/zoo.py``."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers

import zoo

WORDS = {"bos_token_id": 1, "eos_token_id": 2}
CLIP = {"text_config": {**WORDS, "projection_dim": 16}, "vision_config": {"projection_dim": 16}}
WHISPER = {
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 16,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "decoder_start_token_id": 1,
    **WORDS,
}
FOUR = {"depths": [1, 1, 1, 1], "hidden_sizes": [4, 8, 8, 8]}
TWO = {"depths": [1, 1], "hidden_sizes": [4, 8], "embedding_size": 4}
IMAGES = {
    "Beit": {},
    "ConvNext": {**FOUR, "patch_size": 4},
    "MobileNetV2": {"depth_multiplier": 0.25},
    "RegNet": {**TWO, "groups_width": 2},
    "ResNet": TWO,
    "Segformer": {**FOUR, "num_attention_heads": [1, 1, 2, 2]},
    "Swin": {
        "window_size": 4,
        "patch_size": 4,
        "embed_dim": 8,
        "depths": [1, 2],
        "num_heads": [1, 2],
    },
    "ViT": {},
}
RECIPES = {
    **{f"{name}ForImageClassification": IMAGES[name] | {"num_labels": 3} for name in IMAGES},
    **{f"{name}ForMaskedLM": {} for name in ("Albert", "Bert", "DebertaV2", "XLMRoberta")},
    **{f"{name}ForCausalLM": {} for name in (
        "Bloom", "Falcon", "GPTNeoX", "Gemma", "Llama", "Mamba", "Mistral", "OPT", "Phi", "Qwen2")},
    "GPT2LMHeadModel": WORDS,
    "BartForConditionalGeneration": {},
    "T5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "CLIPModel": CLIP,
    "WhisperForConditionalGeneration": WHISPER,
}  # fmt: skip
KINDS = {"ImageClassification": "images", "CausalLM": "causal", "MaskedLM": "masked"}


class Paired(torch.nn.Module):
    """Images and words, with the loss of how they match."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: torch.Tensor) -> Any:
        return self.model(**given, return_loss=True)


def made(name: str) -> tuple[torch.nn.Module, zoo.Batch]:
    """Make a model and a batch, in which some words are masked if the model takes masked words."""
    model_class = getattr(transformers, name)
    config = zoo.shrink(model_class.config_class(**RECIPES[name]))
    config.update(IMAGES.get(name.partition("For")[0], {}))
    batch = zoo.inputs(KINDS.get(name.partition("For")[2], "causal"), config)
    if name.startswith("Whisper"):
        return model_class(config), {
            "input_features": torch.randn(4, 8, 40),
            "labels": batch["labels"],
        }
    if (
        "attention_mask" in inspect.signature(model_class.forward).parameters
        and "input_ids" in batch
    ):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1::2, -2:] = 0
    if name != "CLIPModel":
        return model_class(config), batch
    batch["pixel_values"] = zoo.inputs("images", config.vision_config)["pixel_values"]
    del batch["labels"]
    return Paired(model_class(config)), batch


def names() -> Any:
    return RECIPES


def samples(name: str, most: int) -> Iterator[Any]:
    yield name


def tried(name: str) -> Iterator[Any]:
    """Yield how training went."""
    verdict = zoo.verdict(lambda: made(name), "reference") or "eager torch does not train it"
    yield "training", None if verdict == "equal" else verdict
