"""What follows from a round, by hand; by the kernel, on a CPU and on a GPU."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from specdec import EngineConfig, SamplingParams, SpecDecoder, backend
from specdec.cuda import commit_kernel, ngram_kernel
from specdec.cuda.kernels import cuda_kernel
from specdec.engine.batch import DecodeBatch
from specdec.spec_decode import NamedDrafter, commit, ngram_search
from specdec.spec_decode.commit import Committed
from specdec.tools.decoding import token_level
from tests.cuda.emulation import cuda

# Most rows of few tokens are sound.
PEAKS = [1.0, -2.5, 0.0, 3.0, -math.inf, 7.0, 1e30, math.nan, math.inf]
on_cuda = backend.defaults().name == "cuda"
needs_cuda = pytest.mark.skipif(not on_cuda, reason="needs MLX's CUDA backend")


@dataclass(frozen=True)
class Result:
    """What :func:`specdec.spec_decode.commit.commit` returns, in order."""

    kept: mx.array
    limit: mx.array
    rejected: mx.array
    packed: mx.array
    recent: mx.array
    lengths: mx.array


def result_of(
    compute: commit.Compute,
    inputs: mx.array,
    chosen: mx.array,
    limit: mx.array,
    meant: mx.array | None,
    before: Committed,
    peaks: mx.array | None = None,
) -> Result:
    committed = before.recent, before.lengths
    return Result(*compute(inputs, chosen, limit, meant, *committed, peaks))


by_operations = partial(result_of, commit.commit)
by_kernel = partial(result_of, commit_kernel.commit)


@dataclass(frozen=True)
class Played:
    """A round as lists: each row's text, and what happens to it.

    Args:
        meant: ``None`` where the drafter does not say.
        peaks: the largest logits; ``None``: they are not looked at.
    """

    texts: list[list[int]]
    proposed: list[list[int]]
    chosen: list[list[int]]
    limit: list[int]
    meant: list[int] | None
    window: int
    peaks: list[list[float]] | None = None

    @property
    def with_peaks(self) -> tuple[Any, ...]:
        """The arguments, and the largest logits."""
        peaks = None if self.peaks is None else mx.array(self.peaks)
        return *self.arguments, peaks

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What commits it is given."""
        inputs = [[t[-1], *p] for t, p in zip(self.texts, self.proposed, strict=True)]
        return (
            mx.array(inputs),
            mx.array(self.chosen),
            mx.array(self.limit),
            None if self.meant is None else mx.array(self.meant),
            Committed.of(self.texts, self.window),
        )


def some_rounds(count: int) -> Iterator[Played]:
    """Rounds of all k, with rows that have ended, and drafts that are right or not."""
    choices = random.Random(count)
    for number in range(count):
        k, num_rows = number % 9, choices.randint(1, 5)
        # Few different tokens, so that drafts are right now and then.
        proposed, chosen = (
            [choices.choices((0, 1), (4, 1), k=width) for _ in range(num_rows)]
            for width in (k, k + 1)
        )
        limit, meant = (
            [choices.randint(least, k) for _ in range(num_rows)] for least in (-1, 0)
        )
        texts = [
            [choices.randrange(3, 99) for _ in range(choices.randint(1, 9))]
            for _ in range(num_rows)
        ]
        peaks = [choices.choices(PEAKS, k=k + 1) for _ in range(num_rows)]
        yield Played(
            texts,
            proposed,
            chosen,
            limit,
            meant if k and number % 2 else None,
            choices.randint(2, 6),
            peaks if number % 3 == 1 else None,
        )


def check(played: Played, result: Result) -> None:
    """Against the same, row by row."""
    for i, text in enumerate(played.texts):
        drafts, chosen, limit = played.proposed[i], played.chosen[i], played.limit[i]
        if played.meant is not None:
            limit = min(limit, played.meant[i])
        if played.peaks is not None and not all(p < math.inf for p in played.peaks[i]):
            limit = -1
        kept = 0 if limit < 0 else 1
        while kept and kept <= limit and drafts[kept - 1] == chosen[kept - 1]:
            kept += 1
        new = [*text, *chosen[:kept]]
        padded = [-1] * played.window + new
        arrays: Any = list(vars(result).values())
        assert {array.dtype for array in arrays} == {mx.int32}
        assert [array[i].tolist() for array in arrays] == [
            kept,
            limit,
            len(chosen) - kept,
            [kept, limit, *chosen],
            # What comes first of a row that was wider is its own, not -1. Plain rounds
            # do not keep those of rows that have ended.
            padded[len(padded) - played.window :]
            if kept or len(chosen) > 1
            else result.recent[i].tolist(),
            len(new),
        ]


def test_what_follows_from_a_round() -> None:
    for played in some_rounds(180):
        check(played, by_operations(*played.with_peaks))


def test_what_follows_from_a_verdict_that_others_made() -> None:
    """Rows may keep what equality would not have them keep."""
    for number, played in enumerate(some_rounds(90)):
        _, chosen, limit, _, committed = played.arguments
        kept = min(number % 7, chosen.shape[1])
        count = mx.full(limit.shape, kept, mx.int32)
        before = committed.recent, committed.lengths
        result = Result(count, *commit.after(chosen, count, limit, *before))
        as_if = replace(
            played,
            proposed=[row[:-1] for row in played.chosen],
            limit=[kept - 1] * len(played.texts),
            meant=None,
            peaks=None,
        )
        wanted = by_operations(*as_if.arguments)
        for name in ("rejected", "recent", "lengths"):
            assert mx.array_equal(getattr(result, name), getattr(wanted, name)), name
        assert mx.array_equal(result.packed[:, 2:], wanted.packed[:, 2:])
        assert mx.array_equal(result.packed[:, 0], wanted.kept)
        assert mx.array_equal(result.packed[:, 1], limit)


# -- when the kernel is used -------------------------------------------------


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize("kernels", [True, False])
def test_the_kernel_is_used_where_it_is_meant_to_and_proven(
    monkeypatch: pytest.MonkeyPatch, kernels: bool, proven: bool
) -> None:
    defaults = replace(backend.defaults(), kernels=kernels)
    monkeypatch.setattr(commit, "defaults", lambda: defaults)
    monkeypatch.setattr(commit_kernel, "proven", lambda _: proven)
    module: Any = commit_kernel if kernels and proven else commit
    assert commit.committer() is module.commit


def one_too_many(*arguments: Any) -> tuple[mx.array, ...]:
    kept, limit, rejected, *rest = commit.commit(*arguments)
    return kept, limit, rejected + 1, *rest


def test_what_finds_something_else_is_not_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not on_cuda:
        assert not commit_kernel.proven.__wrapped__(commit.commit)
    for kernel, proven in ((commit.commit, True), (one_too_many, False)):
        monkeypatch.setattr(commit_kernel, "commit", kernel)
        assert commit_kernel.proven.__wrapped__(commit.commit) is proven


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("draft", [None, "ngram", "model"])
def test_lengths_are_those_of_the_caches(
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    draft: str | None,
    verification: Any,
) -> None:
    """Also after rows that have joined, ended, or left."""
    seen: set[int] = set()
    retire = DecodeBatch.retire

    def retired(self: DecodeBatch) -> bool:
        if not retire(self):  # the batch is dropped as it is
            return False
        running = mx.array([s is not None for s in self.slots])
        lengths, offset = self._committed.lengths, self._target.offset
        assert mx.array_equal(mx.where(running, lengths, 1), offset + 1).item()
        assert self._committed.recent.shape[0] == lengths.size
        seen.update(lengths.tolist())  # type: ignore[arg-type]
        return True

    monkeypatch.setattr(DecodeBatch, "retire", retired)
    target = token_level(tiny_model("llama", seed=0))
    drafts = {None: None, "ngram": "ngram", "model": NamedDrafter("itself", target)}
    # As on a GPU: rows that have ended stay.
    defaults = replace(
        backend.defaults(), static_shapes=True, costs_by_token=False, read_bucket=64
    )
    monkeypatch.setattr(backend, "defaults", lambda: defaults)
    config = EngineConfig(batch_size=3, num_draft_tokens=3)
    params = [
        SamplingParams(max_tokens=n, temperature=n % 2, verification=verification)
        for n in (12, 1, 5, 9, 20)
    ]
    prompts = [[1, 2, 1, 2, 1], [5], [3, 3, 3], [7, 8], [9]]
    drafted: Any = drafts[draft]
    SpecDecoder(target, drafter=drafted, config=config).generate(prompts, params)
    assert len(seen) > 5


# -- the kernel itself -------------------------------------------------------


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from cuda.emulated(monkeypatch, cuda_kernel)


def check_kernel(count: int) -> None:
    for played in some_rounds(count):
        check(played, by_kernel(*played.with_peaks))


@cuda.needs_compiler
@pytest.mark.usefixtures("emulator")
def test_the_kernel_finds_what_follows() -> None:
    assert commit_kernel.proven.__wrapped__(commit.commit)
    check_kernel(60)


@cuda.needs_compiler
@pytest.mark.usefixtures("emulator")
def test_the_kernel_copies_more_than_it_has_threads() -> None:
    text = list(range(3, 200))
    for window, kept in ((100, 2), (33, 41), (40, 0)):
        chosen = [0] * kept + [1] * (41 - kept)
        limit = [40 if kept else -1]
        played = Played([text], [[0] * 40], [chosen], limit, None, window)
        check(played, by_kernel(*played.arguments))


@cuda.needs_compiler
@pytest.mark.usefixtures("emulator")
def test_what_other_drafters_propose_is_of_any_integers() -> None:
    for played in some_rounds(9):
        inputs, chosen, limit, _, committed = played.arguments
        meant = limit.astype(mx.int64)
        result = by_kernel(inputs.astype(mx.uint32), chosen, limit, meant, committed)
        check(replace(played, meant=None, peaks=None), result)


FAULTS = {
    "one too many": ("most < 0 ? 0 : accepted + 1", "most < 0 ? 0 : accepted + 2"),
    "ended rows keep": ("most < 0 ? 0 : accepted + 1", "accepted + 1"),
    "beyond the limit": ("accepted < min(k, most)", "accepted < k"),
    "what is not meant": ("min(limit[row], meant[row])", "limit[row]"),
    "a draft too early": ("inputs + row * width + 1", "inputs + row * width"),
    "a token ahead": ("const int at = count + j;", "const int at = count + j + 1;"),
    "the first row's": ("chosen + row * width;", "chosen;"),
    "not all that was chosen": ("j < width; j +=", "j < k; j +="),
    "not finite": ("INFINITY)) most = -1", "INFINITY)) most = most"),
    "not a number": (
        "(!(static_cast<float>(peaks[row * width + j]) < INFINITY))",
        "(static_cast<float>(peaks[row * width + j]) >= INFINITY)",
    ),
    "only the first peak": ("peaks[row * width + j]", "peaks[row * width]"),
    "rejected without the extra token": ("width - count", "k - count"),
    "length as it was": ("lengths[row] + count", "lengths[row]"),
}


@cuda.needs_compiler
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    right, wrong = FAULTS[fault]
    cuda.plant(monkeypatch, commit_kernel, "_SETTLE", right, wrong)
    assert not commit_kernel.proven.__wrapped__(commit.commit)
    with pytest.raises((AssertionError, cuda.KernelFault)):
        check_kernel(60)


@cuda.needs_compiler
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_same(
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    verification: Any,
) -> None:
    """Whole runs with all kernels, and without any."""
    target = token_level(tiny_model("llama", seed=0))
    params = [
        SamplingParams(
            max_tokens=n, temperature=temperature, verification=verification, seed=n
        )
        for n in (12, 1, 9)
    ]
    config = EngineConfig(batch_size=2, num_draft_tokens=3)

    def decoded(drafter: Any) -> list[list[int]]:
        decoder = SpecDecoder(target, drafter=drafter, config=config)
        results = decoder.generate([[1, 2, 1, 2, 1], [5], [3, 3, 3]], params)
        return [result.token_ids for result in results]

    drafters: list[Any] = [None, "ngram", NamedDrafter("itself", target)]
    without = [decoded(drafter) for drafter in drafters]
    monkeypatch.setattr(
        "specdec.spec_decode.verifier.committer", lambda: commit_kernel.commit
    )
    for name in ("search", "keep"):
        monkeypatch.setattr(ngram_search, name, getattr(ngram_kernel, name))
    assert [decoded(drafter) for drafter in drafters] == without


@needs_cuda
def test_a_gpu_finds_what_follows() -> None:
    assert commit_kernel.proven(commit.commit)
    check_kernel(90)


def test_rows_that_join_bring_their_own_tokens() -> None:
    """Those of the slot beside them, or the counts of an idle slot, would follow."""
    rows = Committed.of([[1, 2], [3], [4, 5, 6]], 2)
    others = Committed.of([[7, 8, 9], [10], []], 1)
    placed = rows.placed([2, 0], others)
    assert placed.recent.tolist() == [[-1, 10], [-1, 3], [-1, 9]]
    assert placed.lengths.tolist() == [1, 1, 3]
    wide = others.placed([2], rows)  # the wider ones join
    assert wide.recent.tolist() == [[-1, 9], [-1, 10], [1, 2]]
