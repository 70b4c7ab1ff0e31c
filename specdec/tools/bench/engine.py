"""This engine, driven by token ids and timed like the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx

from ...decoder import SpecDecoder, wired_memory
from ...engine.observer import RoundObserver
from ...request import Request
from ...sampling_params import SamplingParams
from .waves import Options, Prompts, Run, TracedRound, Wave


class Trace(RoundObserver):
    """Writes down what every row drafted and accepted in every round."""

    def __init__(self) -> None:
        self.rounds: list[TracedRound] = []
        self._seen: dict[int, tuple[int, int, int]] = {}

    def read(self, num_draft_tokens: int, rows: Sequence[Request]) -> None:
        """Take what the round added to each row's counts."""
        counts = []
        for row in rows:
            index = row.index
            now = (row.rounds, row.drafted, row.accepted)
            before = self._seen.get(index, (0, 0, 0))
            self._seen[index] = now
            if now[0] > before[0]:
                counts.append((now[1] - before[1], now[2] - before[2]))
        if counts:
            self.rounds.append((num_draft_tokens, counts))


def engine(
    make: Callable[[], SpecDecoder],
    options: Options,
    *,
    warm_prefixes: bool = False,
    others_wait: bool = False,
) -> Run:
    """This engine, by its Python API; text is left out.

    Args:
        make: gives the decoder for a wave.
        warm_prefixes: decode the wave's prompts once before, so that a prefix cache
            has them.
        others_wait: as many requests again wait to take the places of rows that end;
            a wave is over when its first row is.
    """
    params = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )

    def run(prompts: Prompts, first: int = 0) -> Wave:
        decoder = make()
        if warm_prefixes:
            decoder.generate(prompts, SamplingParams(max_tokens=1))
        trace = Trace()
        session = decoder.session(observer=trace)
        wave = Wave(len(prompts), options.clock)
        for i, prompt in enumerate(prompts):
            session.add(prompt, replace(params, seed=options.seed + first + i))
        for prompt in prompts if others_wait else ():
            session.add(prompt, params)
        with wired_memory():
            while session.busy:
                events = session.step()
                events = [e for e in events if e.index < len(prompts)]
                if events:
                    wave.begin_step()
                for event in events:
                    wave.add(event.index, event.token_ids)
                    if event.result is not None:
                        wave.row_ended(event.index)
                        wave.prefix_tokens += event.result.prefix_tokens
                        wave.count(
                            event.index,
                            rounds=event.result.rounds,
                            drafted=event.result.drafted,
                            accepted=event.result.accepted,
                        )
                if others_wait and any(event.result for event in events):
                    for index in range(2 * len(prompts)):
                        session.cancel(index)
        mx.synchronize()
        session.stats.check_draft()
        wave.finish()
        wave.rounds = trace.rounds
        return wave

    return run
