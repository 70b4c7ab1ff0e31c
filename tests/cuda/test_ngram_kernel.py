"""Prompt lookup by kernels: when they are used; on a GPU, that they find the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from specdec import EngineConfig, SamplingParams, SpecDecoder, backend
from specdec.cuda import ngram_kernel
from specdec.spec_decode import NgramDrafter, NgramOptions, ngram, ngram_search
from specdec.tools.decoding import token_level

from .emulation.cuda import needs_cuda
from .test_ngram_kernel_source import alike, kept_alike, searched_alike

REFERENCES = ngram_search.search, ngram_search.keep


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize("kernels", [True, False])
def test_kernels_are_used_where_they_are_meant_to_and_proven(
    monkeypatch: pytest.MonkeyPatch, kernels: bool, proven: bool
) -> None:
    defaults = replace(backend.defaults(), kernels=kernels)
    monkeypatch.setattr(ngram, "defaults", lambda: defaults)
    monkeypatch.setattr(ngram_kernel, "proven", lambda *_: proven)
    used: Any = NgramDrafter().lookup
    assert used is (ngram_kernel if kernels and proven else ngram_search)


def wrong_search(*arguments: Any, **options: Any) -> tuple[mx.array, mx.array]:
    inputs, lengths = ngram_search.search(*arguments, **options)
    return inputs + 1, lengths


def wrong_keep(*arguments: Any) -> mx.array:
    return ngram_search.keep(*arguments) + 1


@pytest.mark.parametrize(
    ("search", "keep", "proven"),
    [
        (ngram_search.search, ngram_search.keep, True),
        (wrong_search, ngram_search.keep, False),
        (ngram_search.search, wrong_keep, False),
    ],
)
def test_what_finds_something_else_is_not_proven(
    monkeypatch: pytest.MonkeyPatch, search: Any, keep: Any, proven: bool
) -> None:
    monkeypatch.setattr(ngram_kernel, "search", search)
    monkeypatch.setattr(ngram_kernel, "keep", keep)
    assert ngram_kernel.proven.__wrapped__(*REFERENCES) is proven


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_what_the_kernels_are_given(
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
    verification: Any,
) -> None:
    """What they were compiled for first, and counts that they do not check."""
    calls = []

    def search(*arrays: Any, **options: Any) -> Any:
        *inputs, k = arrays
        assert k > 0
        assert inputs[0].size > 0
        calls.append({a.dtype for a in inputs})
        return found(*arrays, **options)

    def keep(*arrays: mx.array) -> mx.array:
        *_, chosen, kept = arrays
        assert mx.all((kept >= 0) & (kept <= chosen.shape[1])).item()
        calls.append({a.dtype for a in arrays})
        return kept_in(*arrays)

    found, kept_in = ngram_search.search, ngram_search.keep
    monkeypatch.setattr(ngram_search, "search", search)
    monkeypatch.setattr(ngram_search, "keep", keep)
    model = token_level(tiny_model("llama", seed=0))
    params = [
        SamplingParams(max_tokens=n, temperature=temperature, verification=verification)
        for n in (12, 1, 5)
    ]
    config = EngineConfig(batch_size=2, num_draft_tokens=3)
    drafter = NgramDrafter(NgramOptions(min_ngram=1))
    drafter.lookup = ngram_search
    decoder = SpecDecoder(model, drafter=lambda _: drafter, config=config)
    decoder.generate([[1, 2, 1, 2, 1], [5], [3, 3, 3]], params)
    assert len(calls) > 4
    assert all(dtypes == {mx.int32} for dtypes in calls)


@needs_cuda
def test_the_same_is_found_and_kept() -> None:
    """The device's compiler, or its threads, find another match than the emulator's."""
    assert alike(searched_alike, 60)
    assert alike(kept_alike, 60)
