"""Caches of keys and values of ``transformers`` are traversed as dataclasses are."""

from __future__ import annotations

from transformers import cache_utils

from .._base import trees

# Of a cache and of its layers; names differ between releases.
for _name in ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer"):
    if isinstance(_kind := getattr(cache_utils, _name, None), type):
        trees.traverse_attributes(_kind)
