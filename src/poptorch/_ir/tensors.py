"""Name the two ways in which functions take several tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Tensors = Sequence[torch.Tensor]
TensorsByKey = Mapping[str, torch.Tensor]  # usually by slot key, sometimes by path
