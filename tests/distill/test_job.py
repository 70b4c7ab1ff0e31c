"""Whole runs on a small random target: they learn, stop, and go on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec.distill.train import Trainer

from .harness import options, run, same, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("distill") / "target")


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Interrupt training behind so many steps: ``stopped(4)``."""

    def behind(steps: int) -> None:
        step = Trainer.step

        def counted(self: Trainer) -> None:
            if self.progress.step == steps:
                raise KeyboardInterrupt
            step(self)

        monkeypatch.setattr(Trainer, "step", counted)

    return behind


def test_a_resumed_run_equals_an_uninterrupted_one(
    target: Path, tmp_path: Path, stopped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimizer and data order, to the bit; two epochs and more."""
    whole = options(target, tmp_path / "whole")
    card = run(whole)
    parts = options(target, tmp_path / "parts", resume=True)
    stopped(4)
    with pytest.raises(KeyboardInterrupt):
        run(parts)
    monkeypatch.undo()
    resumed = run(parts)
    assert resumed["training"]["steps"] == card["training"]["steps"] > 8
    assert resumed["agreement"] == card["agreement"]
    weights = [
        mx.load(str(tmp_path / name / "model.safetensors"))
        for name in ("whole", "parts")
    ]
    assert same(*weights)
