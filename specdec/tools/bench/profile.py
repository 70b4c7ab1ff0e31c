"""Profile rounds: time each part by itself, waiting for the device after it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ...decoder import SpecDecoder, wired_memory
from ...engine.observer import Part, RoundObserver
from ...request import Request
from ...sampling_params import SamplingParams
from .job import Clock, ProfiledRound

#: Rounds left out at the start: the prompts' last step, and rounds of new shapes.
WARM_UP = 3


class Profile(RoundObserver):
    """Times the parts of rounds of ``k`` in which ``num_rows`` rows run.

    A round lasts from the start of its building to the start of the next round's. Each
    part has two times: the host's time to build its graph, and the wait for the device
    after that.
    """

    def __init__(self, num_rows: int, k: int, clock: Clock):
        self.rounds: list[ProfiledRound] = []
        self._num_rows, self._k, self._clock = num_rows, k, clock
        self._seen = 0
        self._full = False
        self._round: dict[str, tuple[float, float]] | None = None
        self._start = self._mark = 0.0

    def begun(self, num_draft_tokens: int) -> None:
        """End the previous round and begin a new one."""
        now = self._clock()
        if self._round is not None and self._full and self._seen >= WARM_UP:
            total = (now - self._start) * 1e3
            self.rounds.append(ProfiledRound(total=total, **self._round))
        self._seen += 1
        self._round = {} if num_draft_tokens == self._k else None
        self._full = False
        self._start = self._mark = now

    def built(self, part: Part, *arrays: mx.array) -> None:
        """Wait for the part's arrays, and note its times."""
        built = self._clock()
        mx.eval(*arrays)
        done = self._clock()
        if self._round is not None:
            times = (built - self._mark) * 1e3, (done - built) * 1e3
            self._round[part] = times
        self._mark = done

    def read(self, num_draft_tokens: int, rows: Sequence[Request]) -> None:
        """Note whether all rows took part in the round."""
        self._full = len(rows) == self._num_rows


def profile(
    decoder: SpecDecoder,
    prompts: Sequence[Sequence[int]],
    k: int,
    rounds: int,
    *,
    temperature: float,
    clock: Clock,
) -> list[ProfiledRound]:
    """Decode ``prompts`` and time the parts of up to ``rounds`` rounds."""
    # Enough tokens that no row ends, whatever is accepted.
    params = SamplingParams(
        max_tokens=(rounds + WARM_UP + 3) * (k + 1), temperature=temperature
    )
    observer = Profile(len(prompts), k, clock)
    session = decoder.session(observer=observer)
    for prompt in prompts:
        session.add(prompt, params)
    with wired_memory():
        while session.busy and len(observer.rounds) < rounds:
            session.step()
    mx.synchronize()
    session.stats.check_draft()
    return observer.rounds
