"""Prices and placements of models, before there are devices. Additions to PopTorch."""
