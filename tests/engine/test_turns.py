"""Sessions in several threads: their steps take turns, and the process ends well."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import specdec.engine.turns as turns_module
from specdec import SamplingParams, SpecDecoder
from specdec.engine.turns import Turns, turns
from tests.plain import greedy
from tests.test_decoder import loaded

_PROGRAM = """
import sys, threading
from specdec import SpecDecoder
from tests.conftest import _tiny_model
from tests.test_decoder import loaded

how = sys.argv[1]
models = [_tiny_model("llama", seed=0) for _ in range(2)]
decoders = [SpecDecoder(loaded(model), loaded(model, "draft")) for model in models]
daemons = how == "daemons"
wanted = [r.token_ids for r in decoders[0].generate([[3], [4, 5]], max_tokens=12)]
running = threading.Barrier(3)

def work(decoder, endless):
    for turn in range(10**9 if endless else 6):
        results = decoder.generate([[3], [4, 5]], max_tokens=12)
        assert [r.token_ids for r in results] == wanted
        if turn == 0:
            running.wait()
    print("right")

pair = decoders if how != "left" else decoders[:1] * 2
threads = [
    threading.Thread(target=work, args=(each, daemons), daemon=daemons)
    for each in pair
]
for each in threads:
    each.start()
running.wait()
for each in threads if how == "joined" else ():
    each.join()
"""


@pytest.mark.parametrize("how", ["joined", "left", "daemons"])
def test_a_program_with_threads_ends_well(how: str) -> None:
    """Threads of a decoder each that are joined, or daemons, or two of one that stay.

    It aborted with code 134, now and then: a thread's streams outlived it.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, how],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("right") == (0 if how == "daemons" else 2)


def test_threads_do_not_mix_what_a_decoder_shares(
    target: Any, drafts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward of one thread took the hidden states that another had recorded."""
    decoder = SpecDecoder(loaded(target), loaded(drafts["near"], "draft"))
    inside, most, lock = [0], [0], threading.Lock()
    right = SpecDecoder._parts

    def parts(self: SpecDecoder, *args: Any) -> Any:
        engine, *rest = right(self, *args)
        step = engine.step

        def watched() -> Any:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            try:
                return step()
            finally:
                with lock:
                    inside[0] -= 1

        engine.step = watched
        return engine, *rest

    monkeypatch.setattr(SpecDecoder, "_parts", parts)
    prompts, outputs = [[5, 6, 7], [8], [9, 10]], list[list[int]]()

    def work() -> None:
        results = decoder.generate(prompts, SamplingParams(max_tokens=30))
        outputs.extend(r.token_ids for r in results)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert outputs == [greedy(target, p, 30) for p in prompts] * 3
    assert most == [1]


def test_turns_come_in_order_and_nest() -> None:
    """Without order, a thread that steps in a loop keeps all others waiting."""
    lock, came = Turns(), list[int]()
    begin = [threading.Event() for _ in range(4)]

    def work(number: int) -> None:
        begin[number].set()
        with lock.hold(), lock.hold():  # a user's function may decode, too
            came.append(number)

    with lock.hold():
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for number, each in enumerate(threads):
            each.start()
            begin[number].wait()
            while len(lock._queue) < number + 2:
                pass
        assert not came
    with lock.hold():  # after all that have waited
        assert came == [0, 1, 2, 3]
    for each in threads:
        each.join()


def interrupted_at(number: int) -> Any:
    """A tracer that raises before the ``number``-th line of turns.py that runs."""
    left = number

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line" and frame.f_code.co_filename == turns_module.__file__:
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    return trace


def interrupted_turn(number: int, nested: bool, waits: bool) -> bool:
    """Interrupt a turn at a line; return whether it has so many lines."""
    lock, interrupted = Turns(), False
    inside, leaves, outcome = threading.Event(), threading.Event(), list[str]()

    def hold_first() -> None:
        with lock.hold():
            inside.set()
            leaves.wait()

    def hold_last() -> None:
        with lock.hold():
            outcome.append("came")

    first, timer = (
        threading.Thread(target=hold_first),
        threading.Timer(0.01, leaves.set),
    )
    if waits:
        first.start()
        inside.wait()
    timer.start()
    before = sys.gettrace()
    sys.settrace(interrupted_at(number))
    try:
        with lock.hold(), lock.hold() if nested else nullcontext():
            pass
    except KeyboardInterrupt:
        interrupted = True
    finally:
        sys.settrace(before)
    last = threading.Thread(target=hold_last, daemon=True)
    last.start()
    last.join(10)
    assert outcome == ["came"], number
    timer.join()
    if waits:
        first.join()
    assert not lock._queue
    return interrupted


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_an_interrupt_ends_a_turn_wherever_it_comes(nested: bool, waits: bool) -> None:
    """A turn that nobody ended kept all other threads waiting for ever."""
    numbers = itertools.count(1)
    assert next(n for n in numbers if not interrupted_turn(n, nested, waits)) > 20


def test_a_function_of_the_user_may_decode(target: Any) -> None:
    """In a step, in the same thread."""
    decoder = SpecDecoder(loaded(target))
    inner: list[list[int]] = []

    def processor(tokens: Any, logits: Any) -> Any:
        (result,) = decoder.generate([[8]], max_tokens=2)
        inner.append(result.token_ids)
        return logits

    params = SamplingParams(max_tokens=3, logits_processors=(processor,))
    (result,) = decoder.generate([[5, 6, 7]], params)
    assert result.token_ids == greedy(target, [5, 6, 7], 3)
    assert inner == [greedy(target, [8], 2)] * len(inner)
    assert not turns._queue
