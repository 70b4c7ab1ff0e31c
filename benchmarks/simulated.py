"""What speculation would bring at a given acceptance: real arithmetic, drawn decisions.

Random weights accept nothing, so how many draft tokens a row accepts is drawn: each
with the same chance, given that those before it were. Everything else is computed as
always: draft steps, the verify forward, choosing, trims, and reading what comes out.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import click
import mlx.core as mx
from mlx_lm.generate import wired_limit

from benchmarks.common import (
    Script,
    header_of,
    in_time,
    minutes_option,
    without_rows,
    write_report,
)
from specdec import EngineConfig, backend
from specdec.build import models_of
from specdec.config import NumDraftTokens
from specdec.decoder import SpecDecoder
from specdec.engine.profiler import measure_forwards
from specdec.model_names import short
from specdec.spec_decode import NamedDrafter, verifier
from specdec.spec_decode.commit import Committed, Settled, settler
from specdec.spec_decode.draft_length import Forwards, tokens_per_round
from specdec.tools.bench.engine import engine
from specdec.tools.bench.measure import measure
from specdec.tools.bench.models import load_model, random_prompts, token_level
from specdec.tools.bench.tables import markdown_table, show_spread
from specdec.tools.bench.waves import Options, Record, quiet_rate, rate, total

TITLE = "Simulated acceptance"
#: Seconds: ``verify`` by tokens of a row, and ``draft_step``.
Costs = dict[str, Any]


@dataclass(frozen=True)
class Drawn:
    """Settles rounds as always, but for draft tokens accepted with that ``chance``."""

    chance: float

    def settle(
        self,
        inputs: mx.array,
        chosen: mx.array,
        limit: mx.array,
        meant: mx.array | None,
        committed: Committed,
    ) -> Settled:
        """As if the draft had foreseen what the target chose, or no token at all."""
        passes = mx.random.uniform(shape=(inputs.shape[0], inputs.shape[1] - 1))
        foreseen = mx.where(passes < self.chance, chosen[:, :-1], -1)
        inputs = mx.concatenate([inputs[:, :1], foreseen], axis=1)
        return settler().settle(inputs, chosen, limit, meant, committed)


def allowed(costs: Costs, plain: float, chance: float, k: int) -> float:
    """Speed-up over plain decoding by costs alone, or 0 where they are not known.

    Args:
        plain: seconds of a plain step.
    """
    verify = costs["verify"].get(str(k + 1))
    if verify is None:
        return 0.0
    survival = [chance**i for i in range(1, k + 1)]
    seconds: float = k * costs["draft_step"] + verify
    return tokens_per_round(survival)[k] * plain / seconds


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


def key_of(batch: int, k: NumDraftTokens) -> str:
    return f"B={batch} k={k}"


def table(
    batches: Sequence[int],
    ks: Sequence[int],
    records: dict[str, list[Record]],
    costs: dict[str, Costs],
    chance: float,
) -> str:
    """A row per batch and k."""
    rows: list[Sequence[object]] = []
    for b in batches:
        plain = records[key_of(b, 0)][1:]
        idle = quiet_rate(plain) or float("inf")
        quiet = {
            k: quiet_rate(records[key_of(b, k)][1:]) / idle  # type: ignore[arg-type]
            for k in (*ks, "auto")
        }
        limits = limits_of(costs[str(b)], b / idle, chance, quiet)
        for k in (0, *ks, "auto"):
            found = records[key_of(b, k)][1:]  # type: ignore[arg-type]
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


def body(raw: dict[str, Any]) -> str:
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
    return explained + table([int(b) for b in costs], ks, records, costs, chance)


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--target", default="random:8b", help="Folder, .gguf, random:SHAPE.")
@click.option("--draft", default="random:8b:4", help="The same, of fewer layers.")
@click.option("--acceptance", default=0.8, help="Chance of every draft token.")
@click.option("--prompt-tokens", default=256)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32))
@click.option("--num-draft-tokens", "ks", multiple=True, type=int, default=(2, 4, 8))
@click.option("--max-tokens", default=128)
@click.option("--repeat", default=2, help="Passes after the first.")
@minutes_option
@click.option("--dtype", default="bfloat16")
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    target: str,
    draft: str,
    acceptance: float,
    prompt_tokens: int,
    batches: tuple[int, ...],
    ks: tuple[int, ...],
    max_tokens: int,
    repeat: int,
    minutes: float | None,
    dtype: str,
    out: str | None,
) -> None:
    """Speed-up over plain decoding at a simulated acceptance."""
    raw = header_of(TITLE)
    loaded = load_model(target, dtype)
    bare = token_level(loaded.model)
    named = NamedDrafter(draft, token_level(load_model(draft, dtype, loaded).model))
    vocab_size = loaded.model(mx.array([[0]])).shape[-1]
    options = Options(max_tokens, 512)
    runs: dict[str, Callable[[], Record]] = {}

    def add(b: int, k: NumDraftTokens) -> None:
        config = EngineConfig(batch_size=b, num_draft_tokens=k)
        prompts = random_prompts(b, prompt_tokens, vocab_size)

        @cache  # graphs that were compiled serve the next pass
        def make() -> SpecDecoder:
            return SpecDecoder(bare, drafter=named if k else None, config=config)

        runs[key_of(b, k)] = lambda: measure(engine(make, options), prompts, b)

    def measure_costs(b: int) -> Forwards:
        config = EngineConfig(batch_size=b, num_draft_tokens=max(ks))
        runner, drafter = models_of(
            bare, named, config, backend=backend.defaults(), store=None
        )
        assert drafter is not None
        return measure_forwards(
            runner, drafter, b, max_draft_tokens=max(ks), budget_seconds=20
        )

    for b in batches:
        for k in (0, *ks, "auto"):
            add(b, k)  # type: ignore[arg-type]
    records: dict[str, list[Record]] = {key: [] for key in runs}
    with (
        wired_limit(loaded.model),
        patch.object(verifier, "settler", lambda: Drawn(acceptance)),
    ):
        for number, key, record in in_time(runs, repeat + 1, minutes):
            print(f"pass {number}: {key}: {rate(record):.1f} tok/s", file=sys.stderr)
            record.pop("tokens", None)
            records[key].append(without_rows(record))
        # Only now: kernels that passes compiled are not timed with a forward.
        costs = {b: measure_costs(b) for b in batches}
    raw["options"] = {"target": short(target), "draft": short(draft)} | {
        "acceptance": acceptance,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "dtype": dtype,
    }
    raw["costs"] = {
        str(b): {
            "verify": {str(n): seconds for n, seconds in f.verify.items()},
            "draft_step": f.draft_step,
        }
        for b, f in costs.items()
    }
    raw["passes"] = records
    write_report(out, raw, body(raw))


if __name__ == "__main__":
    main()
