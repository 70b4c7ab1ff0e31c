"""Benchmarks: ``python -m benchmarks.NAME --help``, see README.md."""

from specdec.utils.process import prepare_process

prepare_process()  # as commands do, before a script imports mlx
