"""Benchmarks: ``python -m benchmarks.NAME --help``, see README.md."""

from specdec.utils.blas import load_blas

load_blas()  # as commands do, before a script imports mlx
