"""Reports made anew from raw results, for benchmarks whose raw result has all of it.

python -m benchmarks.report benchmarks/results/draft-length-*.json
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks import draft_length, simulated
from benchmarks.common import Script, report_of
from specdec.errors import ConfigError

#: What a raw result of each title comes to, as Markdown.
BODIES: dict[str, Callable[[dict[str, Any]], str]] = {
    draft_length.TITLE: draft_length.body,
    simulated.TITLE: simulated.body,
}


def rebuilt(path: Path) -> str:
    """The report of a raw result.

    Raises:
        ConfigError: there is none, or it is that of another benchmark.
    """
    try:
        raw = json.loads(path.read_text("utf-8"))
        title = raw["title"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = getattr(error, "strerror", None) or "name its .json"
        raise ConfigError(f"{path} is no raw result: {told}") from error
    if title not in BODIES:
        raise ConfigError(f"{path}: reports can be made anew of: {', '.join(BODIES)}")
    return report_of(raw, BODIES[title](raw))


@click.command(cls=Script)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
def main(paths: tuple[Path, ...]) -> None:
    """Write each FILE.md beside its FILE.json."""
    for path in paths:
        text = rebuilt(path)
        path.with_suffix(".md").write_text(text, "utf-8")
        print(f"wrote {path.with_suffix('.md')}")


if __name__ == "__main__":
    main()
