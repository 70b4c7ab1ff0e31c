#!/usr/bin/env python3
"""Write docs/pairs.md from the registry of pairs, specdec/models/pairs.toml.

Usage: scripts/pairs_table.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from specdec.models.pairs import PublishedDraft, registry  # noqa: E402

PAGE = ROOT / "docs" / "pairs.md"

INTRO = """\
# Published drafts

<!-- Written by scripts/pairs_table.py from specdec/models/pairs.toml. -->

Drafts that others have published for common targets, best first. `--draft NAME` takes
one, and `--draft auto` the first of these that is on the machine, loads, and leaves
room for the rows; before them comes an MTP head in the target's own folder. It asks on
a terminal before it downloads one (`--yes` answers), takes `ngram` if nothing else is
left, and says what it took and why. `specdec advise` without `--draft` measures what
`auto` takes.

- A conversion of a target (`mlx-community/Qwen3-4B-4bit`) is known by its name, if its
  configuration does not contradict. A fine-tuned model is known by its configuration,
  if only one target here has the same. Its drafts may be accepted less often.
- No draft can change the text, and [automatic lengths](draft-length.md) keep one that
  is seldom accepted from costing time.
- **Published** is what others measured, with their software on their machine. Nothing
  of it was measured here. AL is the accepted length of a round, the target's own token
  included; k is the number of draft tokens in that figure.
- **Size** is that of 16-bit weights, where it is known. The hub's own size and licence
  are shown before a download. "not seen" is a licence that nobody looked up: read the
  card.
- Drafts of targets that do not think were trained without thinking. Elsewhere thinking
  may move the acceptance rate, either way.

| target | draft | kind | size | licence | published |
|---|---|---|---|---|---|
"""


def _published(draft: PublishedDraft) -> str:
    k = "" if draft.k is None else f"k {draft.k}"
    return "; ".join(part for part in (draft.published, k) if part)


def rows() -> Iterator[str]:
    """A row for each draft; the target's name stands in its first."""
    for entry in registry():
        name = entry.id
        for draft in entry.drafts:
            size = "" if draft.gb is None else f"{draft.gb:g} GB"
            cells = (
                name,
                f"`{draft.id}`",
                draft.kind,
                size,
                draft.licence or "not seen",
            )
            yield f"| {' | '.join((*cells, _published(draft)))} |"
            name = ""


def page() -> str:
    """The whole page."""
    return INTRO + "\n".join(rows()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
