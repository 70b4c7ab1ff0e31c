"""Draft tokens that the target cannot compute with: rows go on, and exactly.

A rejected token never reaches plain decoding. Its keys and values stay in the cache
until they are overwritten, behind a mask; but 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from specdec.backend import BackendDefaults
from specdec.cache import BatchKVCache, BatchRotatingKVCache
from specdec.models import LoadedModel
from specdec.models.runner import ModelRows
from specdec.sampling_params import VERIFICATIONS, SamplingParams
from specdec.spec_decode import Proposals, Round
from specdec.spec_decode.head_drafter import BlockRows, ChainedRows
from tests.cache.small_models import MODELS
from tests.engine.hostile_layers import BAD, Infinite, Noting, Poisoned, Treacherous
from tests.models.architectures import build
from tests.models.draft_heads.published import LAYERS
from tests.plain import AT_ONCE, BACKENDS, BEHIND, METAL, exact, run_rows
from tests.scripted import Script
from tests.spec_decode.repetitive import Knowing, KnowingRows
from tests.spec_decode.test_heads import CONFIGS, drafter_of

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12] * 9, [14, 15], [17, 18, 19]]
LENGTHS = [24, 9, 30, 17, 12]
#: Without graphs, which take long to build here.
PADDED = replace(BEHIND, compile_after=None)
EVERY = pytest.mark.parametrize(
    "backend", [AT_ONCE, BEHIND, METAL], ids=["cpu", "gpu", "metal"]
)


def poisoned(model: Any, kind: type[nn.Embedding] = Poisoned) -> Any:
    """The model, with a bad token."""
    embeddings = [m for _, m in model.named_modules() if type(m) is nn.Embedding]
    assert embeddings
    for embedding in embeddings:
        embedding.__class__ = kind
    return model


def never_bad(length: int, **how: Any) -> SamplingParams:
    """Parameters of a row whose plain decoding never meets the bad token."""
    return SamplingParams(max_tokens=length, logit_bias={BAD: -float("inf")}, **how)


def proposing(
    model: Any, params: Sequence[SamplingParams], prompts: Sequence[list[int]] = PROMPTS
) -> Knowing:
    """Knows how rows go on, and proposes the bad token now and then."""
    rows = run_rows(model, None, prompts, params)
    whole = {tuple(p): [*p, *row.tokens] for p, row in zip(prompts, rows, strict=True)}
    return Knowing(whole, lambda at, token: BAD if at % 13 == 5 else token)


def check(
    model: Any,
    backend: BackendDefaults,
    params: Sequence[SamplingParams] = (),
    **options: Any,
) -> None:
    """Rows with bad proposals, in every round and in some, equal plain decoding."""
    params = params or [never_bad(n) for n in LENGTHS]
    drafter = proposing(model, params)
    for script in (lambda i: 4, lambda i: 4 if i % 3 == 0 else 0):
        rows = exact(
            model, None, PROMPTS, params,
            batch_size=3, num_draft_tokens=4, backend=backend, drafter=drafter,
            length=Script(script), **options,
        )  # fmt: skip
        assert sum(row.accepted for row in rows) > 0


@EVERY
@pytest.mark.parametrize("kind", [Poisoned, Infinite])
def test_a_rejected_token_ends_no_row(
    tiny_model: Callable[..., Any], kind: type[nn.Embedding], backend: BackendDefaults
) -> None:
    """Rounds read at once or late, rows that join and leave, rounds without a draft."""
    check(poisoned(tiny_model("llama", seed=0), kind), backend)


class Late(Knowing):
    """Proposes the bad token last, after tokens that are rejected."""

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> LateRows:
        return LateRows(self, [tuple(p) for p in prompts])


class LateRows(KnowingRows):
    def propose(self, round_: Round) -> Proposals:
        wrong = (super().propose(round_).tokens + 1) % BAD
        return Proposals(
            mx.concatenate([wrong[:, 1:], mx.full_like(wrong[:, :1], BAD)], 1)
        )


@pytest.mark.parametrize("backend", [AT_ONCE, PADDED, METAL])
def test_a_key_that_harms_only_later_queries(
    tiny_model: Callable[..., Any], backend: BackendDefaults
) -> None:
    """The round of its draft has finite logits, and a round without a draft has not."""
    model = tiny_model("llama", seed=0, num_key_value_heads=4)
    assert model.layers[0].self_attn.n_heads == 4
    model.layers[0].self_attn.rope = Treacherous()  # type: ignore[no-untyped-call]
    model.model.embed_tokens.__class__ = Noting
    params = [never_bad(n) for n in LENGTHS]
    drafter = proposing(model, params)
    wanted = run_rows(model, None, PROMPTS, params)
    for script in (lambda i: 4 - i % 5, lambda i: 3 * (i % 5 == 0), lambda i: 2):
        rows = run_rows(
            model, None, PROMPTS, params,
            batch_size=3, num_draft_tokens=4, backend=backend,
            drafter=Late(drafter.whole), length=Script(script),
        )  # fmt: skip
        assert [row.error for row in rows] == [None] * len(PROMPTS)
        assert [row.tokens for row in rows] == [row.tokens for row in wanted]


class FirstRow(Knowing):
    """Proposes wrong tokens, and the bad one to a row alone."""

    def rows(self, prompts: Sequence[Sequence[int]], *, max_length: int) -> FirstRows:
        return FirstRows(self, [tuple(p) for p in prompts])


class FirstRows(KnowingRows):
    def propose(self, round_: Round) -> Proposals:
        wrong = (super().propose(round_).tokens + 1) % BAD
        first = mx.array([prompt[0] == 5 for prompt in self.prompts])[:, None]
        return Proposals(mx.where(first, BAD, wrong))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_row_that_kept_nothing_is_shorter_than_its_neighbour(
    tiny_model: Callable[..., Any], k: int
) -> None:
    """As long as it would be, both were alike, and read without a mask."""
    model = poisoned(tiny_model("llama", seed=0))
    prompts, params = [[5] * 4, [8] * 3], [never_bad(16)] * 2
    drafter = FirstRow(proposing(model, params, prompts).whole)
    exact(
        model, None, prompts, params,
        batch_size=2, num_draft_tokens=4, backend=replace(METAL, read_bucket=1),
        drafter=drafter, length=Script(lambda i: k * (i == 0)),
    )  # fmt: skip


@pytest.mark.parametrize("backend", [AT_ONCE, PADDED, METAL])
@pytest.mark.parametrize("name", ["sliding", "gpt-oss", "latent", "list", "shared-kv"])
def test_every_kind_of_cache_is_clean_again(
    tiny_model: Callable[..., Any], name: str, backend: BackendDefaults
) -> None:
    """Rings, where the next token overwrites others; several caches in a layer."""
    arch, arguments = MODELS[name]
    check(poisoned(tiny_model(arch, seed=0, **arguments)), backend)


@pytest.mark.parametrize("backend", [AT_ONCE, PADDED, METAL])
@pytest.mark.parametrize("arch", ["qwen3_5", "mamba", "falcon_h1", "lfm2", "jamba"])
def test_recurrent_states_are_those_before_the_round(
    arch: str, backend: BackendDefaults
) -> None:
    """A mask that multiplies would let NaN into the states of a row that keeps none."""
    check(poisoned(build(arch)), backend)


@EVERY
@pytest.mark.parametrize(
    "options", [{"kv_bits": 8, "kv_group_size": 32}, {"max_kv_size": 12}]
)
def test_packed_caches_and_short_windows(
    tiny_model: Callable[..., Any], options: dict[str, Any], backend: BackendDefaults
) -> None:
    """Scales and biases of a packed NaN are NaN, too."""
    model = poisoned(tiny_model("llama", seed=0, head_dim=32))
    params = [never_bad(n) for n in LENGTHS]
    drafter = proposing(model, params)
    plain, drafted = (
        run_rows(
            model, None, PROMPTS, params,
            batch_size=5, num_draft_tokens=4, backend=backend, drafter=each, **options,
        )
        for each in (None, drafter)
    )  # fmt: skip
    assert [row.error for row in drafted] == [None] * len(PROMPTS)
    assert [row.tokens for row in drafted] == [row.tokens for row in plain]


@BACKENDS
def test_rows_with_functions_of_the_user(
    target: Any, tiny_model: Callable[..., Any], backend: BackendDefaults
) -> None:
    """They are not called with logits that are not finite, which decide nothing."""

    def finite(tokens: mx.array, logits: mx.array) -> mx.array:
        assert not mx.isnan(logits).any().item()
        return logits

    model = poisoned(tiny_model("llama", seed=0))
    params = [never_bad(n, logits_processors=(finite,) * (n % 2)) for n in LENGTHS]
    check(model, backend, params)


@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_rows_that_sample_go_on(
    tiny_model: Callable[..., Any], verification: Any
) -> None:
    """Whatever the rule: after the bad token the row draws as without a draft."""
    model = poisoned(tiny_model("llama", seed=0))
    params = never_bad(20, temperature=1.0, seed=3, verification=verification)
    drafter = Knowing({}, lambda at, token: BAD)
    for backend in (AT_ONCE, METAL):
        (row,) = run_rows(
            model, None, [[5, 6, 7]], [params], drafter=drafter, backend=backend
        )
        (plain,) = run_rows(model, None, [[5, 6, 7]], [params])
        assert (row.tokens, row.error) == (plain.tokens, None)


@EVERY
def test_a_token_that_the_target_chooses_is_its_own_affair(
    tiny_model: Callable[..., Any], backend: BackendDefaults
) -> None:
    """The row ends where plain decoding ends it, and says the same."""
    model = poisoned(tiny_model("llama", seed=0))
    params = [
        never_bad(20),
        SamplingParams(max_tokens=20, logit_bias={BAD: 1e4}, min_tokens=3),
        never_bad(20),
    ]
    drafter = Knowing({}, lambda at, token: BAD)
    rows, plain = (
        run_rows(model, None, PROMPTS[:3], params, drafter=each, backend=backend)
        for each in (drafter, None)
    )
    assert [r.error for r in rows] == [r.error for r in plain]
    assert rows[1].error == "its logits hold NaN at token 1"
    assert [r.tokens for r in rows] == [r.tokens for r in plain]


@EVERY
def test_a_draft_with_nan_in_its_own_state(
    target: Any, tiny_model: Callable[..., Any], backend: BackendDefaults
) -> None:
    """A bad token in the prompt, or proposed: whatever it makes of it is refused."""
    draft = poisoned(tiny_model("llama", seed=0))
    prompts = [*PROMPTS, [BAD, 3, 4]]
    exact(target, draft, prompts, [*LENGTHS, 20], batch_size=4, backend=backend)


@pytest.mark.parametrize("backend", [AT_ONCE, PADDED, METAL])
@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "qwen3_5", "mamba"])
def test_a_draft_forgets_nan_in_its_own_state(
    arch: str, backend: BackendDefaults
) -> None:
    """Catches a row of which a draft accepts nothing any more after one bad token."""
    target, draft = build(arch), poisoned(build(arch))
    params = [never_bad(80)] * 2
    prompts = [[5, 6, 7, BAD, 8], [9, 10, 11]]
    rows = exact(
        target, draft, prompts, params,
        batch_size=2, num_draft_tokens=3, backend=backend,
    )  # fmt: skip
    assert min(row.accepted for row in rows) > 5


@pytest.mark.parametrize("backend", [AT_ONCE, PADDED])
@pytest.mark.parametrize("name", ["dflash", "eagle3"])
def test_a_head_that_reads_nan(
    tiny_model: Callable[..., Any],
    tmp_path: Path,
    name: str,
    backend: BackendDefaults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows see hidden states of the bad token; those beside them do not."""
    model = poisoned(tiny_model("qwen3", num_hidden_layers=LAYERS))
    lender = LoadedModel(model, None, {}, "the target")  # type: ignore[arg-type]
    kind: Any = BlockRows if name == "dflash" else ChainedRows
    right, turns = kind.propose, iter(range(10_000))

    def propose(self: Any, round_: Round) -> Proposals:
        usual: Proposals = right(self, round_)
        if next(turns) % 3 != 1:
            return usual
        return replace(usual, tokens=mx.full(usual.tokens.shape, BAD, mx.int32))

    monkeypatch.setattr(kind, "propose", propose)
    drafter, _ = drafter_of(tmp_path / name, CONFIGS[name], lender, backend)
    exact(
        model, None, PROMPTS, [never_bad(n) for n in LENGTHS],
        batch_size=3, backend=backend, drafter=drafter,
    )  # fmt: skip


def test_without_cleaning_the_row_is_lost(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparisons above would pass whatever the caches hold."""
    monkeypatch.setattr(ModelRows, "clean", lambda self, rows: None)
    with pytest.raises(AssertionError):
        check(poisoned(tiny_model("llama", seed=0)), METAL)


@pytest.mark.parametrize(
    "make",
    [
        BatchKVCache,
        lambda rows: BatchKVCache(rows, bits=8, group_size=32),
        lambda rows: BatchRotatingKVCache(rows, max_size=6, max_write=4),
    ],
)
def test_cleaning_touches_no_other_row_and_no_kept_token(
    make: Callable[[int], Any],
) -> None:
    """Bit for bit; and afterwards the row's next tokens are attended to as usual."""
    mx.random.seed(0)
    cache, other = make(3), make(3)
    written = mx.random.normal((3, 2, 14, 32))
    wrong = mx.full((3, 2, 4, 32), float("nan"))
    for at in range(0, 12, 4):
        for each in (cache, other):
            each.update_and_fetch(
                written[:, :, at : at + 4], written[:, :, at : at + 4]
            )
    other.update_and_fetch(written[:, :, :4], written[:, :, :4])
    cache.update_and_fetch(wrong, wrong)
    for each in (cache, other):
        each.trim_per_sequence([4, 4, 4])
    before = cache._storage.arrays
    cache.clean([1], 4)
    for old, new in zip(before, cache._storage.arrays, strict=True):
        for row in (0, 2):
            assert mx.array_equal(old[row], new[row], equal_nan=True).item()
        assert mx.isfinite(new[1].astype(mx.float32)).all().item()
    cache.clean([0, 2], 4)
    mask = cache.make_mask(1, return_array=True)
    new = written[:, :, 12:13]
    states, wanted = (each.update_and_fetch(new, new) for each in (cache, other))
    if cache.packing:
        states, wanted = (
            [mx.dequantize(w, s, b, group_size=32, bits=8) for w, s, b in each]
            for each in (states, wanted)
        )
    for a, b in zip(states, wanted, strict=True):
        hidden = ~mask[:, :, 0, :, None]
        assert mx.array_equal(mx.where(hidden, 0, a), mx.where(hidden, 0, b)).item()
        assert mx.isfinite(a).all().item()


def test_only_what_is_not_finite_is_replaced() -> None:
    """A draft that is merely bad was copied whole, beside the rounds in flight."""
    cache = BatchKVCache(3)
    more = mx.random.normal((3, 2, 4, 32))
    more[1, 0, 2] = float("nan")
    cache.update_and_fetch(more, more)
    before = cache.arrays
    cache.make_finite([0, 2])
    assert cache.arrays is before
    cache.make_finite([0, 1])
    for old, new in zip(before, cache.arrays, strict=True):
        wanted = mx.where(mx.isfinite(old), old, 0)
        assert mx.array_equal(new, wanted).item()
