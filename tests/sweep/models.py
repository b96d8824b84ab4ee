"""Small models built from configurations of the transformers package, five training steps each."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

import poptorch

from . import checks

ROWS, LENGTH, WORDS, SIDE = 2, 8, 60, 32
STEPS = 5

_TEXT = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "max_position_embeddings": 32}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "pad_token_id": 0}
_SEQ2SEQ = {"vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24, "max_position_embeddings": 32, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
_PATCHES = {"image_size": SIDE, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "intermediate_size": 24, "num_labels": 3}  # fmt: skip


def _words(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS, (ROWS, length))


def _whole_sentences() -> dict[str, Any]:
    words = _words()
    return {"input_ids": words, "labels": words}


def _language() -> dict[str, Any]:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return _whole_sentences() | {"attention_mask": mask}


def _pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(ROWS, 3, SIDE, SIDE)}


def _image_classes() -> dict[str, Any]:
    return _pixels() | {"labels": torch.randint(0, 3, (ROWS,))}


def _pictures_and_words() -> dict[str, Any]:
    return _pixels() | {"input_ids": _words(), "return_loss": True}


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(ROWS, 8, 40), "labels": _words(6)}


class Recipe(NamedTuple):
    """How to build one model, and what makes the arguments of one call."""

    family: str  # of its configuration and of its model
    head: str  # the rest of its model class's name
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]

    def build(self) -> nn.Module:
        """Make the model, the same each time, in training mode."""
        import transformers

        torch.manual_seed(1)
        config = getattr(transformers, f"{self.family}Config")(**self.settings)
        model: nn.Module = getattr(transformers, f"{self.family}{self.head}")(config)
        return model.train()


def _masked(family: str, **extra: Any) -> Recipe:
    return Recipe(family, "ForMaskedLM", {**_TEXT, **extra}, _language)


def _causal(family: str, **extra: Any) -> Recipe:
    return Recipe(family, "ForCausalLM", {**_GROUPED, **extra}, _language)


def _image(family: str, **settings: Any) -> Recipe:
    return Recipe(family, "ForImageClassification", settings, _image_classes)


_GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_T5 = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
       "decoder_start_token_id": 0}  # fmt: skip
_MAMBA = {"vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
_CLIP = {
    "text_config": {**_TEXT, "projection_dim": 8, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": {k: v for k, v in _PATCHES.items() if k != "num_labels"},
    "projection_dim": 8,
}

RECIPES: dict[str, Recipe] = {
    "albert": _masked("Albert", embedding_size=8),
    "bart": Recipe("Bart", "ForConditionalGeneration", _SEQ2SEQ, _language),
    "beit": _image("Beit", **_PATCHES),
    "bert": _masked("Bert"),
    "bloom": Recipe("Bloom", "ForCausalLM",
                    {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2}, _language),
    "clip": Recipe("CLIP", "Model", _CLIP, _pictures_and_words),
    "convnext": _image("ConvNext", depths=[1, 1, 1, 1], hidden_sizes=[4, 8, 8, 8], num_labels=3),
    "deberta v2": _masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "falcon": Recipe("Falcon", "ForCausalLM",
                     {k: v for k, v in _TEXT.items() if k != "intermediate_size"}, _language),
    "gemma": _causal("Gemma", head_dim=8),
    "gpt neox": Recipe("GPTNeoX", "ForCausalLM", _TEXT, _language),
    "gpt2": Recipe("GPT2", "LMHeadModel", _GPT2, _language),
    "llama": _causal("Llama"),
    "mamba": Recipe("Mamba", "ForCausalLM", _MAMBA, _whole_sentences),
    "mistral": _causal("Mistral", sliding_window=4),
    "mobilenet v2": _image("MobileNetV2", image_size=SIDE, depth_multiplier=0.25, num_labels=3),
    "opt": Recipe("OPT", "ForCausalLM",
                  {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "ffn_dim": 24, "max_position_embeddings": 32,
                   "word_embed_proj_dim": 16, "layerdrop": 0.0}, _language),
    "phi": _causal("Phi"),
    "qwen2": _causal("Qwen2"),
    "regnet": _image("RegNet", hidden_sizes=[4, 8], depths=[1, 1], embedding_size=4,
                     groups_width=2, num_labels=3),
    "resnet": _image("ResNet", embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=3),
    "segformer": _image("Segformer", hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 1, 1],
                        num_attention_heads=[1, 1, 2, 2], num_labels=3),
    "swin": _image("Swin", image_size=SIDE, patch_size=4, window_size=4, embed_dim=8,
                   depths=[1, 2], num_heads=[1, 2], num_labels=3),
    "t5": Recipe("T5", "ForConditionalGeneration", _T5, _language),
    "vit": _image("ViT", **_PATCHES),
    "whisper": Recipe(
        "Whisper", "ForConditionalGeneration",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 16,
         "suppress_tokens": None, "begin_suppress_tokens": None}, _speech),
    "xlm roberta": _masked("XLMRoberta", max_position_embeddings=40),
}  # fmt: skip


class WithLoss(nn.Module):
    """Returns the loss that the model computes for itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        return poptorch.identity_loss(self.model(**inputs).loss, reduction="none")


def names() -> dict[str, Recipe]:
    """Every model by name."""
    return RECIPES


def samples(name: str, most: int) -> Iterator[Recipe]:
    """Yield the one sample of a model."""
    yield RECIPES[name]


def tried(recipe: Recipe) -> Iterator[tuple[str, str | None]]:
    """Yield how training five steps went."""
    model = WithLoss(recipe.build())
    torch.manual_seed(2)
    batches: list[checks.Inputs] = [((), recipe.inputs()) for _ in range(STEPS)]
    yield "training", checks.problem_of(lambda: checks.check_training(model, batches, 0.05))
