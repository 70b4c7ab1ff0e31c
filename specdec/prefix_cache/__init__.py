"""Prompts that share a prefix with an earlier one skip its prefill (docs/prefix.md).

``radix`` and ``disk`` need no mlx, so that ``specdec cache`` answers quickly; that
is why nothing is imported here.
"""
