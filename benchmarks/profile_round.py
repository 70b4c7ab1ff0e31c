"""The host's time in a decode round by phase: building, handing over, waiting.

Under ``mlx.launch`` the target is divided between the ranks; the times are rank 0's.
"""

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
from mlx_lm.generate import BatchGenerator

from benchmarks.common import Script, header_of, write_report
from specdec import EngineConfig, Ranks
from specdec.decoder import SpecDecoder
from specdec.model_names import short
from specdec.models import LoadedModel, load
from specdec.models.loading import choose_kernels, fit, take_shard
from specdec.tools.bench.models import (
    load_model,
    random_model,
    random_prompts,
    random_shape,
)
from specdec.tools.decoding import WARM_UP, time_rounds, token_level
from specdec.utils.tables import markdown_table

PHASES = ("draft forwards", "target forward", "hand over", "wait", "rest")
GROUP_SIZE = 64  # weights that share a scale, with --bits


class Clock:
    """Seconds spent in each phase; a phase inside another counts to the outer one."""

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
    """Time a round's phases by patching MLX and the models, not the engine."""

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


def load_target(
    source: str, dtype: str, bits: int, ranks: Ranks | None, *, ours: bool = True
) -> LoadedModel:
    """Load a target, or this rank's shard; if not ``ours``, with mlx-lm's layers."""
    if not source.startswith("random:"):
        return load(source, dtype=dtype, ranks=ranks)
    shape, num_layers = random_shape(source)
    packing = (GROUP_SIZE, bits) if bits else None
    model: Any = random_model(
        shape, dtype, num_layers=num_layers, packing=packing, fitted=False
    )
    if ranks is not None and ours:
        take_shard(model, {}, ranks, source)
    elif ranks is not None:
        model.shard(ranks.group)
    mx.eval(model.parameters())
    if ours:
        fit(model)
        choose_kernels(model, ranks)
    whole = token_level(model)
    return LoadedModel(model, whole.tokenizer, {}, source, ranks)


def profile(
    target: LoadedModel, draft: nn.Module | None, k: int, batch_size: int, rounds: int
) -> dict[str, float]:
    """Milliseconds of each phase in a mean round, without the first rounds."""
    decoder = SpecDecoder(
        target,
        token_level(draft) if draft and k else None,
        config=EngineConfig(batch_size=batch_size, num_draft_tokens=k),
    )
    if decoder.follow():
        return {}
    clock = Clock()
    prompts = random_prompts(batch_size, 64, decoder.bounds.vocab_size)
    watching = watched(clock, target.model, draft)
    total = time_rounds(decoder, prompts, k, rounds, watching)
    mx.synchronize()
    if target.ranks is not None:
        target.ranks.release()
    record = {phase: clock.seconds[phase] / rounds * 1e3 for phase in PHASES}
    record["rest"] = total * 1e3 - sum(record.values())
    return {**record, "round": total * 1e3}


def mlx_lm_step(model: nn.Module, batch_size: int, rounds: int) -> float:
    """Milliseconds of a mean step of mlx-lm's generator, which runs on every rank."""
    generator = BatchGenerator(model, completion_batch_size=batch_size)
    vocab_size = model(mx.array([[0]])).shape[-1]
    prompts = random_prompts(batch_size, 64, vocab_size)
    generator.insert(prompts, [rounds + WARM_UP + 8] * batch_size)
    running = 0
    while running < batch_size:  # mlx-lm prefills eight prompts at a time
        running = len(generator.next_generated())
    for i in range(WARM_UP + rounds):
        if i == WARM_UP:
            start = time.perf_counter()
        generator.next_generated()
    seconds = time.perf_counter() - start
    generator.close()
    return seconds / rounds * 1e3


def tokens_per_round(acceptance: float, k: int) -> float:
    """Expected tokens of a row if each draft token is accepted with the same chance."""
    return sum(acceptance**i for i in range(k + 1))


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--target", default="random:tiny")
@click.option("--draft", default="random:tiny:1")
@click.option("--dtype", default="float32")
@click.option("--bits", default=0, help="Pack a random target's weights.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32))
@click.option("--num-draft-tokens", "ks", multiple=True, type=int, default=(0, 4))
@click.option("--acceptance", default=0.8, help="Assumed of a draft token, for rates.")
@click.option("--mlx-lm", "theirs", is_flag=True, help="Time mlx-lm's steps, too.")
@click.option("--rounds", default=32)
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    target: str,
    draft: str,
    dtype: str,
    bits: int,
    batches: tuple[int, ...],
    ks: tuple[int, ...],
    acceptance: float,
    theirs: bool,
    rounds: int,
    out: str | None,
) -> None:
    """Show where the host's time of one round goes."""
    ranks = Ranks.join()
    raw = header_of("Host time of one round")
    loaded = load_target(target, dtype, bits, ranks)
    draft_model = load_model(draft, dtype, loaded).model if any(ks) else None
    raw["ranks"] = 1 if ranks is None else ranks.size
    raw["rounds"] = {
        f"B={b} k={k}": profile(loaded, draft_model, k, b, rounds)
        for b in batches
        for k in ks
    }
    raw["mlx_lm"] = {}
    if theirs:
        plain = load_target(target, dtype, bits, ranks, ours=False).model
        raw["mlx_lm"] = {f"B={b}": mlx_lm_step(plain, b, rounds) for b in batches}
    if ranks is not None and not ranks.leads:
        return
    rows: list[list[object]] = []
    for b in batches:
        for k in ks:
            record = raw["rounds"][f"B={b} k={k}"]
            rate = b * tokens_per_round(acceptance, k) / record["round"] * 1e3
            times = [f"{v:.3f}" for v in record.values()]
            rows.append([f"B={b} k={k}", *times, f"{rate:.1f}"])
        if theirs:
            step = raw["mlx_lm"][f"B={b}"]
            empty = [""] * len(PHASES)
            rate = b / step * 1e3
            rows.append([f"B={b} mlx-lm", *empty, f"{step:.3f}", f"{rate:.1f}"])
    table = markdown_table(["milliseconds", *PHASES, "round", "tokens/s"], rows)
    packed = f", {bits} bits" if bits else ""
    intro = (
        "Mean of each part of a round on the host: building the graphs of the "
        "*forwards*, handing them to the device, *waiting* for it, and the *rest*: "
        "accepting, trimming, committing, bookkeeping. *tokens/s* is what rounds of "
        f"that time give where a draft token is accepted with chance {acceptance:g}. "
        f"Target {short(target)}{packed}, draft {short(draft)}, {dtype}, "
        f"{raw['ranks']} device(s).\n\n"
    )
    write_report(out, raw, intro + table)


if __name__ == "__main__":
    main()
