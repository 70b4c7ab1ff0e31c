"""Sessions of a tensor-parallel run: the other ranks repeat what rank 0's session does.

An engine depends only on its requests, on when it is stepped, and on the draft lengths
chosen. So rank 0 sends only these: requests and cancels, each step, and the answers of
the draft-length policy, which depend on clocks. The tokens that a step commits are
compared before rank 0 reports a request that has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, ClassVar
from weakref import WeakSet

from ..errors import SessionError, SpecdecError
from ..grammar import Grammar, GrammarState
from ..outputs import StreamEvent
from ..parallel import Follower, Leader
from ..prompts import EncodedPrompt
from ..sampling_params import SamplingParams
from .session import Bounds, Session

#: For each request that emitted something: its index, how many tokens it had before,
#: the new tokens, and how it ended, if it did.
Committed = list[tuple[int, int, tuple[int, ...], str | None]]


class _Commits:
    """The tokens that a session's requests have committed, step by step."""

    def __init__(self) -> None:
        self._lengths: defaultdict[int, int] = defaultdict(int)

    def of(self, events: Sequence[StreamEvent]) -> Committed:
        """The commits that the events of a step add."""
        added: Committed = []
        for event in events:
            before = self._lengths[event.index]
            self._lengths[event.index] += len(event.token_ids)
            reason = None
            if event.result is not None:
                reason = event.result.finish_reason
                del self._lengths[event.index]
            added.append((event.index, before, tuple(event.token_ids), reason))
        return added


def parted(mine: Committed, theirs: Committed) -> str:
    """Describe where two ranks' commits differ."""
    rows, others = [row[0] for row in mine], [row[0] for row in theirs]
    if rows != others:
        return f"rows {rows} are rows {others} there"
    here, other = next((a, b) for a, b in zip(mine, theirs, strict=True) if a != b)
    index, before, tokens, reason = here
    where = f"request {index}, token"
    for i, token in enumerate(tokens):
        there = other[2][i] if i < len(other[2]) else "nothing"
        if there != token:
            return f"{where} {before + i} is {token} here and {there} there"
    end = other[2][len(tokens)] if len(other[2]) > len(tokens) else other[3]
    return f"{where} {before + len(tokens)}: {reason} here and {end} there"


class LeadingSession(Session):
    """Rank 0's session.

    Args:
        leader: this rank.
        arguments: of :class:`Session`.
    """

    _numbers = count()
    _alive: ClassVar[WeakSet[LeadingSession]] = WeakSet()

    def __init__(self, leader: Leader, *arguments: Any):
        super().__init__(*arguments)
        self._leader, self._commits = leader, _Commits()
        self._number = next(LeadingSession._numbers)
        with leader.turn:
            # The other ranks drop sessions that no longer exist here.
            alive = [each._number for each in LeadingSession._alive]
            LeadingSession._alive.add(self)
            leader.send("session", self._number, alive)

    def _send(self, what: str, *content: object) -> None:
        if self._leader.broken:
            raise SessionError(
                "a step did not end, so the ranks wait for each other: start all of "
                "them again"
            )
        self._leader.raise_failure()
        self._leader.send(what, self._number, *content)

    def _queue(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        grammar: GrammarState | None,
    ) -> int:
        with self._leader.turn:
            self._send("add", prompt, params)
            return super()._queue(prompt, params, grammar)

    def cancel(self, index: int) -> bool:
        self._check_whole()
        with self._leader.turn:
            self._send("cancel", index)
            return super().cancel(index)

    def step(self) -> list[StreamEvent]:
        if self._broken:
            return super().step()
        with self._leader.turn:
            self._send("step")
            self._leader.broken = True
            try:
                events = super().step()
            except Exception as error:
                raise self._leader.lost(error) from error
            self._leader.broken = False
            ended = any(event.result is not None for event in events)
            self._leader.check(self._commits.of(events), parted, wait=ended)
            return events


def announce(leader: Leader, grammar: Grammar) -> None:
    """Let other ranks compile a grammar while rank 0 does."""
    leader.send("grammar", grammar)


def follow(
    follower: Follower, open_session: Callable[[], Session], bounds: Bounds
) -> None:
    """Repeat what rank 0's sessions do, until rank 0 ends.

    Args:
        open_session: makes a session like rank 0's.
        bounds: the sessions' limits of requests.

    Raises:
        RankError: rank 0 ended unexpectedly.
    """
    sessions: dict[int, tuple[Session, _Commits]] = {}
    with follower.reporting():
        while (message := follower.receive())[0] not in ("release", "end"):
            match message:
                case ["session", number, alive]:
                    sessions = {n: s for n, s in sessions.items() if n in alive}
                    sessions[number] = open_session(), _Commits()
                case ["grammar", grammar]:
                    bounds.prepare(grammar)
                case ["add", number, prompt, params]:
                    _same(partial(sessions[number][0].add_encoded, prompt, params))
                case ["cancel", number, index]:
                    _same(partial(sessions[number][0].cancel, index))
                case ["step", number]:
                    session, commits = sessions[number]
                    added = commits.of(session.step())
                    follower.check(added, parted, wait=False)
                case _:
                    raise AssertionError(message)


def _same(call: Callable[[], object]) -> None:
    """Make a call that rank 0 has made, and ignore its error: rank 0 reports it."""
    try:
        call()
    except SpecdecError:
        return
