"""Products of few rows: MLX's and the kernel's, by matrix and rows (CUDA)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import click
import mlx.core as mx

from benchmarks.chains import chain_seconds
from benchmarks.common import Script, header_of, write_report
from specdec.cuda import skinny_matmul
from specdec.errors import ConfigError
from specdec.tools.bench.models import DTYPES
from specdec.tools.bench.tables import markdown_table

# (name, K, N): one product with (N, K), one with (K, N), in turn.
MATRICES = (
    ("SmolLM2 MLP", 576, 1536),
    ("Qwen2.5 1.5B attention", 1536, 2048),
    ("Qwen2.5 1.5B MLP", 1536, 8960),
    ("Llama 1B MLP", 2048, 8192),
    ("Qwen2.5 1.5B gate and up", 1536, 17920),
    ("Llama 8B MLP", 4096, 14336),
)
# More than any cache holds.
CHAIN_BYTES = 2**30

Product = Callable[[mx.array, mx.array], mx.array]


def microseconds(
    product: Product, x: mx.array, pairs: Sequence[tuple[mx.array, mx.array]], n: int
) -> float:
    """Median time of one product, in compiled chains of them that follow each other."""

    def chain(x: mx.array) -> mx.array:
        for up, down in pairs:
            x = product(product(x, up), down)
        return x

    return chain_seconds(chain, x, n) / (2 * len(pairs)) * 1e6


def usual(x: mx.array, weight: mx.array) -> mx.array:
    """MLX's product."""
    return x @ weight.T


def kernel(x: mx.array, weight: mx.array) -> mx.array:
    """The kernel's, whether it pays or not."""
    return skinny_matmul.product(x, weight, None)


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float16"]))
@click.option(
    "--rows", multiple=True, type=int, default=(1, 2, 4, 8, 16, 32, 64, 96, 160)
)
@click.option("--repeat", default=15)
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(dtype: str, rows: tuple[int, ...], repeat: int, out: str | None) -> None:
    """Time products of few rows by MLX and by the kernel."""
    if not skinny_matmul.proven(DTYPES[dtype]):
        raise ConfigError("the kernel needs MLX's CUDA backend and compute 8.0")
    if repeat < 2:
        raise click.UsageError("--repeat must be 2 or more")
    raw = header_of("Products of few rows")
    raw["microseconds"] = records = []
    table: list[Sequence[object]] = []
    kind = DTYPES[dtype]
    for name, k, n in MATRICES:
        count = max(4, min(32, CHAIN_BYTES // (4 * k * n)))
        pairs = [
            (
                (mx.random.normal((n, k)) * k**-0.5).astype(kind),
                (mx.random.normal((k, n)) * n**-0.5).astype(kind),
            )
            for _ in range(count)
        ]
        mx.eval(pairs)
        for m in rows:
            x = mx.random.normal((m, k)).astype(kind)
            mx.eval(x)
            mlx, ours = (microseconds(f, x, pairs, repeat) for f in (usual, kernel))
            chosen = skinny_matmul.takes(x, pairs[0][0], None)
            records.append(
                {"matrix": name, "rows": m, "mlx": mlx, "kernel": ours, "used": chosen}
            )
            print(records[-1], file=sys.stderr)
            marked = f"**{ours:.1f}**" if chosen else f"{ours:.1f}"
            table.append([name, f"{k} x {n}", m, f"{mlx:.1f}", marked])
        del pairs
        mx.clear_cache()
    intro = (
        f"Weights in {dtype}, more of them than caches hold. Microseconds of a product "
        "of M rows, in compiled chains of K x N and N x K in turn, each chain built "
        f"while the one before runs; medians of {repeat}. Bold where the kernel is "
        "used.\n\n"
    )
    headings = ["matrix", "K x N", "M", "MLX", "kernel"]
    write_report(out, raw, intro + markdown_table(headings, table))


if __name__ == "__main__":
    main()
