"""Prompts that share a prefix with an earlier one skip its prefill (docs/prefix.md).

Nothing is imported here, so that ``specdec cache`` starts quickly: ``radix`` and
``disk`` need no mlx.
"""
