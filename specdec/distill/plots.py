"""How drafts learnt, as a plot: agreement against tokens, a line for each draft.

``python -m specdec.distill.plots OUT DRAFT...`` draws folders of drafts together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bench.plots import COLOURS, MISSING, STYLE
from ..models.draft_folder import CARD

NAME = "learning"
_WIDTH, _HEIGHT = 4.2, 3.6  # inches, of each set of prompts


def draw_learning(cards: Mapping[str, Mapping[str, Any]], folder: Path) -> Path | None:
    """Draw what the cards of drafts tell, into ``folder``.

    Args:
        cards: what is in ``distill.json``, by the draft's name.

    Returns:
        The PNG file, beside which there is an SVG; ``None`` where matplotlib is not
        installed, or nothing was measured on the way.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = {name: _lines(card) for name, card in cards.items()}
    sets = sorted({key for by_set in lines.values() for key in by_set})
    if not sets:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(_WIDTH * len(sets), _HEIGHT))
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(sets), sharey=True, squeeze=False)[0]
        for panel, key in zip(panels, sets, strict=True):
            for i, (name, by_set) in enumerate(lines.items()):
                if key in by_set:
                    colour = COLOURS[i % len(COLOURS)]
                    panel.plot(*by_set[key], color=colour, label=name)
            panel.set_title(key)
            panel.set_xlabel("training tokens (millions)")
        panels[0].set_ylabel("agreement with the target, greedy")
        if len(lines) > 1:
            panels[-1].legend()
        for suffix in ("svg", "png"):
            still = {"Date": None} if suffix == "svg" else {"Software": None}
            figure.savefig(folder / f"{NAME}.{suffix}", metadata=still)
    return folder / f"{NAME}.png"


def _lines(card: Mapping[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    """Millions of tokens and agreement, by set of prompts."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for moment in card["training"]["history"]:
        for name, measured in moment["held_out"].items():
            tokens, agreement = found.setdefault(name, ([], []))
            tokens.append(moment["tokens"] / 1e6)
            agreement.append(measured["agreement"])
    return found


def main(arguments: list[str]) -> str:
    """Draw the drafts of some folders; what became of it, in a line."""
    if len(arguments) < 2:
        raise SystemExit("usage: python -m specdec.distill.plots OUT DRAFT...")
    out, *drafts = map(Path, arguments)
    cards = {d.name: json.loads((d / CARD).read_text("utf-8")) for d in drafts}
    drawn = draw_learning(cards, out)
    return MISSING if drawn is None else f"wrote {drawn}"


if __name__ == "__main__":
    print(main(sys.argv[1:]))
