"""Token for token: right engines pass, ties are distinguished, faults never pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from specdec import SamplingParams, SpecDecoder, backend
from specdec.cache import positions
from specdec.engine.batch import DecodeBatch
from specdec.models.runner import ModelRows
from specdec.spec_decode import Round, commit
from specdec.spec_decode.commit import count_kept
from specdec.spec_decode.verifier import Decision, Verifier
from specdec.tools.parity import TokenCertificate, certify

from .harness import ROUNDING, TinyModel, make_decoder, make_prompts

Patch = pytest.MonkeyPatch


def verified(
    decoder: SpecDecoder, *, max_tokens: int = 24, temperature: float = 0.0, **more: Any
) -> TokenCertificate:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5)
    certificate = certify(decoder, make_prompts(), params, **more)
    assert isinstance(certificate, TokenCertificate)
    return certificate


@pytest.mark.parametrize(
    ("dtype", "temperature", "draft"),
    [
        (mx.float32, 0.0, "near"),
        (mx.float32, 1.0, "near"),
        (mx.float32, 0.0, "none"),
        (mx.float32, 1.0, "none"),
        (mx.bfloat16, 1.0, "near"),
    ],
    ids=str,
)
def test_without_fault_nothing_diverges(
    tiny_model: TinyModel, dtype: mx.Dtype, temperature: float, draft: str
) -> None:
    """Models of this size are rounded almost alike in every shape."""
    decoder = make_decoder(tiny_model, dtype=dtype, draft=draft)
    certificate = verified(decoder, temperature=temperature)
    assert (certificate.verdict, certificate.passed) == ("exact", True)
    assert certificate.compared == certificate.tokens == 6 * 24
    assert certificate.logprob_difference < 1e-4
    assert (certificate.drafted > 0) == (draft == "near")
    assert not certificate.divergences
    assert not certificate.errors


def test_rows_that_end(tiny_model: TinyModel) -> None:
    """A token that ends a row is compared, and nothing is expected after it."""
    decoder = make_decoder(tiny_model, ends=frozenset(range(8)))
    certificate = verified(decoder, max_tokens=40, temperature=1.0)
    assert certificate.verdict == "exact"
    assert certificate.compared == certificate.tokens < 6 * 40


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_keys_and_values(tiny_model: TinyModel, bits: int) -> None:
    decoder = make_decoder(
        tiny_model,
        head_dim=32,
        config={"kv_bits": bits, "kv_group_size": 32, "prefill_step_size": 8},
    )
    certificate = verified(decoder)
    assert certificate.passed, certificate
    assert certificate.compared == certificate.tokens


@pytest.mark.parametrize("bits", [4, 8])
def test_the_reference_unpacks_where_the_engine_does(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """Packed and unpacked keys are rounded in another order, in 16 bits."""
    usual = backend.defaults()
    monkeypatch.setitem(backend._DEFAULTS, usual.name, replace(usual, unpacks=True))
    decoder = make_decoder(
        tiny_model,
        head_dim=32,
        dtype=mx.bfloat16,
        config={"kv_bits": bits, "kv_group_size": 32, "prefill_step_size": 8},
    )
    certificate = verified(decoder)
    assert certificate.passed, [d.reason for d in certificate.divergences]
    assert certificate.compared == certificate.tokens


@pytest.mark.parametrize(
    ("dtype", "temperature"), [(mx.float32, 0.0), (mx.bfloat16, 1.0)], ids=str
)
def test_ties_of_a_machine_that_rounds(
    tiny_model: TinyModel, dtype: mx.Dtype, temperature: float
) -> None:
    """All are ties, and everything after them is compared."""
    decoder = make_decoder(tiny_model, dtype=dtype, rounding=True)
    certificate = verified(decoder, temperature=temperature, max_tokens=48)
    assert certificate.verdict == "ties", [d.reason for d in certificate.divergences]
    assert 0 < certificate.ties == len(certificate.divergences) <= 6 * 16
    assert certificate.compared == certificate.tokens == 6 * 48
    assert certificate.restarts > 0
    places = [(d.prompt, d.position) for d in certificate.divergences]
    assert len(set(places)) == len(places)
    for d in certificate.divergences:
        e = d.evidence
        assert e is not None
        assert d.prefix_tokens == len(make_prompts()[d.prompt]) + d.position
        assert (e.step.batch_size, e.step.width) == (1, 1)
        assert (e.verify.batch_size, e.verify.width) == (4, 4)
        assert 0 < e.noise < 2 * ROUNDING
        assert 0 <= e.step.gap <= 2 * e.noise
        assert 0 <= e.step.top2_gap <= e.step.gap
        assert e.gap_noise <= 2 * e.noise + 1e-6
        assert e.logprob_difference is not None


def test_restarts_are_bounded(tiny_model: TinyModel) -> None:
    """What was not compared is said, and does not pass."""
    decoder = make_decoder(tiny_model, rounding=True)
    certificate = verified(decoder, max_tokens=48, max_restarts=0)
    assert (certificate.verdict, certificate.passed) == ("incomplete", False)
    assert certificate.restarts == 0
    assert certificate.compared < certificate.tokens
    assert certificate.failures == 0


# Faults: each is what a plausible mistake would do.


def trim_off(by: int) -> Callable[[Patch], None]:
    def trim_off_by_one(patch: Patch) -> None:
        right = ModelRows.trim_per_sequence

        def wrong(self: ModelRows, n: Any, at_most: int, *_: int) -> None:
            off = n if isinstance(n, list) else mx.maximum(n + by, 0)
            right(self, off, at_most + 1)

        patch.setattr(ModelRows, "trim_per_sequence", wrong)
        # Rows that grow too long must not write past their slots.
        room = DecodeBatch._max_length
        patch.setattr(DecodeBatch, "_max_length", lambda self: room(self) + 200)

    return trim_off_by_one


def stale_key(patch: Patch) -> None:
    """A query sees the slot after its own too: a rejected token's, or padding."""
    right = positions.visible_slots

    def wrong(
        layout: Any, rules: Any, offset: Any, n: int, slots: int, **how: Any
    ) -> mx.array:
        return right(layout, rules, offset, n + 1, slots, **how)[:, :, 1:]

    patch.setattr("specdec.cache.core.visible_slots", wrong)


def stale_key_of_the_last_round(patch: Patch) -> None:
    """The oldest rejected token's key stays visible to the next round's last query."""
    right = positions.visible_slots

    def wrong(
        layout: Any, rules: Any, offset: Any, n: int, slots: int, **how: Any
    ) -> mx.array:
        seen = right(layout, rules, offset, n, slots, **how)
        beyond = mx.arange(slots) == (offset + n)[:, None]
        last = mx.arange(n)[:, None] == n - 1
        shown: mx.array = seen | (beyond[:, None, None, :] & last)
        return shown

    patch.setattr("specdec.cache.core.visible_slots", wrong)


def mask_edge(patch: Patch) -> None:
    """A query does not see its own key."""
    right = positions.visible_slots

    def wrong(
        layout: Any, rules: Any, offset: Any, n: int, slots: int, **how: Any
    ) -> mx.array:
        return right(layout, rules, mx.maximum(offset - 1, 0), n, slots, **how)

    patch.setattr("specdec.cache.core.visible_slots", wrong)


class Shifted:
    """A cache that gives a model a position too far."""

    def __init__(self, cache: Any):
        self._cache = cache

    @property
    def offset(self) -> mx.array:
        offset: mx.array = self._cache.offset
        return offset + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def shifted_position(patch: Patch) -> None:
    """Rounds rotate queries and keys by a position too far, prefill does not."""

    def wrong(self: ModelRows, tokens: mx.array) -> mx.array:
        caches: list[Any] = self._caches
        if tokens.shape[1] == self._max_round:
            caches = [Shifted(c) for c in caches]
        logits: mx.array = self.runner.model(tokens, cache=caches)
        return logits

    patch.setattr(ModelRows, "forward", wrong)


def one_token_too_many(patch: Patch) -> None:
    def wrong(proposed: mx.array, chosen: mx.array, limit: mx.array) -> mx.array:
        return mx.minimum(count_kept(proposed, chosen, limit) + 1, chosen.shape[1])

    patch.setattr(commit, "count_kept", wrong)
    patch.setattr("specdec.spec_decode.verifier.committer", lambda: commit.commit)


def trim_to_the_minimum(patch: Patch) -> None:
    right = ModelRows.trim_per_sequence

    def wrong(self: ModelRows, n: Any, at_most: int, *_: int) -> None:
        uniform = n if isinstance(n, list) else mx.broadcast_to(n.max(), n.shape)
        right(self, uniform, at_most)

    patch.setattr(ModelRows, "trim_per_sequence", wrong)


FAULTS = {
    "trim one too many": trim_off(+1),
    "trim one too few": trim_off(-1),
    "stale key": stale_key,
    "stale key of the last round": stale_key_of_the_last_round,
    "mask edge": mask_edge,
    "shifted position": shifted_position,
    "one token too many": one_token_too_many,
    "trim to the minimum": trim_to_the_minimum,
}


@pytest.mark.parametrize(
    ("name", "rounding"),
    [*((name, True) for name in FAULTS), ("trim one too few", False)],
)
def test_planted_faults_are_failures(
    tiny_model: TinyModel, name: str, rounding: bool, monkeypatch: Patch
) -> None:
    """Also where ties happen: what a fault does to a choice is none of them.

    Nor is a wrong token whose gap is larger than rounding can make it.
    """
    FAULTS[name](monkeypatch)
    dtype = mx.bfloat16 if rounding else mx.float32
    decoder = make_decoder(tiny_model, dtype=dtype, rounding=rounding)
    certificate = verified(decoder)
    assert (certificate.verdict, certificate.passed) == ("failure", False)
    failed = [d for d in certificate.divergences if d.kind == "failure"]
    assert failed
    for d in failed:
        assert d.reason
        if d.evidence is not None:  # measured without this engine, so without fault
            assert d.evidence.noise < (2 * ROUNDING if rounding else 1e-4)
    for d in certificate.divergences:
        if d.evidence is not None and d.evidence.step.gap > 4 * ROUNDING:
            assert d.kind == "failure"


def test_a_fault_after_a_tie_is_found(
    tiny_model: TinyModel, monkeypatch: Patch
) -> None:
    """A row that differs by a tie first, and is wrong from two tokens after it on."""
    decoder = make_decoder(tiny_model, rounding=True)
    without = verified(decoder, max_tokens=48)
    first = {d.prompt: d.position for d in reversed(without.divergences)}
    # Of the rows that begin together, so that shapes are what they were.
    i, tie = min((item for item in first.items() if item[0] < 4), key=lambda x: x[1])
    wrong_from = len(make_prompts()[i]) + tie + 2
    right = Verifier.decide

    def wrong(
        self: Verifier, round_: Round, inputs: Any, proposals: Any, logits: mx.array,
        *limit: Any, **options: Any,
    ) -> Decision:  # fmt: skip
        late = round_.lengths[:, None] + mx.arange(logits.shape[1]) >= wrong_from
        logits = mx.where(
            late[..., None],
            mx.concatenate([logits[..., -1:], logits[..., :-1]], -1),
            logits,
        )
        return right(self, round_, inputs, proposals, logits, *limit, **options)

    monkeypatch.setattr(Verifier, "decide", wrong)
    certificate = verified(decoder, max_tokens=48)
    kinds = [(d.kind, d.position) for d in certificate.divergences if d.prompt == i]
    assert kinds == [("tie", tie), ("failure", tie + 2)]


def test_a_row_that_ends_early_is_a_failure(
    tiny_model: TinyModel, monkeypatch: Patch
) -> None:
    from specdec.request import Request

    monkeypatch.setattr(
        Request,
        "remaining",
        property(lambda self: self.params.max_tokens - 1 - len(self.tokens)),
    )
    certificate = verified(make_decoder(tiny_model))
    assert certificate.verdict == "failure"
    assert {d.position for d in certificate.divergences} == {23}
    assert all(d.engine is None and d.evidence is None for d in certificate.divergences)


def test_a_row_with_an_error_is_a_failure(tiny_model: TinyModel) -> None:
    decoder = make_decoder(tiny_model)
    weight = decoder.target.model.model.norm.weight
    decoder.target.model.model.norm.weight = weight * float("nan")
    certificate = verified(decoder)
    assert certificate.verdict == "failure"
    assert certificate.compared == 0
    assert [i for i, _ in certificate.errors] == list(range(6))
    assert "NaN" in certificate.errors[0][1]
