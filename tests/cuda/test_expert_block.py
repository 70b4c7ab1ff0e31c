"""Blocks of experts in few launches: their kernels, run on the CPU."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

from specdec.cuda import expert_block, kernels, packed_matmul
from specdec.cuda.expert_block import Form
from specdec.cuda.flattened_matmul import flatten_products
from specdec.cuda.fused_linear import join_products, separated
from tests.cuda.emulation.cuda import KernelFault, emulated, needs_compiler, plant

EXPERTS, USED, SIZE = 5, 2, 64
KINDS = [Qwen3MoeSparseMoeBlock, Qwen3NextSparseMoeBlock]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packed_matmul.proven, "verdicts", {})
    monkeypatch.setattr(expert_block.proven, "verdicts", {})
    yield from emulated(
        monkeypatch,
        packed_matmul._kernel,
        packed_matmul._gathering,
        packed_matmul._expert_kernel,
        expert_block._routing,
        expert_block._summing,
        kernels.cuda_kernel,
    )


class Model(nn.Module):
    """A block of experts of a model."""

    mlp: Any

    def __init__(self, kind: Any, *, normed: bool = True, shared: int = 32):
        super().__init__()  # type: ignore[no-untyped-call]
        args = SimpleNamespace(
            hidden_size=SIZE,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=shared,
            num_experts=EXPERTS,
            num_experts_per_tok=USED,
            norm_topk_prob=normed,
        )
        self.mlp = kind(args)

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.mlp(x)
        return output


def block_of(kind: Any, dtype: mx.Dtype = mx.float16, **options: Any) -> Model:
    mx.random.seed(3)
    model = Model(kind, **options)
    nn.quantize(model, 32, 4)
    model.set_dtype(dtype)
    model.eval()
    return model


@pytest.mark.parametrize("verdict", [None, True, False])
def test_layers_are_the_block_s_until_it_fails(verdict: bool | None) -> None:
    """Those of a block that will be proven are proven twice, or those of none never."""
    model = block_of(KINDS[0])
    form = expert_block.form_of(model.mlp)
    assert form is not None
    if verdict is not None:
        expert_block.proven.verdicts[form] = verdict
    its_own = [] if verdict is False else [*model.mlp.switch_mlp.values()]
    assert [*map(id, expert_block.layers_within(model))] == [*map(id, its_own)]


def hidden(*shape: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    drawn = mx.random.normal((*shape, SIZE), key=mx.random.key(1))
    return drawn.astype(dtype)


def right(model: Model, x: mx.array) -> mx.array:
    """What mlx-lm's block computes in float32."""
    twin = separated(model)
    twin.set_dtype(mx.float32)
    computed: mx.array = twin(x.astype(mx.float32))
    return computed


def agrees(model: Model, x: mx.array) -> bool:
    exact = right(model, x)
    off = mx.abs(model(x).astype(mx.float32) - exact).max()
    return bool((off <= 0.02 * mx.abs(exact).max()).item())


@needs_compiler
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_mlx_lm_s(
    kind: Any, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens, many, and more than one launch takes; joined products or not."""
    model = block_of(kind, normed=normed)
    expert_block.take_few_launches(model)
    assert isinstance(model.mlp, expert_block._FewLaunches)
    assert pickle.loads(pickle.dumps(type(model.mlp))) is kind
    for joined in (False, True):
        if joined:
            flatten_products(model)
            join_products(model)
        for shape in ((1, 1), (2, 3), (1, 40)):
            assert agrees(model, hidden(*shape)), (shape, joined)
    expert_block.take_few_launches(model)
    whole = model(hidden(3, 9))
    monkeypatch.setattr(packed_matmul, "MOST_PAIRS", 20)
    packed_matmul._expert_kernel.cache_clear()
    assert mx.array_equal(model(hidden(3, 9)), whole)
    assert type(separated(model).mlp) is kind


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_beside_others(kind: Any) -> None:
    """Alone, in a batch, and in a prompt whose experts have many pairs."""
    model = block_of(kind, dtype=mx.bfloat16)
    expert_block.take_few_launches(model)
    x = hidden(1, 70, dtype=mx.bfloat16)
    whole = model(x)
    for begin, end in ((0, 1), (5, 8), (30, 70)):
        assert mx.array_equal(model(x[:, begin:end]), whole[:, begin:end])


@needs_compiler
def test_equal_scores() -> None:
    """An expert is chosen twice, or by the order of threads; NaN chooses none."""
    part = packed_matmul.Form(mx.bfloat16, 4, 32, False, True)
    for experts in (5, 40, 70):
        form = Form(part, part, experts, 3, True, False)
        logits = mx.zeros((2, experts), mx.bfloat16)
        logits = mx.concatenate([logits, logits * mx.nan, logits.at[:, 1].add(1)])
        chosen, scores = expert_block.route(form, logits, None)
        last = [experts - 3, experts - 2, experts - 1]
        assert chosen[:2].tolist() == [last] * 2
        assert chosen[4:].tolist() == [[*last[1:], 1]] * 2
        assert mx.allclose(scores[:2], mx.full((2, 3), 1 / 3), atol=0.01)
        blank: Any = chosen[2:4].tolist()
        for row in blank:
            assert len(set(row)) == 3
            assert max(row) < experts


@needs_compiler
def test_other_blocks_stay_mlx_lm_s() -> None:
    """A shared expert of another size, float32, or experts that are not packed."""
    wide = block_of(KINDS[1], shared=64)
    single = block_of(KINDS[0], dtype=mx.float32)
    dense = Model(KINDS[0])
    for model in (wide, single, dense):
        expert_block.take_few_launches(model)
        assert type(model.mlp) in KINDS
        assert not expert_block.proofs_of(model)
    ours = block_of(KINDS[0])
    expert_block.take_few_launches(ours)
    x = hidden(1, 3)
    ours.train()
    assert mx.allclose(ours(x), right(ours, x), atol=0.05)


FAULTS = {
    "the smallest scores": ("other > best ||", "other < best ||"),
    "an expert twice": ("scores_of[i] = -2.0f;", "scores_of[i] *= 1.0f;"),
    "scores that are not divided": ("if (NORMED)", "if (false)"),
    "another token's scores": ("chosen[token * K", "chosen[0 * K"),
    "experts beyond 32": ("at = i * 32 + lane;", "at = lane;"),
    "a score of another pair": ("scores[pair]", "scores[token * (K + SHARED)]"),
    "an expert is left out": ("i < K; ++i) sum", "i + 1 < K; ++i) sum"),
    "no shared expert": ("if (SHARED) sum", "if (false) sum"),
    "the shared expert's logit as its score": (
        "1.0f / (1.0f + expf(-by))",
        "by",
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The proof that runs on the device finds them, too."""
    old, new = FAULTS[name]
    texts = "_ROUTE", "_SHARED_SCORE", "_SUM"
    (text,) = (t for t in texts if old in getattr(expert_block, t))
    plant(monkeypatch, expert_block, text, old, new)
    part = packed_matmul.Form(mx.bfloat16, 4, 32, False, True)
    with suppress(KernelFault):
        assert not expert_block._agrees(Form(part, part, 40, USED, True, True))


@needs_compiler
@pytest.mark.parametrize("shared", [False, True])
def test_proven(shared: bool) -> None:
    part = packed_matmul.Form(mx.bfloat16, 4, 64, True, True)
    form = Form(part, part._replace(eights=False), 40, 8, True, shared)
    assert expert_block.proven(form)
