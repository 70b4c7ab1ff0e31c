"""The ratio test and block verification keep the target's distribution.

Three ways: the array code against the formulas written down with numpy; the
formulas by exact enumeration of everything that can happen; whole decodings by
chi-square of many draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors

from specdec.request import Request
from specdec.sampling import gumbel_noise
from specdec.sampling.noise import ACCEPT, uniform_draws
from specdec.sampling_params import SamplingParams
from specdec.spec_decode import Proposals, Round, rejection_sampler, verifier
from specdec.spec_decode.commit import next_recent
from specdec.spec_decode.rejection_sampler import AcceptedPrefix, Proposed
from specdec.spec_decode.verifier import Verifier
from tests.chains import FirstTokens, chi_square, three_tokens
from tests.plain import AT_ONCE, drawable, exact, run_rows

RULES = {"rejection": rejection_sampler.rejection, "block": rejection_sampler.block}
BY_RULE = pytest.mark.parametrize("rule", ["rejection", "block"])
Distribution = np.ndarray
DRAWS = 30_000


# -- the formulas, one row at a time ----------------------------------------


def pass_probabilities(
    rule: str, p: Distribution, q: Distribution, x: Sequence[int], k: int
) -> tuple[list[float], list[float]]:
    """h_1 .. h_k of a row, and the scale of P after 0 .. k - 1 accepted tokens.

    ``p`` has the target's distributions at k + 1 positions, ``q`` the draft's at k.
    """
    if rule == "rejection":
        return [min(1.0, p[i, x[i]] / q[i, x[i]]) for i in range(k)], [1.0] * k
    prefix = [1.0]
    h = []
    for i in range(1, k + 1):
        prefix.append(min(1.0, prefix[-1] * p[i - 1, x[i - 1]] / q[i - 1, x[i - 1]]))
        if i == k:
            h.append(prefix[k])
            continue
        mass = np.maximum(prefix[i] * p[i] - q[i], 0).sum()
        rest = mass + 1 - prefix[i]
        h.append(mass / rest if rest > 0 else 1.0)
    return h, prefix[:-1]


def count_of(rule: str, h: Sequence[float], u: np.ndarray) -> int:
    passed = [ui < hi for ui, hi in zip(u, h, strict=True)]
    if rule == "rejection":
        return next((i for i, ok in enumerate(passed) if not ok), len(h))
    return max((i + 1 for i, ok in enumerate(passed) if ok), default=0)


def extra_distribution(
    p: Distribution, q: Distribution, scale: Sequence[float], count: int, k: int
) -> Distribution:
    if count == k:
        after: Distribution = p[k]
        return after
    left = np.maximum(scale[count] * p[count] - q[count], 0)
    distribution: Distribution = left / left.sum() if left.sum() > 0 else p[count]
    return distribution


def count_probabilities(rule: str, h: Sequence[float]) -> list[float]:
    """Probability of each number of accepted tokens, over independent draws."""
    k = len(h)
    if rule == "rejection":
        return [math.prod(h[:i]) * (1 - h[i] if i < k else 1) for i in range(k + 1)]
    some = [h[i - 1] if i else 1.0 for i in range(k + 1)]
    return [some[i] * math.prod(1 - x for x in some[i + 1 :]) for i in range(k + 1)]


def random_chains(rng: np.random.Generator, v: int, length: int) -> Distribution:
    """A distribution of the next token after every prefix, shape (v, ..., v)."""
    shape = (v,) * length
    distribution: Distribution = rng.dirichlet(np.full(v, 0.6), size=shape[:-1])
    return distribution


# -- exact enumeration --------------------------------------------------------


@BY_RULE
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_formulas_by_enumeration(rule: str, k: int, limit: int, seed: int) -> None:
    """All drafts, all counts, all extra tokens: k + 1 tokens as the target draws them.

    What a round leaves open is drawn from the target. A row that may accept fewer
    than k is decided as if k were that.
    """
    k = min(k, limit)
    rng = np.random.default_rng(seed)
    v, length = 3, k + 1
    target = {n: random_chains(rng, v, n + 1) for n in range(length)}
    draft = {n: random_chains(rng, v, n + 1) for n in range(length)}
    if seed == 2:  # a token that the draft never proposes, one the target never takes
        for n in range(length):
            draft[n][..., 0] = 0
            draft[n] /= draft[n].sum(-1, keepdims=True)
            target[n][..., 2] = 0
            target[n] /= target[n].sum(-1, keepdims=True)
    got = np.zeros((v,) * length)
    for x in itertools.product(range(v), repeat=k):
        p = np.array([target[n][x[:n]] for n in range(k + 1)])
        q = np.array([draft[n][x[:n]] for n in range(k)]).reshape(k, v)
        drafted = math.prod(q[n, x[n]] for n in range(k))
        if drafted == 0:
            continue
        h, scale = pass_probabilities(rule, p, q, x, k)
        for count, probability in enumerate(count_probabilities(rule, h)):
            if probability == 0:
                continue
            extra = extra_distribution(p, q, scale, count, k)
            for token in range(v):
                prefix = (*x[:count], token)
                weight = drafted * probability * extra[token]
                for rest in itertools.product(range(v), repeat=length - len(prefix)):
                    whole = (*prefix, *rest)
                    after = math.prod(
                        target[n][whole[: n + 1]] for n in range(len(prefix), length)
                    )
                    got[whole] += weight * after
    expected = np.ones(got.shape)
    for n in range(length):
        expected = expected * target[n].reshape(
            (v,) * (n + 1) + (1,) * (length - n - 1)
        )
    np.testing.assert_allclose(got, expected, atol=1e-12)


# -- the array code is the formulas ----------------------------------------


@BY_RULE
@pytest.mark.parametrize("one_hot", [False, True])
def test_the_array_code_follows_the_formulas(rule: str, one_hot: bool) -> None:
    """Random rows of every limit: counts, and the token after them by its noise."""
    rng = np.random.default_rng(5)
    rows, k, v = 1000, 4, 5
    p = rng.dirichlet(np.full(v, 0.5), size=(rows, k + 1)).astype(np.float32)
    q = rng.dirichlet(np.full(v, 0.5), size=(rows, k)).astype(np.float32)
    x = np.array([[rng.choice(v, p=d / d.sum()) for d in row] for row in q])
    if one_hot:
        q = np.eye(v, dtype=np.float32)[x]
    limits = rng.integers(-1, k + 1, size=rows)
    u = rng.random((rows, k)).astype(np.float32)
    gumbel = rng.gumbel(size=(rows, v)).astype(np.float32)
    proposed = Proposed(
        mx.array(x.astype(np.int32)),
        mx.array(q),
        mx.array(p),
        mx.array(limits.astype(np.int32)),
    )
    prefix = RULES[rule](proposed, mx.array(u))
    accepted = rejection_sampler.with_extra_token(proposed, prefix, mx.array(gumbel))
    kept, chosen = np.array(accepted.kept), np.array(accepted.chosen)
    seen = set()
    for i in range(rows):
        n = int(limits[i])
        if n < 0:
            assert kept[i] == 0
            continue
        h, scale = pass_probabilities(rule, p[i].astype(float), q[i], x[i], n)
        count = count_of(rule, h, u[i, :n])
        extra = extra_distribution(p[i].astype(float), q[i], scale, count, n)
        with np.errstate(divide="ignore"):
            token = int(np.argmax(np.log(extra) + gumbel[i]))
        assert kept[i] == count + 1
        assert chosen[i, : count + 1].tolist() == [*x[i, :count], token]
        seen.add((n, count))
    assert {(4, 0), (4, 1), (4, 2), (1, 1), (0, 0)} <= seen
    assert one_hot or (4, 4) in seen


def test_block_verification_keeps_no_fewer_than_the_ratio_test() -> None:
    """In expectation (Sun et al. 2024, theorem 2), here on average over 10^5 rounds."""
    rng = np.random.default_rng(1)
    draws, k, v = 100_000, 4, 4
    p = rng.dirichlet(np.full(v, 0.7), size=k + 1).astype(np.float32)
    q = rng.dirichlet(np.full(v, 0.7), size=k).astype(np.float32)
    x = np.stack([rng.choice(v, size=draws, p=d / d.sum()) for d in q], axis=1)
    proposed = Proposed(
        mx.array(x.astype(np.int32)),
        mx.broadcast_to(mx.array(q), (draws, k, v)),
        mx.broadcast_to(mx.array(p), (draws, k + 1, v)),
        mx.full((draws,), k),
    )
    u = mx.array(rng.random((draws, k)).astype(np.float32))
    by_ratio = rejection_sampler.rejection(proposed, u).count.mean().item()
    by_block = rejection_sampler.block(proposed, u).count.mean().item()
    assert by_block > by_ratio * 1.01  # type: ignore[operator]


def test_equal_distributions_accept_everything() -> None:
    p = mx.broadcast_to(mx.array([0.2, 0.5, 0.3]), (50, 4, 3))
    tokens = mx.array(np.random.default_rng(0).integers(0, 3, (50, 3)).astype(np.int32))
    proposed = Proposed(tokens, p[:, :-1], p, mx.full((50,), 3))
    u = mx.full((50, 3), 0.999999)
    for rule in RULES.values():
        assert (rule(proposed, u).count == 3).all()


# -- whole decodings ----------------------------------------------------------


@cache
def rules_of(rule: str, draws: int, temperature: float, vocab_size: int) -> Verifier:
    """Of rows with a seed each."""
    usual: Any = {"temperature": temperature, "verification": rule}
    params = [SamplingParams(**usual, seed=s) for s in range(draws)]
    return Verifier.of([Request(0, "", (0,), p) for p in params], vocab_size)


def markov_chains() -> tuple[np.ndarray, np.ndarray]:
    """Logits of the next token given the last one, of a target and of a draft."""
    rng = np.random.default_rng(3)
    target = rng.normal(size=(4, 4)).astype(np.float32) * 1.5
    return target, (target + rng.normal(size=(4, 4))).astype(np.float32)


def decodings(
    rule: str, target: np.ndarray, draft: np.ndarray, k: int, draws: int,
    temperature: float, *, point_mass: bool = False,
) -> FirstTokens:  # fmt: skip
    """First three tokens of many decodings of two Markov chains, decided as rounds are.

    With ``point_mass`` the draft proposes its likeliest tokens, as a look-up would.
    """
    rules = rules_of(rule, draws, temperature, target.shape[0])
    target_logits, draft_logits = mx.array(target), mx.array(draft)
    recent = mx.zeros((draws, 2), mx.int32)
    first = mx.ones((draws,), mx.int32)
    limit, active = mx.full((draws,), k), mx.ones((draws,), mx.bool_)
    out = FirstTokens(draws)
    while not out.complete:
        noise = rules.draws(first, k + 1)
        round_ = Round(k, recent, active, rules.sampling, noise, True, lengths=first)
        inputs = recent[:, 1:]
        tokens: list[mx.array] = []
        q: list[mx.array] = []
        for _ in range(k):
            logits = draft_logits[inputs[:, -1:]]
            proposal, probabilities = round_.choose(logits, tokens)
            if point_mass:
                proposal = mx.argmax(logits, axis=-1).astype(mx.int32)
            tokens.append(proposal)
            if probabilities is not None:
                q.append(probabilities)
            inputs = mx.concatenate([inputs, proposal], axis=1)
        drawn_from = mx.concatenate(q, axis=1) if q and not point_mass else None
        proposals = Proposals(inputs[:, 1:], drawn_from)
        logits = target_logits[inputs]
        decision = rules.decide(round_, inputs, proposals, logits, limit)
        recent = next_recent(recent, decision.chosen, decision.kept)
        first = first + decision.kept
        out.add(decision.chosen, decision.kept)
    return out


@BY_RULE
@pytest.mark.parametrize(
    ("k", "temperature", "point_mass"), [(3, 1.0, False), (3, 0.7, True)]
)
def test_decodings_follow_the_target(
    rule: str, k: int, temperature: float, point_mass: bool
) -> None:
    """Chi-square of whole sequences; a right rule fails in 1 of 10^6.

    Fixed seeds: the outcome never changes. Dependent draws (the acceptance test
    reusing the draft's noise, say) fail as well as wrong formulas do.
    """
    target, draft = markov_chains()
    draws = DRAWS
    got = decodings(rule, target, draft, k, draws, temperature, point_mass=point_mass)
    expected = three_tokens(target, temperature) * draws
    statistic, bound = chi_square(got.histogram(4), expected)
    assert statistic < bound


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "filters": {"temperature": 0.8, "top_p": 0.95, "top_k": 3, "min_p": 0.05},
    "penalties": {
        "temperature": 1.3,
        "repetition_penalty": 1.6,
        "logit_bias": {0: 1.0},
    },
    "min_tokens": {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": (1,)},
}


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("rejection", "plain"),
        ("block", "plain"),
        ("rejection", "filters"),
        ("block", "penalties"),
        ("block", "min_tokens"),
    ],
)
def test_the_engine_follows_the_target(
    rule: str, settings: str, tiny_model: Callable[..., Any]
) -> None:
    """2000 requests through batches of 500, both models of five tokens.

    The second and third token by chi-square, against what mlx-lm's own functions
    leave of the target; a right engine fails in 1 of 10^6.
    """
    target = tiny_model("llama", seed=0, vocab_size=5)
    draft = tiny_model("llama", seed=3, vocab_size=5)
    scale = 0.5  # else one token has nearly all of it
    for model in (target, draft):
        model.model.norm.weight = model.model.norm.weight * scale
    draws, prompt = 2000, [1, 2, 3]
    params = [
        SamplingParams(max_tokens=3, seed=s, verification=rule, **SETTINGS[settings])  # type: ignore[arg-type]
        for s in range(draws)
    ]
    rows = run_rows(
        target, draft, [prompt] * draws, params, batch_size=500, num_draft_tokens=2,
        backend=AT_ONCE,
    )  # fmt: skip
    drafted = sum(r.drafted for r in rows)
    assert 0.2 < sum(r.accepted for r in rows) / drafted < 0.98
    counts = np.bincount([r.tokens[1] * 5 + r.tokens[2] for r in rows], minlength=25)
    first = _next(target, [prompt], params[0])[0]
    second = _next(target, [[*prompt, a] for a in range(5)], params[0])
    third = [[*prompt, a, b] for a in range(5) for b in range(5)]
    joint = first[:, None, None] * second[:, :, None]
    joint = joint * _next(target, third, params[0]).reshape(5, 5, 5)
    expected = joint.sum(0).reshape(-1) * draws
    assert counts[expected == 0].sum() == 0
    statistic, bound = chi_square(counts[expected > 0], expected[expected > 0])
    assert statistic < bound


def _next(model: Any, prompts: list[list[int]], params: SamplingParams) -> np.ndarray:
    """What plain decoding draws the next token of each prompt from."""
    processors = make_logits_processors(
        dict(params.logit_bias or {}), params.repetition_penalty
    )
    distributions = []
    for prompt in prompts:
        logits = model(mx.array([prompt]))[:, -1]
        for processor in processors:
            logits = processor(mx.array(prompt), logits)
        if params.min_tokens:
            logits[:, mx.array(params.stop_token_ids)] = -float("inf")
        drawn_from = drawable(logits[0], params) / params.temperature
        distributions.append(np.array(mx.softmax(drawn_from)))
    return np.array(distributions)


@BY_RULE
def test_greedy_rows_are_greedy_under_every_rule(
    rule: str, target: Any, drafts: dict[str, Any]
) -> None:
    params = [
        SamplingParams(max_tokens=8, verification=v)  # type: ignore[arg-type]
        for v in (rule, "coupled")
    ]
    exact(target, drafts["unrelated"], [[5, 6], [5, 6]], params)


def wrong_scale(rule: str, proposed: Proposed, u: mx.array) -> AcceptedPrefix:
    right = RULES[rule](proposed, u)
    return AcceptedPrefix(right.count, right.scale * 0.8)


def one_too_few(rule: str, proposed: Proposed, u: mx.array) -> AcceptedPrefix:
    right = RULES[rule](proposed, u)
    return AcceptedPrefix(mx.maximum(right.count - 1, 0), right.scale)


def single_tokens(rule: str, proposed: Proposed, u: mx.array) -> AcceptedPrefix:
    """The longest prefix whose last token passes the ratio test."""
    index = mx.arange(1, u.shape[1] + 1)
    count = mx.where(u < proposed.ratios(), index, 0).max(axis=1)
    return AcceptedPrefix(count, mx.ones(count.shape))


def drawn_by_position(
    seed: mx.array, first: mx.array, num_tokens: int, vocab_size: int
) -> tuple[mx.array, mx.array]:
    """The same draws in every round: a decision about prefixes leaves them biased."""
    at = first[:, None] + mx.arange(num_tokens)
    return gumbel_noise(seed, at, vocab_size), uniform_draws(seed, at, use=ACCEPT)


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("rejection", wrong_scale),
        ("block", wrong_scale),
        ("rejection", one_too_few),
        ("block", one_too_few),
        ("block", single_tokens),
        ("block", drawn_by_position),
    ],
)
def test_faults_are_caught(
    rule: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules that are nearly right do not pass the chi-square that right ones pass."""
    by_position = fault is drawn_by_position
    if by_position:
        monkeypatch.setattr(verifier, "round_draws", fault)
    else:
        monkeypatch.setattr(rejection_sampler, rule, partial(fault, rule))
    target, draft = markov_chains()
    got = decodings(rule, target, draft, 3, DRAWS, 1.0, point_mass=by_position)
    statistic, bound = chi_square(got.histogram(4), three_tokens(target, 1.0) * DRAWS)
    assert statistic > bound
