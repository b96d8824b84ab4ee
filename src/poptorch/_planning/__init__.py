"""Estimate and place models before there are devices. These are additions to PopTorch."""
