"""Options of a request refuse what cannot work, when they are built, by name."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.errors import ConfigError
from specdec.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": -1}, "min_tokens is -1: it must be a whole number, 0 or more"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9: it must be at most"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"num_draft_tokens": True}, "num_draft_tokens is True"),
        ({"stop": ("",)}, "stop is '': it must be one text or several"),
        ({"stop": 5}, "stop is 5: it must be a list or a tuple"),
        ({"stop": (5,)}, "stop is 5: it must be one text"),
        ({"stop": b"x"}, "stop is b'x'"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5: it must be a list or a tuple"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids is -1"),
        ({"stop_token_ids": None}, "stop_token_ids is None"),
        ({"xtc_special_tokens": (1.0,)}, "xtc_special_tokens is 1.0"),
        ({"xtc_probability": 1.1}, "xtc_probability is 1.1: it must be a number from"),
        ({"xtc_threshold": 0.6}, "xtc_threshold is 0.6: it must be a number from 0 to"),
        ({"top_p": 0}, "top_p is 0: it must be a number above 0, at most 1 (1 keeps"),
        ({"min_p": NAN}, "min_p is nan: it must be a number from 0 to 1 (0 keeps all)"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.9}, "top_p needs a temperature above 0: at 0 nothing is drawn"),
        ({"min_p": 0.1}, "min_p needs a temperature above 0"),
        ({"top_k": 5}, "top_k needs a temperature above 0"),
        ({"xtc_probability": 0.5}, "xtc_probability needs a temperature above 0"),
        ({"xtc_threshold": 0.3, "temperature": 1.0}, "xtc_threshold needs xtc_proba"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0: it must be a number abo"),
        ({"repetition_penalty": INF}, "repetition_penalty is inf"),
        ({"presence_penalty": "1"}, "presence_penalty is '1'"),
        ({"frequency_penalty": NAN}, "frequency_penalty is nan"),
        ({"presence_context_size": 0}, "presence_context_size is 0"),
        ({"logit_bias": [1]}, "logit_bias is [1]: it must be a mapping"),
        ({"logit_bias": {-1: 0.5}}, "logit_bias is {-1: 0.5}"),
        ({"logit_bias": {"1": 0.5}}, "logit_bias is {'1': 0.5}"),
        ({"logit_bias": {1: INF}}, "logit_bias is {1: inf}"),
        ({"logit_bias": {1: NAN}}, "logit_bias is {1: nan}"),
        ({"logits_processors": (3,)}, "3 is no sampler or logits processor: pass a f"),
        ({"logits_processors": 3}, "logits_processors is 3: it must be a list or a t"),
        ({"sampler": "greedy"}, "'greedy' is no sampler or logits processor"),
        ({"sampler": len, "temperature": 1.0}, "sampler replaces temperature: leave"),
        ({"sampler": len, "top_k": 4}, "sampler replaces top_k"),
        ({"max_tokens": 2**31}, "max_tokens is 2147483648: it must be a whole number,"),
        ({"repetition_penalty": 10**400}, "repetition_penalty is 1"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty is 1e-45: it must be a"),
        ({"presence_penalty": 1e39}, "presence_penalty is 1e+39: it must be a number"),
        ({"frequency_penalty": -(10**400)}, "frequency_penalty is -1"),
        ({"logit_bias": {1: 4e38}}, "logit_bias is {1: 4e+38}"),
        ({"logit_bias": {1: 10**400}}, "logit_bias is {1: 1"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": -0.1}, "temperature is -0.1: it must be a number from 0"),
        ({"temperature": NAN}, "temperature is nan"),
        ({"temperature": 1000001}, "temperature is 1000001: it must be a number"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 10**400}, "top_p is 1000"),
        ({"max_tokens": 10**400}, "max_tokens is 1000"),
        ({"max_tokens": 0}, "max_tokens is 0: it must be a whole number, 1 or more"),
        ({"repetition_context_size": 10**30}, "repetition_context_size is 1"),
        ({"frequency_context_size": 2**31}, "frequency_context_size is 2147483648"),
        ({"seed": 1.5}, "seed is 1.5: it must be a whole number"),
        ({"stop": ["a"] * 129}, "stop has 129 texts: give at most 128"),
        ({"stop": "a" * 513}, "a stop text has 513 characters: give at most 512"),
        ({"logprobs": 1}, "logprobs is 1: it must be a bool"),
        ({"top_logprobs": -1}, "top_logprobs is -1"),
        ({"top_logprobs": 1001}, "top_logprobs is 1001: it must be at most 1000"),
        ({"verification": "ratio"}, "verification is 'ratio': it must be coupled, rej"),
        ({"verification": "block", "sampler": len}, "verification 'block' needs the w"),
        ({"verification": "rejection", "logits_processors": (len,)},
         "verification 'rejection' needs the whole distribution"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**options)
    assert str(caught.value).startswith(message)


def test_one_value_needs_no_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(logits_processors=max).logits_processors == (max,)  # type: ignore[arg-type]
    assert SamplingParams(logits_processors=[max]).logits_processors == (max,)  # type: ignore[arg-type]


def test_what_was_given_can_change_without_harm() -> None:
    bias, ids = {1: 2.0}, [3]
    params = SamplingParams(logit_bias=bias, stop_token_ids=ids)  # type: ignore[arg-type]
    bias[2] = 5.0
    ids.append(4)
    assert params.logit_bias == {1: 2.0}
    assert params.stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("options", "context_size"),
    [
        ({}, 0),
        ({"repetition_penalty": 1, "repetition_context_size": 500}, 0),
        ({"presence_penalty": 0.0, "presence_context_size": 500}, 0),
        ({"repetition_penalty": 1.1}, 20),
        ({"frequency_penalty": 0.1, "frequency_context_size": 64}, 64),
    ],
)
def test_context_size(options: dict[str, Any], context_size: int) -> None:
    assert SamplingParams(**options).context_size == context_size


def test_only_requests_that_draw_get_a_seed() -> None:
    """One for all of them, as 0 was, lets concurrent requests draw the same."""
    assert SamplingParams().seeded().seed is None
    assert SamplingParams(temperature=1.0, seed=7).seeded().seed == 7
    warm = SamplingParams(temperature=1.0), SamplingParams(sampler=len)
    seeds = {p.seeded().seed for p in warm for _ in range(8)}
    assert None not in seeds
    assert len(seeds) == 16  # false alarm: 3 in 10**8
