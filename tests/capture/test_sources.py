"""Compiling leaves no text of generated code behind, and takes none away."""

from __future__ import annotations

import linecache

import torch
from torch import fx, nn
from torch.fx import graph_module

import poptorch
from helpers.wrapped import options
from poptorch._capture.sources import forgetting_sources


def test_only_what_is_new_is_forgotten() -> None:
    mine = fx.symbolic_trace(nn.Linear(2, 2))
    name = mine.forward.__code__.co_filename
    with forgetting_sources():
        other = fx.symbolic_trace(nn.Linear(3, 3))
    assert name in graph_module._loader.eval_cache
    assert other.forward.__code__.co_filename not in linecache.cache
    assert other(torch.ones(1, 3)).shape == (1, 3)


def test_wrapping_models_keeps_nothing() -> None:
    kept = graph_module._loader.eval_cache
    before = len(kept)
    model = nn.Linear(2, 2)
    training = poptorch.trainingModel(model, options(accumulation=2), loss=nn.MSELoss())
    training(torch.ones(4, 2), torch.ones(4, 2))
    training.plan()
    training.explain(torch.ones(4, 2), torch.ones(4, 2))
    poptorch.inferenceModel(model, options())(torch.ones(4, 2))
    assert len(kept) == before
