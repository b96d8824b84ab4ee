"""PopTorch scripts as plain PyTorch; needs libcst."""
