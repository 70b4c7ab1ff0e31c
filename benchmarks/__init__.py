"""Benchmarks: ``python -m benchmarks.NAME --help``, see README.md."""
