"""The ratio rules: right ones are consistent with the target, wrong ones are not.

Fixed seeds: no outcome ever changes. A right engine fails for 1 in 10^6 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from specdec import SamplingParams, SpecDecoder
from specdec.spec_decode import rejection_sampler
from specdec.spec_decode.commit import Accepted
from specdec.spec_decode.rejection_sampler import AcceptedPrefix, Proposed
from specdec.tools.parity import DistributionCertificate, certify

from .harness import TinyModel, make_decoder, make_prompts
from .test_tokens import FAULTS

Patch = pytest.MonkeyPatch
BY_RULE = pytest.mark.parametrize("rule", ["rejection", "block"])
VOCAB = 9


@pytest.fixture
def decoder(tiny_model: TinyModel) -> SpecDecoder:
    return make_decoder(
        tiny_model, vocab_size=VOCAB, config={"batch_size": 125, "num_draft_tokens": 2}
    )


def verified(
    decoder: SpecDecoder, rule: Any, *, draws: int = 500, **changes: Any
) -> DistributionCertificate:
    params = SamplingParams(max_tokens=5, temperature=1.5, verification=rule, seed=11)
    certificate = certify(
        decoder, make_prompts(2, VOCAB), replace(params, **changes), draws=draws
    )
    assert isinstance(certificate, DistributionCertificate)
    return certificate


@BY_RULE
def test_right_rules_are_consistent(decoder: SpecDecoder, rule: str) -> None:
    certificate = verified(decoder, rule)
    assert (certificate.verdict, certificate.passed) == ("consistent", True)
    assert certificate.df > 30
    assert 0 < certificate.accepted < certificate.drafted
    assert min(certificate.p_values.values()) > 1e-3
    # The prompts themselves, and what comes after some of their tokens.
    assert [t.fit.draws for t in certificate.prefixes if not t.tokens] == [500, 500]
    assert max(len(t.tokens) for t in certificate.prefixes) >= 3
    assert all(t.fit.draws >= 20 for t in certificate.prefixes)
    fields = certificate.to_dict()
    assert fields["df"] == certificate.df
    assert len(fields["prefixes"]) == len(certificate.prefixes)  # type: ignore[arg-type]


@BY_RULE
def test_a_peaked_distribution(decoder: SpecDecoder, rule: str) -> None:
    """With one likely token there is hardly a cell; what is beside it still counts."""
    certificate = verified(decoder, rule, temperature=0.05, draws=40)
    assert certificate.verdict == "consistent"


def test_nothing_drafted_certifies_nothing(tiny_model: TinyModel) -> None:
    decoder = make_decoder(tiny_model, vocab_size=VOCAB, draft="none")
    certificate = verified(decoder, "rejection", draws=40)
    assert (certificate.verdict, certificate.passed) == ("incomplete", False)


def test_a_row_with_an_error_is_a_failure(decoder: SpecDecoder) -> None:
    weight = decoder.target.model.model.norm.weight
    decoder.target.model.model.norm.weight = weight * float("nan")
    certificate = verified(decoder, "rejection", draws=20)
    assert certificate.verdict == "failure"
    assert len(certificate.errors) == 40


# Faults of the rules.


def draws_changed(change: Callable[[mx.array], mx.array]) -> Callable[[Patch], None]:
    """Both rules compare with other draws than uniform ones."""

    def plant(patch: Patch) -> None:
        for name in ("rejection", "block"):
            right = getattr(rejection_sampler, name)

            def wrong(
                proposed: Proposed, uniform: mx.array, right: Any = right
            ) -> AcceptedPrefix:
                prefix: AcceptedPrefix = right(proposed, change(uniform))
                return prefix

            patch.setattr(rejection_sampler, name, wrong)

    return plant


def extra_from_the_target(patch: Patch) -> None:
    """After a rejection, draws from P in place of what P has over Q."""
    right = rejection_sampler.with_extra_token

    def wrong(
        proposed: Proposed, accepted: AcceptedPrefix, gumbel: mx.array
    ) -> Accepted:
        spread = mx.zeros((*proposed.tokens.shape, proposed.target.shape[-1]))
        return right(replace(proposed, draft=spread), accepted, gumbel)

    patch.setattr(rejection_sampler, "with_extra_token", wrong)


RULE_FAULTS: dict[str, Callable[[Patch], None]] = {
    "accepts too much": draws_changed(lambda uniform: uniform * uniform),
    "extra from the target": extra_from_the_target,
    "keeps everything": draws_changed(lambda uniform: uniform * 0),
}
# Of the caches, which no rule looks at: one rule is enough to see them.
CACHE_FAULTS = {name: FAULTS[name] for name in ("stale key", "mask edge")}


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *((rule, name) for rule in ("rejection", "block") for name in RULE_FAULTS),
        ("rejection", "stale key"),
        ("block", "mask edge"),
    ],
)
def test_planted_faults_are_failures(
    decoder: SpecDecoder, rule: str, name: str, monkeypatch: Patch
) -> None:
    (RULE_FAULTS | CACHE_FAULTS)[name](monkeypatch)
    # A fault of a cache shows only after the first round, and in some rows.
    few = name in ("keeps everything", *CACHE_FAULTS)
    draws = 300 if few else 1000 if name == "extra from the target" else 700
    certificate = verified(decoder, rule, draws=draws, max_tokens=7)
    assert (certificate.verdict, certificate.passed) == ("failure", False), (
        certificate.p_values
    )
