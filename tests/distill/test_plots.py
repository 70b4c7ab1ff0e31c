"""The plot of learning: a line for each draft, a panel for each set of prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.distill.plots import draw_learning, main


def card(*agreements: float) -> dict[str, Any]:
    return {
        "training": {
            "history": [
                {
                    "tokens": 1_000_000 * (i + 1),
                    "held_out": {"own": {"agreement": a}, "code": {"agreement": a / 2}},
                }
                for i, a in enumerate(agreements)
            ]
        }
    }


def test_drafts_are_drawn_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, values in (("2-layers", (0.1, 0.3)), ("4-layers", (0.2, 0.6, 0.7))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "distill.json").write_text(json.dumps(card(*values)))
    folders = [str(tmp_path / name) for name in ("2-layers", "4-layers")]
    assert main([str(tmp_path / "out"), *folders]).startswith("wrote ")
    drawn = (tmp_path / "out" / "learning.svg").read_text("utf-8")
    for text in ("own", "code", "2-layers", "4-layers", "training tokens (millions)"):
        assert f">{text}<" in drawn
    assert (tmp_path / "out" / "learning.png").stat().st_size > 5000
    assert draw_learning({"a": card()}, tmp_path) is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install" in main([str(tmp_path / "out"), *folders])
    with pytest.raises(SystemExit, match="usage"):
        main([])
