"""The plots of drafts: by training tokens, by layers, by draft length."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.tools.distill.plots import draw_all, main


def card(layers: int, *agreements: float, lengths: tuple[int, ...] = ()) -> Any:
    """What was measured on the way, and rounds; the first length sampled, too."""
    rounds = [
        {
            "set": "code",
            "num_draft_tokens": k,
            "temperature": temperature,
            "acceptance_rate": 0.1 * layers / k,
            "acceptance_length": 1 + 0.1 * layers,
        }
        for i, k in enumerate(lengths)
        for temperature in ([0.0] if i else [0.0, 0.7])
    ]
    history = [
        {
            "tokens": 1_000_000 * (i + 1),
            "held_out": {"own": {"agreement": a}, "code": {"agreement": a / 2}},
        }
        for i, a in enumerate(agreements)
    ]
    return {
        "layers": list(range(layers)),
        "training": {"history": history},
        "rounds": rounds,
    }


def texts(file: Path) -> str:
    return file.with_suffix(".svg").read_text("utf-8")


def test_drafts_are_drawn_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = {
        "8-layers": card(8, 0.2, 0.6, 0.7, lengths=(4, 1, 8)),
        "1-layers": card(1, 0.1, 0.3, lengths=(4, 1, 8)),
    }
    for name, made in cards.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "distill.json").write_text(json.dumps(made))
    arguments = [str(tmp_path / "out"), *(str(tmp_path / name) for name in cards)]
    lines = main(arguments).splitlines()
    drawn = [Path(line.removeprefix("wrote ")) for line in lines]
    assert [path.name for path in drawn] == ["learning.png", "layers.png", "length.png"]
    assert all(path.stat().st_size > 5000 for path in drawn)
    learning, layers, length = map(texts, drawn)
    own = "the target's own prompts"
    for text in (own, "code", "1 layer", "8 layers", "training tokens (millions)"):
        assert f">{text}<" in learning
    for text in ("greedy", "T = 0.7", "layers of the draft", "0.03", "0.20"):
        assert f">{text}<" in layers
    assert "accepts, by layers of the draft (k = 4)<" in layers
    for text in ("1 layer", "8 layers", "k, tokens drafted in a round", "1.10", "1.80"):
        assert f">{text}<" in length
    assert ">T = 0.7<" not in length
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install '.[bench]' in a checkout" in main(arguments)
    with pytest.raises(SystemExit, match="usage"):
        main([])


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert draw_all({"a": card(2)}, tmp_path) == []
    (tmp_path / "distill.json").write_text(json.dumps(card(2)))
    assert "nothing was measured" in main([str(tmp_path), str(tmp_path)])
    alone = draw_all({"a": card(2, 0.1, lengths=(4,))}, tmp_path)
    assert alone == [tmp_path / "learning.png"]
    # Two drafts of as many layers are called by their names.
    draw_all({"a": card(2, 0.1), "b": card(2, 0.2)}, tmp_path)
    assert ">b<" in texts(tmp_path / "learning.svg")
    assert ">2 layers<" not in texts(tmp_path / "learning.svg")
