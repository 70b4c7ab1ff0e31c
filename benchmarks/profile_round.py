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
import mlx.nn as nn

from benchmarks.common import Script, header_of, write_report
from specdec import EngineConfig, SamplingParams
from specdec.decoder import SpecDecoder
from specdec.model_names import short
from specdec.tools.bench.models import load_model, random_prompts, token_level
from specdec.tools.bench.tables import markdown_table

PHASES = ("draft forwards", "target forward", "hand over", "wait", "rest")
WARM_UP = 4


class Clock:
    """Seconds spent in each phase; a phase inside another is part of that one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = False

    def timed(
        self, phase: Callable[..., str], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[phase(*args)] += time.perf_counter() - start
                self._inside = False

        return call


@contextmanager
def watched(clock: Clock, target: nn.Module, draft: nn.Module | None) -> Iterator[None]:
    """Time what a round does, whatever the engine calls its parts."""

    def forward(model: nn.Module, *_: Any) -> str:
        return "target forward" if model is target else "draft forwards"

    parts: list[tuple[Any, str, Callable[..., str]]] = [
        (mx, "async_eval", lambda *_: "hand over"),
        (mx, "eval", lambda *_: "wait"),
        (mx.array, "tolist", lambda *_: "wait"),
        *((kind, "__call__", forward) for kind in {type(target), type(draft)}),
    ]
    with ExitStack() as stack:
        for owner, name, phase in parts:
            if owner is not type(None):
                timed = clock.timed(phase, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, timed))
        yield


def profile(
    target: nn.Module, draft: nn.Module | None, k: int, batch_size: int, rounds: int
) -> dict[str, float]:
    """Milliseconds of each phase in a mean round, the first ones left out."""
    decoder = SpecDecoder(
        token_level(target),
        token_level(draft) if draft and k else None,
        config=EngineConfig(batch_size=batch_size, num_draft_tokens=k),
    )
    # Enough that no row ends, whatever is accepted.
    params = SamplingParams(max_tokens=(rounds + WARM_UP + 4) * (k + 1))
    vocab_size = target(mx.array([[0]])).shape[-1]
    prompts = random_prompts(batch_size, 64, vocab_size)
    events = decoder.stream(prompts, params)
    while decoder.stats.rounds < WARM_UP:
        next(events)
    clock = Clock()
    with watched(clock, target, draft):
        before = decoder.stats.rounds
        start = time.perf_counter()
        while decoder.stats.rounds < before + rounds:
            next(events)
        total = time.perf_counter() - start
    events.close()  # type: ignore[attr-defined]
    mx.synchronize()
    clock.seconds["rest"] = total - sum(clock.seconds.values())
    record = {phase: clock.seconds[phase] / rounds * 1e3 for phase in PHASES}
    return {**record, "round": total / rounds * 1e3}


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--target", default="random:tiny")
@click.option("--draft", default="random:tiny:1")
@click.option("--dtype", default="float32")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32))
@click.option("--num-draft-tokens", "ks", multiple=True, type=int, default=(0, 4))
@click.option("--rounds", default=32)
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    target: str,
    draft: str,
    dtype: str,
    batches: tuple[int, ...],
    ks: tuple[int, ...],
    rounds: int,
    out: str | None,
) -> None:
    """Show where the host's time of one round goes."""
    raw = header_of("Host time of one round")
    loaded = load_model(target, dtype)
    draft_model = load_model(draft, dtype, loaded).model if any(ks) else None
    raw["rounds"] = {
        f"B={b} k={k}": profile(loaded.model, draft_model, k, b, rounds)
        for b in batches
        for k in ks
    }
    table = markdown_table(
        ["milliseconds", *PHASES, "round"],
        [[n, *(f"{v:.3f}" for v in r.values())] for n, r in raw["rounds"].items()],
    )
    intro = (
        "Mean of each part of a round on the host: building the graphs of the "
        "*forwards*, handing them to the device, *waiting* for it, and the *rest*: "
        "accepting, trimming, committing, bookkeeping. "
        f"Target {short(target)}, draft {short(draft)}, {dtype}.\n\n"
    )
    write_report(out, raw, intro + table)


if __name__ == "__main__":
    main()
