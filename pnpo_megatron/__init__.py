"""PNPO (Prefix-Normalized Policy Optimization, arXiv 2608.01418) on Megatron-Core."""

__version__ = "0.1.0"
