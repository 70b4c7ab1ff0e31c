"""``specdec bench`` and ``specdec report``: recipes, run and shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..utils.extras import install
from ..utils.printable import counted
from . import options
from .interrupts import concluding
from .output import command_line, note, show, show_interrupted
from .progress import Progress

if TYPE_CHECKING:
    from ..tools.bench.cells import Unit

DEFAULT_OUT = "specdec-bench"


@click.command(short_help="Run a recipe: acceptance and speed, with a report.")
@click.argument("recipe", required=False, metavar="[RECIPE]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the recipe, such as 'batch=[1, 8]'; repeat it for more.",
)
@click.option(
    "--out",
    metavar="DIR",
    help=f"Folder for results and report. [default: {DEFAULT_OUT}/NAME]",
)
@click.option(
    "--compare",
    nargs=2,
    metavar="DIR DIR",
    help="Compare the results of two runs, and run nothing.",
)
@options.trust_remote_code()
@options.quiet()
def bench(
    recipe: str | None,
    settings: tuple[str, ...],
    out: str | None,
    compare: tuple[str, str] | None,
    trust_remote_code: bool,
    quiet: bool,
) -> None:
    """Run RECIPE, a .toml file or the name of one that comes with specdec.

    Finished parts are kept: the same command continues where it was stopped. DIR
    gets raw.jsonl, report.html (open it in a browser) and report.md. The command ends
    with a block to paste into an issue.

    \b
      specdec bench acceptance-quick
      specdec bench acceptance-humaneval --set target=MODEL --set draft=MODEL
      specdec bench --compare specdec-bench/before specdec-bench/after
    """  # noqa: D301 - click's mark for lines to keep
    if compare is not None:
        if recipe is not None or settings or out is not None or trust_remote_code:
            raise click.UsageError("--compare takes two folders and nothing else")
        from ..tools.bench.compare import compare as compared

        show(compared(*map(Path, compare)), nl=False)
        return
    from ..tools.bench.recipe import Recipe, shipped_recipes

    if recipe is None:
        names = ", ".join(file.stem for file in shipped_recipes())
        raise click.UsageError(f"name a recipe: a .toml file, or one of {names}")
    wanted = Recipe.read(recipe, settings)
    if out is not None and not out.strip():
        raise click.UsageError("--out is empty: name a folder")
    folder = Path(out or Path(DEFAULT_OUT) / wanted.name)

    from ..tools.bench.figures import Figures
    from ..tools.bench.report import block
    from ..tools.bench.run import run_recipe

    progress = _Parts(quiet=quiet)

    def say_what_is_kept() -> None:
        state = "nothing was complete yet"
        if progress.done:
            parts = counted(progress.total, "part")
            are = "is" if progress.done == 1 else "are"
            state = (
                f"{progress.done} of {parts} {are} kept in {folder}; the same command "
                "continues"
            )
        show_interrupted(state)

    try:
        with concluding(say_what_is_kept):
            results = run_recipe(
                wanted,
                folder,
                command=command_line(),
                progress=progress.expect,
                trust_remote_code=trust_remote_code,
            )
    finally:
        progress.close()
    show("Paste from here into an issue:\n", err=True)
    show(block(Figures(results)))
    _write(folder)


@click.command(short_help="Rebuild a report from raw results.")
@click.argument("folder", metavar="DIR")
def report(folder: str) -> None:
    """Rebuild the report from DIR/raw.jsonl.

    \b
      specdec report specdec-bench/acceptance-quick
    """  # noqa: D301 - click's mark for lines to keep
    _write(Path(folder))


def _write(folder: Path) -> None:
    from ..tools.bench.report import PAGE, write_report

    files = write_report(folder)
    for file in files:
        show(f"wrote {file}", err=True)
    if all(file.name != PAGE for file in files):
        note(f"no {PAGE} without markdown-it-py: {install('bench')}")


class _Parts:
    """The progress of a recipe; without a bar, also a line for each part."""

    def __init__(self, *, quiet: bool) -> None:
        self.total = self.done = 0
        self._quiet = quiet
        self._progress: Progress | None = None

    def expect(self, total: int, done: int) -> _Parts:
        """Begin; earlier runs have done ``done`` of the parts."""
        self.total, self.done = total, done
        self._progress = Progress("part", total, done=done, quiet=self._quiet)
        return self

    @contextmanager
    def __call__(self, unit: Unit) -> Iterator[None]:
        """Run one part within the block."""
        assert self._progress is not None
        self._progress.show(self.done, what=unit.label)
        start = time.perf_counter()
        yield
        self.done += 1
        self._progress.show(self.done, what=unit.label)
        if not self._quiet and not self._progress.on_terminal:
            seconds = time.perf_counter() - start
            show(f"[{self.done}/{self.total}] {unit.label}: {seconds:.1f} s", err=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.close()
