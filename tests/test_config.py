"""Options refuse what cannot work, when they are built, by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.config import EngineConfig
from specdec.errors import ConfigError
from specdec.sampling_params import SamplingParams
from specdec.server.config import ServerConfig


def test_a_setting_that_does_not_exist_is_named_with_the_nearest() -> None:
    """Python's TypeError names a constructor, and nothing that there is."""
    for kind, values, message in (
        (EngineConfig, {"batch": 4}, "EngineConfig has no setting batch: did you mean"),
        (EngineConfig, {"max_tokens": 4}, "setting max_tokens: SamplingParams has it"),
        (EngineConfig, {"num_draft": 4}, "did you mean num_draft_tokens?"),
        (SamplingParams, {"temp": 1.0}, "did you mean temperature?"),
        (ServerConfig, {"zzz": 1}, "ServerConfig has no setting zzz: it has names,"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            kind(**values)
    with pytest.raises(ConfigError, match="by name: write batch_size="):
        EngineConfig(4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: it must be a whole number, 1 or more"),
        ({"batch_size": 50_000_000}, "batch_size is 50000000: it must be at most"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"batch_size": None}, "batch_size is None"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1: it must be a whole number"),
        ({"prefill_step_size": 0}, "prefill_step_size is 0"),
        ({"kv_bits": 5}, "kv_bits is 5: it must be 4 or 8"),
        ({"kv_bits": 4.0}, "kv_bits is 4.0: it must be 4 or 8"),
        ({"kv_bits": "4"}, "kv_bits is '4': it must be 4 or 8"),
        ({"kv_group_size": 16}, "kv_group_size is 16: it must be 32, 64 or 128"),
        ({"kv_group_size": 64.0}, "kv_group_size is 64.0: it must be 32, 64 or 128"),
        ({"kv_group_size": None}, "kv_group_size is None"),
        ({"quantized_kv_start": -1}, "quantized_kv_start is -1"),
        ({"max_kv_size": 4}, "max_kv_size is 4: it must be a whole number, 5 or more"),
        ({"prefix_cache": __file__}, f"prefix_cache is {__file__!r}: it must be"),
        ({"prefix_cache": ""}, "prefix_cache is '': it must be the path of a folder"),
        ({"prefix_cache_size": 0}, "prefix_cache_size is 0"),
        ({"prefix_cache_size": "8GB"}, "prefix_cache_size is '8GB': it must be a"),
        ({"memory_limit": "8GB"}, "memory_limit is '8GB': it must be a whole number of "
         "bytes, 1 or more: 8 GB are 8 * 10**9"),
        ({"memory_limit": 8.5}, "memory_limit is 8.5: it must be a whole number of by"),
        ({"prefix_cache_memory": -1}, "prefix_cache_memory is -1"),
        ({"prefix_cache_memory": 9, "kv_bits": 8, "quantized_kv_start": 5},
         "quantized_kv_start above 0 does not go with a prefix cache"),
    ],
)  # fmt: skip
def test_engine_config_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert str(caught.value).startswith(message)


def test_the_edges_are_allowed() -> None:
    EngineConfig(batch_size=1, num_draft_tokens=0, prefill_step_size=1)
    EngineConfig(kv_bits=8, kv_group_size=32, quantized_kv_start=0, max_kv_size=5)
    SamplingParams(max_tokens=1, temperature=0, seed=-1)
    SamplingParams(temperature=1e6)


@pytest.mark.parametrize("options", [EngineConfig(), SamplingParams()])
def test_options_are_frozen(options: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.batch_size = 2


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        EngineConfig(batch_size=0)


PerPrompt = Callable[[Any, int], list[SamplingParams]]


@pytest.fixture
def per_prompt() -> PerPrompt:
    """What ``generate`` makes of its ``params``."""
    from specdec.sampling_params import per_prompt

    return per_prompt


def test_shared_params_differ_in_their_seed(per_prompt: PerPrompt) -> None:
    assert [p.seed for p in per_prompt(SamplingParams(seed=5), 2)] == [5, 6]


def test_a_seed_that_is_not_given_is_random_where_one_is_used(
    per_prompt: PerPrompt,
) -> None:
    """Two calls would draw the same; a greedy request would report a seed in vain."""
    assert [p.seed for p in per_prompt(None, 2)] == [None, None]
    warm = SamplingParams(temperature=1.0)
    first, again = per_prompt(warm, 2), per_prompt(warm, 2)
    assert first[0].seed is not None
    assert first[1].seed == first[0].seed + 1
    assert first != again


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_params_of_each_prompt_come_in_any_iterable(
    per_prompt: PerPrompt, kind: Callable[[Any], Iterable[SamplingParams]]
) -> None:
    params = [SamplingParams(seed=3), SamplingParams(seed=3, max_tokens=1)]
    assert per_prompt(kind(params), 2) == params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 5}, "params are of type dict: give SamplingParams(...)"),
        ({}, "params are of type dict"),
        ([{"max_tokens": 5}] * 2, "params are of type dict"),
        ([SamplingParams(), None], "params are of type NoneType"),
        (5, "params are of type int: give SamplingParams(...), one, or one for each"),
        ("hot", "params are of type str"),
        (SamplingParams, "params are of type type"),
        ([], "0 SamplingParams for 2 prompts: give one, or one for each"),
        (iter([SamplingParams()] * 3), "3 SamplingParams for 2 prompts"),
    ],
)
def test_params_of_another_type(
    per_prompt: PerPrompt, params: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        per_prompt(params, 2)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


class _Fails:
    def __repr__(self) -> str:
        raise RuntimeError("it has no text")


ODD: list[Any] = [
    object(), b"x", 3.5, [], {}, float("nan"), -1, True, None, "\0", "\ud800", [None],
    {1: 2}, 10**5000, [[]], (b"",), _Fails(), "a" * 5000, range(3), set(), 1j, [1, "a"],
    Path("\0"), "a b " * 2000, len, np.array([1, 2]),
]  # fmt: skip


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams, ServerConfig])
def test_values_of_any_type(kind: Any) -> None:
    """A bare TypeError, or an error that repeats 5,000 characters."""
    for field in dataclasses.fields(kind):
        for value in ODD:
            message = field.name
            try:
                kind(**{field.name: value})
            except ConfigError as error:
                message = str(error)
            assert len(message) < 600
            assert field.name in message or "sampler or" in message, message
