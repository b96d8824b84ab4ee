"""What a graph costs this machine: bytes, operations, seconds of a core, and links.

Lanes, placement and the exchange of gradients are decided by these numbers. What the same program
would cost on IPUs is priced by ``_ipu_model``, from a finished plan.
"""
