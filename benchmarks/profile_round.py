"""Where the host's time of one decode round goes: building, handing over, waiting."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import click
import mlx.core as mx

from benchmarks.common import (
    header_of,
    load_model,
    markdown_table,
    random_prompts,
    short,
    write_report,
)
from specdec import EngineConfig, SamplingParams, backend, engine
from specdec.drafters import DraftModel
from specdec.models.runner import ModelRunner
from specdec.sequence import Request, Sequence

PHASES = ("propose", "verify", "accept", "trim", "commit", "hand over", "other", "wait")


class Clock:
    """Seconds spent in each phase, a phase inside another counted once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[phase] += time.perf_counter() - start
                self._inside = False

        return call


@contextmanager
def watched(batch: engine.RowBatch, clock: Clock) -> Iterator[None]:
    """Time the parts of a round of ``batch``."""
    parts: list[tuple[str, Any, str]] = [
        ("verify", batch.target, "forward"),
        ("trim", batch.target, "trim_per_sequence"),
        ("accept", engine, "choose"),
        ("accept", engine, "count_kept"),
        ("commit", engine, "next_tail"),
        ("hand over", mx, "async_eval"),
    ]
    if batch.drafter is not None:
        parts += [
            ("propose", batch.drafter, "propose"),
            ("commit", batch.drafter, "commit"),
        ]
    with ExitStack() as stack:
        for phase, owner, name in parts:
            timed = clock.timed(phase, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, timed))
        yield


def profile(
    models: list[Any], k: int, batch_size: int, prompt_tokens: int, rounds: int
) -> dict[str, float]:
    """Milliseconds of each phase in a mean round, the first ones left out."""
    warm_up = 4
    config = EngineConfig(batch_size=batch_size, num_draft_tokens=k)
    defaults = backend.defaults()
    target = ModelRunner(models[0], "target", config, defaults)
    drafter = None
    if k:
        drafter = DraftModel(
            ModelRunner(models[1], "draft", config, defaults),
            vocab_size=target.vocab_size,
            max_draft_tokens=k,
        )
    # Enough that no row ends, whatever is accepted.
    params = SamplingParams(max_tokens=(rounds + warm_up + 2) * (k + 1) + 1)
    prompts = random_prompts(batch_size, prompt_tokens, target.vocab_size)
    rows = [
        Sequence(Request(i, "", tuple(p), params), frozenset())
        for i, p in enumerate(prompts)
    ]
    batch = engine.RowBatch(target, drafter, rows, config, defaults)
    batch.prefill()
    running = batch.run()
    for _ in range(warm_up):
        next(running)
    mx.synchronize()
    clock = Clock()
    # Reading a round is where the host waits for the device.
    waited = _time_reads(batch, clock)
    with watched(batch, clock), waited:
        start = time.perf_counter()
        for _ in range(rounds):
            next(running)
        total = time.perf_counter() - start
    running.close()  # type: ignore[attr-defined]
    mx.synchronize()
    clock.seconds["other"] = total - sum(clock.seconds.values())
    record = {phase: clock.seconds[phase] / rounds * 1e3 for phase in PHASES}
    return {**record, "round": total / rounds * 1e3}


def _time_reads(batch: engine.RowBatch, clock: Clock) -> Any:
    read = batch._read

    def wait_then_read(in_flight: engine.InFlight) -> Any:
        clock.timed("wait", mx.eval)(in_flight.packed)
        return read(in_flight)

    return patch.object(batch, "_read", wait_then_read)


@click.command(context_settings={"show_default": True})
@click.option("--target", default="random:tiny")
@click.option("--draft", default="random:tiny:1")
@click.option("--dtype", default="float32")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32))
@click.option("--num-draft-tokens", "ks", multiple=True, type=int, default=(0, 4))
@click.option("--prompt-tokens", default=64)
@click.option("--rounds", default=32)
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    target: str,
    draft: str,
    dtype: str,
    batches: tuple[int, ...],
    ks: tuple[int, ...],
    prompt_tokens: int,
    rounds: int,
    out: str | None,
) -> None:
    """Show where the host's time of one round goes."""
    raw = header_of("Host time of one round")
    loaded = load_model(target, dtype)
    models = [loaded.model]
    if any(ks):
        models.append(load_model(draft, dtype, loaded).model)
    raw["rounds"] = {
        f"B={b} k={k}": profile(models, k, b, prompt_tokens, rounds)
        for b in batches
        for k in ks
    }
    table = markdown_table(
        ["milliseconds", *PHASES, "round"],
        [[n, *(f"{v:.3f}" for v in r.values())] for n, r in raw["rounds"].items()],
    )
    intro = (
        "Mean of each part of a round on the host: building the graph (*propose* to "
        "*commit*), handing it to the device, bookkeeping (*other*), and waiting for "
        f"the device. Target {short(target)}, draft {short(draft)}, {dtype}.\n\n"
    )
    write_report(out, raw, intro + table)


if __name__ == "__main__":
    main()
