"""Options refuse what cannot work, when they are built, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specdec.config import EngineConfig, SamplingParams
from specdec.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: it must be a whole number, 1 or more"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"batch_size": None}, "batch_size is None"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1: it must be a whole number"),
        ({"prefill_step_size": 0}, "prefill_step_size is 0"),
        ({"read_bucket": 0}, "read_bucket is 0"),
    ],
)
def test_engine_config_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: it must be a whole number, 1 or more"),
        ({"temperature": -0.1}, "temperature is -0.1: it must be a finite number"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"seed": 1.5}, "seed is 1.5: it must be a whole number"),
    ],
)
def test_sampling_params_refuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**options)
    assert str(caught.value).startswith(message)


def test_the_edges_are_allowed() -> None:
    EngineConfig(batch_size=1, num_draft_tokens=0, prefill_step_size=1, read_bucket=1)
    SamplingParams(max_tokens=1, temperature=0, seed=-1)


@pytest.mark.parametrize("options", [EngineConfig(), SamplingParams()])
def test_options_are_frozen(options: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.batch_size = 2


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        EngineConfig(batch_size=0)
