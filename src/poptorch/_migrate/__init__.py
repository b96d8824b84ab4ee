"""Translate PopTorch scripts into plain PyTorch. This requires libcst."""
