"""Products with packed weights: as mlx-lm's layers compute them, flattened, dense."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn

from benchmarks.common import Script, header_of, write_report
from specdec.cuda.flattened_matmul import flatten_products
from specdec.tools.bench.models import DTYPES
from specdec.tools.bench.tables import markdown_table

SHAPES = ((4096, 14336), (4096, 4096), (1536, 8960), (1536, 151936))
TOKENS = ((1, 1), (1, 5), (8, 1), (8, 5), (32, 1), (32, 5))
Layer = Callable[[mx.array], mx.array]


def microseconds(layer: Layer, x: mx.array, repeat: int) -> float:
    """Median time of a product, of ``repeat`` that are handed over together."""
    mx.eval([layer(x) for _ in range(repeat)])
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        mx.eval([layer(x) for _ in range(repeat)])
        times.append((time.perf_counter() - begun) / repeat * 1e6)
    return statistics.median(times)


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--bits", default=4)
@click.option("--group-size", default=64)
@click.option("--dtype", default="bfloat16", type=click.Choice(list(DTYPES)))
@click.option("--scale", default=1, help="Divide the sizes of layers by this.")
@click.option("--repeat", default=8, help="Products handed over together.")
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    bits: int, group_size: int, dtype: str, scale: int, repeat: int, out: str | None
) -> None:
    """Time products with packed weights by shape."""
    raw = header_of("Products with packed weights")
    raw["microseconds"] = records = []
    rows: list[Sequence[object]] = []
    for inputs, outputs in SHAPES:
        size = inputs // scale, outputs // scale
        dense = nn.Linear(*size, bias=False)
        dense.set_dtype(DTYPES[dtype])
        packed = nn.QuantizedLinear.from_linear(dense, group_size, bits)
        holder = nn.Sequential(packed)
        flatten_products(holder)
        flat: Any = holder.layers[0]
        mx.eval(dense.parameters(), packed.parameters())
        layers = {"as they are": packed, "flattened": flat, "dense": dense}
        for tokens in TOKENS:
            x = mx.random.normal((*tokens, size[0])).astype(DTYPES[dtype])
            found = {n: microseconds(f, x, repeat) for n, f in layers.items()}
            records.append({"layer": size, "tokens": tokens, **found})
            print(size, tokens, found, file=sys.stderr)
            gain = found["as they are"] / found["flattened"]
            cells = [f"{found[n]:.0f}" for n in layers]
            shape = f"{size[0]} x {size[1]}"
            rows.append([shape, f"{tokens[0]} x {tokens[1]}", *cells, f"{gain:.1f}"])
    header = ["layer", "B x S", "as they are", "flattened", "dense", "gain"]
    intro = (
        f"Weights in {bits} bits, groups of {group_size}, {dtype}; microseconds a "
        f"product, the median of 5 times {repeat}. *as they are*: x (B, S, D) as "
        "mlx-lm's layers pass it; *flattened*: (B * S, D); *dense*: the same layer in "
        f"{dtype}; *gain*: as they are over flattened.\n\n"
    )
    write_report(out, raw, intro + markdown_table(header, rows))


if __name__ == "__main__":
    main()
