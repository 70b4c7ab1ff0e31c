"""What verifying k+1 tokens costs beside a plain step, over a growing context.

Random weights of a real shape. Every forward meets a context length for the
first time in the process, as decoding does: what a new shape costs is counted.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import BatchKVCache

from benchmarks.common import Script, header_of, write_report
from specdec.cache.factory import CacheOptions, make_batch_caches
from specdec.tools.bench.models import DTYPES, SHAPES, random_model
from specdec.tools.bench.tables import markdown_table

PREFILL_STEP_SIZE = 512
Record = dict[str, Any]


class Rows(Protocol):
    """Rows of a batch in some cache."""

    def forward(self, tokens: mx.array) -> mx.array:
        """Write tokens (B, S); return logits (B, S, V)."""


class EngineRows:
    """This engine's cache, with columns read in multiples of ``read_bucket``."""

    def __init__(
        self,
        model: nn.Module,
        rows: list[list[int]],
        read_bucket: int,
        *,
        width: int,
        growth: int,
    ):
        lengths = [len(row) for row in rows]
        options = CacheOptions(
            max_write=PREFILL_STEP_SIZE,
            read_bucket=read_bucket,
            # Prefill pads its last chunk.
            max_length=max(lengths) + growth + PREFILL_STEP_SIZE,
        )
        self._model = model
        self._caches = make_batch_caches(model, len(rows), options)
        self._none = mx.zeros((len(rows),), mx.int32)
        for first in range(0, max(lengths), PREFILL_STEP_SIZE):
            valid = [min(max(n - first, 0), PREFILL_STEP_SIZE) for n in lengths]
            wide = max(valid)
            chunk = [
                [*row[first : first + n], *[0] * (wide - n)]
                for row, n in zip(rows, valid, strict=True)
            ]
            model(mx.array(chunk), cache=self._caches)
            self._trim([wide - n for n in valid], wide)
            mx.eval([c.state for c in self._caches])
        for cache in self._caches:
            cache.note_lengths(longest=max(lengths))

    def _trim(self, counts: Any, at_most: int) -> None:
        for cache in self._caches:
            cache.trim_per_sequence(counts, at_most)

    def forward(self, tokens: mx.array) -> mx.array:
        logits: mx.array = self._model(tokens, cache=self._caches)
        width = tokens.shape[1]
        if width > 1:
            # A round trims what was rejected: nothing here, but at this price.
            self._trim(self._none, width)
        mx.async_eval(logits, self._caches[0].offset)
        return logits


class PeerRows:
    """mlx-lm's ``BatchKVCache``."""

    def __init__(
        self, model: nn.Module, rows: list[list[int]], *, width: int, growth: int
    ):
        longest = max(map(len, rows))
        padding = [longest - len(row) for row in rows]
        self._model = model
        self._caches = [BatchKVCache(padding) for _ in model.layers]
        tokens = mx.array([[0] * n + row for n, row in zip(padding, rows, strict=True)])
        for first in range(0, longest, PREFILL_STEP_SIZE):
            chunk = tokens[:, first : first + PREFILL_STEP_SIZE]
            model(chunk, cache=self._caches)
            mx.eval([c.state for c in self._caches])

    def forward(self, tokens: mx.array) -> mx.array:
        logits: mx.array = self._model(tokens, cache=self._caches)
        mx.async_eval(logits)
        return logits


class Walk:
    """Forwards of one width in one cache, each fed what the last one chose."""

    def __init__(self, rows: Rows, tokens: mx.array, context: int):
        self._rows = rows
        self._tokens = tokens
        self._width = tokens.shape[1]
        self.context = context

    def dispatch(self) -> mx.array:
        logits = self._rows.forward(self._tokens)
        self._tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        self.context += self._width
        mx.async_eval(self._tokens)
        return self._tokens

    def blocking(self) -> float:
        """One forward, built and waited for; milliseconds."""
        start = time.perf_counter()
        mx.eval(self.dispatch())
        return (time.perf_counter() - start) * 1e3

    def pipelined(self, steps: int) -> float:
        """Forwards built while the one before runs; milliseconds each."""
        mx.eval(self.dispatch())
        start = time.perf_counter()
        before = self.dispatch()
        for _ in range(steps - 1):
            after = self.dispatch()
            mx.eval(before)
            before = after
        mx.eval(before)
        return (time.perf_counter() - start) * 1e3 / steps

    def check(self) -> None:
        """One more forward: random weights must compute numbers."""
        logits = self._rows.forward(self._tokens)
        if not mx.isfinite(logits).all().item():
            raise SystemExit("logits are not finite: nothing measured here counts")


def prompts(batch: int, context: int, vocab_size: int) -> list[list[int]]:
    """Rows of different lengths, as prompts have; the longest has ``context``."""
    draw = np.random.default_rng(0)
    lengths = [max(1, context - i) for i in range(batch)]
    return [draw.integers(0, vocab_size, n).tolist() for n in lengths]


def measure(
    model: nn.Module,
    *,
    batch: int,
    k: int,
    context: int,
    steps: int,
    read_bucket: int,
    vocab_size: int,
) -> dict[str, Record]:
    """Walk every cache at both widths, the blocking steps taken in turns."""
    # Walks of equal shapes start where they never meet the same length: after
    # each other (width 1), or at another remainder (width k + 1).
    makers: dict[str, tuple[int, Callable[..., Rows]]] = {
        "exact": (0, partial(EngineRows, model, read_bucket=1)),
        f"bucket {read_bucket}": (
            0,
            partial(EngineRows, model, read_bucket=read_bucket),
        ),
        "mlx-lm": (1, partial(PeerRows, model)),
    }
    walks: dict[str, Walk] = {}
    forwards = 2 * steps + 3
    for name, (shift, make) in makers.items():
        for kind, width in (("plain", 1), ("verify", k + 1)):
            first = context + shift * (forwards if width == 1 else 1)
            rows = make(
                rows=prompts(batch, first, vocab_size),
                width=width,
                growth=forwards * width,
            )
            tokens = mx.ones((batch, width), mx.int32)
            walks[f"{name} {kind}"] = Walk(rows, tokens, first)
    records: dict[str, Record] = {}
    for name, walk in walks.items():
        records[name] = {"first_context": walk.context, "blocking_ms": []}
        # Kernels are loaded here; the length is one that nothing else counts.
        records[name]["warm_up_ms"] = walk.blocking()
    names = list(walks)
    for step in range(steps):
        turn = step % len(names)
        for name in names[turn:] + names[:turn]:
            records[name]["blocking_ms"].append(round(walks[name].blocking(), 4))
    for name, walk in walks.items():
        records[name]["pipelined_ms"] = walk.pipelined(steps)
        records[name]["last_context"] = walk.context
        walk.check()
        print(f"{name}: {records[name]['pipelined_ms']:.3f} ms", file=sys.stderr)
    return records


def tables(records: dict[str, Record], target: float) -> tuple[str, Record]:
    """Milliseconds per forward, and what verifying costs beside a plain step."""
    rows: list[Sequence[object]] = []
    figures: Record = {}
    for name, record in records.items():
        blocking = record["blocking_ms"]
        figures[name] = {
            "median": statistics.median(blocking),
            "mean": statistics.mean(blocking),
            "pipelined": record["pipelined_ms"],
        }
        rows.append(
            [
                name,
                f"{record['first_context']} to {record['last_context']}",
                f"{figures[name]['median']:.2f}",
                f"{figures[name]['mean']:.2f}",
                f"{min(blocking):.2f}",
                f"{max(blocking):.2f}",
                f"{sum(blocking):.0f}",
                f"{record['pipelined_ms']:.2f}",
            ]
        )
    header = ["forward", "context", "median ms", "mean", "min", "max", "total"]
    text = markdown_table([*header, "pipelined"], rows)

    plain = {n: f for n, f in figures.items() if n.endswith(" plain")}
    ratios: Record = {}
    rows = []
    for name in figures.keys() - plain.keys():
        own = figures[f"{name.removesuffix(' verify')} plain"]
        ratios[name] = {m: figures[name][m] / own[m] for m in own}
        cheapest = min(f["median"] for f in plain.values())
        ratios[name]["to_cheapest_plain"] = figures[name]["median"] / cheapest
    for name in sorted(ratios):
        r = ratios[name]
        verdict = "yes" if r["median"] <= target else "no"
        rows.append([name, *(f"{value:.2f}" for value in r.values()), verdict])
    header = [
        "verify / plain",
        "median",
        "mean",
        "pipelined",
        "median / cheapest",
    ]
    return text + "\n" + markdown_table([*header, f"<= {target:g}"], rows), ratios


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--shape", default="8b", type=click.Choice(list(SHAPES)))
@click.option("--layers", type=int, help="Another number of layers.")
@click.option("--dtype", default="bfloat16", type=click.Choice(list(DTYPES)))
@click.option("--batch", default=8)
@click.option("--draft-tokens", default=4, help="k; a verify forward takes k + 1.")
@click.option("--context", default=512, help="Length of the longest row at first.")
@click.option("--steps", default=64, help="Forwards timed, twice.")
@click.option("--read-bucket", default=256)
@click.option("--at-most", default=1.2, help="What the ratio should be.")
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    shape: str,
    layers: int | None,
    dtype: str,
    batch: int,
    draft_tokens: int,
    context: int,
    steps: int,
    read_bucket: int,
    at_most: float,
    out: str | None,
) -> None:
    """Compare verify forwards with plain ones."""
    if draft_tokens < 1:
        raise click.UsageError("--draft-tokens must be 1 or more")
    raw = header_of("Verify forwards over a growing context")
    model = random_model(shape, dtype, num_layers=layers)
    records = measure(
        model,
        batch=batch,
        k=draft_tokens,
        context=context,
        steps=steps,
        read_bucket=read_bucket,
        vocab_size=SHAPES[shape]["vocab_size"],
    )
    body, ratios = tables(records, at_most)
    raw["forwards"] = records
    raw["ratios"] = ratios
    depth = layers or SHAPES[shape]["num_hidden_layers"]
    intro = (
        f"Random Llama weights of the {shape} shape, {depth} layers, {dtype}; plain: "
        f"{batch} x 1 tokens, verify: {batch} x {draft_tokens + 1}, each met at "
        f"{steps} context lengths for the first time. Milliseconds per forward, "
        "host included: waited for one by one (in turns), and *pipelined*: built "
        "while the one before runs, mean. *exact* and *bucket* are this engine's "
        "cache reading its columns exactly or in multiples; *mlx-lm* is its "
        "`BatchKVCache`.\n\n"
    )
    write_report(out, raw, intro + body)


if __name__ == "__main__":
    main()
