#!/usr/bin/env python3
"""Make the pages of kept raw results anew, of scripts that are gone.

Usage: scripts/kept_reports.py benchmarks/results/draft-length-*.json

Version 0.1's scripts draft_length and simulated wrote them; what they measured, recipes
measure now.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import report_of
from specdec.config import NumDraftTokens
from specdec.errors import ConfigError, SpecdecError
from specdec.model_names import short
from specdec.tools.bench.counts import expected_tokens
from specdec.tools.bench.tables import markdown_table, show_spread
from specdec.tools.bench.waves import (
    Record,
    full_rate,
    quiet_rate,
    rate,
    total,
)

WRONG = "wrong:"
#: Seconds: ``verify`` by tokens of a row, and ``draft_step``.
Costs = dict[str, Any]
WAVES = (
    "*all running*: while every row of the batch was, as where others take the places "
    "of those that end; batches here end with the rows that accept least. "
)
OTHERS_WAIT = (
    "Others wait to take the places of rows that end: all rates are of the time in "
    "which every row of a batch was running, until its first one ended. "
)


# -- draft lengths -------------------------------------------------------------


def _lengths_key(draft: str, batch_size: int, k: NumDraftTokens) -> str:
    return f"{draft} B={batch_size} k={k}"


def _lengths_table(
    drafts: Sequence[str],
    batches: Sequence[int],
    ks: Sequence[int],
    records: dict[str, list[Record]],
    *,
    others_wait: bool = False,
    quietly: bool = True,
) -> str:
    """A row per draft and batch; ratios are taken pass by pass."""
    rows = []
    counted = full_rate if others_wait else rate
    for draft in drafts:
        for b in batches:
            plain = records[_lengths_key("plain", b, 0)][1:]
            fixed = {k: records[_lengths_key(draft, b, k)][1:] for k in ks}
            auto = records[_lengths_key(draft, b, "auto")][1:]
            best = max(ks, key=lambda k: statistics.median(map(counted, fixed[k])))
            against = fixed[best]
            if statistics.median(map(counted, plain)) > statistics.median(
                map(counted, against)
            ):
                best, against = 0, plain

            def ratios(
                a: list[Record],
                b: list[Record],
                of: Callable[[Record], float],
            ) -> str:
                pairs = [(of(x), of(y)) for x, y in zip(a, b, strict=True)]
                return show_spread([x / y for x, y in pairs if y], 3)

            steady = max(ks, key=lambda k: statistics.median(map(full_rate, fixed[k])))
            quiet_plain = quiet_rate(plain) or float("inf")
            quiet = {k: quiet_rate(fixed[k]) / quiet_plain for k in ks}
            limit = max(ks, key=lambda k: quiet[k])
            medians = [
                statistics.median(map(full_rate, passes)) for passes in (auto, plain)
            ]
            allowed = max(1.0, quiet[limit]) * medians[1]
            share = medians[0] / allowed if allowed else 0.0
            chosen: Counter[int] = Counter()
            for record in auto:
                for wave in record["waves"]:
                    chosen.update(k for k, _ in wave.get("rounds", ()))
            drafted = sum(total(r, "drafted") for rs in fixed.values() for r in rs)
            accepted = sum(total(r, "accepted") for rs in fixed.values() for r in rs)
            rows.append(
                [
                    "wrong" if draft.startswith(WRONG) else Path(draft).name,
                    b,
                    show_spread([counted(r) for r in plain]),
                    *(show_spread([counted(r) for r in fixed[k]]) for k in ks),
                    show_spread([counted(r) for r in auto]),
                    ratios(auto, plain, counted),
                    f"{ratios(auto, against, counted)} (k={best})",
                    *(
                        ()
                        if others_wait
                        else (
                            f"{ratios(fixed[steady], plain, full_rate)} (k={steady})",
                            ratios(auto, plain, full_rate),
                        )
                    ),
                    *(
                        (
                            f"{quiet[limit]:.3f} (k={limit})",
                            f"{quiet_rate(auto) / quiet_plain:.3f}",
                            f"{share:.3f}",
                        )
                        if quietly
                        else ()
                    ),
                    f"{accepted / drafted:.3f}" if drafted else "-",
                    " ".join(f"{k}:{n}" for k, n in sorted(chosen.items())),
                ]
            )
    header = [
        "draft",
        "B",
        "plain tok/s",
        *(f"k={k}" for k in ks),
        "auto",
        "auto / plain",
        "auto / best fixed",
        *(
            ()
            if others_wait
            else ("all running: best fixed / plain", "all running: auto / plain")
        ),
        *(
            ("quiet rounds: best fixed", "quiet rounds: auto", "share of the limit")
            if quietly
            else ()
        ),
        "acceptance rate",
        "auto's rounds by k",
    ]
    return markdown_table(header, rows)


def draft_lengths(raw: dict[str, Any]) -> str:
    """What a raw result comes to, as Markdown."""
    options, records = raw["options"], raw["passes"]
    names = {
        short(key.rpartition(" B=")[0]): key.rpartition(" B=")[0] for key in records
    }
    explained = (
        f"Target {options['target']}, {options['dtype']}; {options['num_prompts']} "
        f"prompts, {options['max_tokens']} new tokens, greedy, no end of sequence. "
        f"Median (smallest to largest) of {options['repeat']} interleaved passes after "
        "the first, in which costs are measured where they are not on disk; ratios are "
        "taken pass by pass. *auto / best fixed*: against the best of all k by its "
        "median, 0 included. " + (OTHERS_WAIT if options["others_wait"] else WAVES)
    )
    # On a CPU a round that drafts is waited for, and others are read two at a time.
    quietly = raw["machine"]["backend"] != "cpu"
    if quietly:
        explained += (
            "*quiet rounds*: over plain decoding, all rows running, were every round "
            "as long as the quickest twentieth of its k take at most, over all passes. "
            "*share of the limit*: auto over plain decoding, medians with all rows "
            "running, over what those rounds allow the best of all k, 0 included."
        )
    explained = f"{explained.rstrip()} *acceptance rate*: of all fixed k together."
    return f"{explained}\n\n" + _lengths_table(
        [names[draft] for draft in options["drafts"]],
        options["batch"],
        options["num_draft_tokens"],
        records,
        others_wait=options["others_wait"],
        quietly=quietly,
    )


# -- a given acceptance ---------------------------------------------------------


def allowed(costs: Costs, plain: float, chance: float, k: int) -> float:
    """Speed-up over plain decoding by costs alone, or 0 where they are not known.

    Args:
        plain: seconds of a plain step.
    """
    verify = costs["verify"].get(str(k + 1))
    if verify is None:
        return 0.0
    seconds: float = k * costs["draft_step"] + verify
    return expected_tokens(chance, k) * plain / seconds


def limits_of(
    costs: Costs, plain: float, chance: float, quiet: dict[Any, float]
) -> dict[Any, float]:
    """What is allowed by k, and for ``auto`` the best of all; 0 where nothing tells.

    A limit that quiet rounds exceed is none: something else was timed with a forward,
    as compiling its kernels is.

    Args:
        quiet: speed-up in quiet rounds by k.
    """
    limits: dict[Any, float] = {}
    for k in (k for k in quiet if k != "auto"):
        limit = allowed(costs, plain, chance, k)
        limits[k] = limit if quiet[k] <= limit else 0.0
    return limits | {"auto": max(limits.values()) if all(limits.values()) else 0.0}


def _simulated_key(batch: int, k: NumDraftTokens) -> str:
    return f"B={batch} k={k}"


def _simulated_table(
    batches: Sequence[int],
    ks: Sequence[int],
    records: dict[str, list[Record]],
    costs: dict[str, Costs],
    chance: float,
) -> str:
    """A row per batch and k."""
    rows: list[Sequence[object]] = []
    for b in batches:
        plain = records[_simulated_key(b, 0)][1:]
        idle = quiet_rate(plain) or float("inf")
        quiet = {
            k: quiet_rate(records[_simulated_key(b, k)][1:]) / idle  # type: ignore[arg-type]
            for k in (*ks, "auto")
        }
        limits = limits_of(costs[str(b)], b / idle, chance, quiet)
        for k in (0, *ks, "auto"):
            found = records[_simulated_key(b, k)][1:]  # type: ignore[arg-type]
            ups = [rate(x) / rate(y) for x, y in zip(found, plain, strict=True)]
            limit = limits.get(k, 0.0)
            unknown = "-" if k else ""
            drafted = sum(total(r, "drafted") for r in found)
            accepted = sum(total(r, "accepted") for r in found)
            chosen: Counter[int] = Counter()
            for record in found:
                for wave in record["waves"]:
                    chosen.update(n for n, _ in wave.get("rounds", ()))
            rows.append(
                [
                    b,
                    k,
                    show_spread([rate(r) for r in found]),
                    show_spread(ups, 3) if k else "",
                    f"{quiet[k]:.3f}" if k else "",
                    f"{limit:.2f}" if limit else unknown,
                    f"{quiet[k] / limit:.2f}" if limit else unknown,
                    f"{accepted / drafted:.3f}" if drafted else "",
                    " ".join(f"{n}:{c}" for n, c in sorted(chosen.items()))
                    if k == "auto"
                    else "",
                ]
            )
    header = [
        "B",
        "k",
        "tokens/s",
        "/ plain",
        "quiet rounds: / plain",
        "allowed",
        "share",
        "accepted",
        "rounds",
    ]
    return markdown_table(header, rows)


def simulated(raw: dict[str, Any]) -> str:
    """What a raw result comes to, as Markdown."""
    options, records, costs = raw["options"], raw["passes"], raw["costs"]
    chance, said = options["acceptance"], []
    for b, cost in costs.items():
        verify = sorted((int(n), seconds) for n, seconds in cost["verify"].items())
        # A plain step is taken from rounds.
        verifying = ", ".join(f"{n}: {t * 1e3:.2f}" for n, t in verify if n > 1)
        said.append(
            f"B={b}: draft step {cost['draft_step'] * 1e3:.2f}, verify {verifying}"
        )
    explained = (
        f"**Simulated**: a draft token is accepted with chance {chance}, drawn; "
        f"all other arithmetic is done. Target {options['target']}, draft "
        f"{options['draft']}, {options['dtype']}; prompts of "
        f"{options['prompt_tokens']} tokens, {options['max_tokens']} new ones, greedy. "
        f"Median (smallest to largest) of {len(next(iter(records.values()))) - 1} "
        "interleaved passes after the first. *quiet rounds*: while all rows run, were "
        "every round as long as the quickest twentieth of its k take at most. "
        "*allowed*: (1 - a^(k+1)) / (1 - a) tokens a round over (k c + v), c and v the "
        "costs of a draft step and a verify forward in plain steps: these from quiet "
        "rounds, those timed one by one (milliseconds by tokens of a row: "
        f"{'; '.join(said)}); for auto the best of all k. *share*: what quiet rounds "
        "reached of it. *-*: not known, or they exceeded it, so that those costs are "
        "not the rounds' own; for auto, where that is so of any k.\n\n"
    )
    lengths = dict.fromkeys(key.partition(" k=")[2] for key in records)
    ks = [int(k) for k in lengths if k not in ("0", "auto")]
    return explained + _simulated_table(
        [int(b) for b in costs], ks, records, costs, chance
    )


#: What a raw result of each title comes to, as Markdown.
BODIES: dict[str, Callable[[dict[str, Any]], str]] = {
    "Draft lengths": draft_lengths,
    "Simulated acceptance": simulated,
}


def rebuilt(path: Path) -> str:
    """The page of a raw result.

    Raises:
        ConfigError: there is none, or it is that of another script.
    """
    try:
        raw = json.loads(path.read_text("utf-8"))
        title = raw["title"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "name its .json"
        raise ConfigError(f"{path} is no raw result: {reason}") from error
    if title not in BODIES:
        raise ConfigError(f"{path}: pages can be made anew of: {', '.join(BODIES)}")
    return report_of(raw, BODIES[title](raw))


def main(arguments: list[str]) -> int:
    """Write each FILE.md beside its FILE.json."""
    try:
        for path in map(Path, arguments):
            text = rebuilt(path)
            path.with_suffix(".md").write_text(text, "utf-8")
            print(f"wrote {path.with_suffix('.md')}")
    except SpecdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
