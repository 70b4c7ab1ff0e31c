"""Keeps costs on disk, so that a pair of models is measured once on a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...utils.kept import KeptEntries, kept_path
from .costs import Correction, ForwardCosts, Forwards, RoundCosts

VERSION = 7
# How many pairs of models are remembered; the oldest are forgotten.
MOST_ENTRIES = 64


def default_path() -> Path:
    """``costs.json`` in the user's cache folder."""
    return kept_path("costs.json")


class CostStore:
    """A JSON file of costs by key. If it cannot be read or written, nothing is kept.

    Args:
        path: the file; it and its folder are made when something is saved.
    """

    def __init__(self, path: Path):
        self.path = path
        self._kept = KeptEntries(path, "costs", version=VERSION, most=MOST_ENTRIES)

    def load(self, key: str, *, new_shape: float = 0.0) -> RoundCosts:
        """The costs saved for ``key``; empty ones if there are none."""
        try:
            return _costs_of(self._kept.load()[key], new_shape)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return RoundCosts(ForwardCosts(), new_shape=new_shape)

    def save(self, key: str, costs: RoundCosts) -> None:
        """Add ``costs`` to the file, atomically."""
        self._kept.save(key, _entry_of(costs))


def _entry_of(costs: RoundCosts) -> dict[str, Any]:
    return {
        "forwards": [
            {
                "rows": f.num_rows,
                "verify": [[s, f.verify[s]] for s in sorted(f.verify)],
                "draft_step": f.draft_step,
                "draft_once": f.draft_once,
            }
            for f in costs.forwards.measured
        ],
        "corrections": [
            [*at, c.log_factor, c.rounds] for at, c in costs.corrections.items()
        ],
    }


def _costs_of(entry: dict[str, Any], new_shape: float) -> RoundCosts:
    forwards = [
        Forwards(
            int(f["rows"]),
            {int(s): _positive(seconds) for s, seconds in f["verify"]},
            _positive(f["draft_step"], or_zero=True),
            _positive(f.get("draft_once", 0.0), or_zero=True),
        )
        for f in entry["forwards"]
    ]
    if not all(f.num_rows > 0 and 1 in f.verify for f in forwards):
        raise ValueError("no plain forward")
    corrections = {
        (int(b), int(k)): Correction(_finite(factor), max(0, int(rounds)))
        for b, k, factor, rounds in entry["corrections"]
    }
    return RoundCosts(ForwardCosts(forwards), corrections, new_shape)


def _finite(value: float) -> float:
    number = float(value)
    if not -50 < number < 50:  # NaN too
        raise ValueError(f"{value} is no logarithm of a factor")
    return number


def _positive(value: float, *, or_zero: bool = False) -> float:
    number = float(value)
    if not (0 < number < 1e6 or (or_zero and number == 0)):
        raise ValueError(f"{value} is no number of seconds")
    return number
