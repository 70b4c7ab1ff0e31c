"""What a cache costs by itself: one layer's update, attention and trim.

Every system holds the same number of columns and, a step at a time, makes its
mask, writes a block, attends to all, and takes the rejected part back: row by row
where it can, the same for all rows where it cannot.
"""

from __future__ import annotations

import inspect
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.base import scaled_dot_product_attention

from benchmarks.common import MIB, Script, header_of, write_report
from specdec import backend
from specdec.cache import (
    BatchChunkedKVCache,
    BatchKVCache,
    BatchQuantizedKVCache,
    BatchQuantizedRotatingKVCache,
    BatchRotatingKVCache,
)
from specdec.errors import ConfigError
from specdec.tools.bench.cells import interleaved
from specdec.tools.bench.models import DTYPES
from specdec.utils.tables import markdown_table, show_spread

PREFILL = 512  # tokens per write while a cache is filled
ROOM = 128  # columns left free for the measured steps, so that no cache grows
Record = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """One attention layer."""

    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: mx.Dtype

    def tokens(self, rows: int, n: int, heads: int | None = None) -> mx.array:
        shape = (rows, heads or self.kv_heads, n, self.head_dim)
        return mx.random.normal(shape).astype(self.dtype)


class System:
    """A cache of ``rows`` rows, filled with ``columns`` tokens each."""

    def __init__(
        self, make: Callable[[], Any], shape: Shape, rows: int, columns: int, width: int
    ):
        self.cache = make()
        self.width = width
        self.block = shape.tokens(rows, width)
        self.queries = shape.tokens(rows, width, shape.query_heads)
        self.scale = shape.head_dim**-0.5
        draw = np.random.default_rng(0)
        self.rejected = draw.integers(0, width, (64, rows))
        self.rejected[:, 0] = width - 1  # one row always rejects as many as possible
        self.steps = 0
        part = shape.tokens(rows, PREFILL)
        for start in range(0, columns - ROOM, PREFILL):
            n = min(PREFILL, columns - ROOM - start)
            self._front()
            self.cache.update_and_fetch(part[:, :, :n], part[:, :, :n])
            mx.eval(self.cache.state)
        self.end_prefill()
        mx.eval(self.block, self.queries, self.cache.state)
        mx.clear_cache()

    def end_prefill(self) -> None:
        pass

    def _front(self) -> None:
        front = getattr(self.cache, "maybe_trim_front", None)
        if front is not None:
            front()

    def mask(self) -> Any:
        return self.cache.make_mask(self.width, return_array=False, window_size=None)

    def step(self) -> None:
        self._front()
        mask = self.mask()
        k, v = self.cache.update_and_fetch(self.block, self.block)
        out = scaled_dot_product_attention(
            self.queries[...], k, v, cache=self.cache, scale=self.scale, mask=mask
        )
        del k, v
        self.trim(self.rejected[self.steps % len(self.rejected)])
        self.steps += 1
        mx.eval(out, self.cache.state)

    def trim(self, rejected: Any) -> None:
        raise NotImplementedError


class Ours(System):
    """Trims each row's own rejected tokens; the host knows the lengths."""

    def end_prefill(self) -> None:
        self.cache.resize(self.width)
        self.lengths = np.array(self.cache.offset)

    def trim(self, rejected: Any) -> None:
        self.lengths = self.lengths + self.width
        if self.width > 1:
            counts = mx.array(rejected)
            self.cache.trim_per_sequence(counts, at_most=self.width - 1)
            self.lengths = self.lengths - rejected
            self.cache.note_lengths(
                longest=int(self.lengths.max()), shortest=int(self.lengths.min())
            )


class Uniform(System):
    """mlx-lm: trims the same number of tokens from every row."""

    def trim(self, rejected: Any) -> None:
        if self.width > 1:
            self.cache.trim(int(rejected.max()))


class Rolled(System):
    """mlx-lm: rolls rows so that they end in the same column again."""

    def trim(self, rejected: Any) -> None:
        if self.width > 1:
            self.cache.prepare(right_padding=rejected.tolist())
            self.cache.finalize()


class Untrimmed(System):
    """mlx-lm's ring and chunk, which cannot be trimmed once they are full."""

    def trim(self, rejected: Any) -> None:
        pass


class Chunk(Untrimmed):
    """mlx-lm's chunk with llama4's mask, since it makes none itself."""

    def mask(self) -> Any:
        c, n, chunk = self.cache, self.width, self.cache.chunk_size
        keys = mx.arange(c.start_position, c.offset + n)
        queries = mx.arange(c.offset, c.offset + n)[:, None]
        return (keys <= queries) & (keys // chunk == queries // chunk)


def systems(
    shape: Shape, rows: int, columns: int, width: int, window: int
) -> dict[str, Callable[[], System]]:
    """Functions that make each system, by name."""
    bucket = 256
    group = 64 if shape.head_dim % 64 == 0 else 32
    ring: Record = {"max_size": window, "max_write": PREFILL}
    made: list[tuple[str, type[System], Callable[[], Any]]] = [
        ("BatchKVCache", Ours, partial(BatchKVCache, rows)),
        (f"BatchKVCache, bucket {bucket}", Ours,
         partial(BatchKVCache, rows, read_bucket=bucket, additive_mask=True)),
        ("mlx-lm BatchKVCache", Uniform,
         partial(mlx_lm_cache.BatchKVCache, [0] * rows)),
        ("mlx-lm BatchKVCache, re-aligned by rolling", Rolled,
         partial(mlx_lm_cache.BatchKVCache, [0] * rows)),
        ("BatchQuantizedKVCache, 4 bits", Ours,
         partial(BatchQuantizedKVCache, rows, bits=4, group_size=group)),
        ("BatchQuantizedKVCache, 8 bits", Ours,
         partial(BatchQuantizedKVCache, rows, bits=8, group_size=group)),
        ("mlx-lm QuantizedKVCache, 4 bits", Uniform,
         partial(mlx_lm_cache.QuantizedKVCache, group_size=group, bits=4)),
        (f"BatchRotatingKVCache, window {window}", Ours,
         partial(BatchRotatingKVCache, rows, **ring)),
        (f"mlx-lm BatchRotatingKVCache, window {window}, no trim", Untrimmed,
         partial(mlx_lm_cache.BatchRotatingKVCache, window, [0] * rows)),
        (f"BatchQuantizedRotatingKVCache, window {window}, 4 bits", Ours,
         partial(BatchQuantizedRotatingKVCache, rows, bits=4, group_size=group,
                 **ring)),
        (f"BatchChunkedKVCache, chunk {window}", Ours,
         partial(BatchChunkedKVCache, rows, chunk_size=window, max_write=PREFILL)),
        (f"mlx-lm ChunkedKVCache, chunk {window}, no trim", Chunk,
         partial(mlx_lm_cache.ChunkedKVCache, window)),
    ]  # fmt: skip
    return {
        name: partial(kind, make, shape, rows, columns, width)
        for name, kind, make in made
    }


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of ``work``, and MiB by which its peak exceeds the memory before."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.perf_counter()
    work()
    mx.synchronize()
    spent = time.perf_counter() - start
    return spent * 1e3, (mx.get_peak_memory() - before) / MIB


def layer_costs(
    shape: Shape, rows: int, columns: int, width: int, window: int, repeat: int
) -> list[Record]:
    """Step times and peaks of all systems, which exist together and take turns."""
    alive = {
        name: make()
        for name, make in systems(shape, rows, columns, width, window).items()
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in alive}
    runs = {name: partial(timed, system.step) for name, system in alive.items()}
    for number, name, result in interleaved(runs, repeat + 1):
        if number:  # in the first pass code compiles and caches grow
            found[name].append(result)
    return [
        {
            "system": name,
            "rows": rows,
            "columns": columns,
            "tokens": width,
            "ms": [round(ms, 4) for ms, _ in results],
            "peak_mib": [round(peak, 3) for _, peak in results],
            "nbytes": alive[name].cache.nbytes,
        }
        for name, results in found.items()
    ]


def growth_costs(shape: Shape, rows: int, columns: int, repeat: int) -> list[Record]:
    """Time and peak of the write that makes a full cache grow, and count of growths."""
    makers: dict[str, Callable[[], Any]] = {
        "BatchKVCache": partial(BatchKVCache, rows),
        "mlx-lm BatchKVCache": partial(mlx_lm_cache.BatchKVCache, [0] * rows),
    }
    token = shape.tokens(rows, 1)
    whole = shape.tokens(rows, columns)
    mx.eval(token, whole)

    def grow(make: Callable[[], Any]) -> tuple[float, float]:
        cache = make()
        cache.update_and_fetch(whole, whole)
        cache.trim(1)  # so that the old columns do not end at a block's end
        mx.eval(cache.state)

        def write() -> None:
            for _ in range(2):
                cache.update_and_fetch(token, token)
                mx.eval(cache.state)

        return timed(write)

    runs = {name: partial(grow, make) for name, make in makers.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for number, name, result in interleaved(runs, repeat + 1):
        if number:
            found[name].append(result)
    return [
        {
            "system": name,
            "rows": rows,
            "columns": columns,
            "cache_mib": round(whole.nbytes * 2 / MIB, 3),
            "ms": [round(ms, 4) for ms, _ in results],
            "peak_mib": [round(peak, 3) for _, peak in results],
            "growths_to_32768": count_growths(makers[name]),
        }
        for name, results in found.items()
    ]


def count_growths(make: Callable[[], Any], columns: int = 32768) -> int:
    """How often a cache grows when it is filled 128 tokens at a time.

    Its arrays are tiny.
    """
    cache = make()
    capacities: list[int] = []
    rows = cache.offset.shape[0]
    part = mx.zeros((rows, 1, 128, 1), mx.float16)
    for _ in range(columns // 128):
        cache.update_and_fetch(part, part)
        if not capacities or cache.keys.shape[2] != capacities[-1]:
            capacities.append(cache.keys.shape[2])
        mx.eval(cache.state)
    return len(capacities) - 1


def geometry(layers: int, measured: int) -> list[Record]:
    """Memory of ``layers`` local layers of a 31B-like model, for one row.

    The window has 1024 tokens, prefill chunks have 256, rounds have 5. There are 16
    heads of 256 in bfloat16. ``measured`` layers are allocated, and their bytes scaled.
    """
    window, chunk, width, heads, dim = 1024, 256, 5, 16, 256
    per_slot = 2 * heads * dim * 2
    part = mx.zeros((1, heads, chunk, dim), mx.bfloat16)
    mx.eval(part)
    mx.clear_cache()
    before = mx.get_active_memory()
    caches = [
        BatchRotatingKVCache(1, max_size=window, max_write=chunk)
        for _ in range(measured)
    ]
    for _ in range(3 * window // chunk):
        for cache in caches:
            cache.update_and_fetch(part, part)
        mx.eval([c.state for c in caches])
    prefill = mx.get_active_memory() - before
    for cache in caches:
        cache.resize(width)
        mx.eval(cache.state)
    decode = mx.get_active_memory() - before
    slots = {
        "ring, prefill": (window + chunk - 1, prefill),
        "ring, decoding": (window + width - 1, decode),
        "buffer of two windows": (2 * window, None),
    }
    return [
        {
            "cache": name,
            "slots": n,
            "computed_mib": round(layers * n * per_slot / MIB, 1),
            "measured_mib": None
            if size is None
            else round(size / measured * layers / MIB, 1),
            "measured_layers": None if size is None else measured,
        }
        for name, (n, size) in slots.items()
    ]


def tables(raw: Record) -> Iterator[str]:
    """The measurements, as parts of a Markdown page."""
    yield "## One step of one layer: mask, write, attend, trim\n"
    sizes = sorted({(r["rows"], r["tokens"]) for r in raw["layer"]})
    columns = sorted({r["columns"] for r in raw["layer"]})
    for rows, tokens in sizes:
        yield f"B = {rows}, {tokens} tokens per row; ms (and peak MiB):\n"
        cells: dict[str, list[str]] = {}
        for record in raw["layer"]:
            if (record["rows"], record["tokens"]) == (rows, tokens):
                ms, peak = (statistics.median(record[k]) for k in ("ms", "peak_mib"))
                cells.setdefault(record["system"], []).append(f"{ms:.2f} ({peak:.1f})")
        head = ["system", *(f"{n} columns" for n in columns)]
        yield markdown_table(head, [[name, *line] for name, line in cells.items()])
    yield "## Growing past a full cache\n"
    yield markdown_table(
        ["system", "B", "columns", "cache MiB", "ms", "peak MiB above",
         "growths to 32768"],
        [[r["system"], r["rows"], r["columns"], r["cache_mib"], show_spread(r["ms"], 2),
          f"{statistics.median(r['peak_mib']):.1f}", r["growths_to_32768"]]
         for r in raw["growth"]],
    )  # fmt: skip
    yield "## 50 local layers of a 31B-like model, one row\n"
    yield (inspect.getdoc(geometry) or "").partition("\n\n")[2] + "\n"
    yield markdown_table(
        ["cache", "slots", "MiB computed", "MiB measured"],
        [[r["cache"], r["slots"], r["computed_mib"], r["measured_mib"] or ""]
         for r in raw["geometry"]],
    )  # fmt: skip


@click.command(cls=Script, help=__doc__)
@click.option("--columns", multiple=True, type=int, help="Tokens held per row.")
@click.option("--batch", multiple=True, type=int, help="Rows.")
@click.option("--tokens", multiple=True, type=int, help="Tokens per row and step.")
@click.option("--window", default=1024, show_default=True, help="Of rings and chunks.")
@click.option("--heads", default=None, help="QUERY:KV:DIM of a layer.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default=None)
@click.option("--repeat", default=7, show_default=True, help="Steps measured.")
@click.option("--quick", is_flag=True, help="Small sizes, to see that it runs.")
@click.option("--out", default=None, help="Write OUT.md and OUT.json.")
def main(
    columns: Sequence[int],
    batch: Sequence[int],
    tokens: Sequence[int],
    window: int,
    heads: str | None,
    dtype: str | None,
    repeat: int,
    quick: bool,
    out: str | None,
) -> None:
    cpu = backend.defaults().name == "cpu"
    # The sizes of SmolLM2's layer on a CPU, else of an 8B model's.
    heads = heads or ("9:3:64" if cpu else "32:8:128")
    found = re.fullmatch("([1-9][0-9]*):([1-9][0-9]*):([1-9][0-9]*)", heads)
    if not found:
        raise ConfigError(f"--heads {heads}: write QUERY:KV:DIM, such as 9:3:64")
    query_heads, kv_heads, head_dim = map(int, found.groups())
    dtype = dtype or ("float32" if cpu else "bfloat16")
    if quick:
        columns, batch, tokens = columns or [512], batch or [2], tokens or [5]
        window, repeat = min(window, 128), min(repeat, 2)
    columns = columns or [1024, 8192, 32768]
    shape = Shape(query_heads, kv_heads, head_dim, DTYPES[dtype])
    raw = header_of("What a cache costs by itself")
    raw["shape"] = {"heads": heads, "dtype": dtype, "window": window}
    raw["layer"] = []
    for rows in batch or [1, 8]:
        for width in tokens or [1, 5]:
            for n in columns:
                mx.clear_cache()
                raw["layer"] += layer_costs(shape, rows, n, width, window, repeat)
    raw["growth"] = [
        record
        for rows in batch or [1, 8]
        for n in columns
        for record in growth_costs(shape, rows, n, min(repeat, 5))
    ]
    mx.clear_cache()
    raw["geometry"] = geometry(50, 2 if quick else 50)
    write_report(out, raw, "\n".join(tables(raw)))


if __name__ == "__main__":
    main()
