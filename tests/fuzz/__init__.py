"""Malformed input of every kind, drawn from a seed, and what must hold for all of it.

``python -m tests.fuzz`` runs cases; ``tests/fuzz/test_fuzz.py`` runs a bounded number.
A kind of input is one function with :func:`tests.fuzz.case.kind` above it, in a module
that :mod:`tests.fuzz.kinds` imports. It draws an input, gives it to specdec, and checks
what came of it. The worker (:mod:`tests.fuzz.worker`) checks the rest: time, memory,
descriptors, threads and files that are left.
"""
