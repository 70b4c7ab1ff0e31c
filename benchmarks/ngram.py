"""What prompt lookup costs in a round: searching, and writing what was kept."""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import Any

import click
import mlx.core as mx
import numpy as np

from benchmarks.common import Script, header_of, write_report
from specdec.errors import ConfigError
from specdec.request import Request, Sequence
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import NgramDrafter, NgramOptions, Round
from specdec.spec_decode.rejection_sampler import Verdict
from specdec.spec_decode.verifier import RowRules
from specdec.tools.bench.tables import interleaved, markdown_table, show_spread

VOCAB = 1000
WARM_UP = 3


def measure(num_rows: int, history: int, k: int, rounds: int) -> dict[str, list[float]]:
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
    rules = RowRules.of([Sequence(request, frozenset())] * num_rows, VOCAB)
    active = mx.ones((num_rows,), mx.bool_)
    times: dict[str, list[float]] = {"search": [], "write": []}
    for number in range(WARM_UP + rounds):
        committed = length + 1 + kept * number
        recent = mx.array(draw.integers(0, VOCAB, (num_rows, 2)), mx.int32)
        chosen = mx.array(draw.integers(0, VOCAB, (num_rows, k + 1)), mx.int32)
        lengths = mx.full((num_rows,), committed, mx.int32)
        draws = rules.draws(lengths, k + 1)
        round_ = Round(k, recent, active, rules.sampling, draws, lengths=lengths)
        verdict = Verdict(chosen, mx.full((num_rows,), kept, mx.int32))
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


def name_of(history: int, num_rows: int) -> str:
    return f"ngram history={history} B={num_rows}"


@click.command(cls=Script)
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8, 32))
@click.option("--history", "histories", type=int, multiple=True, default=(1024, 8192))
@click.option("--num-draft-tokens", "k", type=int, default=4, show_default=True)
@click.option("--rounds", type=int, default=20, show_default=True)
@click.option("--repeat", type=int, default=3, show_default=True)
@click.option("--out")
def main(
    batches: tuple[int, ...],
    histories: tuple[int, ...],
    k: int,
    rounds: int,
    repeat: int,
    out: str | None,
) -> None:
    """Time searches and writes of ngram."""
    raw: dict[str, Any] = header_of("What prompt lookup costs in a round")
    raw["load_average_before"] = os.getloadavg()
    raw["num_draft_tokens"] = k
    systems = {
        name_of(n, b): partial(measure, b, n, k, rounds)
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
        [f"ngram, {n} tokens, {part}"] + [cell(name_of(n, b), part) for b in batches]
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
