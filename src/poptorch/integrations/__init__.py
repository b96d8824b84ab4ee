"""Training loops of other libraries that run wrapped models. Additions to PopTorch.

Each module imports the library that it supports, so ``import poptorch`` imports none of them.
"""
