"""``specdec probe``: times a target's products here, and tries Metal kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ..utils.data_files import json_text
from ..utils.tables import text_table
from . import options
from .output import FAILURE, show
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
@click.option("--again", is_flag=True, help="Try kernels that were tried before.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@options.quiet()
def probe(
    *, target: str | None, dtype: str | None, again: bool, as_json: bool, quiet: bool
) -> None:
    """Time products with a target's matrices for 1 to 32 rows; loads no weights.

    The target has to be on this machine: a folder, or what hf download has fetched.

    On Metal this also proves and times kernels of ours, in a process of their own. A
    kernel that is right and clearly faster is used from then on; one that hangs or
    crashes is not tried again. SPECDEC_METAL_KERNELS=0 turns all of them off.

    \b
      hf download mlx-community/Qwen3-4B-4bit
      specdec probe --target mlx-community/Qwen3-4B-4bit
    """  # noqa: D301 - click's mark for lines to keep
    from ..backend import defaults, describe
    from ..model_names import short, target_name
    from ..models.metal_kernels import matrices_of, subjects_of, trials
    from ..models.model_outline import outline

    name = target_name(target)
    machine, ours = describe(), defaults().name == "metal"
    model = outline(name, dtype=dtype).model
    kinds = subjects_of(model, ours=ours)
    if not matrices_of(model):
        raise click.UsageError(f"{short(name)} has no matrices to time: only experts")
    results: list[Trial] = []
    with Progress("kind", len(kinds), quiet=quiet) as progress:
        progress.add(0, what="timing products")
        for trial in trials(kinds, ours=ours, again=again):
            results.append(trial)
            progress.add(1, what="timing products")
    if as_json:
        show(
            json_text(
                {"target": name, "machine": machine, "trials": [*map(vars, results)]}
            )
        )
    else:
        show(report(short(name), machine, results, ours=ours))
    if not any(each.mlx for each in results):
        raise click.exceptions.Exit(FAILURE)


def report(
    name: str, machine: dict[str, str], results: Sequence[Trial], *, ours: bool
) -> str:
    """A block to paste into an issue: the machine, times by rows, and what failed."""
    lines = [
        "```",
        f"specdec probe: {name}",
        ", ".join(f"{key} {value}" for key, value in machine.items() if value),
        "",
        _table(results),
    ]
    lines += [f"{e.name}: {e.fault}" for e in results if e.fault]
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


def _table(results: Sequence[Trial]) -> str:
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
    if len(timed) > 1:
        whole = {n: sum(e.layers * e.mlx[n] for e in timed) for n in rows}
        one = whole[rows[0]]
        relative = (f"{whole[n] / one:.2f}" for n in rows[1:])
        total = str(sum(e.layers for e in timed))
        lines.append(["all", f"x{total}", "MLX", f"{one:.3f}", *relative])
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
