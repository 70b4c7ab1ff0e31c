"""kv_bits="auto": keys and values are packed for requests that do not fit otherwise."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from specdec import (
    EngineConfig,
    GenerationResult,
    MemoryLimitError,
    SamplingParams,
    SpecDecoder,
)
from specdec import backend as backend_
from specdec.engine.admission import row_needs
from specdec.memory.planning import plan_memory
from specdec.models import LoadedModel, load

from ..models.folders import write_folder

SHAPE: dict[str, Any] = {
    "head_dim": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
SOME = SamplingParams(max_tokens=6, logprobs=True)
SHORT, LONG = [5, 9, 11] * 10, [7, 12, 5, 40, 33] * 100
PROMPTS = [SHORT, LONG, SHORT[:20], LONG[:-5], SHORT[:7]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("models") / "m"
    write_folder(path, **SHAPE)
    return load(str(path), dtype="float32")


def config_of(**options: Any) -> EngineConfig:
    shape = {"prefill_step_size": 64, "kv_group_size": 32, "num_draft_tokens": 2}
    return EngineConfig(**{**shape, **options})


def needed(
    target: LoadedModel,
    kv_bits: int | None,
    prompt: list[int] = LONG,
    draft: LoadedModel | None = None,
) -> int:
    """Bytes of the prompt alone."""
    config = config_of(kv_bits=kv_bits)
    plan = plan_memory(target, draft, config, backend_.defaults())
    return plan.peak([row_needs(len(prompt), SOME)])


def decode(
    target: LoadedModel, draft: LoadedModel | None = None, **options: Any
) -> tuple[list[GenerationResult], SpecDecoder]:
    decoder = SpecDecoder(target, draft, config=config_of(**options))
    return decoder.generate(PROMPTS, SOME), decoder


@pytest.fixture(scope="module")
def alike(target: LoadedModel) -> dict[int | None, list[GenerationResult]]:
    """The result of every prompt, with all keys and values in so many bits."""
    return {n: decode(target, kv_bits=n)[0] for n in (None, 8, 4)}


def tokens(results: list[GenerationResult]) -> list[list[int]]:
    return [r.token_ids for r in results]


Alike = dict[int | None, list[GenerationResult]]


def distance(a: GenerationResult, b: GenerationResult) -> float:
    """Largest difference of log-probabilities, up to where the tokens differ."""
    pairs = zip(
        a.token_ids, b.token_ids, a.logprobs or [], b.logprobs or [], strict=True
    )
    found = 0.0
    for x, y, p, q in pairs:
        found = max(found, abs(p.logprob - q.logprob))
        if x != y:
            break
    return found


def check_as_alone(result: GenerationResult, index: int, alike: Alike) -> None:
    """The result is that of its own bits, to rounding."""
    expected = alike[result.kv_bits][index]
    assert result.token_ids == expected.token_ids
    assert distance(result, expected) < 1e-5


def test_with_memory_enough_nothing_changes(target: LoadedModel, alike: Alike) -> None:
    limit = needed(target, None)
    results, decoder = decode(target, kv_bits="auto", memory_limit=limit)
    assert tokens(results) == tokens(alike[None])
    assert {r.kv_bits for r in results} == {None}
    assert decoder.stats.fallbacks == {}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("with_draft", [False, True])
def test_only_what_does_not_fit_is_packed(
    target: LoadedModel, alike: Alike, bits: int, with_draft: bool
) -> None:
    """Each row is what it would be alone with its own bits; the peak stays below."""
    draft = replace(target, name="draft") if with_draft else None
    limit = needed(target, bits, draft=draft) + 100_000
    more = needed(target, {8: None, 4: 8}[bits], draft=draft)
    assert limit < more
    gc.collect()
    mx.synchronize()
    plan = plan_memory(target, draft, config_of(), backend_.defaults())
    others = mx.get_active_memory() - plan.weight_bytes
    mx.reset_peak_memory()
    results, decoder = decode(target, draft, kv_bits="auto", memory_limit=limit)
    assert mx.get_peak_memory() - others <= limit
    long = [1, 3]
    for i, result in enumerate(results):
        assert result.kv_bits == (bits if i in long else None)
        check_as_alone(result, i, alike)
        assert result.to_dict()["kv_bits"] == result.kv_bits
    assert sorted(decoder.stats.fallbacks) == long
    fallback = decoder.stats.fallbacks[1]
    assert (fallback.kv_bits, fallback.limit) == (bits, limit)
    assert fallback.packed <= limit < fallback.needed
    assert fallback.needed == needed(target, None, draft=draft)


def test_packing_is_seen(alike: Alike) -> None:
    """Every number of bits shows in log-probabilities: else these tests are blind."""
    for i in (1, 3):
        for a, b in combinations(alike.values(), 2):
            assert distance(a[i], b[i]) > 1e-4


def test_what_never_fits_is_refused_with_all_numbers(target: LoadedModel) -> None:
    limit = needed(target, 4) - 1
    decoder = SpecDecoder(target, config=config_of(kv_bits="auto", memory_limit=limit))
    with pytest.raises(MemoryLimitError) as raised:
        decoder.generate(PROMPTS, SOME)
    message = str(raised.value)
    assert message.startswith("prompt 1: 500 prompt tokens and up to 6 more need ")
    assert "with keys and values in 4 bits) and the memory limit is" in message
    assert "--kv-bits" not in message


def test_keys_that_cannot_be_packed_stay_and_the_refusal_says_why(
    tmp_path: Path,
) -> None:
    write_folder(tmp_path / "m", **{**SHAPE, "head_dim": 16})
    target = load(str(tmp_path / "m"), dtype="float32")
    assert decode(target, kv_bits="auto")[0]
    limit = needed(target, None) - 1
    decoder = SpecDecoder(target, config=config_of(kv_bits="auto", memory_limit=limit))
    with pytest.raises(MemoryLimitError, match="head size 16 cannot be quantized"):
        decoder.generate([LONG], SOME)


def test_requests_that_come_one_by_one_wait_for_rows_of_their_kind(
    target: LoadedModel, alike: Alike
) -> None:
    """What a request falls back to depends on it alone, not on what runs."""
    limit = needed(target, 8) + 100_000
    decoder = SpecDecoder(target, config=config_of(kv_bits="auto", memory_limit=limit))
    session = decoder.session()
    session.add(SHORT, SOME)
    found: dict[int, GenerationResult] = {}
    while not any(event.token_ids for event in session.step()):
        pass
    session.add(LONG, SOME)
    session.add(SHORT[:20], SOME)
    while session.busy:
        for event in session.step():
            if event.result is not None:
                found[event.index] = event.result
    assert list(found) == [0, 1, 2]  # nobody overtakes
    assert [found[i].kv_bits for i in range(3)] == [None, 8, None]
    for index, result in found.items():
        check_as_alone(result, index, alike)


def test_prefixes_are_kept_apart(target: LoadedModel) -> None:
    """A dense prefix never becomes part of a packed row, nor the other way round."""
    budget = 8_000_000
    limit = needed(target, 8) + budget + 300_000
    options: dict[str, Any] = {"prefix_cache_memory": budget, "memory_limit": limit}
    decoder = SpecDecoder(target, config=config_of(kv_bits="auto", **options))
    first = decoder.generate([LONG, LONG[:200]], SOME)
    assert [r.kv_bits for r in first] == [8, None]
    assert [r.prefix_tokens for r in first] == [0, 0]
    again = decoder.generate([LONG, LONG[:200]], SOME)
    assert tokens(again) == tokens(first)
    assert all(r.prefix_tokens for r in again)
