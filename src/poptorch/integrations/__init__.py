"""Training loops of other libraries, running wrapped models. Additions to PopTorch.

Each module imports the library that it is for, so nothing here is imported by ``import poptorch``.
"""
