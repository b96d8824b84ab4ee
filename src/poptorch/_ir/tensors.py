"""Name the two types in which functions take several tensors: in order, and by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Tensors = Sequence[torch.Tensor]
TensorsByKey = Mapping[str, torch.Tensor]  # usually by slot key, sometimes by path
