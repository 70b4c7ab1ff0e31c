"""Plots of drafts' quality: by training tokens, by layers, by draft length.

``python -m specdec.tools.distill.plots OUT DRAFT...`` draws folders of drafts together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...models.draft_folder import CARD
from ...utils.printable import counted
from ..plots import COLOURS, MISSING, Chart, Line, save

Card = Mapping[str, Any]
#: A point of a line: the set of prompts it was measured on, the line's label, x and y.
Point = tuple[str, str, float, float]


def draw_all(cards: Mapping[str, Card], folder: Path) -> list[Path] | None:
    """Draw the measurements on the cards of drafts into ``folder``.

    Args:
        cards: the contents of ``distill.json`` by the draft's name.

    Returns:
        The PNG files of plots that have data, each with an SVG file next to it;
        ``None`` if matplotlib is not installed.
    """
    charts = {name: chart for name, chart in _charts(cards).items() if chart.panels}
    try:
        return [save(folder / name, c.size, c.draw) for name, c in charts.items()]
    except ImportError:
        return None


def _charts(cards: Mapping[str, Card]) -> dict[str, Chart]:
    named, lengths = _named(cards), _lengths(cards)
    several = len({len(card["layers"]) for card in cards.values()}) > 1
    learning = _panels(_learning(named), last=True)
    by_layers = list(_by_layers(cards, lengths[0])) if several and lengths else []
    by_length = list(_by_length(named)) if len(lengths) > 1 else []
    return {
        "learning": Chart(
            title="Agreement with the target's greedy choice, on texts never learnt "
            "from",
            x="training tokens (millions)",
            y="agreement (share of positions)",
            panels=learning,
            top=1.0,
        ),
        "layers": Chart(
            title="Draft tokens that the target accepts, by layers of the draft "
            + " and ".join(f"(k = {k})" for k in lengths[:1]),
            x="layers of the draft",
            y="share of draft tokens accepted",
            panels=_panels(_placed(by_layers)),
            ticks=_ticks(by_layers),
        ),
        "length": Chart(
            title="Tokens that a round brings, by the number of tokens drafted",
            x="k, tokens drafted in a round",
            y="tokens a round, greedy",
            panels=_panels(_placed(by_length)),
            ticks=_ticks(by_length),
        ),
    }


def _ticks(points: Iterable[Point]) -> list[float]:
    """The values of x that were measured."""
    return sorted({x for *_, x, _ in points})


def _placed(points: Sequence[Point]) -> list[Point]:
    """The points with x replaced by its index among the ticks."""
    ticks = _ticks(points)
    return [(name, label, ticks.index(x), y) for name, label, x, y in points]


def _panels(points: Iterable[Point], *, last: bool = False) -> dict[str, list[Line]]:
    """A panel for each set of prompts; all points, or the last ones, are labelled."""
    sets: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, label, x, y in points:
        sets.setdefault(name, {}).setdefault(label, []).append((x, y))
    labels = list(dict.fromkeys(label for lines in sets.values() for label in lines))
    colours = dict(zip(labels, COLOURS * len(labels), strict=False))
    return {
        "the target's own prompts" if name == "own" else name: [
            Line(
                label,
                line,
                colours[label],
                numbers=range(len(line))[-1 if last or len(lines) > 2 else 0 :],
                above=not i,
            )
            for i, (label, line) in enumerate(lines.items())
        ]
        for name, lines in sorted(sets.items())
    }


def _named(cards: Mapping[str, Card]) -> dict[str, Card]:
    """Cards by the number of layers if that distinguishes them, else by name."""
    counts = [len(card["layers"]) for card in cards.values()]
    if len(set(counts)) < len(counts):
        return dict(cards)
    ordered = sorted(cards.values(), key=lambda card: len(card["layers"]))
    numbers = (len(card["layers"]) for card in ordered)
    names = (counted(n, "layer") for n in numbers)
    return dict(zip(names, ordered, strict=True))


def _learning(cards: Mapping[str, Card]) -> Iterator[Point]:
    for label, card in cards.items():
        for moment in card["training"]["history"]:
            for name, entry in moment["held_out"].items():
                yield name, label, moment["tokens"] / 1e6, entry["agreement"]


def _lengths(cards: Mapping[str, Card]) -> list[int]:
    """Draft lengths of the rounds; those with more sampled measurements come first."""
    rounds = [r for card in cards.values() for r in card["rounds"]]
    sampled = [r["num_draft_tokens"] for r in rounds if r["temperature"]]
    every = {r["num_draft_tokens"] for r in rounds}
    return sorted(every, key=lambda k: (-sampled.count(k), k))


def _by_layers(cards: Mapping[str, Card], length: int) -> Iterator[Point]:
    for card in cards.values():
        for r in card["rounds"]:
            if r["num_draft_tokens"] == length:
                label = f"T = {r['temperature']:g}" if r["temperature"] else "greedy"
                yield r["set"], label, len(card["layers"]), r["acceptance_rate"]


def _by_length(cards: Mapping[str, Card]) -> Iterator[Point]:
    for label, card in cards.items():
        for r in card["rounds"]:
            if not r["temperature"]:
                yield r["set"], label, r["num_draft_tokens"], r["acceptance_length"]


def main(arguments: list[str]) -> str:
    """Draw the drafts of some folders; return the names of the plots, in lines."""
    if len(arguments) < 2:
        raise SystemExit("usage: python -m specdec.tools.distill.plots OUT DRAFT...")
    out, *drafts = map(Path, arguments)
    cards = {d.name: json.loads((d / CARD).read_text("utf-8")) for d in drafts}
    drawn = draw_all(cards, out)
    if drawn is None:
        return MISSING
    lines = [f"wrote {path}" for path in drawn]
    return "\n".join(lines or ["no plots: nothing was measured on held-out texts"])


if __name__ == "__main__":
    print(main(sys.argv[1:]))
