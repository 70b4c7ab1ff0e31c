"""Rows that follow grammars: the target's masked choice, whatever is drafted."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest

from specdec.grammar import Grammar, GrammarCompiler, GrammarState
from specdec.request import Request
from specdec.sampling.grammar_masks import GrammarMasks
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import ChainDrafter, DraftModel, NgramDrafter
from tests.byte_tokenizer import byte_tokenizer
from tests.plain import AT_ONCE, BEHIND, Masked, greedy, plainly, run_rows
from tests.scripted import Script

TOKENIZER: Any = byte_tokenizer()
# Logits beyond the vocabulary, as padded embeddings have them.
VOCAB = len(TOKENIZER.get_vocab()) + 7
ENDS = frozenset(TOKENIZER.eos_token_ids)
SCHEMAS = 120


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Any]) -> Any:
    return tiny_model("llama", seed=0, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def draft(target: Any, tiny_model: Callable[..., Any]) -> Any:
    """Agrees often, but not always: the target's weights, disturbed."""
    disturbed = tiny_model("llama", seed=0, vocab_size=VOCAB)
    projection = disturbed.model.layers[1].mlp.down_proj
    noise = mx.random.normal(projection.weight.shape, key=mx.random.key(3))
    projection.weight = projection.weight + 0.2 * noise
    return disturbed


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB)


def schema_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema whose values are short, so that most outputs end."""
    kinds = ["enum", "const", "string", "integer", "boolean", "null", "pattern"]
    if depth < 2:
        kinds += ["object"] * 4 + ["array", "anyOf"]
    kind = rng.choice(kinds) if depth else "object"
    if kind == "enum":
        return {"enum": rng.sample(["a", "true", 10, 1.5, None, "x\ny", "name"], 3)}
    if kind == "const":
        return {"const": rng.choice(["name", 110, True, {"name": "al"}])}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 3)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[ab]{2}$", "^(al|se)+x$"])}
    if kind == "integer":
        low = rng.randint(-20, 100)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 99)}
    if kind == "object":
        names = rng.sample(["name", "n", "true", "a b", "é", "id"], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: schema_of(rng, depth + 1) for name in names},
            "required": names[: rng.randint(0, len(names))],
            "additionalProperties": False,
        }
    if kind == "array":
        most = rng.randint(0, 2)
        return {"type": "array", "items": schema_of(rng, depth + 1), "maxItems": most}
    if kind == "anyOf":
        return {"anyOf": [schema_of(rng, depth + 1) for _ in range(2)]}
    return {"type": kind}


def job() -> tuple[list[dict[str, Any]], list[list[int]], list[SamplingParams]]:
    """Schemas, prompts, and settings that differ from row to row."""
    rng = random.Random(11)
    schemas = [schema_of(rng) for _ in range(SCHEMAS)]
    prompts = [
        [rng.randrange(VOCAB) for _ in range(rng.choice((1, 4, 20)))] for _ in schemas
    ]
    more: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
        {"presence_penalty": 1.0, "logit_bias": {7: 3.0, 8: float("-inf")}},
        {"temperature": 1.5, "top_k": 20, "top_logprobs": 3},
        {"temperature": 0.5, "num_draft_tokens": 1, "frequency_penalty": 0.3},
    ]
    params = [
        SamplingParams(
            max_tokens=90,
            seed=i,
            grammar=Grammar.json_schema(schema),
            **more[i % len(more)],
        )
        for i, schema in enumerate(schemas)
    ]
    return schemas, prompts, params


@pytest.fixture(scope="module")
def wanted(target: Any, compiler: GrammarCompiler) -> list[Request]:
    """The rows of the job without a draft."""
    _, prompts, params = job()
    return run_rows(
        target, None, prompts, params, batch_size=40, eos=ENDS, grammars=compiler
    )


def same(rows: Sequence[Request], wanted: Sequence[Request]) -> bool:
    return all(
        (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)
        for a, b in zip(rows, wanted, strict=True)
    )


def test_every_finished_output_is_what_its_schema_says(
    wanted: Sequence[Request],
) -> None:
    """A mask that is missing, or of another row, lets through what does not parse."""
    schemas, _, _ = job()
    ended = 0
    for schema, row in zip(schemas, wanted, strict=True):
        assert row.error is None
        if row.finish_reason == "stop":
            jsonschema.validate(json.loads(TOKENIZER.decode(row.tokens)), schema)
            ended += 1
    assert ended > 0.9 * SCHEMAS


@pytest.mark.parametrize(
    ("name", "k", "batch_size", "backend", "few"),
    [
        ("model", 3, 40, AT_ONCE, slice(None)),
        ("model", 1, 7, BEHIND, slice(0, 40)),
        ("ngram", 4, 30, AT_ONCE, slice(40, 80)),
        ("chain", 5, 25, BEHIND, slice(80, 120)),
    ],
)
def test_a_draft_changes_nothing(
    name: str,
    k: int,
    batch_size: int,
    backend: Any,
    few: slice,
    target: Any,
    draft: Any,
    compiler: GrammarCompiler,
    wanted: Sequence[Request],
) -> None:
    """Whoever proposes: the state goes back by what was rejected, rows join others."""
    _, prompts, params = job()
    rows = run_rows(
        target,
        draft if name == "model" else None,
        prompts[few],
        params[few],
        batch_size=batch_size,
        num_draft_tokens=k,
        backend=backend,
        eos=ENDS,
        grammars=compiler,
        drafter=None if name == "model" else drafter_of(name, draft, k, backend),
        # With and without proposals, in turn, and looks at what would be proposed.
        length=Script(lambda n: (4, 0, 3, 1)[n % 4]) if name == "ngram" else None,
    )
    assert same(rows, wanted[few])
    drafted, accepted = (
        sum(getattr(row, what) for row in rows) for what in ("drafted", "accepted")
    )
    assert 0.1 * drafted < accepted < drafted


def drafter_of(name: str, model: Any, k: int, backend: Any) -> Any:
    if name == "ngram":
        return NgramDrafter()
    from specdec.config import EngineConfig
    from specdec.models.runner import ModelRunner

    config = EngineConfig(batch_size=64, num_draft_tokens=k)
    runner = ModelRunner(model, "draft", config, backend)
    second = DraftModel(runner, vocab_size=VOCAB, max_draft_tokens=k)
    return ChainDrafter(NgramDrafter(), second)


def test_tokens_and_logprobs_are_those_of_plain_decoding(
    target: Any, compiler: GrammarCompiler, wanted: Sequence[Request]
) -> None:
    """mlx-lm alone, with a processor that masks.

    Wrong were another order of bias, penalties, mask and filters, and log-probabilities
    in which a refused token has a part.
    """
    _, prompts, params = job()
    for i in range(20):
        grammar = params[i].grammar
        assert grammar is not None
        mask = Masked(compiler, grammar, len(prompts[i]))
        alone = replace(params[i], grammar=None, logits_processors=(mask,))
        plain = plainly(target, prompts[i], alone, ENDS)
        assert plain.tokens == wanted[i].tokens
        assert plain.finish_reason == wanted[i].finish_reason
        for entry, token, logprobs in zip(
            wanted[i].logprobs, plain.tokens, plain.logprobs, strict=False
        ):
            assert abs(entry.logprob - float(logprobs[token])) < 1e-4
            assert 0 < len(entry.top) <= 3
            assert all(float(logprobs[t]) > -mx.inf for t, _ in entry.top)
    assert any(len(e.top) < 3 for row in wanted for e in row.logprobs)


def never_back(self: GrammarState, ahead: Sequence[int]) -> None:
    for token in ahead[len(self._ahead) :]:
        if not self._matcher.consume_token(token):
            return
        self._ahead.append(token)


def one_late(self: GrammarMasks, logits: mx.array, proposed: mx.array) -> mx.array:
    masked = GRAMMAR_MASK(self, logits, proposed)
    before = mx.concatenate([masked[:, :1], masked[:, :-1]], axis=1)
    return mx.where(before > -mx.inf, logits, -mx.inf)


def first_only(self: GrammarMasks, logits: mx.array, proposed: mx.array) -> mx.array:
    masked = GRAMMAR_MASK(self, logits, proposed)
    return mx.concatenate([masked[:, :1], logits[:, 1:]], axis=1)


GRAMMAR_MASK = GrammarMasks.mask


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (GrammarState, "move", never_back),
        (GrammarMasks, "mask", one_late),
        (GrammarMasks, "mask", first_only),
    ],
)
def test_planted_faults_are_seen(
    place: Any,
    name: str,
    fault: Any,
    target: Any,
    draft: Any,
    compiler: GrammarCompiler,
    wanted: Sequence[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison above sees each of them.

    A state that keeps what was rejected, a mask of the position before, and none after
    the first.
    """
    monkeypatch.setattr(place, name, fault)
    _, prompts, params = job()
    some = slice(0, 24)
    rows = run_rows(
        target,
        draft,
        prompts[some],
        params[some],
        batch_size=24,
        eos=ENDS,
        grammars=compiler,
    )
    assert not same(rows, wanted[some])


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_sampled_texts_have_the_distribution_of_the_masked_target(
    verification: Any, target: Any, draft: Any, compiler: GrammarCompiler
) -> None:
    """Exact enumeration: proposals that are refused must count as rejected draws.

    Chi-square with 18 degrees of freedom or fewer is above 50 in one run of 10,000.
    """
    grammar = Grammar.regex("[abc]{2}(x|yz?)")
    texts = [a + b + c for a in "abc" for b in "abc" for c in ("x", "y", "yz")]
    number, prompt = 1500, [5, 6, 7]
    params = [
        SamplingParams(
            max_tokens=5,
            temperature=1.3,
            seed=i,
            grammar=grammar,
            verification=verification,
        )
        for i in range(number)
    ]
    rows = run_rows(
        target,
        draft,
        [prompt] * number,
        params,
        batch_size=250,
        eos=ENDS,
        grammars=compiler,
    )
    counts = Counter(TOKENIZER.decode(row.tokens) for row in rows)
    assert set(counts) <= set(texts)
    expected = {text: number * likelihood(target, prompt, text) for text in texts}
    assert abs(sum(expected.values()) - number) < 1e-2 * number
    rare = [t for t in texts if expected[t] < 5]
    cells = [(counts[t], expected[t]) for t in texts if expected[t] >= 5]
    cells.append((sum(counts[t] for t in rare), sum(expected[t] for t in rare)))
    assert len(cells) > 5
    assert sum((n - e) ** 2 / e for n, e in cells if e > 0) < 50
    assert 0 < sum(row.accepted for row in rows) < sum(row.drafted for row in rows)


def likelihood(model: Any, prompt: list[int], text: str) -> float:
    """Of a text of that grammar, each letter one token, at temperature 1.3."""
    (end,) = ENDS
    letters = {letter: TOKENIZER.encode(letter)[0] for letter in "abcxyz"}
    tokens = [letters[letter] for letter in text] + [end]
    allowed: list[list[int]] = [[letters[a] for a in "abc"]] * 2
    allowed += [[letters["x"], letters["y"]]]
    allowed += [[end]] if text[2] == "x" else [[letters["z"], end], [end]]
    logits = model(mx.array([prompt + tokens]))[0, len(prompt) - 1 :] / 1.3
    likely = 1.0
    for j, token in enumerate(tokens):
        some = allowed[j]
        likely *= float(mx.softmax(logits[j, mx.array(some)])[some.index(token)])
    return likely


def test_rows_beside_them_are_as_they_were(
    target: Any, draft: Any, compiler: GrammarCompiler
) -> None:
    """Rows without grammars beside rows with them, which come and go in their slots."""
    prompts = [[i + 1, 3 * i, 7] for i in range(12)]
    grammar = Grammar.regex("(ab|c){1,8}")
    params = [
        SamplingParams(max_tokens=5 + i, grammar=grammar if i % 3 == 1 else None)
        for i in range(12)
    ]
    for backend in (AT_ONCE, BEHIND):
        rows = run_rows(
            target, draft, prompts, params, batch_size=4, backend=backend,
            grammars=compiler, eos=ENDS,
        )  # fmt: skip
        for row in rows:
            if row.grammar is None:
                tokens = greedy(target, row.prompt_tokens, row.params.max_tokens)
                first = next((i for i, t in enumerate(tokens) if t in ENDS), None)
                assert row.tokens == tokens[:first]
            else:
                text = TOKENIZER.decode(row.tokens)
                assert set(text) <= set("abc")
                assert row.finish_reason == "stop"


def test_what_must_follow_is_proposed(target: Any, compiler: GrammarCompiler) -> None:
    """A text that is given costs a round for every k + 1 tokens, n-grams or not."""
    text = "qwertyuiopasdfghjklzxcvbnm"
    (row,) = run_rows(
        target,
        None,
        [[1, 2]],
        [SamplingParams(grammar=Grammar.regex(text))],
        num_draft_tokens=4,
        eos=ENDS,
        grammars=compiler,
        drafter=NgramDrafter(),
    )
    assert TOKENIZER.decode(row.tokens) == text
    assert row.finish_reason == "stop"
    assert row.rounds == -(-len(text) // 5)


def test_a_grammar_that_fails_ends_its_row_alone(
    target: Any, draft: Any, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits of llguidance, reached in the middle: its row has what came before.

    After a failure on what was only proposed, the state is as if nothing had been.
    """
    grammar = Grammar.regex("[a-z]{30}")
    prompts = [[1, 2, 3], [4, 5, 6]]
    params = [SamplingParams(max_tokens=20, grammar=grammar), SamplingParams()]
    params[1] = replace(params[1], max_tokens=20)
    options: Any = {"grammars": compiler, "eos": ENDS}
    whole = run_rows(target, None, prompts, params, **options)

    fill = GrammarState.fill

    def broken(self: GrammarState, address: int) -> bool:
        committed = self._committed + self._ahead
        if committed == whole[0].tokens[: len(committed)] and len(committed) >= 7:
            self._matcher.consume_token(VOCAB - 1)  # which it can never take
        return fill(self, address)

    monkeypatch.setattr(GrammarState, "fill", broken)
    for model in (None, draft):
        rows = run_rows(target, model, prompts, params, **options)
        assert rows[1].tokens == whole[1].tokens
        assert rows[0].finish_reason == "error"
        assert rows[0].tokens == whole[0].tokens[:7]

    monkeypatch.undo()
    state = compiler.compile(grammar)
    other = compiler.compile(grammar)
    state.commit(whole[0].tokens[:3])
    state.move(whole[0].tokens[3:5])
    state._matcher.consume_token(VOCAB - 1)
    assert state.error
    state.commit(whole[0].tokens[:6])
    other.commit(whole[0].tokens[:6])
    assert state._matcher.compute_bitmask() == other._matcher.compute_bitmask()


def test_masks_follow_the_proposals_that_are_verified(
    compiler: GrammarCompiler,
) -> None:
    """A draft asks with other tokens first; no mask made for those may be left.

    The verified proposals may leave the grammar earlier: what follows is not masked.
    """
    grammar = compiler.compile(Grammar.regex("a(bcd|xyz)*e"))
    logits = mx.zeros((1, 4, VOCAB))

    def tokens(text: str) -> mx.array:
        return mx.array([TOKENIZER.encode(text, add_special_tokens=False)])

    for asked in ("abc", "axy", "abx"):
        for verified in ("abc", "axy", "qqq", "axb", "e" * 3, "abb"):
            masks = GrammarMasks({0: grammar}, {0: ENDS}, [3], 4)
            whole = tokens(asked)
            for j in range(4):
                proposed = [whole[:, i : i + 1] for i in range(j)]
                masks.mask_next(logits[:, j : j + 1], proposed)
            masked = masks.mask(logits, tokens(verified))
            fresh = compiler.compile(Grammar.regex("a(bcd|xyz)*e"))
            alone = GrammarMasks({0: fresh}, {0: ENDS}, [3], 4)
            wanted = alone.mask(logits, tokens(verified))
            assert mx.array_equal(masked, wanted).item(), (asked, verified)


def test_an_error_of_tokens_ahead_is_gone_with_them(compiler: GrammarCompiler) -> None:
    """Those tokens may be dropped; the row's own state has no error."""
    state = compiler.compile(Grammar.regex("a(bcd|xyz)*e"))
    fresh = compiler.compile(Grammar.regex("a(bcd|xyz)*e"))
    a, b, q = (
        TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("a", "b", "q")
    )
    buffers = [np.zeros(state.num_words, np.uint32) for _ in range(2)]
    state.commit([a])
    fresh.commit([a])
    state.move([b, q])
    assert state._matcher.is_error()
    state.move([b])
    fresh.move([b])
    for each, buffer in zip((state, fresh), buffers, strict=True):
        assert each.fill(buffer.ctypes.data)
    assert (buffers[0] == buffers[1]).all()
