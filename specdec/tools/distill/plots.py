"""How drafts do, as plots: by training tokens, by layers, by draft length.

``python -m specdec.tools.distill.plots OUT DRAFT...`` draws folders of drafts together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...models.draft_folder import CARD
from ..bench.plot_style import COLOURS, STYLE
from ..bench.plots import MISSING

_WIDTH, _HEIGHT = 4.2, 3.8  # inches, of each set of prompts

Card = Mapping[str, Any]
#: Points of a line, by x.
Line = list[tuple[float, float]]
#: Lines by their label, by the set of prompts that they were measured on.
Lines = dict[str, dict[str, Line]]


def draw_all(cards: Mapping[str, Card], folder: Path) -> list[Path] | None:
    """Draw what the cards of drafts report, into ``folder``.

    Args:
        cards: what is in ``distill.json``, by the draft's name.

    Returns:
        The PNG files, beside each an SVG, of what there is something to draw of;
        ``None`` where matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return None
    named = _named(cards)
    lengths = _lengths(cards)
    several = len({len(card["layers"]) for card in cards.values()}) > 1
    drawn = []
    for name, title, x, y, lines in (
        (
            "learning",
            "Agreement with the target's greedy choice, on texts never learnt from",
            "training tokens (millions)",
            "agreement (share of positions)",
            _learning(named),
        ),
        (
            "layers",
            "Draft tokens that the target accepts, by layers of the draft "
            + " and ".join(f"(k = {k})" for k in lengths[:1]),
            "layers of the draft",
            "share of draft tokens accepted",
            _by_layers(cards, lengths[:1]) if several else {},
        ),
        (
            "length",
            "Tokens that a round brings, by the number of tokens drafted",
            "k, tokens drafted in a round",
            "tokens a round, greedy",
            _by_length(named) if len(lengths) > 1 else {},
        ),
    ):
        if lines:
            draw: Callable[[Any], None] = _marked if name != "learning" else _plain
            drawn.append(_draw(folder / name, title, (x, y), lines, draw))
    return drawn


def _draw(
    path: Path,
    title: str,
    labels: tuple[str, str],
    lines: Lines,
    finish: Callable[[Any], None],
) -> Path:
    """A panel for each set of prompts, side by side."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):  # type: ignore[arg-type]
        width = max(_WIDTH * len(lines), 1.8 * _WIDTH)
        figure = Figure(figsize=(width, _HEIGHT))
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
        shown = sorted({label for by_label in lines.values() for label in by_label})
        shown.sort(key=lambda label: int("".join(filter(str.isdigit, label)) or 0))
        colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(shown)}
        handles = {}
        for panel, (name, by_label) in zip(panels, lines.items(), strict=True):
            for label, points in by_label.items():
                xs, ys = zip(*sorted(points), strict=True)
                (handles[label],) = panel.plot(xs, ys, color=colours[label])
            panel.set_title("the target's own prompts" if name == "own" else name)
            panel.set_xlabel(labels[0])
            finish(panel)
        panels[0].set_ylabel(labels[1])
        if len(shown) > 1:
            figure.legend(
                [handles[label] for label in shown],
                shown,
                loc="outside lower center",
                ncols=len(shown),
            )
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        for suffix in ("svg", "png"):
            still = {"Date": None} if suffix == "svg" else {"Software": None}
            figure.savefig(path.with_suffix(f".{suffix}"), metadata=still)
    return path.with_suffix(".png")


def _plain(panel: Any) -> None:
    panel.set_ylim(0, 1)
    panel.set_xlim(left=0)
    _number_ends(panel)


def _marked(panel: Any) -> None:
    """A mark at each point; only xs that were measured have ticks."""
    ticks = sorted({x for line in panel.lines for x in line.get_xdata()})
    for line in panel.lines:
        line.set_marker("o")
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.margins(x=0.14)
    panel.set_ylim(0, 1.15 * max(max(line.get_ydata()) for line in panel.lines))
    if len(panel.lines) > 2:
        _number_ends(panel)
        return
    for i, line in enumerate(panel.lines):
        for point in zip(line.get_xdata(), line.get_ydata(), strict=True):
            _number(panel, line, point, (0, -13 if i else 6), "center")


def _number_ends(panel: Any) -> None:
    """A number after each line's last point."""
    for line in panel.lines:
        end = line.get_xdata()[-1], line.get_ydata()[-1]
        _number(panel, line, end, (6, -3), "left")


def _number(
    panel: Any,
    line: Any,
    point: tuple[float, float],
    aside: tuple[int, int],
    side: str,
) -> None:
    panel.annotate(
        f"{point[1]:.2f}",
        point,
        xytext=aside,
        textcoords="offset points",
        ha=side,
        fontsize=8,
        color=line.get_color(),
    )


def _named(cards: Mapping[str, Card]) -> dict[str, Card]:
    """Cards by the number of layers, where that distinguishes them."""
    counts = [len(card["layers"]) for card in cards.values()]
    if len(set(counts)) < len(counts):
        return dict(cards)
    names = [f"{n} layer" if n == 1 else f"{n} layers" for n in counts]
    found = dict(zip(names, cards.values(), strict=True))
    return dict(sorted(found.items(), key=lambda item: len(item[1]["layers"])))


def _learning(cards: Mapping[str, Card]) -> Lines:
    lines: Lines = {}
    for label, card in cards.items():
        for moment in card["training"]["history"]:
            for name, found in moment["held_out"].items():
                line = lines.setdefault(name, {}).setdefault(label, [])
                line.append((moment["tokens"] / 1e6, found["agreement"]))
    return dict(sorted(lines.items()))


def _lengths(cards: Mapping[str, Card]) -> list[int]:
    """Draft lengths of the rounds, those first that most drafts were sampled at."""
    sampled = [
        r["num_draft_tokens"]
        for card in cards.values()
        for r in card["rounds"]
        if r["temperature"]
    ]
    every = {r["num_draft_tokens"] for card in cards.values() for r in card["rounds"]}
    return sorted(every, key=lambda k: (-sampled.count(k), k))


def _by_layers(cards: Mapping[str, Card], lengths: Sequence[int]) -> Lines:
    lines: Lines = {}
    for card in cards.values():
        for r in card["rounds"]:
            if r["num_draft_tokens"] in lengths:
                label = f"T = {r['temperature']:g}" if r["temperature"] else "greedy"
                line = lines.setdefault(r["set"], {}).setdefault(label, [])
                line.append((len(card["layers"]), r["acceptance_rate"]))
    return lines


def _by_length(cards: Mapping[str, Card]) -> Lines:
    lines: Lines = {}
    for label, card in cards.items():
        for r in card["rounds"]:
            if not r["temperature"]:
                line = lines.setdefault(r["set"], {}).setdefault(label, [])
                line.append((r["num_draft_tokens"], r["acceptance_length"]))
    return lines


def main(arguments: list[str]) -> str:
    """Draw the drafts of some folders; what became of it, in lines."""
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
