"""``specdec probe``: times a target's products here, and tries Metal kernels."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ..utils.child import Child
from ..utils.data_files import json_text
from ..utils.tables import text_table
from . import options
from .interrupts import RequestsToEnd, concluding
from .output import FAILURE, noted_if_slow, show, show_interrupted
from .progress import Progress

if TYPE_CHECKING:
    from ..models.metal_kernels import Trial


_ISSUE = "Times from your machine"


@click.command(
    cls=options.Command,
    short_help="Time a target's products by rows, and try Metal kernels.",
)
@options.target()
@options.dtype(help="Time the weights in this type. [default: as they are stored]")
@options.positive(
    "--seconds",
    default=120,
    help="End after N seconds, with what was timed by then.",
)
@click.option("--again", is_flag=True, help="Try kernels that were tried before.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@options.quiet()
def probe(
    *,
    target: str | None,
    dtype: str | None,
    seconds: int,
    again: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Time products with a target's matrices for 1 to 32 rows; loads no weights.

    The target has to be on this machine: a folder, or what hf download has fetched.

    It takes two minutes at most, unless --seconds says otherwise; the first run on a
    machine compiles kernels. Ctrl-C ends it earlier. Either way it prints what was
    timed.

    On Metal this also proves and times kernels of ours, in a process of their own. A
    kernel that is right and clearly faster is used from then on; one that hangs or
    crashes is not tried again. SPECDEC_METAL_KERNELS=0 turns all of them off.

    \b
      hf download mlx-community/Qwen3-4B-4bit
      specdec probe --target mlx-community/Qwen3-4B-4bit
    """  # noqa: D301 - click's mark for lines to keep
    end = time.monotonic() + seconds
    child = Child("specdec.metal.trial", again=False)
    click.get_current_context().call_on_close(child.close)
    child.start()  # it imports MLX, as this process does
    with noted_if_slow("importing MLX, and reading the target's shapes", quiet=quiet):
        from ..backend import defaults, describe
        from ..model_names import short, target_name
        from ..models.metal_kernels import Trials, matrices_of, subjects_of
        from ..models.model_outline import outline

        name = target_name(target)
        machine, ours = describe(), defaults().name == "metal"
        model = outline(name, dtype=dtype).model
    kinds = subjects_of(model, ours=ours)
    if not matrices_of(model):
        raise click.UsageError(f"{short(name)} has no matrices to time: only experts")
    results: list[Trial] = []
    number = sum(len(subject.rows) for subject, _ in kinds)

    def conclude(why: str) -> None:
        timed = sum(len(each.mlx) for each in results)
        if as_json:
            counts = {"timed": timed, "measurements": number}
            facts = {"target": name, "machine": machine, **counts}
            show(json_text({**facts, "trials": [*map(vars, results)]}))
        else:
            note = f"timed {timed} of {number} measurements{why}"
            notes = [note] if timed < number else []
            show(report(short(name), machine, results, notes, ours=ours))

    def interrupted() -> None:
        if results:
            conclude("; interrupted")
        show_interrupted()

    with (
        RequestsToEnd(),
        concluding(interrupted),
        Progress("measurement", number, quiet=quiet) as progress,
    ):
        progress.show(0, what="timing products")
        for trial in Trials(child, end, ours=ours, again=again).of(kinds):
            if trial not in results:
                results.append(trial)
            timed = sum(len(each.mlx) for each in results)
            progress.show(timed, what=trial.name)
    late = time.monotonic() >= end - 1
    conclude(f"; the time of {seconds} seconds was up" if late else "")
    if not any(each.mlx for each in results):
        raise click.exceptions.Exit(FAILURE)


def report(
    name: str,
    machine: dict[str, str],
    results: Sequence[Trial],
    notes: Sequence[str] = (),
    *,
    ours: bool,
) -> str:
    """A block to paste into an issue: the machine, times by rows, and what failed.

    Args:
        notes: lines on what is missing; then the table has no line for all layers.
    """
    lines = [
        "```",
        f"specdec probe: {name}",
        ", ".join(f"{key} {value}" for key, value in machine.items() if value),
        "",
        _table(results, total=not notes),
    ]
    for fault in dict.fromkeys(each.fault for each in results if each.fault):
        names = "; ".join(each.name for each in results if each.fault == fault)
        lines.append(f"{names}: {fault}")
    lines += notes
    if ours:
        used = [e for e in results if e.used]
        lines += [f"{e.name}: used for {_ranges(e.used)} rows" for e in used]
        if not used:
            lines.append("no kernel of ours is used")
        lines += ["```", f"Please open an issue, {_ISSUE!r}, with this block."]
    else:
        lines += [
            f"on {machine['backend']} there are no kernels for this command to try",
            "```",
        ]
    return "\n".join(lines)


def _table(results: Sequence[Trial], *, total: bool) -> str:
    """Milliseconds of one row, and how many times as long more rows take."""
    rows = sorted({number for each in results for number in each.mlx})
    lines: list[list[str]] = [["matrix", "layers", "by", "ms", *map(str, rows[1:])]]
    for each in results:
        for by, times in (("MLX", each.mlx), ("ours", each.ours)):
            if not times:
                continue
            one = each.mlx[rows[0]]
            relative = (f"{times[n] / one:.2f}" if n in times else "" for n in rows[1:])
            head = [each.name, f"x{each.layers}"] if by == "MLX" else ["", ""]
            first = f"{one:.3f}" if by == "MLX" else ""
            lines.append([*head, by, first, *relative])
    timed = [each for each in results if rows and each.mlx.keys() == set(rows)]
    if total and len(timed) > 1:
        whole = {n: sum(e.layers * e.mlx[n] for e in timed) for n in rows}
        one = whole[rows[0]]
        relative = (f"{whole[n] / one:.2f}" for n in rows[1:])
        layers = sum(e.layers for e in timed)
        lines.append(["all", f"x{layers}", "MLX", f"{one:.3f}", *relative])
    return text_table(lines, align="right")


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in a row as a range: ``2 to 4, 9 to 16``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{low} to {high}" for low, high in parts)
