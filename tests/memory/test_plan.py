"""The plan as a pure function, and the estimate made of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.backend import BackendDefaults
from specdec.cache.capacity import CATCH_UP_STEP
from specdec.memory import (
    CacheGeometry,
    MemoryPlan,
    ModelGeometry,
    RowNeeds,
    largest_fitting,
)
from specdec.memory.estimate import Estimate
from specdec.sampling_params import SamplingParams

# An 8B model: 32 layers, 8 heads of 128 in 16 bits.
TARGET = ModelGeometry(
    name="8B",
    num_parameters=8_000_000_000,
    weight_bytes=16_000_000_000,
    caches=(CacheGeometry(slot_bytes=2 * 8 * 128 * 2),) * 32,
    vocab_size=128_256,
    elem_bytes=2,
    token_bytes=2 * 43_008 + 24 * 32 * 128 + 32 * 4096,
    score_bytes=32 * 2 + 4,
    loading_bytes=16_000_000_000,
)
DRAFT = replace(
    TARGET,
    name="1B",
    num_parameters=1_000_000_000,
    weight_bytes=2_000_000_000,
    caches=(CacheGeometry(slot_bytes=2 * 8 * 64 * 2),) * 16,
    loading_bytes=2_500_000_000,
)
# Shapes that are to repeat, and tokens that cost.
STATIC = BackendDefaults("cuda", read_bucket=1, static_shapes=True)
BY_TOKEN = BackendDefaults(
    "cpu", read_bucket=1, static_shapes=False, costs_by_token=True
)
PLAN = MemoryPlan(target=TARGET, prefill_step_size=512, backend=STATIC)
PAIR = replace(PLAN, draft=DRAFT, num_draft_tokens=3, backend=BY_TOKEN)

WARM = {"temperature": 0.7}
rows = st.lists(
    st.builds(
        RowNeeds,
        prompt_tokens=st.integers(1, 9000),
        params=st.builds(
            lambda filters, **others: SamplingParams(**filters, **others),
            st.sampled_from([{}, WARM, WARM | {"top_p": 0.5}, WARM | {"top_p": 0.9}]),
            max_tokens=st.integers(1, 3000),
            presence_penalty=st.sampled_from([0, 0.5]),
            top_logprobs=st.sampled_from([0, 3]),
            verification=st.sampled_from(["coupled", "block"]),
        ),
    ),
    min_size=1,
    max_size=9,
)


def row_of(prompt_tokens: int, max_tokens: int) -> RowNeeds:
    return RowNeeds(prompt_tokens, SamplingParams(max_tokens=max_tokens))


def test_the_parts_of_a_run() -> None:
    loading, prefill, decoding = PAIR.moments([row_of(1000, 1048)] * 4)
    assert loading.total == 18_500_000_000
    assert prefill.parts["draft weights"] == 2_000_000_000
    # 2,047 cached tokens and a round of four more, of a limit of 2,048 + 3 * 4.
    slots = 2060
    assert decoding.parts["target KV cache"] == 4 * 32 * 4096 * slots
    assert decoding.parts["draft KV cache"] == 4 * 16 * 2048 * slots
    assert decoding.parts["growth and joins"] == 3 * 4 * 4096 * slots
    assert decoding.parts["logits"] == 4 * (4 + 2) * 128_256 * 2
    assert "rounds in flight" not in decoding.parts
    assert "rounds in flight" in PLAN.moments([row_of(9, 9)])[2].parts


def test_a_draft_that_catches_up_has_padding_where_shapes_repeat() -> None:
    """Up to a piece's width after what its rows hold; the target has none."""
    row = row_of(300, 100)
    exact = replace(PAIR, pauses=True).moments([row])[2]
    padded = replace(PAIR, pauses=True, backend=STATIC).moments([row])[2]
    fixed = replace(PAIR, backend=STATIC).moments([row])[2]
    assert exact.parts["draft KV cache"] == 16 * 2048 * 412
    assert padded.parts["draft KV cache"] >= exact.parts["draft KV cache"]
    assert padded.parts["target KV cache"] == fixed.parts["target KV cache"]
    # Rows of 250 tokens fit 256 slots, and their padding does not.
    short = row_of(200, 50)
    longest = replace(PAIR, pauses=True, backend=replace(STATIC, read_bucket=256))
    without = replace(longest, pauses=False)
    needed = [p.moments([short])[2].parts["draft KV cache"] for p in (longest, without)]
    assert needed[0] > needed[1]


def test_copies_of_caches_that_are_not_written_in_place_count() -> None:
    """A target of few layers once, a draft's as often as it writes, deep ones never."""
    pair = replace(PAIR, backend=replace(STATIC, copied_layers=25))
    shallow = replace(TARGET, caches=TARGET.caches[:20])
    draft = replace(DRAFT, caches=DRAFT.caches[:4])

    def flying(target: ModelGeometry, draft: ModelGeometry) -> tuple[int, list[int]]:
        plan = replace(pair, target=target, draft=draft)
        decoding = plan.moments([row_of(1000, 1048)])[2]
        held = [decoding.parts[f"{name} KV cache"] for name in ("target", "draft")]
        return decoding.parts["rounds in flight"], held

    own = replace(draft, in_place=True)
    none, held = flying(replace(shallow, in_place=True), own)
    assert flying(shallow, own)[0] - none == held[0]
    assert flying(replace(shallow, in_place=True), draft)[0] - none == 3 * held[1]
    # A tail of 64 columns, and rows of fewer than 64 tokens in all, of 2048.
    tails = replace(draft, tail=64, tail_from=64)
    copied = flying(replace(shallow, in_place=True), tails)[0] - none
    assert held[1] < copied < 1.4 * held[1]
    always = replace(tails, tail_from=4096)
    assert flying(replace(shallow, in_place=True), always)[0] - none == 4 * held[1]
    deep = flying(TARGET, own)[0]
    assert deep == flying(replace(TARGET, in_place=True), own)[0]


def test_a_drafts_rings_can_undo_what_it_catches_up_with() -> None:
    """They are laid anew for pieces of that width."""
    window = CacheGeometry(slot_bytes=100, window=512)
    draft = replace(DRAFT, caches=(window,))
    row = row_of(3000, 1000)
    pausing, steady = (
        replace(PAIR, draft=draft, pauses=pauses).moments([row])[2]
        for pauses in (True, False)
    )
    slots = [m.parts["draft KV cache"] // 100 for m in (pausing, steady)]
    assert slots[0] >= 512 + CATCH_UP_STEP - 1 > slots[1]


@given(rows, st.integers(0, 8), st.sampled_from([PLAN, PAIR]))
def test_more_never_needs_less(
    batch: list[RowNeeds], at: int, plan: MemoryPlan
) -> None:
    """Searches for what fits rely on it: a row, a token, a draw more costs."""
    peak = plan.peak(batch)
    row = batch[at % len(batch)]
    params = row.params
    assert plan.peak([*batch, row]) >= peak
    for longer in (
        replace(row, params=replace(params, max_tokens=params.max_tokens + 1)),
        replace(row, prompt_tokens=row.prompt_tokens + 1),
        replace(row, params=replace(params, temperature=0.7, min_p=0.1, top_k=9)),
    ):
        changed = [longer if r is row else r for r in batch]
        assert plan.peak(changed) >= peak


def test_a_window_bounds_the_cache() -> None:
    ring = CacheGeometry(slot_bytes=1000, window=1024)
    plan = replace(PLAN, target=replace(TARGET, caches=(ring,)))
    _, prefill, decoding = plan.moments([row_of(99_999, 1)])
    assert prefill.parts["target KV cache"] == 1000 * (1024 + 511)
    assert decoding.parts["target KV cache"] == 1000 * 1024


def test_rows_that_are_quantized_late_are_dense_before() -> None:
    packed = replace(
        TARGET,
        caches=(CacheGeometry(slot_bytes=1000),),
        dense_caches=(CacheGeometry(slot_bytes=3000),),
    )
    plan = replace(PLAN, target=packed, quantized_kv_start=4096)

    def kv(prompt: int) -> int:
        return plan.moments([row_of(prompt, 1)])[1].parts["target KV cache"]

    assert kv(257) == 3000 * 256
    assert kv(4096) == 3000 * 4096
    assert kv(65_537) == 1000 * 65_536


@given(st.integers(0, 50), st.integers(0, 50))
def test_the_largest_that_fits(most: int, limit: int) -> None:
    assert largest_fitting(lambda n: n <= most, limit) == min(most, limit)


def estimate(limit: int | None, context: int = 8192, batch: int = 1) -> Estimate:
    def with_bits(bits: int | None, step: int) -> MemoryPlan | None:
        if bits is None:
            return PLAN
        slot = CacheGeometry(slot_bytes=4096 * bits // 16 + 256)
        return replace(PLAN, target=replace(TARGET, caches=(slot,) * 32))

    return Estimate(
        plan=PLAN,
        context=context,
        batch=batch,
        limit=limit,
        plan_with=with_bits,
        command=str,
    )


def test_no_more_than_the_target_serves() -> None:
    """A context to which the model was never made, shown as one that fits."""
    found = replace(estimate(24 * 10**9), context_length=8192)
    assert found.largest_context() == 8192
    assert found.as_dict()["context_length"] == 8192
    assert "largest context at this batch: 8192 tokens\n" in found.table()
    # Where less fits, that is said.
    fitting = estimate(20 * 10**9).largest_context()
    assert 0 < fitting < 100_000
    assert replace(found, limit=20 * 10**9).largest_context() == min(fitting, 8192)
    longer = replace(found, limit=20 * 10**9, context_length=100_000)
    assert longer.largest_context() == fitting


def test_suggestions_where_it_does_not_fit() -> None:
    long = estimate(36 * 10**9, context=128 * 1024)
    assert not long.fits
    assert long.suggested_kv_bits() == 8
    assert long.suggested_weight_bits() == 8
    none = estimate(10**9)
    assert none.suggested_kv_bits() is none.suggested_weight_bits() is None
    assert none.largest_context() == none.largest_batch() == 0
    assert "largest context at this batch: none fits" in none.table()


def test_table_and_json_agree() -> None:
    found = estimate(24 * 10**9)
    shown = found.as_dict()
    assert shown["total"] == found.total == max(m.total for m in found.moments)
    for moment in found.moments:
        assert shown["moments"][moment.name]["total"] == sum(moment.parts.values())
    lines = found.table().splitlines()
    assert lines[0] == "8B: 1 row of 8192 tokens"
    assert lines[2].split() == ["loading", "prefill", "decoding"]
    assert (
        next(x for x in lines if x.startswith("target weights")).count("16.0 GB") == 3
    )
    assert "fits" in lines[-5]
    unknown = estimate(None)
    assert unknown.fits is None
    assert "give --memory-limit" in unknown.table()
    assert "largest_context" not in unknown.as_dict()


@pytest.mark.parametrize("batch", [1, 2, 8, 64])
@pytest.mark.parametrize("limit", [20 * 10**9, 24 * 10**9, 36 * 10**9])
def test_nothing_longer_than_the_largest_context_fits(limit: int, batch: int) -> None:
    """An edge that is off by one, or that a longer row crosses back."""
    context = estimate(limit, 8192, batch).largest_context()
    assert not context or estimate(limit, context, batch).fits
    assert not any(
        estimate(limit, max(2, context + more), batch).fits
        for more in (1, 300, 5000, 100_000)
    )


@pytest.mark.parametrize("context", [2, 3])
def test_the_smallest_context(context: int) -> None:
    assert estimate(24 * 10**9, context).fits
