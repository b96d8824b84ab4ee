"""Traverse the key and value caches of ``transformers`` in the same way as dataclasses."""

from __future__ import annotations

from transformers import cache_utils

from .._base import nested_values

# Names of cache and layer classes; they differ between releases.
for _name in ("Cache", "CacheLayerMixin", "LinearAttentionCacheLayerMixin", "DummyLayer"):
    if isinstance(_kind := getattr(cache_utils, _name, None), type):
        nested_values.traverse_attributes(_kind)
