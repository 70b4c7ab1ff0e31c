"""Trials of Metal kernels: what a machine has proven is used, all else is off."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.llama import Attention as LlamaAttention

from specdec import backend
from specdec.cuda import gated_delta, proofs
from specdec.cuda.fused_linear import separated
from specdec.metal import attention, few_rows, trial
from specdec.metal.few_rows import FewRowsEmbedding, FewRowsLinear, Kind
from specdec.models import kernel_proofs, metal_kernels
from specdec.models.kernel_proofs import kept_proofs
from specdec.models.metal_kernels import (
    ROWS,
    matrices_of,
    subjects_of,
    take_kernels,
    trials,
)
from specdec.models.precision import cast, quantized_copy
from specdec.utils.child import ChildError
from tests.cuda.emulation.cuda import emulated, needs_compiler
from tests.cuda.test_gated_delta import HALF
from tests.metal.emulation import metal_kernel
from tests.models.architectures import build

KIND = Kind(4, 32, mx.float32, 40, 64)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(few_rows, "rows_of", {})
    kernel_proofs.proof_key.cache_clear()
    yield
    kernel_proofs.proof_key.cache_clear()


class FakeChild:
    """Answers as a machine whose kernel takes a share of MLX's time would."""

    #: How a trial of our kernel ends: its share of MLX's times by number of rows, a
    #: fault, or the child's end.
    ours: Any = "it is wrong"
    requests: list[dict[str, Any]]

    def __init__(self, module: str, *, again: bool):
        assert not again

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        type(self).requests.append(request)
        mlx = {str(n): float(n) for n in request["rows"]}
        answer: dict[str, Any] = {"fault": "", "mlx": mlx, "ours": {}}
        if request["ours"]:
            # The machine may go down now.
            assert used() == ()
            assert proofs.kept(verdict(KIND, (2, 4))) is False
            if isinstance(self.ours, ChildError):
                raise self.ours
            if isinstance(self.ours, str):
                return answer | {"fault": self.ours}
            times = {n: n * type(self).ours(n) for n in request["rows"] if 1 < n <= 16}
            answer["ours"] = {str(n): ms for n, ms in times.items()}
        return answer

    def kill(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> type[FakeChild]:
    monkeypatch.setattr(metal_kernels, "Child", FakeChild)
    monkeypatch.setattr(FakeChild, "requests", [], raising=False)
    return FakeChild


def used() -> tuple[int, ...]:
    with kept_proofs():
        return metal_kernels._of_matrix(KIND).used


def verdict(kind: Kind, band: tuple[int, int]) -> str:
    return metal_kernels._of_matrix(kind).verdicts[band]


def probe(**how: Any) -> metal_kernels.Trial:
    layer = nn.QuantizedLinear(64, 40, bias=False, group_size=32, bits=4)
    ours, rows = how.pop("ours", True), how.pop("rows", ROWS)
    subjects = subjects_of(nn.Sequential(layer), ours=ours, rows=rows)
    (found,) = trials(subjects, ours=ours, **how)
    return found


def test_a_kernel_is_used_where_it_is_faster(child: type[FakeChild]) -> None:
    """Not in a band of rows in which one number is slower."""
    child.ours = staticmethod(lambda rows: 1.2 if rows == 3 else 0.5)
    found = probe()
    assert found.used == tuple(range(5, 17))
    assert (found.fault, found.mlx[32], found.ours[16]) == ("", 32.0, 8.0)
    assert used() == tuple(range(5, 17))
    child.ours = staticmethod(lambda rows: 0.9)
    assert probe().used == found.used  # kept, not tried again
    assert [request["ours"] for request in child.requests] == [True, False]
    assert probe(again=True).used == ()
    assert used() == ()


@pytest.mark.parametrize(
    "end",
    [
        ChildError("late", "it takes longer than 240 seconds"),
        ChildError("ended", "its process ended (-6)"),
        "3 rows are off by 1.0e+00",
    ],
)
def test_what_hangs_crashes_or_is_wrong_is_off_and_not_repeated(
    child: type[FakeChild], end: ChildError | str
) -> None:
    """A GPU that hung once would hang with each start."""
    child.ours = end
    found = probe()
    assert found.fault == str(end)
    assert found.used == ()
    assert set(found.mlx) == set(ROWS)  # MLX's products are timed all the same
    child.ours = staticmethod(lambda rows: 0.1)
    again = probe()
    assert (again.used, used()) == ((), ())
    assert "tried before" in again.fault
    assert not child.requests[-1]["ours"]


def test_a_machine_without_metal_times_mlx_s_products(child: type[FakeChild]) -> None:
    assert probe(ours=False).fault == ""
    assert not child.requests[-1]["ours"]
    with kept_proofs():
        assert proofs.kept(verdict(KIND, (2, 4))) is None


@pytest.mark.skipif(mx.metal.is_available(), reason="there the trial is real")
def test_a_process_of_its_own_fails_alone() -> None:
    """Here MLX has no Metal: the trial says so, and MLX's products are timed."""
    found = probe(rows=(1, 2))
    assert "Metal" in found.fault
    assert sorted(found.mlx) == [1, 2]
    assert all(ms > 0 for ms in found.mlx.values())
    assert used() == ()


@needs_compiler
@pytest.mark.parametrize("kind", [KIND, Kind(0, 0, mx.float32, 40, 64)])
def test_a_trial_proves_and_times(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_MOST_PRODUCTS", 2)
    request = {"kind": kind.wire(), "rows": [1, 2, 9, 20], "ours": bool(kind.bits)}
    for _ in emulated(monkeypatch, few_rows._kernel, metal_kernel=metal_kernel):
        found = trial.answer(request)
    assert found["fault"] == ""
    assert set(found["mlx"]) == {1, 2, 9, 20}
    assert set(found["ours"]) == ({2, 9} if kind.bits else set())


@needs_compiler
@pytest.mark.parametrize("ours", [True, False])
def test_a_trial_proves_and_times_a_gated_delta_layer(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that has hung before would run again, unasked."""
    monkeypatch.setattr(trial, "_LAYERS", 2)
    monkeypatch.setattr(trial, "gated_delta_kernel", gated_delta_ops)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    request = {"form": trial.form_wire(HALF), "rows": [1, 3], "ours": ours}
    request = json.loads(json.dumps(request))
    for _ in emulated(monkeypatch, gated_delta._kernel, metal_kernel=metal_kernel):
        found = trial.answer(request)
    assert found["fault"] == ""
    assert set(found["mlx"]) == {1, 3}
    assert set(found["ours"]) == ({1, 3} if ours else set())


@needs_compiler
@pytest.mark.parametrize("ours", [True, False])
def test_a_trial_proves_and_times_attention(
    ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_LAYERS", 2)
    monkeypatch.setattr(trial, "_COLUMNS", 40)
    monkeypatch.setattr(attention, "SPAN", 96)
    form = attention.Form(64, 2, 1, mx.float32)
    request = {"attention": form.wire(), "rows": [1, 3], "ours": ours}
    for _ in emulated(monkeypatch, attention._kernel, metal_kernel=metal_kernel):
        found = trial.answer(json.loads(json.dumps(request)))
    assert found["fault"] == ""
    assert set(found["mlx"]) == {1, 3}
    assert set(found["ours"]) == ({3} if ours else set())


def test_attention_uses_what_was_proven(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "tokens_of", {})
    monkeypatch.setattr(attention, "FEWEST_COLUMNS", 1)
    model = tiny_model("llama", seed=0, head_dim=64)
    ((form, layers),) = metal_kernels.attention_of(model).items()
    assert (form.size, layers) == (64, len(model.layers))
    take_kernels(model)
    assert type(model.layers[0].self_attn).__call__ is LlamaAttention.__call__
    with kept_proofs():
        proofs.keep(metal_kernels._of_attention(form).verdicts[2, 4], True)
    right = model(mx.array([[1, 2, 3]]))
    take_kernels(model)
    calls: list[int] = []

    def attended(q: mx.array, k: Any, v: Any, scale: float, mask: Any) -> mx.array:
        calls.append(q.shape[2])
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)

    monkeypatch.setattr(attention, "attention", attended)
    cache = make_prompt_cache(model)
    assert mx.array_equal(model(mx.array([[1, 2, 3]]), cache=cache), right)
    model(mx.array([[4]]), cache=cache)
    assert calls == [3] * len(model.layers)
    assert type(separated(model).layers[0].self_attn) is LlamaAttention


def test_gated_delta_layers_use_what_was_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds are the kernel's, prompts MLX's."""
    monkeypatch.setattr(gated_delta.proven, "verdicts", {})
    model = build("qwen3_next")
    ((form, layers),) = metal_kernels.layers_of(model).items()
    assert layers
    take_kernels(model)
    assert gated_delta.proven.verdicts == {form: False}
    with kept_proofs():
        proofs.keep(gated_delta.proven.named(form), True)
    take_kernels(model)
    hidden = mx.zeros((1, 1, 8), form.dtype)
    for metal in (False, True):
        monkeypatch.setattr(mx.metal, "is_available", lambda metal=metal: metal)
        assert gated_delta.takes(form, hidden, 16)
        assert gated_delta.takes(form, hidden, 17) != metal


@needs_compiler
def test_a_trial_of_a_wrong_kernel_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = few_rows.product
    monkeypatch.setattr(few_rows, "product", lambda *a, **k: right(*a, **k) * 1.01)
    request = {"kind": KIND.wire(), "rows": [1, 2], "ours": True}
    for _ in emulated(monkeypatch, few_rows._kernel, metal_kernel=metal_kernel):
        found = trial.answer(request)
    assert "off by" in found["fault"]
    assert found["ours"] == {}


class TestModels:
    """Layers of a model use what was proven."""

    @pytest.fixture
    def model(self, tiny_model: Callable[..., Any]) -> Any:
        model = tiny_model("llama", seed=0, hidden_size=64, intermediate_size=96)
        nn.quantize(model, group_size=32, bits=4)
        model.eval()
        return model

    def kinds(self, model: Any) -> list[type]:
        return [type(each) for _, each in model.named_modules()]

    def test_matrices(self, model: Any) -> None:
        counts = matrices_of(model)
        layers = len(model.layers)
        assert counts[Kind(4, 32, mx.float32, 96, 64)] == 2 * layers
        assert counts[Kind(4, 32, mx.float32, 64, 96)] == layers

    def test_what_is_proven_is_used(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = model(mx.array([[1, 2, 3]]))
        take_kernels(model)
        assert FewRowsLinear not in self.kinds(model)
        kind = Kind(4, 32, mx.float32, 96, 64)
        with kept_proofs():
            proofs.keep(verdict(kind, (2, 4)), True)
        monkeypatch.setenv(metal_kernels.SWITCH, "0")
        take_kernels(model)
        assert FewRowsLinear not in self.kinds(model)
        monkeypatch.delenv(metal_kernels.SWITCH)
        take_kernels(model)
        assert self.kinds(model).count(FewRowsLinear) == 2 * len(model.layers)
        seen: list[Kind] = []

        def product(x: mx.array, packed: Any, *, bits: int, group_size: int) -> Any:
            seen.append(Kind(bits, group_size, x.dtype, packed[0].shape[0], 64))
            weight, scales, biases = packed
            return mx.quantized_matmul(
                x, weight, scales, biases, bits=bits, group_size=group_size
            )

        monkeypatch.setattr(few_rows, "product", product)
        assert mx.array_equal(model(mx.array([[1, 2, 3]])), right)
        assert seen == [kind] * (2 * len(model.layers))
        model(mx.array([[1, 2, 3, 4, 5]]))
        assert len(seen) == 2 * len(model.layers)

    def test_changed_layers_are_packed_layers_to_everyone(self, model: Any) -> None:
        """Drafts made of the target, casts, and mlx-lm's own layers for comparison."""
        for kind in matrices_of(model):
            with kept_proofs():
                for band in few_rows.BANDS:
                    proofs.keep(verdict(kind, band), True)
        take_kernels(model)
        ours = {FewRowsLinear, FewRowsEmbedding} & set(self.kinds(model))
        assert ours
        assert not ours & set(self.kinds(separated(model)))
        quantized_copy(model, 8)
        cast(model, mx.float32)
        assert not ours & set(self.kinds(model))


def test_a_proof_is_of_a_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version of macOS has its own compiler of kernels."""
    described = {**backend.describe(), "backend": "metal", "platform": "macOS-26.1"}
    monkeypatch.setattr(backend, "describe", lambda: described)
    kernel_proofs.proof_key.cache_clear()
    before = kernel_proofs.proof_key()
    described["platform"] = "macOS-26.2"
    kernel_proofs.proof_key.cache_clear()
    assert kernel_proofs.proof_key() != before
