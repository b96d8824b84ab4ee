"""Estimate what a graph costs on this machine: bytes, operations, seconds of a core, and links.

Lanes, placement and the exchange of gradients are decided with these numbers. ``_ipu_model``
estimates what the same program would cost on IPUs, from a finished plan.
"""
