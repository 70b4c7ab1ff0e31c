"""What is compared, what is refused, and how it reads."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest

from specdec import ConfigError, PromptError, SamplingParams
from specdec.cuda.fused_linear import JoinedLinear, join_products
from specdec.tools.parity import TokenCertificate, certify, summary

from .harness import TinyModel, make_decoder, make_prompts


@pytest.mark.parametrize(
    ("params", "config", "message"),
    [
        ({"top_p": 0.9, "temperature": 1.0}, {}, "top_p is not verified: leave it out"),
        ({"stop": ("a",)}, {}, "stop is not verified"),
        ({"repetition_penalty": 1.2}, {}, "repetition_penalty is not verified"),
        ({}, {"max_kv_size": 64}, "max_kv_size makes"),
        (
            {},
            {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 9},
            "quantized_kv_start makes",
        ),
    ],
)
def test_what_has_no_plain_counterpart_is_refused(
    tiny_model: TinyModel, params: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    decoder = make_decoder(tiny_model, head_dim=32, config=config)
    with pytest.raises(ConfigError, match=message):
        certify(decoder, [[5, 6]], SamplingParams(max_tokens=4, **params))


def test_prompts_that_cannot_be_used(tiny_model: TinyModel) -> None:
    decoder = make_decoder(tiny_model)
    with pytest.raises(PromptError, match="no prompts"):
        certify(decoder, [])
    with pytest.raises(PromptError, match="prompt 1: it is empty"):
        certify(decoder, [[5], []])
    for option, value in (("draws", 5), ("max_restarts", -1)):
        with pytest.raises(ConfigError, match=f"{option} is {value}"):
            certify(decoder, [[5]], **{option: value})  # type: ignore[arg-type]


def test_the_chat_template_can_be_ignored(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run can: a certificate of other prompts would say nothing about it."""
    decoder = make_decoder(tiny_model)
    rendered: list[Any] = []

    def render(messages: Any, **options: Any) -> str:
        rendered.append(messages)
        return f"<{messages[0]['content']}>"

    monkeypatch.setattr(decoder.tokenizer, "has_chat_template", True)
    decoder.tokenizer.apply_chat_template = render
    for ignored in (True, False):
        assert not rendered
        params = SamplingParams(max_tokens=2)
        certificate = certify(decoder, ["Hi"], params, ignore_chat_template=ignored)
        assert certificate.verdict == "exact"
    assert rendered


def test_every_prompt_has_a_seed_of_its_own(tiny_model: TinyModel) -> None:
    """As generate() has it: the certificate is about what a user gets."""
    decoder = make_decoder(tiny_model)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=4)
    prompts = [[5, 6, 7], [5, 6, 7]]
    certificate = certify(decoder, prompts, params)
    assert certificate.verdict == "exact"
    one, two = (r.token_ids for r in decoder.generate(prompts, params))
    assert one != two


def test_progress(tiny_model: TinyModel) -> None:
    """Rows that end together, of which nothing is known until they have ended."""
    seen: dict[str, list[tuple[int, int, float]]] = {}

    def progress(what: str, done: int, total: int, share: float) -> None:
        seen.setdefault(what, []).append((done, total, share))

    params = SamplingParams(max_tokens=6)
    certify(make_decoder(tiny_model), [[5, 6, 7], [9]], params, progress=progress)
    assert list(seen) == ["speculative", "plain", "comparing"]
    for each in seen.values():
        assert each == sorted(each)
        assert (each[0], each[-1]) == ((0, 2, 0.0), (2, 2, 1.0))
    assert [share for done, _, share in seen["speculative"] if share and not done]


def test_the_context_ends_both(tiny_model: TinyModel) -> None:
    decoder = make_decoder(tiny_model)
    decoder.target.config["max_position_embeddings"] = 12
    from specdec.decoder import SpecDecoder

    short = SpecDecoder(decoder.target, config=decoder.config)
    certificate = certify(short, [[5] * 10, [6] * 3], SamplingParams(max_tokens=20))
    assert isinstance(certificate, TokenCertificate)
    assert (certificate.verdict, certificate.tokens) == ("exact", 2 + 9)
    with pytest.raises(PromptError, match="prompt 1: it has 13 tokens"):
        certify(short, [[5], [6] * 13])


@pytest.mark.parametrize("rounding", [False, True])
def test_how_it_reads(tiny_model: TinyModel, rounding: bool) -> None:
    decoder = make_decoder(tiny_model, rounding=rounding)
    certificate = certify(decoder, make_prompts(), SamplingParams(max_tokens=30))
    assert isinstance(certificate, TokenCertificate)
    lines = summary(certificate).splitlines()
    json.dumps(certificate.to_dict(), allow_nan=False)
    if not rounding:
        assert lines == [
            "verdict: exact: 180 of 180 tokens of 6 prompts equal plain decoding; "
            f"log-probabilities within {certificate.logprob_difference:.2g}"
        ]
        return
    assert lines[0].split()[:4] == ["prompt", "token", "plain", "engine"]
    assert [line.split()[-1] for line in lines[1:-2]] == ["tie"] * certificate.ties
    assert lines[-1].startswith(f"verdict: exact up to {certificate.ties} tie")


def test_a_fault_of_fitted_layers_is_not_the_reference_s_too(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading may fit a model's products to the backend; the reference has mlx-lm's."""
    decoder = make_decoder(tiny_model)
    join_products(decoder.target.model)
    params = SamplingParams(max_tokens=16)
    assert certify(decoder, make_prompts(), params).verdict == "exact"
    exact = JoinedLinear.__call__

    def wrong(self: JoinedLinear, x: mx.array) -> mx.array:
        y = exact(self, x)
        return y.at[..., 0].multiply(-1.0)

    monkeypatch.setattr(JoinedLinear, "__call__", wrong)
    assert certify(decoder, make_prompts(), params).verdict == "failure"
