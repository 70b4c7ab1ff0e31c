"""What kernels take beside MLX's own: attention, products, packed products, n-grams."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks.common import Script, header_of, write_report
from specdec.cuda import decode_attention, skinny_matmul
from specdec.cuda.flattened_matmul import flatten_products
from specdec.errors import ConfigError
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import NgramDrafter, NgramOptions, Round
from specdec.spec_decode.rejection_sampler import Accepted
from specdec.spec_decode.verifier import Verifier
from specdec.tools.bench.models import DTYPES
from specdec.tools.bench.tables import interleaved, markdown_table, show_spread

NO_KERNEL = "the kernel needs MLX's CUDA backend and compute 8.0"
HALF = click.Choice(["bfloat16", "float16"])
Operation = Callable[..., mx.array]

out_option = click.option("--out", help="Write OUT.json and OUT.md.")


@click.group(cls=click.Group, context_settings={"show_default": True})
def main() -> None:
    """Time a kernel, or what takes its place."""


def require_runs(proven: bool, repeat: int) -> None:
    """Refuse a machine without the kernel, or a median of nothing."""
    if not proven:
        raise ConfigError(NO_KERNEL)
    if repeat < 2:
        raise ConfigError("--repeat must be 2 or more")


def chain_us(
    chain: Callable[[mx.array], mx.array], x: mx.array, repeat: int, length: int
) -> float:
    """Median microseconds of one of a chain's operations, which follow each other.

    Each chain, compiled, is built while the one before runs, as a forward's layers are.
    """
    compiled = mx.compile(chain)
    for _ in range(2):
        mx.eval(compiled(x))
    waiting = compiled(x)
    mx.async_eval(waiting)
    ends = []
    for _ in range(repeat):
        following = compiled(x)
        mx.async_eval(following)
        mx.eval(waiting)
        ends.append(time.perf_counter())
        waiting = following
    mx.eval(waiting)
    return statistics.median(b - a for a, b in pairwise(ends)) / length * 1e6


def marked(microseconds: float, used: bool) -> str:
    """A table's cell, bold where the kernel is used."""
    return f"**{microseconds:.1f}**" if used else f"{microseconds:.1f}"


# -- attention of few queries ------------------------------------------------

# (name, heads, key heads, head size)
HEADS = (
    ("SmolLM2", 9, 3, 64),
    ("Gemma 3 270M", 4, 1, 256),
    ("Qwen2.5 1.5B", 12, 2, 128),
    ("Llama 1B", 32, 8, 64),
    ("Llama 8B", 32, 8, 128),
)
LAYERS = 24


def mlx_attention(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array
) -> mx.array:
    """MLX's own."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def attention_us(
    attend: Operation,
    q: mx.array,
    layers: Sequence[tuple[mx.array, mx.array]],
    mask: mx.array,
    repeat: int,
) -> float:
    """Median time of one attention among those of other layers."""
    scale, columns = q.shape[-1] ** -0.5, mask.shape[-1]

    def chain(x: mx.array) -> mx.array:
        for k, v in layers:
            x = attend(x, k[..., :columns, :], v[..., :columns, :], scale, mask)
        return x

    return chain_us(chain, q, repeat, len(layers))


@main.command(cls=Script)
@click.option("--dtype", default="bfloat16", type=HALF)
@click.option("--rows", multiple=True, type=int, default=(1, 8, 32))
@click.option("--tokens", multiple=True, type=int, default=(2, 5, 9))
@click.option("--columns", multiple=True, type=int, default=(256, 512, 2048, 8192))
@click.option("--repeat", default=9)
@out_option
def attention(
    dtype: str,
    rows: tuple[int, ...],
    tokens: tuple[int, ...],
    columns: tuple[int, ...],
    repeat: int,
    out: str | None,
) -> None:
    """Attention of few queries with a mask (CUDA)."""
    require_runs(all(decode_attention.proven(size) for *_, size in HEADS), repeat)
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
                tuple(mx.random.normal(shape).astype(kind) for _ in range(2))
                for _ in range(layers)
            ]
            mx.eval(pairs)
            for s in tokens:
                q = mx.random.normal((b, heads, s, size)).astype(kind)
                last = held - held // 8 - s + mx.arange(s)[:, None]
                mask = mx.where(mx.arange(held) <= last, 0.0, -mx.inf).astype(kind)
                mask = mx.contiguous(mx.broadcast_to(mask, (b, 1, s, held)))
                mx.eval(q, mask)
                mlx, ours = (
                    attention_us(f, q, pairs, mask, repeat)  # type: ignore[arg-type]
                    for f in (mlx_attention, decode_attention.attention)
                )
                k, v = (each[..., :held, :] for each in pairs[0])
                used = decode_attention.takes(q, k, v, mask)
                records.append(
                    {"heads": name, "rows": b, "tokens": s, "columns": held}
                    | {"mlx": mlx, "kernel": ours, "used": used}
                )
                print(records[-1], file=sys.stderr)
                sizes = f"{heads} / {key_heads} of {size}"
                cells = [f"{mlx:.1f}", marked(ours, used)]
                table.append([name, sizes, b, held, s, *cells])
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


# -- products of few rows ----------------------------------------------------

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


def product_us(
    product: Operation,
    x: mx.array,
    pairs: Sequence[tuple[mx.array, mx.array]],
    repeat: int,
) -> float:
    """Median time of one product among others that follow each other."""

    def chain(x: mx.array) -> mx.array:
        for up, down in pairs:
            x = product(product(x, up), down)
        return x

    return chain_us(chain, x, repeat, 2 * len(pairs))


@main.command(cls=Script)
@click.option("--dtype", default="bfloat16", type=HALF)
@click.option(
    "--rows", multiple=True, type=int, default=(1, 2, 4, 8, 16, 32, 64, 96, 160)
)
@click.option("--repeat", default=15)
@out_option
def skinny(dtype: str, rows: tuple[int, ...], repeat: int, out: str | None) -> None:
    """Products of few rows (CUDA)."""
    require_runs(skinny_matmul.proven(DTYPES[dtype]), repeat)
    raw = header_of("Products of few rows")
    raw["microseconds"] = records = []
    table: list[Sequence[object]] = []
    kind = DTYPES[dtype]
    products: tuple[Operation, ...] = (
        lambda x, weight: x @ weight.T,
        lambda x, weight: skinny_matmul.product(x, weight, None),
    )
    for name, k, n in MATRICES:
        pairs = [
            (
                (mx.random.normal((n, k)) * k**-0.5).astype(kind),
                (mx.random.normal((k, n)) * n**-0.5).astype(kind),
            )
            for _ in range(max(4, min(32, CHAIN_BYTES // (4 * k * n))))
        ]
        mx.eval(pairs)
        for m in rows:
            x = mx.random.normal((m, k)).astype(kind)
            mx.eval(x)
            mlx, ours = (product_us(f, x, pairs, repeat) for f in products)
            used = skinny_matmul.takes(x, pairs[0][0], None)
            records.append(
                {"matrix": name, "rows": m, "mlx": mlx, "kernel": ours, "used": used}
            )
            print(records[-1], file=sys.stderr)
            table.append([name, f"{k} x {n}", m, f"{mlx:.1f}", marked(ours, used)])
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


# -- products with packed weights --------------------------------------------

PACKED = ((4096, 14336), (4096, 4096), (1536, 8960), (1536, 151936))
TOKENS = ((1, 1), (1, 5), (8, 1), (8, 5), (32, 1), (32, 5))


def together_us(layer: Operation, x: mx.array, repeat: int) -> float:
    """Median time of a product, of ``repeat`` that are handed over together."""
    mx.eval([layer(x) for _ in range(repeat)])
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        mx.eval([layer(x) for _ in range(repeat)])
        times.append((time.perf_counter() - begun) / repeat * 1e6)
    return statistics.median(times)


@main.command(cls=Script)
@click.option("--bits", default=4)
@click.option("--group-size", default=64)
@click.option("--dtype", default="bfloat16", type=click.Choice(list(DTYPES)))
@click.option("--scale", default=1, help="Divide the sizes of layers by this.")
@click.option("--repeat", default=8, help="Products handed over together.")
@out_option
def packed(
    bits: int, group_size: int, dtype: str, scale: int, repeat: int, out: str | None
) -> None:
    """Products with packed weights: as mlx-lm's layers have them, flattened, dense."""
    raw = header_of("Products with packed weights")
    raw["microseconds"] = records = []
    rows: list[Sequence[object]] = []
    for inputs, outputs in PACKED:
        size = inputs // scale, outputs // scale
        dense = nn.Linear(*size, bias=False)
        dense.set_dtype(DTYPES[dtype])
        as_they_are = nn.QuantizedLinear.from_linear(dense, group_size, bits)
        holder = nn.Sequential(as_they_are)
        flatten_products(holder)
        flat: Any = holder.layers[0]
        mx.eval(dense.parameters(), as_they_are.parameters())
        layers = {"as they are": as_they_are, "flattened": flat, "dense": dense}
        for tokens in TOKENS:
            x = mx.random.normal((*tokens, size[0])).astype(DTYPES[dtype])
            found = {n: together_us(f, x, repeat) for n, f in layers.items()}
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


# -- prompt lookup -----------------------------------------------------------

VOCAB = 1000
WARM_UP = 3


def lookup_ms(
    num_rows: int, history: int, k: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each round, waited for, with rows of up to ``history`` tokens.

    Tokens are random, which costs what others do: all slots are compared. Of each
    round three tokens are kept.
    """
    draw = np.random.default_rng(num_rows)
    length = history - (k + 1) * (rounds + WARM_UP + 2)
    if length < 2:
        raise ConfigError(f"--history {history} is too short for {rounds} rounds")
    prompts = draw.integers(0, VOCAB, (num_rows, length)).tolist()
    options = NgramOptions(max_history=max(history, 256))
    rows = NgramDrafter(options).rows(prompts, max_length=history)
    for _ in rows.prefill():
        pass
    kept = min(3, k + 1)
    request = Request(0, "", (1,), SamplingParams())
    rules = Verifier.of([request] * num_rows, VOCAB)
    active = mx.ones((num_rows,), mx.bool_)
    times: dict[str, list[float]] = {"search": [], "write": []}
    for number in range(WARM_UP + rounds):
        committed = length + 1 + kept * number
        recent = mx.array(draw.integers(0, VOCAB, (num_rows, 2)), mx.int32)
        chosen = mx.array(draw.integers(0, VOCAB, (num_rows, k + 1)), mx.int32)
        lengths = mx.full((num_rows,), committed, mx.int32)
        draws = rules.draws(lengths, k + 1)
        round_ = Round(k, recent, active, rules.sampling, draws, lengths=lengths)
        verdict = Accepted(chosen, mx.full((num_rows,), kept, mx.int32))
        mx.eval(recent, chosen, verdict.kept, round_.lengths)
        start = time.perf_counter()
        proposals = rows.propose(round_)
        mx.eval(proposals.tokens, proposals.lengths)
        searched = time.perf_counter()
        rows.commit(round_, verdict)
        mx.synchronize()
        if number >= WARM_UP:
            times["search"].append(1e3 * (searched - start))
            times["write"].append(1e3 * (time.perf_counter() - searched))
    return times


@main.command(cls=Script)
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8, 32))
@click.option("--history", "histories", type=int, multiple=True, default=(1024, 8192))
@click.option("--num-draft-tokens", "k", type=int, default=4)
@click.option("--rounds", type=int, default=20)
@click.option("--repeat", type=int, default=3)
@out_option
def ngram(
    batches: tuple[int, ...],
    histories: tuple[int, ...],
    k: int,
    rounds: int,
    repeat: int,
    out: str | None,
) -> None:
    """What prompt lookup costs in a round: searching, and writing what was kept."""
    raw: dict[str, Any] = header_of("What prompt lookup costs in a round")
    raw["load_average_before"] = os.getloadavg()
    raw["num_draft_tokens"] = k
    systems = {
        f"ngram history={n} B={b}": partial(lookup_ms, b, n, k, rounds)
        for n in histories
        for b in batches
    }
    passes: dict[str, list[dict[str, list[float]]]] = {name: [] for name in systems}
    for _, name, times in interleaved(systems, repeat):
        passes[name].append(times)
    raw["load_average_after"] = os.getloadavg()
    raw["passes_ms"] = passes

    def cell(name: str, part: str) -> str:
        return show_spread([statistics.median(p[part]) for p in passes[name]], 2)

    rows = [
        [f"ngram, {n} tokens, {part}"]
        + [cell(f"ngram history={n} B={b}", part) for b in batches]
        for n in histories
        for part in ("search", "write")
    ]
    table = markdown_table(["ms a round", *(f"B={b}" for b in batches)], rows)
    before, after = (raw[f"load_average_{w}"][0] for w in ("before", "after"))
    write_report(
        out,
        raw,
        f"k = {k}; the host's work included, each part waited for. Medians of {rounds} "
        f"rounds: the median of {repeat} passes, and their range.\n\n{table}\n"
        f"Processes that wanted a core, on average over a minute: {before:.1f} when it "
        f"began, {after:.1f} when it ended.\n",
    )


if __name__ == "__main__":
    main()
