#!/usr/bin/env python3
"""Draw docs/rows.svg: the tokens that each row of a batch keeps in each round.

Usage: scripts/rows_picture.py [OUT.svg]

The default model decodes four prompts in float32 with the head that comes with
specdec. Counts of tokens do not depend on how fast the machine is.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from specdec import EngineConfig, SpecDecoder  # noqa: E402
from specdec.cli.demo import PROMPTS  # noqa: E402

MORE = "Explain to a child why the sky is blue."
BLOCK, TOKENS = 6, 64
# Sizes of the picture, in pixels.
SIDE, GAP, APART, LINE, LEFT, TOP = 9, 1, 5, 52, 14, 66

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #333; }
.title { font-size: 15px; font-weight: 600; }
.quiet { fill: #777; }
.draft { fill: #009e73; } .target { fill: #56657a; }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd; } .quiet { fill: #999; } .target { fill: #9aa8bb; }
}
"""


def kept_by_round(prompts: list[str]) -> list[list[int]]:
    """For each prompt, how many tokens each round gave it, the first round at first."""
    config = EngineConfig(batch_size=len(prompts), num_draft_tokens=BLOCK)
    decoder = SpecDecoder.from_pretrained(dtype="float32", config=config)
    rounds: list[list[int]] = [[] for _ in prompts]
    for event in decoder.stream(prompts, max_tokens=TOKENS):
        if event.token_ids:
            rounds[event.index].append(len(event.token_ids))
    return rounds


def square(x: float, y: float, kind: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" rx="2" class="{kind}"/>'
    )


def picture(prompts: list[str], rounds: list[list[int]]) -> str:
    """The SVG: a line for each prompt, a group of squares for each of its rounds."""
    parts, widest = [], 0.0
    for row, (prompt, counts) in enumerate(zip(prompts, rounds, strict=True)):
        x, y = float(LEFT), TOP + row * LINE
        tokens = sum(counts)
        parts.append(f'<text x="{x}" y="{y}">{escape(prompt)}</text>')
        for count in counts:
            for token in range(count):
                last = token == count - 1
                parts.append(square(x, y + 9, "target" if last else "draft"))
                x += SIDE + GAP
            x += APART
        said = f"{tokens} tokens, {len(counts)} rounds"
        parts.append(f'<text x="{x + 4}" y="{y + 18}" class="quiet">{said}</text>')
        widest = max(widest, x + 140)
    height = TOP + len(prompts) * LINE - 12
    legend = (
        f'<text x="{LEFT}" y="22" class="title">Four rows of one batch: each keeps its '
        "own number of tokens in each round</text>"
        + square(LEFT, 33, "draft")
        + f'<text x="{LEFT + 15}" y="42" class="quiet">drafted and accepted</text>'
        + square(LEFT + 175, 33, "target")
        + f'<text x="{LEFT + 190}" y="42" class="quiet">the target\'s own</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {widest:.0f} {height}" '
        f'width="{widest:.0f}" height="{height}" role="img" '
        f'aria-label="Tokens by row and round">\n<style>{STYLE}</style>\n'
        + "\n".join([legend, *parts])
        + "\n</svg>\n"
    )


def main(arguments: list[str]) -> None:
    """Decode, and write the picture."""
    out = Path(arguments[0]) if arguments else ROOT / "docs" / "rows.svg"
    prompts = [*PROMPTS[:2], MORE, PROMPTS[2]]
    out.write_text(picture(prompts, kept_by_round(prompts)), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
