"""Attention of few queries by MLX and by the kernel, over heads and columns (CUDA)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import click
import mlx.core as mx

from benchmarks.chains import chain_seconds
from benchmarks.common import Script, header_of, write_report
from specdec.cuda import decode_attention
from specdec.errors import ConfigError
from specdec.tools.bench.models import DTYPES
from specdec.tools.bench.tables import markdown_table

# (name, heads, key heads, head size)
HEADS = (
    ("SmolLM2", 9, 3, 64),
    ("Gemma 3 270M", 4, 1, 256),
    ("Qwen2.5 1.5B", 12, 2, 128),
    ("Llama 1B", 32, 8, 64),
    ("Llama 8B", 32, 8, 128),
)
LAYERS = 24

Attention = Callable[[mx.array, mx.array, mx.array, float, mx.array], mx.array]


def usual(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array
) -> mx.array:
    """MLX's attention."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def microseconds(
    attention: Attention,
    q: mx.array,
    layers: Sequence[tuple[mx.array, mx.array]],
    mask: mx.array,
    repeat: int,
) -> float:
    """Median time of one attention among those of other layers."""
    scale = q.shape[-1] ** -0.5
    columns = mask.shape[-1]

    def chain(x: mx.array) -> mx.array:
        for k, v in layers:
            x = attention(x, k[..., :columns, :], v[..., :columns, :], scale, mask)
        return x

    return chain_seconds(chain, q, repeat) / len(layers) * 1e6


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float16"]))
@click.option("--rows", multiple=True, type=int, default=(1, 8, 32))
@click.option("--tokens", multiple=True, type=int, default=(2, 5, 9))
@click.option("--columns", multiple=True, type=int, default=(256, 512, 2048, 8192))
@click.option("--repeat", default=9)
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    dtype: str,
    rows: tuple[int, ...],
    tokens: tuple[int, ...],
    columns: tuple[int, ...],
    repeat: int,
    out: str | None,
) -> None:
    """Time attention of few queries with a mask, by MLX and by the kernel."""
    if not all(decode_attention.proven(size, DTYPES[dtype]) for *_, size in HEADS):
        raise ConfigError("the kernel needs MLX's CUDA backend and compute 8.0")
    if repeat < 2:
        raise click.UsageError("--repeat must be 2 or more")
    raw = header_of("Attention of few queries")
    raw["microseconds"] = records = []
    table: list[Sequence[object]] = []
    kind = DTYPES[dtype]
    for name, heads, key_heads, size in HEADS:
        for b, held in ((b, held) for b in rows for held in columns):
            layers = min(LAYERS, max(2, 2**33 // (4 * b * key_heads * held * size)))
            # A quarter more than is read, as caches have.
            shape = (b, key_heads, held + held // 4, size)
            pairs = [
                (
                    mx.random.normal(shape).astype(kind),
                    mx.random.normal(shape).astype(kind),
                )
                for _ in range(layers)
            ]
            mx.eval(pairs)
            for s in tokens:
                q = mx.random.normal((b, heads, s, size)).astype(kind)
                last = held - held // 8 - s + mx.arange(s)[:, None]
                seen = mx.arange(held) <= last
                mask = mx.where(seen, 0.0, -mx.inf).astype(kind)
                mask = mx.contiguous(mx.broadcast_to(mask, (b, 1, s, held)))
                mx.eval(q, mask)
                mlx, ours = (
                    microseconds(f, q, pairs, mask, repeat)
                    for f in (usual, decode_attention.attention)
                )
                used = decode_attention.takes(
                    q, pairs[0][0][..., :held, :], pairs[0][1][..., :held, :], mask
                )
                records.append(
                    {"heads": name, "rows": b, "tokens": s, "columns": held}
                    | {"mlx": mlx, "kernel": ours, "used": used}
                )
                print(records[-1], file=sys.stderr)
                marked = f"**{ours:.1f}**" if used else f"{ours:.1f}"
                sizes = f"{heads} / {key_heads} of {size}"
                table.append([name, sizes, b, held, s, f"{mlx:.1f}", marked])
            del pairs
            mx.clear_cache()
    intro = (
        f"In {dtype}, with a mask that is added. Microseconds of one attention of B "
        "rows, S queries each, over so many columns, in compiled chains of up to "
        f"{LAYERS} with other keys and values each, every chain built while the one "
        f"before runs; medians of {repeat}. Bold where the kernel is used.\n\n"
    )
    headings = ["model", "heads / key heads", "B", "columns", "S", "MLX", "kernel"]
    write_report(out, raw, intro + markdown_table(headings, table))


if __name__ == "__main__":
    main()
