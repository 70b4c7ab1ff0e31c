"""What a decode forward costs, as usual and compiled, by rows, width, context."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import click
import mlx.core as mx
import mlx.nn as nn

from benchmarks.common import Script, header_of, write_report
from specdec import EngineConfig, backend
from specdec.cuda.fused_linear import separated
from specdec.models.runner import ModelRunner
from specdec.tools.bench.models import DTYPES, SHAPES, random_model, random_prompts
from specdec.tools.bench.tables import markdown_table

WARM_UP = 5
# Columns of the table: tokens per row, compiled or not, layers' products apart or as
# the backend has them (joined on CUDA).
VARIANTS = (
    (1, False, False),
    (1, True, False),
    (2, True, True),
    (2, True, False),
    (5, False, False),
    (5, True, True),
    (5, True, False),
)


def milliseconds(
    model: nn.Module, rows: int, context: int, width: int, steps: int, *, compiles: bool
) -> float:
    """Mean time of a forward and its arg-max, each built while the one before runs."""
    defaults = replace(
        backend.defaults(),
        read_bucket=256,
        static_shapes=True,
        compile_after=0 if compiles else None,
        pad_single_token=False,
    )
    runner = ModelRunner(model, "target", EngineConfig(batch_size=rows), defaults)
    length = context + (steps + WARM_UP) * width + 1
    prompts = random_prompts(rows, context, runner.vocab_size)
    held = runner.rows(prompts, max_round=width, max_length=length)
    for _ in held.prefill():
        pass
    tokens = mx.ones((rows, width), mx.int32)
    waiting: list[mx.array] = []
    begun = 0.0
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            mx.eval(waiting)
            begun = time.perf_counter()
        tokens = mx.argmax(held.forward(tokens), axis=-1).astype(mx.int32)
        mx.async_eval(tokens, held.offset)
        mx.eval(waiting)
        waiting = [tokens]
    mx.eval(waiting)
    return (time.perf_counter() - begun) / steps * 1e3


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--shape", default="1b", type=click.Choice(list(SHAPES)))
@click.option("--layers", type=int, help="Another number of layers.")
@click.option("--dtype", default="bfloat16", type=click.Choice(list(DTYPES)))
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 16, 32))
@click.option("--context", "contexts", multiple=True, type=int, default=(300, 2000))
@click.option("--steps", default=30)
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    shape: str,
    layers: int | None,
    dtype: str,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    steps: int,
    out: str | None,
) -> None:
    """Time decode forwards: as usual and compiled, products joined and apart."""
    raw = header_of("Compiled forwards")
    model = random_model(shape, dtype, num_layers=layers)
    raw["milliseconds"] = records = []
    rows: list[Sequence[object]] = []
    alone = separated(model)
    names = [
        f"S={s}{' compiled' * compiles}{', apart' * apart}"
        for s, compiles, apart in VARIANTS
    ]
    for context in contexts:
        for b in batches:
            found = {
                name: milliseconds(
                    alone if apart else model, b, context, s, steps, compiles=compiles
                )
                for name, (s, compiles, apart) in zip(names, VARIANTS, strict=True)
            }
            print(context, b, found, file=sys.stderr)
            records.append({"context": context, "batch": b, **found})
            rows.append([context, b, *(f"{ms:.2f}" for ms in found.values())])
    depth = layers or SHAPES[shape]["num_hidden_layers"]
    intro = (
        f"Random Llama weights of the {shape} shape, {depth} layers, {dtype}; columns "
        "read in multiples of 256. Milliseconds of a forward of B rows by S tokens and "
        f"its arg-max, mean of {steps}, each built while the one before runs.\n\n"
    )
    write_report(out, raw, intro + markdown_table(["context", "B", *names], rows))


if __name__ == "__main__":
    main()
