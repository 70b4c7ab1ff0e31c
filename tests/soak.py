"""Random requests through random engines, every row checked against a run alone.

``python -m tests.soak --minutes 10``, or ``scripts/soak``; ``tests/test_soak.py``
runs a bounded part. A world is one target, draft, cache kind, batch size and draft
length; requests of all settings arrive, end and are cancelled in it at random. What
each must give is worked out by plain decoding, or, where there is no plain decoding
(quantized or bounded caches, the ratio rules), by the engine with that row alone.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from specdec.backend import BackendDefaults
from specdec.cache.positions import counted
from specdec.config import EngineConfig, NumDraftTokens
from specdec.engine.engine import Engine
from specdec.engine.session import Bounds, Session
from specdec.grammar import Grammar, GrammarCompiler
from specdec.models.runner import ModelRows, ModelRunner
from specdec.outputs import GenerationResult
from specdec.request import Request
from specdec.sampling_params import VERIFICATIONS, SamplingParams
from specdec.spec_decode import Drafter, DraftModel
from specdec.spec_decode.draft_length import (
    AutoLength,
    BatchState,
    DraftLength,
    ForwardCosts,
    Forwards,
    RoundCosts,
    RoundTiming,
)
from tests.byte_tokenizer import character_tokenizer
from tests.cache.small_models import MODELS
from tests.conftest import _tiny_model
from tests.plain import AT_ONCE, BEHIND, METAL, Masked, plainly
from tests.scripted import Script
from tests.test_decoder import Tokenizer

VOCAB = 97
EOS = frozenset({13})
LOGPROB_TOLERANCE = 1e-3
# Bytes of the keys and values of one row, of one token, in the smallest model.
SMALLEST_ROW = 512
A_FEW_SCALARS = 32
# Most draft tokens of a round whose number is chosen.
MOST_DRAFT = 8
# What of a result goes with how many tokens its rounds drafted.
COUNTS = (
    "rounds",
    "drafted",
    "accepted",
    "num_draft_tokens_per_pos",
    "num_accepted_tokens_per_pos",
)
WIDE = {"hidden_size": 128, "head_dim": 32}
#: name -> model, options of the caches
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "sliding": ("sliding", {}),
    "gemma3": ("gemma3", {}),
    "8-bit": ("full", {"kv_bits": 8, "kv_group_size": 32}),
    "bounded": ("sliding", {"max_kv_size": 24}),
}


#: Where a step may be broken off: in a forward, a trim, and what the host does.
POINTS: tuple[tuple[Any, str], ...] = (
    (ModelRows, "forward"),
    (ModelRows, "trim_per_sequence"),
    (Request, "commit"),
    (Engine, "_count"),
)


class WatchedRunner(ModelRunner):
    """Remembers, weakly, all rows that it ever began."""

    begun: weakref.WeakSet[ModelRows]

    def rows(self, *args: Any, **options: Any) -> ModelRows:
        rows = super().rows(*args, **options)
        self.begun.add(rows)
        return rows


@cache
def grammars() -> GrammarCompiler:
    """Of a tokenizer whose tokens are characters; the engine's has other texts."""
    return GrammarCompiler(character_tokenizer(*EOS), VOCAB)


#: Endless and short ones, such in which much must follow, and such that ends allow.
GRAMMARS = (
    Grammar.json_object(),
    Grammar.json_schema(
        {"type": "object", "properties": {"name": {"enum": ["ab", "cd"]}},
         "required": ["name"]}
    ),
    Grammar.regex("([A-Ma-z]{2}|xyz, )*"),
    Grammar.regex("(!|[0-9]{3}){1,9}"),
    Grammar.lark('start: sum\nsum: N ("+" N)*\nN: /[0-9]+/'),
)  # fmt: skip


class Seen:
    """A logits processor that notes how many tokens it was shown, and may fail.

    It refuses what is congruent to the last token, modulo 5.
    """

    def __init__(self, fails_at: int | None = None):
        self.lengths: list[int] = []
        self.fails_at = fails_at

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.lengths.append(len(tokens))
        if len(self.lengths) - 1 == self.fails_at:
            raise ArithmeticError("no luck")
        refused = mx.arange(logits.shape[-1]) % 5 == tokens[-1] % 5
        return mx.where(refused, -float("inf"), logits)


@dataclass(frozen=True)
class Work:
    """A request as it can be made again, with processors of its own each time."""

    prompt: tuple[int, ...]
    settings: dict[str, Any]
    processed: bool = False
    fails_at: int | None = None

    def params(self, *, fails: bool = True, **changes: Any) -> SamplingParams:
        """Its settings; of a plain run, the grammar is masked by a processor."""
        processors: tuple[Any, ...] = ()
        if "grammar" in changes and "grammar" in self.settings:
            grammar = self.settings["grammar"]
            processors = (Masked(grammars(), grammar, len(self.prompt)),)
            changes["verification"] = "coupled"  # others go with no processor
        if self.processed:
            processors = (Seen(self.fails_at if fails else None),)
        settings = {**self.settings, "logits_processors": processors, **changes}
        return SamplingParams(**settings)


def draw_work(rng: random.Random) -> Work:
    """A request with some of all settings."""
    max_tokens = rng.choice((1, 2, 5, 12, 24, 24, 40, 60))
    settings: dict[str, Any] = {"max_tokens": max_tokens, "seed": rng.randrange(2**33)}

    def some(probability: float, **more: Any) -> None:
        if rng.random() < probability:
            settings.update(more)

    if rng.random() < 0.6:
        settings["temperature"] = rng.choice((0.3, 0.8, 1.0, 1.7))
        some(0.2, top_p=rng.choice((0.5, 0.9)))
        some(0.2, top_k=rng.choice((1, 5, 200)))
        some(0.2, min_p=0.05)
        some(0.1, xtc_probability=0.5, xtc_threshold=0.02, xtc_special_tokens=(1, 13))
    some(0.15, repetition_penalty=1.4, repetition_context_size=rng.choice((4, 20)))
    some(0.15, presence_penalty=0.7)
    some(0.15, frequency_penalty=rng.choice((0.4, -0.2)), frequency_context_size=33)
    some(0.15, logit_bias={rng.randrange(VOCAB): 4.0, 5: -float("inf")})
    some(0.2, stop=tuple(f"{rng.randrange(100)}," for _ in range(4)))
    some(0.1, stop=(f"{rng.randrange(10)},{rng.randrange(10)}",))
    some(0.2, stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice((1, 4, 30)))))
    some(0.15, min_tokens=min(max_tokens, 6))
    some(0.2, logprobs=True)
    some(0.1, top_logprobs=rng.choice((1, 4, 100)))
    some(0.4, num_draft_tokens=rng.choice((0, 1, 2, 9)))
    processed, fails_at = rng.random() < 0.15, None
    if processed and rng.random() < 0.6:
        fails_at = rng.randrange(max_tokens + 3)
    if not processed:
        if rng.random() < 0.05:
            drawn = ("temperature", "top_p", "top_k", "min_p")
            for name in (*drawn, "xtc_probability", "xtc_threshold"):
                settings.pop(name, None)
            settings["sampler"] = make_sampler(temp=0.9, top_k=20)
        else:
            settings["verification"] = rng.choice(VERIFICATIONS)
    length = rng.choice((1, 2, 3, 9, 17, 33, 70))
    prompt = tuple(rng.randrange(VOCAB) for _ in range(length))
    apart = random.Random(settings["seed"])
    if apart.random() < 0.2 and not processed and "sampler" not in settings:
        for name in ("min_tokens", "logit_bias"):  # refused, or all it leaves is
            settings.pop(name, None)
        settings["grammar"] = apart.choice(GRAMMARS)
    return Work(prompt, settings, processed, fails_at)


@dataclass
class Counts:
    """What a soak has done."""

    worlds: int = 0
    rounds: int = 0
    rows: int = 0
    tokens: int = 0
    cancelled: int = 0
    failed: int = 0
    accepted: int = 0
    auto_plain: int = 0
    auto_drafting: int = 0
    interrupted: int = 0
    ties: int = 0
    checks: int = 0

    def check(self, condition: object, *what: object) -> None:
        """Count a check; what does not hold is a failure."""
        self.checks += 1
        assert condition, " ".join(map(str, what))

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, f.name)} {f.name}" for f in fields(self))


@cache
def models(model: str, wide: bool) -> dict[str, Any]:
    """A target, and drafts that agree with it always, often, hardly ever."""
    arch, arguments = MODELS[model]
    arguments = {**arguments, **(WIDE if wide else {})}
    target = _tiny_model(arch, seed=0, **arguments)
    near = _tiny_model(arch, seed=0, **arguments)
    embedding = near.model.embed_tokens
    noise = mx.random.normal(embedding.weight.shape, key=mx.random.key(1))
    embedding.weight = embedding.weight + (0.05 if wide else 0.1) * noise
    unrelated = _tiny_model(
        "llama",
        seed=5,
        **{"num_hidden_layers": 1, "vocab_size": VOCAB - 7, **(WIDE if wide else {})},
    )
    mx.eval(near, unrelated)
    return {"perfect": target, "near": near, "unrelated": unrelated}


class ByTheBook(AutoLength):
    """Chooses k as ``auto`` does, by what rounds are said to take.

    By the clock, no failure could be had again. What is said comes near to where a
    draft pays, so that rounds with and without one follow each other. Some
    batches begin without a draft, which comes when it is wanted.

    Args:
        rng: draws how costs go with rows and tokens.
    """

    def __init__(self, rng: random.Random):
        self.per_token, self.per_step = rng.uniform(0, 0.1), rng.uniform(0, 0.1)
        self.noise = rng
        self.ks: list[int] = []
        super().__init__(
            RoundCosts(ForwardCosts()),
            max_draft_tokens=MOST_DRAFT,
            forwards=self.measured,
        )

    def measured(self, num_rows: int, *, context: int) -> Forwards:
        plain = 1 + 0.1 * num_rows
        verify = {s: plain * (1 + self.per_token * (s - 1)) for s in (1, 2, 5, 9)}
        return Forwards(num_rows, verify, self.per_step * plain)

    def may_pay(self, state: BatchState) -> bool:
        return self.noise.random() < 0.7 and super().may_pay(state)

    def observe(self, timing: RoundTiming) -> None:
        k = timing.num_draft_tokens
        self.ks.append(k)
        if timing.seconds is not None and timing.fair:
            cost = 1 + self.per_token * k + self.per_step * k
            seconds = (1 + 0.1 * timing.num_rows) * cost * self.noise.uniform(0.8, 1.2)
            timing = replace(timing, seconds=seconds)
        # Random drafts are hardly ever right: that they are is said for some rounds.
        if self.noise.random() < 0.3:
            reported = [(limit, limit) for limit, _ in timing.accepted]
            timing = replace(timing, accepted=reported)
        if timing.seconds is not None and not timing.fair:
            # Now and then getting ready for shapes, or catching up, takes long.
            timing = replace(timing, seconds=1.5 * self.noise.choice((1, 2, 10)))
        super().observe(timing)


class Again(Script):
    """A row's rounds once more: as many draft tokens in each as it could accept then.

    With the ratio rules that is what a row's tokens depend on, besides its request.
    """

    max_draft_tokens = MOST_DRAFT

    def __init__(self, limits: Sequence[int]):
        super().__init__(lambda number: limits[number] if number < len(limits) else 0)


@dataclass
class World:
    """An engine, and how to make the same one for a row alone.

    Args:
        kind: a key of ``KINDS``.
        draft: a key of :func:`models`, or ``None``.
        compiled: with MLX's fused kernels, whose cache keeps a few bytes of every
            constant that mlx-lm's filters meet.
    """

    kind: str
    draft: str | None
    backend: BackendDefaults
    batch_size: int
    num_draft_tokens: NumDraftTokens
    prefill_step_size: int
    draft_context: int | None
    compiled: bool = True

    def __post_init__(self) -> None:
        model, self.options = KINDS[self.kind]
        drafts = models(model, bool(self.options))
        self.model = drafts["perfect"]
        self.drafting = drafts[self.draft] if self.draft else None
        self.begun: weakref.WeakSet[ModelRows] = weakref.WeakSet()

    @property
    def is_auto(self) -> bool:
        """Whether k is chosen for every round, by what rounds before it brought."""
        return self.num_draft_tokens == "auto" and self.drafting is not None

    @property
    def is_plain(self) -> bool:
        """Whether mlx-lm's plain decoding has the same arithmetic."""
        return not self.options

    def session(
        self,
        *,
        alone: bool = False,
        draft: bool = True,
        length: DraftLength | None = None,
    ) -> Session:
        """A new engine of this world."""
        config = EngineConfig(
            batch_size=1 if alone else self.batch_size,
            num_draft_tokens=self.num_draft_tokens,
            prefill_step_size=self.prefill_step_size,
            **self.options,
        )
        target = self._runner(self.model, config)
        drafter: Drafter | None = None
        if self.drafting is not None and draft:
            drafter = DraftModel(
                self._runner(self.drafting, config),
                vocab_size=target.vocab_size,
                max_draft_tokens=config.max_draft_tokens,
                context_length=self.draft_context,
            )
        self.length = length
        if length is None and self.num_draft_tokens == "auto":
            self.length = ByTheBook(random.Random(self.prefill_step_size))
        vocabulary = {str(i): i for i in range(VOCAB)}
        tokenizer: Any = Tokenizer(vocabulary, eos_token_ids=EOS)
        engine = Engine(
            target,
            drafter,
            config,
            self.backend,
            EOS,
            lambda: tokenizer.detokenizer,
            length=self.length,
        )
        bounds = Bounds(target.vocab_size, grammars=grammars())
        return Session(engine, tokenizer, bounds)

    def _runner(self, model: Any, config: EngineConfig) -> WatchedRunner:
        runner = WatchedRunner(model, "model", config, self.backend)
        runner.begun = self.begun
        return runner

    # -- what must come out ------------------------------------------------

    def alone(self, work: Work, **options: Any) -> GenerationResult:
        """The request by itself, in an engine of its own."""
        changes = options.pop("changes", {})
        session = self.session(alone=True, **options)
        session.add(list(work.prompt), work.params(**changes))
        result = None
        while session.busy:
            for event in session.step():
                result = event.result
        assert result is not None
        return result

    def whole(
        self, work: Work, limits: Sequence[int]
    ) -> tuple[list[int], str, list[mx.array] | None]:
        """Tokens as if there were no stop texts and no failure, and why they end.

        Args:
            limits: draft tokens that the row could accept in each of its rounds.
        """
        changes: dict[str, Any] = {"fails": False, "stop": ()}
        if by_ratio(work):
            length = Again(limits) if self.is_auto else None
            result = self.alone(work, changes=changes, length=length)
        elif self.is_plain:
            params = work.params(**changes, grammar=None)
            plain = plainly(self.model, work.prompt, params, EOS)
            return plain.tokens, plain.finish_reason, plain.logprobs
        else:
            result = self.alone(work, draft=False, changes=changes)
        return result.token_ids, result.finish_reason, None


class Afresh:
    """A model without its cache: the same function, summed in another order."""

    def __init__(self, model: Any):
        self.model, self.layers = model, model.layers
        self._seen: list[int] = []

    def parameters(self) -> dict[str, Any]:
        return {}

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self._seen += inputs[0].tolist()  # type: ignore[arg-type]
        logits: mx.array = self.model(mx.array([self._seen]))
        return logits


def is_tie(world: World, work: Work, found: Sequence[int], wanted: list[int]) -> bool:
    """Whether plain decoding is not sure either of the first token that differs.

    Two tokens may be as likely as each other but for float32's last bits, which go with
    the shape of a forward.
    """
    if not world.is_plain or by_ratio(work):
        return False
    pairs = zip(found, wanted, strict=False)
    first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return False
    params = work.params(fails=False, stop=(), grammar=None)
    other = plainly(Afresh(world.model), work.prompt, params, EOS).tokens
    return other[:first] == wanted[:first] and other[first:][:1] != [wanted[first]]


def by_ratio(work: Work) -> bool:
    """Whether a ratio rule decides, with which the draft has a say in the text."""
    sampling: bool = work.settings.get("temperature", 0) > 0
    rule: str = work.settings.get("verification", "coupled")
    return sampling and rule != "coupled"


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f"{t}," for t in tokens)


def cut(
    tokens: list[int], finish_reason: str, work: Work
) -> tuple[list[int], str, str, int | None]:
    """Where stop texts and a failing processor end it.

    Returns:
        Tokens, text, finish reason, and how often a processor was called.
    """
    stop = work.settings.get("stop", ())
    failed = work.fails_at is not None
    for n in range(len(tokens) + 1):
        text = text_of(tokens[:n])
        places = [at for s in stop if (at := text.find(s)) >= 0]
        if places:
            end = min(places)
            kept = next(i for i in range(n + 1) if len(text_of(tokens[:i])) >= end)
            return tokens[:kept], text[:end], "stop", n
        ended = n == len(tokens)
        calls = n + (finish_reason == "stop" and ended)
        if ended and not (failed and work.fails_at == n and finish_reason == "stop"):
            return tokens, text, finish_reason, calls
        if failed and work.fails_at == n:
            return tokens[:n], text, "error", n + 1
    raise AssertionError


class Client:
    """Adds, cancels and steps at random; checks what comes while it comes."""

    def __init__(self, world: World, rng: random.Random, counts: Counts):
        self.world, self.rng, self.counts = world, rng, counts
        self.session = world.session()
        self.stats = self.session.stats
        self.length = world.length
        self.work: dict[int, Work] = {}
        self.seen: dict[int, Seen] = {}
        self.tokens: dict[int, list[int]] = {}
        self.text: dict[int, str] = {}
        self.results: dict[int, GenerationResult] = {}
        self.cancelled: set[int] = set()
        #: For each row, the draft tokens that it could accept in each of its rounds.
        self.limits: dict[int, list[int]] = {}

    def run(self, requests: int) -> None:
        rng = self.rng
        eager = rng.choice((0.1, 0.4, 1.0))
        patience = rng.choice((0.0, 0.01, 0.05))
        while self.session.busy or len(self.work) < requests:
            while len(self.work) < requests and rng.random() < eager:
                self.add()
                if rng.random() < 0.5:
                    break
            if rng.random() < patience:
                self.cancel()
            self.step()
        self.counts.check(self.session.step() == [])

    def add(self) -> None:
        work = draw_work(self.rng)
        params = work.params()
        index = self.session.add(list(work.prompt), params)
        self.work[index] = work
        self.tokens[index], self.text[index] = [], ""
        self.watch(index)
        if params.logits_processors:
            self.seen[index] = params.logits_processors[0]  # type: ignore[assignment]

    def watch(self, index: int) -> None:
        """Note what a row may accept in its rounds."""
        limits: list[int] = []
        sequence: Any = self.session._engine._alive[index]
        commit = sequence.commit

        def noted(tokens: Any, logprobs: Any, drafted: int | None) -> None:
            if drafted is not None:
                limits.append(drafted)
            commit(tokens, logprobs, drafted)

        sequence.commit = noted
        self.limits[index] = limits

    def cancel(self) -> None:
        alive = [i for i in self.work if i not in self.results]
        if alive:
            index = self.rng.choice(alive)
            if self.session.cancel(index):
                self.cancelled.add(index)
        ended = self.rng.choice(list(self.results) or [10**6])
        self.counts.check(not self.session.cancel(ended))

    def step(self) -> None:
        for event in self.session.step():
            i = event.index
            self.counts.check(i not in self.results, "an event after the last")
            self.tokens[i] += event.token_ids
            self.text[i] += event.text
            if event.result is not None:
                self.results[i] = event.result

    def run_into(self, requests: int) -> None:
        """Like :meth:`run`; a step is broken off at a random point, as by Ctrl-C."""
        owner, name = self.rng.choice(POINTS)
        usual: Any = getattr(owner, name)
        left = self.rng.randrange(60)

        def broken(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
            return usual(*args, **options)

        setattr(owner, name, broken)
        try:
            self.run(requests)
        except KeyboardInterrupt:
            self.counts.interrupted += 1
        finally:
            setattr(owner, name, usual)

    def verify_so_far(self) -> None:
        """What came before a step was broken off is right."""
        for i, work in self.work.items():
            if i in self.results:
                self.verify_row(i, work)
                continue
            tokens, *_ = self.world.whole(work, self.limits[i])
            emitted = self.tokens[i]
            if not is_tie(self.world, work, emitted, tokens):
                self.counts.check(tokens[: len(emitted)] == emitted, self.world, work)

    def leave(self) -> None:
        """Let go of the session."""
        del self.session
        gc.collect()

    def verify(self) -> None:
        """Every row is what it would be alone; the totals are the rows'."""
        check, stats = self.counts.check, self.stats
        check(self.results.keys() == self.work.keys())
        results = list(self.results.values())
        check(stats.prompts == len(results))
        for name in ("drafted", "accepted"):
            check(getattr(stats, name) == sum(getattr(r, name) for r in results))
        check(stats.row_rounds == sum(r.rounds for r in results))
        for i, work in self.work.items():
            self.verify_row(i, work)
        counts = self.counts
        counts.worlds += 1
        counts.rounds += stats.rounds
        counts.rows += len(results)
        counts.tokens += sum(r.generated_tokens for r in results)
        counts.accepted += stats.accepted
        counts.cancelled += sum(r.finish_reason == "cancelled" for r in results)
        counts.failed += sum(r.finish_reason == "error" for r in results)
        if self.world.is_auto and isinstance(self.length, ByTheBook):
            counts.auto_plain += self.length.ks.count(0)
            counts.auto_drafting += len(self.length.ks) - self.length.ks.count(0)

    def verify_row(self, i: int, work: Work) -> None:
        check, result = self.counts.check, self.results[i]
        where = (self.world, work, replace(result, logprobs=None))
        check(self.tokens[i] == result.token_ids, "streamed tokens", *where)
        check(self.text[i] == result.text, "streamed text", *where)
        check((i in self.cancelled) == (result.finish_reason == "cancelled"), *where)
        tokens, reason, logprobs = self.world.whole(work, self.limits[i])
        kept, text, finish_reason, calls = cut(tokens, reason, work)
        if is_tie(self.world, work, result.token_ids, tokens):
            self.counts.ties += 1
            return
        if i in self.cancelled:
            n = len(result.token_ids)
            check(tokens[:n] == result.token_ids, "prefix", tokens, *where)
            check(text_of(result.token_ids) == result.text, *where)
        else:
            check(result.token_ids == kept, "expected", kept, finish_reason, *where)
            check(result.text == text, "expected", text, *where)
            check(result.finish_reason == finish_reason, finish_reason, *where)
        if i in self.seen:
            lengths = self.seen[i].lengths
            first = len(work.prompt)
            check(lengths == list(range(first, first + len(lengths))), lengths, *where)
            # Stop texts are looked for after the round: it may have gone on.
            by_text = isinstance(result.stop_reason, str)
            n = min(len(lengths), calls or 0) if by_text else len(lengths)
            check(i in self.cancelled or n == calls, lengths, calls, *where)
        if logprobs is not None and result.logprobs is not None:
            self.verify_logprobs(result, work, logprobs)
        repeats = not (self.world.is_auto and by_ratio(work))
        if repeats and i not in self.cancelled and self.rng.random() < 0.15:
            again = self.world.alone(work)
            same = replace(again, index=result.index, logprobs=result.logprobs)
            if self.world.is_auto:
                same = replace(same, **{name: getattr(result, name) for name in COUNTS})
            check(same == result, "alone:", replace(again, logprobs=None), *where)

    def verify_logprobs(
        self, result: GenerationResult, work: Work, logprobs: list[mx.array]
    ) -> None:
        check = self.counts.check
        reported = result.logprobs or []
        check(len(reported) == len(result.token_ids), result)
        n = min(work.settings.get("top_logprobs", 0), VOCAB)
        for token, one, all_ in zip(result.token_ids, reported, logprobs, strict=False):
            values: list[float] = all_.tolist()  # type: ignore[assignment]
            check(is_close(one.logprob, values[token]), one, values[token])
            # What bias or a processor forbids is no alternative.
            possible = [v for v in values if v > -math.inf]
            best = sorted(possible, reverse=True)[:n]
            check(len(one.top) == len(best), one)
            check(all(map(is_close, [p for _, p in one.top], best)), one, best)
            check(all(is_close(values[t], p) for t, p in one.top), one)


def is_close(a: float, b: float) -> bool:
    return a == b or abs(a - b) < LOGPROB_TOLERANCE


def draw_worlds(rng: random.Random) -> Iterator[World]:
    """Worlds without end; every kind of cache comes up once in as many."""
    while True:
        kinds = list(KINDS)
        rng.shuffle(kinds)
        for kind in kinds:
            yield World(
                kind,
                rng.choice(("perfect", "near", "near", "near", "unrelated", None)),
                rng.choice((AT_ONCE, BEHIND, METAL)),
                batch_size=rng.choice((1, 2, 3, 5, 8)),
                num_draft_tokens=rng.choice((1, 2, 3, 5, "auto", "auto")),
                prefill_step_size=rng.choice((4, 16, 64)),
                draft_context=rng.choice((None, None, 30)),
                compiled=rng.random() < 0.5,
            )


def soak(
    seed: int,
    more: Callable[[Counts], bool],
    *,
    requests: int = 40,
    show: Callable[[str], object] = lambda line: None,
) -> Counts:
    """Worlds until ``more`` says no; raises AssertionError at what does not hold."""
    rng, counts = random.Random(seed), Counts()
    for kind in KINDS:  # models stay: they are no part of what must come back
        World(kind, None, AT_ONCE, 1, 1, 4, None)
    counted(0, 1)  # so do these numbers
    try:
        for number, world in enumerate(draw_worlds(rng)):
            if not more(counts):
                break
            inhabit(world, random.Random(f"{seed} {number}"), requests, counts)
            show(f"{number}: {counts}")
    finally:
        mx.enable_compile()
    return counts


def inhabit(world: World, rng: random.Random, requests: int, counts: Counts) -> None:
    """Let requests come and go in a world; then it is as if none had been there."""
    (mx.enable_compile if world.compiled else mx.disable_compile)()
    gc.collect()
    before = mx.get_active_memory()
    broken: Client | None = None
    # Not of the whole world, whose record gets new fields.
    apart = random.Random(f"{world.kind} {world.draft} {counts.worlds}")
    if apart.random() < 0.5:
        broken = Client(world, apart, counts)
        broken.run_into(requests // 4)
        broken.leave()
    client = Client(world, rng, counts)
    client.run(requests)
    # The session is still there, and idle.
    gc.collect()
    counts.check(not world.begun, "rows left:", list(world.begun))
    if world.backend.compile_after is not None:
        # It keeps the constants of its compiled forwards, more than a row may have.
        client.leave()
    left = mx.get_active_memory() - before
    allowed = SMALLEST_ROW if world.compiled else A_FEW_SCALARS
    counts.check(abs(left) <= allowed, f"{left} bytes left behind", world)
    # Only now: references keep their logits.
    client.verify()
    if broken is not None:
        broken.verify_so_far()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    start_memory = mx.get_active_memory()
    counts = soak(options.seed, lambda _: time.monotonic() < end, show=print)
    print(f"{options.minutes:g} minutes, seed {options.seed}: {counts}")
    models.cache_clear()
    gc.collect()
    print(f"memory: {start_memory} bytes before, {mx.get_active_memory()} after")


if __name__ == "__main__":
    main()
