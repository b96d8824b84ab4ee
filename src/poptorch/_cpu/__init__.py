"""Compile graphs for CPUs with torch's compiler: the backend ``inductor``."""

from .backend import Inductor
