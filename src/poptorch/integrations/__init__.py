"""Run wrapped models in the training loops of other libraries. These are additions to PopTorch.

Each module imports the library that it supports, so ``import poptorch`` imports none of them.
"""
