"""Answers in the prefix store: the next turn computes only its new message."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.backend import BackendDefaults
from specdec.cache import recurrent
from specdec.engine.engine import Engine
from specdec.models.runner import EndedRow, ModelRows, ModelRunner
from specdec.prefix_cache import entries, session, snapshot
from specdec.prefix_cache.store import PrefixStore
from specdec.request import Request
from specdec.spec_decode import Drafter, DraftModel, NgramDrafter
from specdec.tools.decoding import token_level
from tests.cache.small_models import MODELS
from tests.conftest import _tiny_model
from tests.models import architectures
from tests.models.test_recurrent import slightly_off
from tests.plain import AT_ONCE, BEHIND, METAL

from .harness import STEP, memory_store

HYBRIDS = ("qwen3_5", "mamba", "falcon_h1")
LINEAR = ("full", "full-8-bit", "list", "latent")
VOCAB = 61  # of all models here, at least
K = 3


@cache
def target_of(name: str) -> Any:
    if name in HYBRIDS:
        return architectures.build(name)
    arch, arguments = MODELS[name.removesuffix("-8-bit")]
    if name.endswith("-8-bit"):
        arguments = {**arguments, "hidden_size": 128, "head_dim": 32}
    return _tiny_model(arch, **arguments)


class Talk:
    """An engine with a store that decodes turns of conversations in one batch."""

    def __init__(
        self,
        name: str,
        drafts: str,
        backend: BackendDefaults,
        prefixes: PrefixStore | None,
        detokenizer: Any = None,
        **options: Any,
    ):
        if name.endswith("-8-bit"):
            options = {"kv_bits": 8, "kv_group_size": 32, **options}
        self.backend, self.options = backend, options
        self.model, self._detokenizer = target_of(name), detokenizer
        config = self._config = EngineConfig(
            batch_size=3,
            num_draft_tokens=K if drafts else 0,
            prefill_step_size=STEP,
            **options,
        )
        self.runner = ModelRunner(self.model, "target", config, backend, prefixes)
        self.drafter: Drafter | None = NgramDrafter() if drafts == "ngram" else None
        if drafts in ("same", "near"):
            draft: Any = self.model
            if drafts == "near" and name in HYBRIDS:
                draft = slightly_off(name)
            elif drafts == "near":
                draft = target_of("full")
            self.drafter = DraftModel(
                ModelRunner(draft, "draft", config, backend, prefixes),
                vocab_size=self.runner.vocab_size,
                max_draft_tokens=K,
            )

    def turn(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        cancel_after: int | None = None,
    ) -> list[Request]:
        engine = Engine(
            self.runner,
            self.drafter,
            self._config,
            self.backend,
            frozenset(),
            self._detokenizer,
        )
        requests = [
            Request(i, "", tuple(p), own)
            for i, (p, own) in enumerate(zip(prompts, params, strict=True))
        ]
        for request in requests:
            engine.add(request)
        while engine.busy:
            engine.step()
            if cancel_after is not None and len(requests[0].tokens) >= cancel_after:
                engine.cancel(0)
        assert engine.stats.draft_error is None
        return requests

    def check(self, prompt: Sequence[int]) -> int:
        """What follows a prompt's stored prefix is what follows it without a store.

        Returns:
            Tokens that are reused.
        """

        def logits_of(runner: ModelRunner) -> tuple[mx.array, int]:
            rows = runner.rows([list(prompt[:-1])], max_round=1, max_length=400)
            for _ in rows.prefill():
                pass
            return rows.forward(mx.array([prompt[-1:]])), rows.reused[0]

        wanted, _ = logits_of(self.runner.without_prefixes())
        logits, reused = logits_of(self.runner)
        atol = 2e-2 if "kv_bits" in self.options else 1e-4
        assert mx.allclose(logits, wanted, rtol=0, atol=atol).item()
        return reused


BEGINNINGS = [
    [(7 * i + i * i) % VOCAB for i in range(21)],
    [(5 * i + 3) % VOCAB for i in range(13)],
    [(11 * i + 1) % VOCAB for i in range(34)],
]
MESSAGES = [[9, 4, 33], [2, 17, 8, 51, 20], [40]]
#: Rows end while others run.
LIMITS = (6, 11, 17)
#: What is asked of each kind of model, by draft and backend.
CASES = [
    *((name, "", AT_ONCE) for name in ("gemma3", "list", "latent", "mamba")),
    *((name, "near", AT_ONCE) for name in ("full", "sliding", "qwen3_5")),
    *((name, "same", BEHIND) for name in ("full", "sliding", "sliding-8-bit")),
    *((name, "near", METAL) for name in ("full", "sliding", "qwen3_5")),
    ("full-8-bit", "same", METAL),
    *((name, "ngram", METAL) for name in ("full", "sliding", "falcon_h1")),
    *((name, "", METAL) for name in ("qwen3_5", "sliding")),
    ("qwen3_5", "same", BEHIND),
    ("full", "ngram", AT_ONCE),
    ("qwen3_5", "", BEHIND),
]
NAMES = {id(AT_ONCE): "cpu", id(BEHIND): "gpu", id(METAL): "metal"}
conversations = pytest.mark.parametrize(
    ("name", "drafts", "backend"),
    CASES,
    ids=[f"{n}-{d or 'plain'}-{NAMES[id(b)]}" for n, d, b in CASES],
)


@conversations
def test_the_next_turn_computes_its_message(
    name: str, drafts: str, backend: BackendDefaults
) -> None:
    """A column or state of a rejected token, or one too few or too many."""
    talk(name, drafts, backend, memory_store())


def talk(
    name: str, drafts: str, backend: BackendDefaults, prefixes: PrefixStore
) -> None:
    """Three conversations of three turns, which end by length or at a token."""
    decoding = Talk(name, drafts, backend, prefixes)
    plain = Talk(name, "", AT_ONCE, None)
    params = [SamplingParams(max_tokens=n) for n in LIMITS]
    params[1] = replace(params[1], stop_token_ids=tuple(range(30, 40)))
    prompts, whole = [list(p) for p in BEGINNINGS], []
    at_once = backend is AT_ONCE
    for _ in range(3):
        requests = decoding.turn(prompts, params)
        wanted = plain.turn(prompts, params)
        assert [r.tokens for r in requests] == [r.tokens for r in wanted]
        prefixes.flush()
        for prompt, request, message in zip(prompts, requests, MESSAGES, strict=True):
            ends = [request.stop_token] if request.finish_reason == "stop" else []
            known = len(prompt) + len(request.tokens) - (not ends)
            prompt += [*request.tokens, *ends, *message]  # type: ignore[list-item]
            # An end token may have been read before the host knew of the end. Where
            # rounds are read late, states and rings may be beyond the end.
            reused = decoding.check(prompt)
            whole.append(reused in (known, known + 1))
            assert whole[-1] or reused == known - len(request.tokens) - bool(ends)
            assert whole[-1] or (drafts and name not in LINEAR and not at_once)
            # Others after its end, and after its first token, as without its thoughts.
            decoding.check([*prompt[:known], 7, 3])
            decoding.check([*prompt[: known - len(request.tokens) + 2], 3, 3, 3])
    assert sum(whole) > len(whole) / 3


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def fault(plant: Callable[[pytest.MonkeyPatch], None]) -> Any:
    FAULTS[plant.__name__] = plant
    return plant


@fault
def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    finish = session.PrefixSession.finish

    def late(self: Any, n: int, c: Any, s: int, answer: Any, *a: Any, **k: Any) -> None:
        finish(self, n, c, s, [*answer, 7], *a, **k)

    patch.setattr(session.PrefixSession, "finish", late)


@fault
def names_of_the_next_token(patch: pytest.MonkeyPatch) -> None:
    usual = ModelRunner._known_as
    patch.setattr(
        ModelRunner,
        "_known_as",
        lambda self, prompts, last: (
            usual(self, [[*p[1:], *last] if len(p) > 1 else p for p in prompts], last)
            if last and len(prompts) == 1
            else usual(self, prompts, last)
        ),
    )


@fault
def another_row(patch: pytest.MonkeyPatch) -> None:
    usual = snapshot.cut

    def cut(caches: Any, row: int, *args: Any, **more: Any) -> Any:
        rows = caches[0].offset.shape[0]
        return usual(caches, (row + ("waits" in more)) % rows, *args, **more)

    patch.setattr(session, "cut", cut)


@fault
def after_the_slot_was_emptied(patch: pytest.MonkeyPatch) -> None:
    usual = ModelRunner.rows

    def rows(*args: Any, **more: Any) -> Any:
        made: Any = usual(*args, **more)
        store_of, reset = made.store, made.reset
        waiting: list[Any] = []

        def emptied(which: Any) -> None:
            held = list(made._finish)
            reset(which)
            made._finish = held
            for call in waiting:
                store_of(*call)
            waiting.clear()
            for row in which:
                made._finish[row] = None

        made.store = lambda ended: waiting.append([ended]) if ended else None
        made.reset = emptied
        return made

    patch.setattr(ModelRunner, "rows", rows)


@pytest.mark.parametrize("plant", FAULTS.values(), ids=list(FAULTS))
def test_columns_that_are_not_the_rows_show(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above must see a wrong offset, row, name or time."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        talk("full", "same", METAL, memory_store())


def test_states_with_rejected_tokens_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above must see states after a round that was not read."""
    states_of = recurrent.BatchRecurrentCache.states_of
    monkeypatch.setattr(recurrent.BatchRecurrentCache, "states_before", states_of)
    with pytest.raises(AssertionError):
        talk("qwen3_5", "near", METAL, memory_store())


@pytest.mark.parametrize("name", ["full", "sliding", "qwen3_5"])
def test_from_disk(name: str, tmp_path: Path) -> None:
    """Entries that are written before they are computed, or after what they need."""
    folder: dict[str, Any] = {"memory": 0, "folder": tmp_path, "disk": 1 << 30}
    prefixes = memory_store(**folder)
    talk(name, "" if name == "qwen3_5" else "same", METAL, prefixes)
    prefixes.close()
    again, plain = (Talk(name, "", AT_ONCE, p) for p in (memory_store(**folder), None))
    prompt = BEGINNINGS[0]
    (request,) = plain.turn([prompt], [SamplingParams(max_tokens=LIMITS[0])])
    known = len(prompt) + LIMITS[0] - 1
    assert again.check([*prompt, *request.tokens, 8]) in (known, known + 1)


class Pairs:
    """A detokenizer: every token is two characters."""

    def __init__(self) -> None:
        self.text = ""

    def add_token(self, token: int) -> None:
        self.text += chr(200 + token) + chr(400 + token)

    def finalize(self) -> None: ...


@pytest.mark.parametrize("name", ["full", "sliding", "qwen3_5"])
@pytest.mark.parametrize("drafts", ["", "same"])
@pytest.mark.parametrize("backend", [AT_ONCE, METAL], ids=["cpu", "metal"])
def test_a_stop_text_in_the_middle_of_a_token(
    name: str, drafts: str, backend: BackendDefaults
) -> None:
    """Tokens of the text that was cut off, taken for others that follow."""
    decoding = Talk(name, drafts, backend, memory_store())
    prompt = BEGINNINGS[0]
    (plain,) = decoding.turn([prompt], [SamplingParams(max_tokens=12)])
    decoding = Talk(name, drafts, backend, memory_store(), detokenizer=Pairs)
    for at, width in ((5, 2), (6, 2), (7, 2), (8, 2), (4, 6)):
        # The first half of a token stays; the rest and those after it go. They may be
        # of several rounds, which the caches cannot take back.
        text = "".join(chr(200 + t) + chr(400 + t) for t in plain.tokens[at:][:width])
        stop = text[1:-1]
        (request,) = decoding.turn(
            [prompt], [SamplingParams(max_tokens=12, stop=(stop,))]
        )
        assert request.finish_reason == "stop"
        n = len(request.tokens)
        assert request.tokens == plain.tokens[:n]
        known = [*prompt, *request.tokens]
        assert decoding.check([*known, 3, 3]) >= len(prompt) - 1
        decoding.check([*known[:-1], 4, 4, 4])
        decoding.check([*prompt, *plain.tokens, 5])


@pytest.mark.parametrize("name", ["full", "sliding", "qwen3_5"])
@pytest.mark.parametrize("drafts", ["", "near"])
@pytest.mark.parametrize("backend", [AT_ONCE, METAL], ids=["cpu", "metal"])
def test_cancelled(name: str, drafts: str, backend: BackendDefaults) -> None:
    """The tokens of rounds that nobody reads, taken for those that were committed."""
    for after in (1, 4, 5):
        decoding = Talk(name, drafts, backend, memory_store())
        params = [SamplingParams(max_tokens=12)] * 2
        first, _ = decoding.turn(BEGINNINGS[:2], params, cancel_after=after)
        assert first.finish_reason == "cancelled"
        prompt = [*BEGINNINGS[0], *first.tokens]
        if name == "full" or backend is AT_ONCE:
            assert decoding.check([*prompt, 3]) >= len(prompt) - 1
        decoding.check([*prompt, 3, 3])
        decoding.check([*prompt[:-1], 7, 7])


# Blocks of 8 tokens: prompts within the first, on a block's edge, and after it.
@pytest.mark.parametrize("length", [3, 9, 17, 21])
@pytest.mark.parametrize("name", ["full", "sliding"])
def test_answers_are_their_clients_own(name: str, length: int, tmp_path: Path) -> None:
    """Another client's count of cached tokens would say what was answered."""
    for place in ("memory", "disk"):
        clients(name, BEGINNINGS[2][:length], tmp_path / place, place == "disk")


def clients(name: str, prompt: list[int], folder: Path, on_disk: bool) -> None:
    where: dict[str, Any] = {}
    if on_disk:
        where = {"memory": 0, "folder": folder, "disk": 1 << 30}
    params = SamplingParams(max_tokens=10)
    prefixes = memory_store(**where)

    def asked(prompt: list[int], client: str | None, salt: str | None = None) -> Any:
        decoding = Talk(name, "same", AT_ONCE, prefixes)
        own = replace(params, draft_corpus=client, cache_salt=salt)
        (request,) = decoding.turn([prompt], [own])
        assert request.tokens == plain.turn([prompt], [params])[0].tokens
        prefixes.flush()
        return request

    plain = Talk(name, "", AT_ONCE, None)
    answer = asked(prompt, "a").tokens
    second = [*prompt, *answer, 5, 5, 5]
    for client, salt in (("b", None), (None, None), ("a", "s"), (None, "a")):
        reused = asked(second, client, salt).prefix_tokens
        # Prompts without a salt are shared, as before.
        assert reused <= len(prompt) - 1
        if name == "full" and salt is None:
            assert reused == len(prompt) - 1
        if on_disk:
            prefixes.close()
            prefixes = memory_store(**where)
        if client == "b":
            break
    own = asked(second, "a")
    if name == "full":
        # What b asked is a prompt, which all share.
        assert own.prefix_tokens == len(second) - 1
    third = [*second, *own.tokens, 4, 4]
    assert asked(third, "c").prefix_tokens <= len(second) - 1
    assert asked(third, "a").prefix_tokens >= len(second) - 1
    other = [*prompt[::-1], 9]
    theirs = asked(other, "a").tokens
    follow = [*other, *theirs, 6, 6]
    ours = asked(follow, "a")
    assert ours.prefix_tokens == len(other) + len(theirs) - 1
    last = [*follow, *ours.tokens, 8]
    assert asked(last, "a").prefix_tokens == len(follow) + len(ours.tokens) - 1
    # A prompt that goes on from an answer is its client's own as well.
    assert asked(last, "b").prefix_tokens <= len(other) - 1
    assert asked(follow, None, "s").prefix_tokens == 0
    prefixes.close()


@pytest.mark.parametrize("length", [3, 17, 21])
def test_two_clients_with_one_answer(length: int, tmp_path: Path) -> None:
    """One file would be both clients', and the second one's answer be lost."""
    prompt, params = BEGINNINGS[2][:length], SamplingParams(max_tokens=10)

    def asked(prompt: list[int], client: str, folder: Path) -> Request:
        prefixes = memory_store(memory=0, folder=folder, disk=1 << 30)
        decoding = Talk("full", "", AT_ONCE, prefixes)
        own = replace(params, draft_corpus=client)
        (request,) = decoding.turn([prompt], [own])
        prefixes.close()
        return request

    first = tmp_path / "first"
    answer = asked(prompt, "a", first).tokens
    assert asked(prompt, "b", first).tokens == answer
    for client in "ab":
        shutil.copytree(first, tmp_path / client)
        follow = asked([*prompt, *answer, 5, 5], client, tmp_path / client)
        assert follow.prefix_tokens == len(prompt) + len(answer) - 1, client


def clients_are_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    right = entries.apart

    def wrong(signature: str, kind: Any, name: str | None) -> str:
        return signature if kind == "client" else right(signature, kind, name)

    patch.setattr(session, "apart", wrong)


def test_another_clients_answer_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The test above must see an answer that another client finds."""
    clients_are_not_told_apart(monkeypatch)
    with pytest.raises(AssertionError):
        clients("full", BEGINNINGS[2][:21], tmp_path, False)


def test_budgets_hold(tmp_path: Path) -> None:
    """Answers that are counted beside the budget, or waiting for the disk for ever."""
    prefixes = memory_store(memory=20_000, folder=tmp_path, disk=30_000)
    for name in ("full", "sliding"):
        decoding, plain = (Talk(name, "same", AT_ONCE, p) for p in (prefixes, None))
        params = [SamplingParams(max_tokens=30)] * 3
        for _ in range(2):
            found = decoding.turn(BEGINNINGS, params)
            wanted = plain.turn(BEGINNINGS, params)
            assert [r.tokens for r in found] == [r.tokens for r in wanted]
            assert not prefixes._unwritten
            prefixes.flush()
            assert prefixes.nbytes <= 20_000
            assert sum(f.stat().st_size for f in tmp_path.iterdir()) <= 30_000
    prefixes.close()


def test_a_switch_turns_it_off() -> None:
    """An option that does nothing."""
    decoding = Talk("full", "", AT_ONCE, memory_store(), prefix_answers=False)
    prompt = BEGINNINGS[0]
    (request,) = decoding.turn([prompt], [SamplingParams(max_tokens=9)])
    assert decoding.check([*prompt, *request.tokens, 3]) == len(prompt) - 1


def test_a_row_that_failed_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values that are not finite, say, would be another row's prefix."""
    stored = list[EndedRow]()
    monkeypatch.setattr(ModelRows, "store", lambda self, rows: stored.extend(rows))

    def fails(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits * mx.nan if tokens.size > 6 else logits

    config = EngineConfig(batch_size=2, prefix_cache_memory=1 << 24)
    decoder = SpecDecoder(token_level(target_of("full")), config=config)
    params = SamplingParams(max_tokens=8)
    broken = replace(params, logits_processors=(fails,))
    results = decoder.generate([[1, 2, 3, 4], [5, 6, 7]], [broken, params])
    assert [r.finish_reason for r in results] == ["error", "length"]
    assert [row.tokens[0] for row in stored] == [7]
