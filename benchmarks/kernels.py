"""Times of kernels and of MLX's own: attention, products, packed ones, n-grams."""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from benchmarks.common import Script, header_of, pipelined, write_report
from specdec import EngineConfig, SpecDecoder
from specdec.backend import defaults
from specdec.cuda import decode_attention, packed_matmul, skinny_matmul
from specdec.cuda.attention_patch import take_few_queries
from specdec.cuda.flattened_matmul import flatten_products
from specdec.cuda.fused_linear import join_products, separated
from specdec.cuda.skinny_matmul import take_few_rows
from specdec.errors import ConfigError
from specdec.models.runner import ModelRunner
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import NgramDrafter, NgramOptions, Round
from specdec.spec_decode.commit import Accepted
from specdec.spec_decode.verifier import Verifier
from specdec.tools.bench.cells import turns
from specdec.tools.bench.models import (
    DTYPES,
    SHAPES,
    random_model,
)
from specdec.tools.decoding import token_level
from specdec.utils.tables import markdown_table, show_spread

NO_KERNEL = "the kernel needs MLX's CUDA backend and compute 8.0"
HALF = click.Choice(["bfloat16", "float16"])
Operation = Callable[..., mx.array]

out_option = click.option("--out", help="Write OUT.json and OUT.md.")


@click.group(cls=click.Group, context_settings={"show_default": True})
def main() -> None:
    """Time a kernel, or what takes its place."""


def require_runs(proven: bool, repeat: int) -> None:
    """Raise ConfigError if the kernel cannot run here or ``repeat`` is below 2."""
    if not proven:
        raise ConfigError(NO_KERNEL)
    if repeat < 2:
        raise ConfigError("--repeat must be 2 or more")


def chain_us(
    chain: Callable[[mx.array], mx.array], x: mx.array, repeat: int, length: int
) -> float:
    """Median microseconds of an operation in a chain of ``length`` dependent ones.

    The chain is compiled. Each run is built while the previous one runs, as forwards
    are.
    """
    compiled = mx.compile(chain)
    return pipelined(lambda: compiled(x), repeat) / length * 1e6


def marked(microseconds: float, used: bool) -> str:
    """A table's cell, in bold if ``used``."""
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
    """MLX's own attention."""
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


def attention_us(
    attend: Operation,
    q: mx.array,
    layers: Sequence[tuple[mx.array, mx.array]],
    mask: mx.array,
    repeat: int,
) -> float:
    """Median microseconds of one attention in a chain through several layers."""
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
    require_runs(
        all(decode_attention.proven((size, DTYPES[dtype])) for *_, size in HEADS),
        repeat,
    )
    raw = header_of("Attention of few queries")
    raw["microseconds"] = records = []
    table: list[Sequence[object]] = []
    kind = DTYPES[dtype]
    for name, heads, key_heads, size in HEADS:
        for b, held in ((b, held) for b in rows for held in columns):
            layers = min(LAYERS, max(2, 2**33 // (4 * b * key_heads * held * size)))
            # A quarter more columns than are read, as in caches.
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

# (name, K, N): products with (N, K) and with (K, N) alternate.
MATRICES = (
    ("SmolLM2 MLP", 576, 1536),
    ("Qwen2.5 1.5B attention", 1536, 2048),
    ("Qwen2.5 1.5B MLP", 1536, 8960),
    ("Llama 1B MLP", 2048, 8192),
    ("Qwen2.5 1.5B gate and up", 1536, 17920),
    ("Llama 8B MLP", 4096, 14336),
)
# More bytes than any device's cache holds.
CHAIN_BYTES = 2**30


def product_us(
    product: Operation,
    x: mx.array,
    pairs: Sequence[tuple[Any, Any]],
    repeat: int,
) -> float:
    """Median microseconds of one product in a chain of dependent products."""

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

# (K, N): products with (N, K) and with (K, N) alternate.
PACKED = ((4096, 4096), (4096, 14336), (4096, 28672))
PACKED_ROWS = (1, 8, 16, 40, 64, 160, 256, 512)
# Tokens of context; (rows, tokens of each row) of a step.
CONTEXT = 200
STEPS = ((1, 1), (1, 2), (1, 5), (8, 1), (8, 5), (32, 1), (32, 5))


Matrix = tuple[mx.array, mx.array, mx.array]


def by_kernel(x: mx.array, w: Matrix, group_size: int, bits: int) -> mx.array:
    """The kernel's product, or MLX's if there is no CUDA."""
    if mx.default_device() == mx.cpu:
        return by_mlx(x, w, group_size, bits)
    return packed_matmul.product(x, w, bits=bits, group_size=group_size)[0]


def by_mlx(x: mx.array, w: Matrix, group_size: int, bits: int) -> mx.array:
    """MLX's product, which compiles for half a minute for more than one row."""
    return mx.quantized_matmul(x, *w, True, group_size, bits)


def unpacked(x: mx.array, w: Matrix, group_size: int, bits: int) -> mx.array:
    """The dense product with the matrix after unpacking it."""
    return x @ mx.dequantize(*w, group_size, bits).T


@main.command(cls=Script)
@click.option("--bits", default=4)
@click.option("--group-size", default=64)
@click.option("--dtype", default="bfloat16", type=click.Choice(list(DTYPES)))
@click.option("--scale", default=1, help="Divide the sizes of layers by this.")
@click.option("--repeat", default=9)
@click.option("--rows", multiple=True, type=int, default=PACKED_ROWS)
@click.option(
    "--mlx-rows",
    multiple=True,
    type=int,
    default=(1,),
    help="Time MLX's own too; for more than a row it compiles half a minute.",
)
@out_option
def packed(
    bits: int,
    group_size: int,
    dtype: str,
    scale: int,
    repeat: int,
    rows: tuple[int, ...],
    mlx_rows: tuple[int, ...],
    out: str | None,
) -> None:
    """Products with packed weights: by MLX, by the kernel (CUDA), and its errors."""
    logging.basicConfig(level=logging.DEBUG)
    raw = header_of("Products with packed weights")
    kind = DTYPES[dtype]
    raw["proven"] = packed_matmul.proven(
        packed_matmul.Form(kind, bits, group_size, eights=True)
    )
    print(f"proven: {raw['proven']}", file=sys.stderr)
    raw["microseconds"] = records = []
    products = {"mlx": by_mlx, "unpacked": unpacked, "kernel": by_kernel}
    table: list[Sequence[object]] = []
    for k, n in ((k // scale, n // scale) for k, n in PACKED):
        nbytes = n * k * bits // 8 + n * k // group_size * 4
        shapes = [(n, k), (k, n)] * max(2, min(16, 2**27 // nbytes))
        drawn = [
            mx.quantize(
                (mx.random.normal(shape) * shape[1] ** -0.5).astype(kind),
                group_size,
                bits,
            )
            for shape in shapes
        ]
        mx.eval(drawn)
        pairs: Any = list(zip(drawn[::2], drawn[1::2], strict=True))
        for m in rows:
            x = mx.random.normal((m, k), key=mx.random.key(1)).astype(kind)
            found = {
                name: product_us(
                    partial(product, group_size=group_size, bits=bits), x, pairs, repeat
                )
                for name, product in products.items()
                if name != "mlx" or m in mlx_rows
            }
            wide: Any = (drawn[0][0], *(a.astype(mx.float32) for a in drawn[0][1:]))
            right = unpacked(x.astype(mx.float32), wide, group_size, bits)
            off = mx.abs(by_kernel(x, drawn[0], group_size, bits) - right).max()
            error: Any = (off / mx.abs(right).max()).item()
            records.append({"matrix": [k, n], "rows": m, "error": error, **found})
            print(records[-1], file=sys.stderr, flush=True)
            ours, dense = found["kernel"], found["unpacked"]
            cells = [f"{found['mlx']:.1f}" if "mlx" in found else "", f"{dense:.1f}"]
            cells += [marked(ours, ours < dense), f"{nbytes / ours / 1e6:.2f}"]
            table.append([f"{k} x {n}", m, *cells, f"{error:.1e}"])
        del pairs, drawn
        mx.clear_cache()
    header = ["K x N", "rows", "MLX", "unpacked", "kernel", "TB/s", "error"]
    intro = (
        f"Weights in {bits} bits, groups of {group_size}, {dtype}, more of them than "
        "caches hold. Microseconds of a product of so many rows, in compiled chains of "
        f"K x N and N x K in turn; medians of {repeat}. *unpacked*: `mx.dequantize` "
        "and a dense product; *TB/s*: weights over the kernel's time; *error*: the "
        "kernel's largest, over the largest number. Bold where it is faster.\n\n"
    )
    write_report(out, raw, intro + markdown_table(header, table))


def prompts(batch: int, context: int, vocab_size: int) -> list[list[int]]:
    """Random prompts of different lengths; the longest has ``context`` tokens."""
    draw = np.random.default_rng(0)
    lengths = [max(1, context - i) for i in range(batch)]
    return [draw.integers(0, vocab_size, n).tolist() for n in lengths]


def different_tokens(b: int, s: int) -> mx.array:
    """Tokens (B, S) that count up, to 200, so that they go to different experts."""
    return mx.arange(b * s, dtype=mx.int32).reshape(b, s) % 200


def engine_step(model: nn.Module, b: int, s: int) -> Callable[[], Any]:
    """The engine's forwards; each is trimmed again."""
    runner = ModelRunner(model, "model", EngineConfig(), defaults())
    length = CONTEXT + 4 * s + 64
    rows = runner.rows(prompts(b, CONTEXT, 200), max_round=s, max_length=length)
    for _ in rows.prefill():
        mx.synchronize()
    tokens = different_tokens(b, s)

    def step() -> Any:
        chosen = mx.argmax(rows.forward(tokens), axis=-1)
        rows.trim_per_sequence(mx.full((b,), s, mx.int32), s, s)
        return [chosen, rows.offset]

    return step


def peer_step(filler: nn.Module, model: nn.Module, b: int, s: int) -> Callable[[], Any]:
    """mlx-lm's forwards, trimmed in the same way.

    ``filler`` fills the cache, since it compiles less.
    """
    caches: Any = make_prompt_cache(model)
    if b > 1:
        caches = [BatchKVCache([0] * b) for _ in caches]
    context = [prompts(1, CONTEXT, 200)[0][i:] + [i] * i for i in range(b)]
    filler(mx.array(context, mx.int32), cache=caches)
    mx.eval([c.state for c in caches])
    tokens = different_tokens(b, s)

    def step() -> Any:
        chosen = mx.argmax(model(tokens, cache=caches), axis=-1)
        for c in caches:
            c.trim(s)
        return chosen

    return step


@main.command(cls=Script)
@click.option("--shape", default="8b", type=click.Choice(list(SHAPES)))
@click.option("--bits", default=4, help="16: not packed.")
@click.option("--group-size", default=64)
@click.option("--repeat", default=16)
@out_option
def steps(
    shape: str,
    bits: int,
    group_size: int,
    repeat: int,
    out: str | None,
) -> None:
    """Steps of a whole model with packed weights, and mlx-lm's."""
    raw = header_of("Steps with packed weights")
    model = random_model(shape, packing=None if bits == 16 else (group_size, bits))
    twin = separated(model)
    weights: Any = tree_flatten(model.parameters())
    nbytes = sum(a.nbytes for name, a in weights if "embed_tokens" not in name)
    raw["milliseconds"] = records = []
    table: list[Sequence[object]] = []
    for b, s in STEPS:
        found = {
            name: 1e3 * pipelined(make(which, b, s), repeat)
            for name, make, which in (
                ("specdec", engine_step, model),
                ("mlx_lm", partial(peer_step, model), twin),
            )
            if s == 1 or name == "specdec"  # MLX compiles other sizes for too long
        }
        records.append({"rows": b, "tokens": s, **found})
        print(records[-1], file=sys.stderr, flush=True)
        ours, theirs = found["specdec"], found.get("mlx_lm")
        cells = [f"{theirs:.2f}", f"{theirs / ours:.2f}"] if theirs else ["", ""]
        rate = f"{nbytes / ours / 1e9:.2f}"
        table.append([f"{b} x {s}", f"{ours:.2f}", *cells, rate])
    intro = (
        f"Random weights of the {shape} shape, {bits} bits, groups of {group_size}, "
        f"{nbytes / 1e9:.2f} GB; {CONTEXT} tokens of context; milliseconds of "
        f"rows x tokens, built while the one before runs, medians of {repeat}.\n\n"
    )
    header = ["rows x tokens", "specdec", "mlx-lm", "mlx-lm / specdec", "TB/s"]
    write_report(out, raw, intro + markdown_table(header, table))


@main.command(cls=Script)
@click.option("--shape", default="1b", type=click.Choice(list(SHAPES)))
@click.option("--bits", default=16, help="16: not packed.")
@click.option("--peer", is_flag=True, help="mlx-lm's first waves instead.")
@click.option("--kernels", default="", help="A folder of kernels, if not an empty one.")
def cold(shape: str, bits: int, peer: bool, kernels: str) -> None:
    """What the first waves of a process take, and what is compiled for them."""
    folder = Path(kernels or tempfile.mkdtemp())
    os.environ["MLX_PTX_CACHE_DIR"] = str(folder)
    begun, seen = time.perf_counter(), {p.stem[:60] for p in folder.rglob("*.ptx")}

    def phase(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        done = work()
        mx.synchronize()
        end = time.perf_counter()
        new = {p.stem[:60] for p in folder.rglob("*.ptx")} - seen
        seen.update(new)
        print(f"{end - begun:7.2f} s  {name}: {end - start:.2f} s, compiled", *new)
        return done

    packing = None if bits == 16 else (64, bits)
    model = phase("weights", lambda: random_model(shape, packing=packing, fitted=False))
    for fit in (flatten_products, take_few_rows, take_few_queries, join_products):
        if not peer:
            phase(fit.__name__, partial(fit, model))
    for b, k in ((8, 0), (8, 3), (32, 0), (8, 0)):
        ids = prompts(b, 120, SHAPES[shape]["vocab_size"])
        if peer:
            wave: Callable[[], Any] = partial(peer_wave, model, ids)
        else:
            config = EngineConfig(batch_size=b, num_draft_tokens=k or 1)
            draft = "ngram" if k else None
            decoder = SpecDecoder(token_level(model), drafter=draft, config=config)
            wave = partial(decoder.generate, ids, SamplingParams(max_tokens=32))
        phase(f"B={b} k={k}", wave)


def peer_wave(model: nn.Module, ids: list[list[int]]) -> None:
    """Decode as mlx-lm's ``batch_generate`` does."""
    (generator := BatchGenerator(model, max_tokens=32)).insert(ids)
    while any(generator.next_generated()):
        pass


# -- prompt lookup -----------------------------------------------------------

VOCAB, WARM_UP = 1000, 3


def lookup_ms(
    num_rows: int, history: int, k: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of the parts of each round, with rows of up to ``history`` tokens.

    Each part is waited for. Tokens are random, which does not change the cost, since
    all slots are compared. Each round keeps up to three tokens.
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
    for number in range(repeat):
        for name in turns(list(systems), number):
            passes[name].append(systems[name]())
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
