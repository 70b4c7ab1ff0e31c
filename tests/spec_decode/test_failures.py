"""A drafter that raises, wherever it does: rows go on without it, and exactly."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from specdec import DrafterError, EngineConfig, SpecDecoder
from specdec.backend import BackendDefaults
from specdec.engine.round import RoundObserver
from specdec.sampling_params import VERIFICATIONS, SamplingParams
from specdec.spec_decode import Drafter, DraftGuard, DraftRows, Proposals, Round
from specdec.spec_decode.commit import Accepted
from specdec.tools.decoding import token_level
from tests.plain import AT_ONCE, BEHIND, exact, greedy, run_rows
from tests.spec_decode.repetitive import make_prompts

LENGTHS = [9, 30, 4, 17, 25, 1, 12, 21]


class Failing(Drafter):
    """Repeats each row's newest token, and raises at the n-th call of a method."""

    def __init__(self, method: str = "", n: int = 1, error: Exception | None = None):
        self.method, self.n = method, n
        self.error = error or ZeroDivisionError("no luck")
        self.calls: Counter[str] = Counter()
        self.hidden_layers = (-1,) if method == "observe" else ()
        self.rows_made: list[weakref.ref[FailingRows]] = []

    def call(self, method: str) -> None:
        assert self.calls[self.method] < self.n, "it was asked after its failure"
        self.calls[method] += 1
        if method == self.method and self.calls[method] == self.n:
            raise type(self.error)(*self.error.args)  # without frames of earlier ones

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> DraftRows:
        self.call("rows")
        made = FailingRows(self)
        self.rows_made.append(weakref.ref(made))
        return made


class FailingRows(DraftRows):
    def __init__(self, drafter: Failing):
        self.drafter = drafter

    def observe(
        self, hidden: mx.array, following: mx.array, lengths: Sequence[int]
    ) -> None:
        self.drafter.call("observe")

    def prefill(self) -> Iterator[None]:
        for _ in range(2):
            self.drafter.call("prefill")
            yield

    def propose(self, round_: Round) -> Proposals:
        self.drafter.call("propose")
        k = round_.num_draft_tokens
        return Proposals(mx.repeat(round_.recent[:, -1:], k, axis=1))

    def commit(self, round_: Round, accepted: Accepted) -> None:
        self.drafter.call("commit")

    def note_lengths(self, longest: int, shortest: int) -> None:
        self.drafter.call("note_lengths")

    def filter(self, rows: Sequence[int]) -> None:
        self.drafter.call("filter")

    def extend(self, other: FailingRows) -> None:
        self.drafter.call("extend")


CALLS = [
    *((method, n) for method in ("rows", "extend") for n in (1, 3)),
    *((method, n) for method in ("observe", "prefill", "filter") for n in (1, 4)),
    *((method, n) for method in ("propose", "commit") for n in (1, 2, 12)),
    *(("note_lengths", n) for n in (1, 20)),
]


@pytest.mark.parametrize(
    ("method", "n", "backend"),
    [(*call, (AT_ONCE, BEHIND)[(i + i // 2) % 2]) for i, call in enumerate(CALLS)],
)
def test_rows_go_on(
    method: str,
    n: int,
    backend: BackendDefaults,
    target: Any,
    draft_failures: list[str],
) -> None:
    """Those that run, those that join and those to come; it is asked no more."""
    drafter = Failing(method, n)
    exact(
        target, None, make_prompts(), LENGTHS,
        batch_size=3, num_draft_tokens=2, backend=backend, drafter=drafter,
    )  # fmt: skip
    assert drafter.calls[method] == n, "it never came so far"
    assert draft_failures.pop() == (
        f"drafter Failing{'' if method == 'rows' else 'Rows'} failed "
        "(ZeroDivisionError: no luck): decoding goes on without a draft"
    )
    assert [rows() for rows in drafter.rows_made] == [None] * len(drafter.rows_made)


@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_sampled_rows_go_on(
    verification: Any, tiny_model: Callable[..., Any], draft_failures: list[str]
) -> None:
    """After the failure they draw as rows do for which nothing is drafted."""
    model, prompt = tiny_model("llama"), [5, 6, 7]
    params = SamplingParams(
        max_tokens=20, temperature=0.8, seed=3, verification=verification
    )
    (row,) = run_rows(
        model, None, [prompt], [params],
        num_draft_tokens=2, drafter=Failing("propose", 1),
    )  # fmt: skip
    (plain,) = run_rows(model, None, [prompt], [params])
    assert row.tokens == plain.tokens
    draft_failures.pop()


def test_a_failure_ends_drafting_and_no_more(
    tiny_model: Callable[..., Any], draft_failures: list[str]
) -> None:
    """What was drafted before counts; the next call begins anew."""
    model, drafter = tiny_model("llama"), Failing("propose", 4)
    decoder = SpecDecoder(
        token_level(model),
        drafter=lambda context: drafter,
        config=EngineConfig(num_draft_tokens=2),
    )
    (first,) = decoder.generate([[5, 6, 7]], SamplingParams(max_tokens=30))
    assert first.token_ids == greedy(model, [5, 6, 7], 30)
    assert first.drafted == 3 * 2
    assert decoder.stats.drafted == first.drafted
    message = "drafter FailingRows failed (ZeroDivisionError: no luck)"
    assert decoder.stats.draft_error == message
    with pytest.raises(DrafterError, match="no luck"):
        decoder.stats.check_draft()
    draft_failures.pop()
    drafter.method = ""
    (again,) = decoder.generate([[5, 6, 7]], SamplingParams(max_tokens=30))
    assert again.token_ids == first.token_ids
    assert again.drafted > first.drafted
    decoder.stats.check_draft()


def test_where_costs_are_measured(
    tiny_model: Callable[..., Any], draft_failures: list[str]
) -> None:
    """With auto, it is asked before the first round."""
    model, drafter = tiny_model("llama"), Failing("commit", 2, KeyError())
    decoder = SpecDecoder(token_level(model), drafter=lambda context: drafter)
    results = decoder.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=9))
    assert [r.token_ids for r in results] == [
        greedy(model, prompt, 9) for prompt in ([5, 6, 7], [8])
    ]
    assert draft_failures.pop().startswith("drafter Failing failed (KeyError): decod")
    drafter.calls.clear()
    with pytest.raises(DrafterError, match=r"drafter Failing failed \(KeyError\)"):
        decoder.measure_forwards(1)


def test_what_no_drafter_has_is_no_failure() -> None:
    """Catches a look for a name that ends drafting for all rows."""
    guard = DraftGuard()
    drafter = guard.drafter(Failing())
    rows = drafter.rows([[1]], max_length=4)
    for guarded in (drafter, rows):
        assert not hasattr(guarded, "nonsense")
    assert guard.error is None


class Lengths(RoundObserver):
    def __init__(self) -> None:
        self.ks: list[int] = []

    def begun(self, num_draft_tokens: int) -> None:
        self.ks.append(num_draft_tokens)


def test_rounds_are_plain_again(
    tiny_model: Callable[..., Any], draft_failures: list[str]
) -> None:
    """Verifying proposals that nobody makes would cost every round."""
    drafter, lengths = Failing("propose", 3), Lengths()
    decoder = SpecDecoder(
        token_level(tiny_model("llama")),
        drafter=lambda context: drafter,
        config=EngineConfig(num_draft_tokens=2),
    )
    session = decoder.session(observer=lengths)
    session.add([5, 6, 7], SamplingParams(max_tokens=30))
    while session.busy:
        session.step()
    draft_failures.pop()
    prefill, *rounds = lengths.ks
    assert (prefill, rounds[:3]) == (0, [2, 2, 2])
    assert set(rounds[3:]) == {0}


def test_what_is_no_failure_of_a_drafter_is_raised(
    tiny_model: Callable[..., Any],
) -> None:
    """An interruption, say: the guard is for exceptions alone."""

    class Interrupted(Failing):
        def call(self, method: str) -> None:
            if method == "propose":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_rows(
            tiny_model("llama"), None, [[5]], [SamplingParams(max_tokens=9)],
            drafter=Interrupted(),
        )  # fmt: skip
