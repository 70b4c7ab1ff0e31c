"""The time of the engine's own code in a round: everything but the model.

A stub replaces the model. It computes nothing: its logits are made once for each shape.
What is left is the scheduler, the round, sampling, text, and their calls to MLX.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import click
import mlx.core as mx
import numpy as np

from benchmarks.common import Script, header_of, write_report
from specdec import EngineConfig, SamplingParams, backend
from specdec.cache import CacheOptions
from specdec.engine.engine import Engine
from specdec.engine.session import Bounds, Session
from specdec.spec_decode import DraftModel
from specdec.utils.tables import markdown_table, show_spread

VOCAB = 256
WARM_UP = 20
#: Milliseconds that the engine may take for a round, and for each of its rows.
PER_ROUND, PER_ROW = 0.3, 0.05


class StubRunner:
    """A stand-in for a ModelRunner that gives every position the same logits."""

    vocab_size = VOCAB
    prefixes = recorder = compiled = None
    backend = backend.defaults()
    options = CacheOptions(max_write=1)

    def __init__(self) -> None:
        likely = np.zeros(VOCAB, np.float32)
        likely[7] = 9.0
        self._logits = mx.array(likely)
        self._by_shape: dict[tuple[int, ...], mx.array] = {}

    def logits(self, shape: tuple[int, ...]) -> mx.array:
        if shape not in self._by_shape:
            made = mx.broadcast_to(self._logits, (*shape, VOCAB))
            self._by_shape[shape] = mx.contiguous(made)
            mx.eval(self._by_shape[shape])
        return self._by_shape[shape]

    def rows(self, prompts: Sequence[Sequence[int]], **options: Any) -> StubRows:
        return StubRows(self, [len(p) for p in prompts])


class StubRows:
    """A stand-in for ModelRows that knows only its rows' lengths."""

    def __init__(self, runner: StubRunner, lengths: list[int]):
        self.runner = runner
        self.num_rows = len(lengths)
        self.hidden = None
        self.new_shapes = 0
        self.reused, self.written = [0] * len(lengths), lengths
        self.done = lengths
        self.offset = mx.array(lengths, mx.int32)

    def prefill(self) -> Iterator[None]:
        return iter(())

    def forward(self, tokens: mx.array) -> mx.array:
        self.offset = self.offset + tokens.shape[1]
        return self.runner.logits(tokens.shape)

    def trim_per_sequence(self, n: Any, at_most: int, fewest: int = 0) -> None:
        self.offset = self.offset - n

    def note_lengths(self, longest: int, shortest: int) -> None:
        pass

    def checkpoint(self) -> None:
        pass

    def filter(self, rows: Sequence[int]) -> None:
        self.num_rows = len(rows)
        self.offset = self.offset[mx.array(list(rows), mx.int32)]

    def reset(self, rows: Sequence[int]) -> None:
        pass

    def fits(self, num_tokens: int) -> bool:
        return True

    def extend(self, other: StubRows) -> None:
        self.num_rows += other.num_rows
        self.offset = mx.concatenate([self.offset, other.offset])


class Words:
    """A tokenizer and detokenizer whose every token is a short word."""

    eos_token_ids = frozenset[int]()
    has_chat_template = False

    def __init__(self) -> None:
        self.text = ""

    def add_token(self, token: int) -> None:
        self.text += "word "

    def finalize(self) -> None:
        pass

    def decode(self, tokens: Sequence[int]) -> str:
        return "word " * len(tokens)

    def __len__(self) -> int:
        return VOCAB


#: Sampling parameters by what rows ask for; ``None`` asks for tokens without text.
ASKED: dict[str, dict[str, Any] | None] = {
    "tokens": None,
    "text": {},
    "text, stop texts": {"stop": ("worm", "wordy", "\n\n")},
    "text, logprobs": {"logprobs": True},
    "text, sampling": {"temperature": 0.7, "top_p": 0.9},
}


def make_session(asked: str, batch_size: int, k: int) -> Session:
    """A session over the stub, with its rows added."""
    config = EngineConfig(batch_size=batch_size, num_draft_tokens=k)
    target: Any = StubRunner()
    drafter = None
    if k:
        draft: Any = StubRunner()
        drafter = DraftModel(draft, vocab_size=VOCAB, max_draft_tokens=k)
    options = ASKED[asked]
    text = None if options is None else Words
    engine = Engine(target, drafter, config, backend.defaults(), frozenset(), text)
    session = Session(engine, Words(), Bounds(VOCAB))
    params = SamplingParams(max_tokens=10**6, **(options or {}))
    for i in range(batch_size):
        session.add([1 + i, 2], params)
    return session


def measure(asked: str, batch_size: int, k: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a mean round, by the host thread's time and by the clock.

    ``engine_ms`` leaves out the time to hand a round's graph to MLX
    (``mx.async_eval``).
    """
    session = make_session(asked, batch_size, k)
    while session.stats.rounds < WARM_UP:
        for event in session.step():
            # A row that ends here shows an error: the stub lacks something.
            assert event.result is None, event.result.error
    handing_over = 0.0
    hand_over = mx.async_eval

    def timed(*arrays: Any) -> None:
        nonlocal handing_over
        begin = time.thread_time()
        hand_over(*arrays)
        handing_over += time.thread_time() - begin

    before = session.stats.rounds
    start, busy = time.perf_counter(), time.thread_time()
    with patch.object(mx, "async_eval", timed):
        while session.stats.rounds < before + rounds:
            session.step()
    busy, wall = time.thread_time() - busy, time.perf_counter() - start
    return {
        "engine_ms": (busy - handing_over) / rounds * 1e3,
        "host_ms": busy / rounds * 1e3,
        "wall_ms": wall / rounds * 1e3,
    }


@click.command(cls=Script, context_settings={"show_default": True})
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32))
@click.option("--num-draft-tokens", "ks", multiple=True, type=int, default=(0, 3))
@click.option("--rounds", default=200)
@click.option("--repeat", default=5)
@click.option("--out", help="Write OUT.json and OUT.md.")
def main(
    batches: tuple[int, ...],
    ks: tuple[int, ...],
    rounds: int,
    repeat: int,
    out: str | None,
) -> None:
    """Measure the engine's own time in a round."""
    raw = header_of("The engine's own time in a round")
    cells = [(a, k, b) for a in ASKED for k in ks for b in batches]
    measured: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeat):
        for asked, k, b in cells:
            record = measure(asked, b, k, rounds)
            measured.setdefault(f"{asked} k={k} B={b}", []).append(record)
    raw["options"] = {"rounds": rounds, "repeat": repeat, "vocabulary": VOCAB}
    raw["target_ms"] = {str(b): PER_ROUND + PER_ROW * b for b in batches}
    raw["rounds"] = measured

    def cell(asked: str, k: int, b: int, what: str) -> str:
        return show_spread([r[what] for r in measured[f"{asked} k={k} B={b}"]], 2)

    header = ["rows ask for", "k", *(f"B={b}" for b in batches)]
    allowed = [f"{PER_ROUND + PER_ROW * b:.2f}" for b in batches]
    body = ""
    titles = {
        "engine_ms": "Engine",
        "host_ms": "Host thread",
        "wall_ms": "Wall clock",
    }
    for what, title in titles.items():
        rows: list[list[object]] = [
            [asked, k, *(cell(asked, k, b, what) for b in batches)]
            for asked in ASKED
            for k in ks
        ]
        if what != "wall_ms":
            rows.append(["*target*", "", *allowed])
        body += f"{title}, ms per round:\n\n{markdown_table(header, rows)}\n"
    write_report(out, raw, f"{explain(rounds, repeat)}\n{body}")


def explain(rounds: int, repeat: int) -> str:
    return (
        f"Median (smallest to largest) of {repeat} runs of {rounds} rounds, with a "
        f"stub in the place of target and draft and {VOCAB} tokens. *Engine* is the "
        "processor time of the thread that steps the engine, without that in which MLX "
        "takes a graph over (`mx.async_eval`); *host thread* is with it; *wall clock* "
        "has the arrays' own computing and other processes as well.\n"
    )


if __name__ == "__main__":
    main()
