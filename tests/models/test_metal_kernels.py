"""Trials of Metal kernels: what a machine has proven is used, all else is off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.llama import Attention as LlamaAttention

from specdec import EngineConfig, backend
from specdec.cuda import gated_delta, proofs, split_attention
from specdec.cuda.fused_linear import separated
from specdec.metal import attention, few_rows, trial
from specdec.metal.few_rows import FewRowsEmbedding, FewRowsLinear, Kind
from specdec.models import kernel_proofs, metal_kernels
from specdec.models.kernel_proofs import cached_proofs
from specdec.models.metal_kernels import (
    ROWS,
    Trials,
    matrices_of,
    subjects_of,
    take_kernels,
)
from specdec.models.precision import cast, quantized_copy
from specdec.models.runner import ModelRunner
from specdec.utils.child import Child, ChildError
from tests.cuda.emulation.cuda import emulated, needs_compiler
from tests.cuda.test_gated_delta import HALF
from tests.metal.emulation import metal_kernel
from tests.models.architectures import build
from tests.plain import BEHIND, METAL

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
    #: fault, the child's end, or an interrupt; and what MLX's products end with.
    ours: Any = "it is wrong"
    mlx: BaseException | None = None
    #: Seconds that pass while it answers.
    takes = 0.0

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.now = 0.0

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.requests.append(request)
        self.now += self.takes
        (number,) = request["rows"]
        answer: dict[str, Any] = {"fault": "", "mlx": {str(number): float(number)}}
        answer["ours"] = {}
        if not request["ours"] and self.mlx is not None:
            raise self.mlx
        if request["ours"]:
            # The machine may go down now.
            kind = Kind.read(request["kind"])
            with cached_proofs():
                assert proofs.kept(verdict(kind, (2, 4))) is False
            if isinstance(self.ours, BaseException):
                raise self.ours
            if isinstance(self.ours, str):
                return answer | {"fault": self.ours}
            if 1 < number <= 16:
                answer["ours"] = {str(number): number * self.ours(number)}
        return answer

    def kill(self) -> None: ...


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> FakeChild:
    child = FakeChild()
    monkeypatch.setattr(time, "monotonic", lambda: child.now)
    return child


def used() -> tuple[int, ...]:
    with cached_proofs():
        return metal_kernels._of_matrix(KIND).used


def verdict(kind: Kind, band: tuple[int, int]) -> str:
    return metal_kernels._of_matrix(kind).verdicts[band]


def layer(columns: int = 40) -> nn.QuantizedLinear:
    return nn.QuantizedLinear(64, columns, bias=False, group_size=32, bits=4)


def probe(
    child: Any,
    *layers: nn.Module,
    ours: bool = True,
    again: bool = False,
    rows: Sequence[int] = ROWS,
    seconds: float = 1e3,
) -> list[metal_kernels.Trial]:
    """What was found when it ended, or was interrupted."""
    model = nn.Sequential(*layers or [layer()])
    subjects = subjects_of(model, ours=ours, rows=rows)
    end = time.monotonic() + seconds
    results: list[metal_kernels.Trial] = []
    with suppress(KeyboardInterrupt):
        for trial in Trials(child, end, ours=ours, again=again).of(subjects):
            results += [trial] * (trial not in results)
    return results


def test_a_kernel_is_used_where_it_is_faster(child: FakeChild) -> None:
    """Not in a band of rows in which one number is slower."""
    child.ours = lambda rows: 1.2 if rows == 3 else 0.5
    (found,) = probe(child)
    assert found.used == tuple(range(5, 17))
    assert (found.fault, found.mlx[32], found.ours[16]) == ("", 32.0, 8.0)
    assert used() == tuple(range(5, 17))
    child.ours = lambda rows: 0.9
    child.requests.clear()
    assert probe(child)[0].used == found.used  # kept, not tried again
    assert not any(request["ours"] for request in child.requests)
    assert probe(child, again=True)[0].used == ()
    assert used() == ()


@pytest.mark.parametrize(
    "end",
    [
        ChildError("late", "it takes longer than 30 seconds"),
        ChildError("ended", "its process ended (-6)"),
        "3 rows are off by 1.0e+00",
    ],
)
def test_what_hangs_crashes_or_is_wrong_is_off_and_not_repeated(
    child: FakeChild, end: ChildError | str
) -> None:
    """A GPU that hung once would hang with each start, and with each number of rows."""
    child.ours = end
    (found,) = probe(child)
    assert found.fault == str(end)
    assert found.used == ()
    assert set(found.mlx) == set(ROWS)  # MLX's products are timed all the same
    assert sum(request["ours"] for request in child.requests) == 1
    child.ours = lambda rows: 0.1
    (again,) = probe(child)
    assert (again.used, used()) == ((), ())
    assert "tried before" in again.fault
    assert not child.requests[-1]["ours"]


def test_a_kernel_that_crashed_is_not_tried_with_another_kind(child: FakeChild) -> None:
    """Each crash would cost a process, of which each imports MLX anew."""
    child.ours = ChildError("ended", "its process ended (-6)")
    first, second = probe(child, layer(), layer(48))
    assert sum(request["ours"] for request in child.requests) == 1
    assert (first.fault, set(second.mlx)) == ("its process ended (-6)", set(ROWS))
    assert "not tried" in second.fault
    child.ours = lambda rows: 0.5
    later, before = probe(child, layer(), layer(48))  # new ones first
    assert later.name == second.name
    assert later.used == tuple(range(2, 17))
    assert "tried before" in before.fault


def test_a_process_that_cannot_time_mlx_is_reported_once(child: FakeChild) -> None:
    """Each kind would wait for another process that ends."""
    child.mlx = ChildError("ended", "its process ended (-11)")
    (found,) = probe(child, layer(), layer(48), ours=False)
    assert (found.fault, found.mlx) == ("its process ended (-11)", {})
    assert len(child.requests) == 1


def test_the_time_ends_all_and_keeps_what_was_timed(child: FakeChild) -> None:
    child.takes = 1.0
    (found,) = probe(child, layer(), layer(48), ours=False, seconds=5)
    assert sorted(found.mlx) == sorted(ROWS)[:5]
    assert found.fault == ""


@pytest.mark.parametrize("interrupt", [True, False])
def test_a_trial_that_was_cut_is_tried_again(child: FakeChild, interrupt: bool) -> None:
    """The kernel would be off for good, although nothing is wrong with it."""

    def ours(rows: int) -> float:
        if rows == 6 and interrupt:
            raise KeyboardInterrupt
        return 0.5

    child.ours, child.takes = ours, 0.0 if interrupt else 3.0
    (found,) = probe(child, seconds=1e3 if interrupt else 16)
    assert 5 in found.mlx
    assert 9 not in found.mlx
    assert found.used == used() == (2, 3, 4)  # that range is timed
    child.ours, child.takes = lambda rows: 0.5, 0.0
    assert probe(child)[0].used == tuple(range(2, 17))


def test_a_kernel_is_not_tried_if_a_hang_could_not_be_told(child: FakeChild) -> None:
    (found,) = probe(child, seconds=10)
    assert set(found.mlx) == set(ROWS)
    assert "too little time" in found.fault
    assert not any(request["ours"] for request in child.requests)


@pytest.mark.skipif(mx.metal.is_available(), reason="there the trial is real")
def test_a_process_of_its_own_fails_alone() -> None:
    """Here MLX has no Metal: the trial says so, and MLX's products are timed."""
    child = Child("specdec.metal.trial", again=False)
    (found,) = probe(child, rows=(1, 2))
    child.close()
    assert "Metal" in found.fault
    assert sorted(found.mlx) == [1, 2]
    assert all(ms > 0 for ms in found.mlx.values())
    assert used() == ()


def test_a_process_that_hangs_ends_with_the_time() -> None:
    """Wherever it hangs: here while it is imported."""
    child = Child("specdec.metal.trial", again=False)
    stopped = subprocess.Popen(["sleep", "600"], stdin=-1, stdout=-1)
    child._process, child._owner = stopped, os.getpid()
    assert probe(child, seconds=1)[0].mlx == {}
    child.close()
    assert stopped.wait() == -signal.SIGKILL


ATTENTION = attention.Form(64, 2, 1, mx.float32)
PACKED = attention.Form(64, 2, 1, mx.float32, 4, 32)


@needs_compiler
@pytest.mark.parametrize(
    ("request_", "kernel", "rows", "ours"),
    [
        ({"kind": KIND.wire()}, few_rows, {1, 2, 9, 20}, {2, 9}),
        ({"kind": Kind(0, 0, mx.float32, 40, 64).wire()}, few_rows, {1, 2, 9}, set()),
        ({"form": trial.form_wire(HALF)}, gated_delta, {1, 3}, {1, 3}),
        ({"form": trial.form_wire(HALF)}, gated_delta, {1, 3}, set()),
        ({"attention": ATTENTION.wire()}, attention, {1, 3}, {3}),
        ({"attention": PACKED.wire()}, attention, {1, 3}, {3}),
        ({"attention": ATTENTION.wire()}, attention, {1, 3}, set()),
        ({"tail": ATTENTION.wire()}, attention, {1, 4}, {1, 4}),
        ({"tail": ATTENTION.wire()}, attention, {1}, set()),
    ],
)
def test_a_trial_proves_and_times(
    request_: dict[str, Any],
    kernel: Any,
    rows: set[int],
    ours: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that has hung before would run again, unasked."""
    for name, size in (("_MOST_PRODUCTS", 2), ("_LAYERS", 2), ("COLUMNS", 100)):
        monkeypatch.setattr(trial, name, size)
    monkeypatch.setattr(trial, "gated_delta_kernel", gated_delta_ops)
    monkeypatch.setattr(attention, "SPAN", 96)
    if kernel is gated_delta:
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    asked = {**request_, "rows": sorted(rows), "ours": bool(ours), "seconds": 1}
    for _ in emulated(monkeypatch, kernel._kernel, metal_kernel=metal_kernel):
        answer = trial.answer(json.loads(json.dumps(asked)))
    assert answer["fault"] == ""
    assert {int(n) for n in answer["mlx"]} == rows
    assert {int(n) for n in answer["ours"]} == ours


@pytest.fixture
def attending(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """A model whose attention has no proof, and its form."""
    monkeypatch.setattr(attention, "tokens_of", {})
    monkeypatch.setattr(attention, "FEWEST_COLUMNS", 1)
    model = tiny_model("llama", seed=0, head_dim=64)
    ((form, layers),) = metal_kernels.attention_of(model).items()
    assert (form.size, layers) == (64, len(model.layers))
    return model, form


def test_attention_uses_what_was_proven(
    attending: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, form = attending
    take_kernels(model)
    assert type(model.layers[0].self_attn).__call__ is LlamaAttention.__call__
    with cached_proofs():
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


def test_tails_are_used_from_where_they_were_faster(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four rows of 4096 tokens, and not with one; never on other backends."""
    model = tiny_model("llama", seed=0, head_dim=64)
    runner = ModelRunner(model, "draft", EngineConfig(), METAL)
    assert runner.with_tails().options == runner.options
    (form,) = metal_kernels.attention_of(model)
    verdicts = metal_kernels._of_tail(form).verdicts
    with cached_proofs():
        proofs.keep(verdicts[1, 1], False)
        proofs.keep(verdicts[4, 4], True)
    options = runner.with_tails().options
    assert (options.tail, options.tail_from) == (64, 4 * 4096)
    take_kernels(model)  # what reads tails is not lost, nor found again
    assert runner.with_tails().options == options
    other = ModelRunner(model, "draft", EngineConfig(), BEHIND)
    assert not other.with_tails().options.tail
    monkeypatch.setenv(metal_kernels.SWITCH, "0")
    assert not runner.with_tails().options.tail


def test_a_tail_that_is_read_wrongly_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are compared before it is timed."""
    monkeypatch.setattr(trial, "COLUMNS", 100)
    right = split_attention.Split.attention

    def wrong(*how: Any) -> mx.array:
        return right(*how) * 1.1

    monkeypatch.setattr(split_attention.Split, "attention", wrong)
    asked = {"tail": ATTENTION.wire(), "rows": [1], "ours": True, "seconds": 1}
    answer = trial.answer(asked)
    assert "off by" in answer["fault"]
    assert not answer["ours"]
    assert answer["mlx"]


def test_packed_keys_use_what_was_proven_for_them(
    attending: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict for 8 bits says nothing of 4, nor of keys that are not packed."""
    model, form = attending
    packed = form.variants[1]
    with cached_proofs():
        proofs.keep(metal_kernels._of_attention(packed).verdicts[2, 4], True)
    take_kernels(model)
    calls: list[int] = []

    def attended(q: mx.array, k: Any, v: Any, scale: float, mask: Any) -> mx.array:
        calls.append(packed.bits)
        dense = packed.unpacked(k), packed.unpacked(v)
        return mx.fast.scaled_dot_product_attention(q, *dense, scale=scale, mask=mask)

    monkeypatch.setattr(attention, "attention", attended)
    for bits, wanted in ((8, len(model.layers)), (4, 0), (None, 0)):
        caches = make_prompt_cache(model)
        if bits:
            caches = [c.to_quantized(group_size=64, bits=bits) for c in caches]
        model(mx.array([[1, 2, 3]]), cache=caches)
        assert len(calls) == wanted
        calls.clear()


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
    with cached_proofs():
        proofs.keep(gated_delta.proven.named(form), True)
    take_kernels(model)
    hidden = mx.zeros((1, 1, 8), form.dtype)
    for metal in (False, True):
        monkeypatch.setattr(mx.metal, "is_available", lambda metal=metal: metal)
        assert gated_delta.takes(form, hidden, 16)
        assert gated_delta.takes(form, hidden, 17) != metal


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

    def test_what_is_proven_is_used(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = model(mx.array([[1, 2, 3]]))
        take_kernels(model)
        assert FewRowsLinear not in self.kinds(model)
        kind = Kind(4, 32, mx.float32, 96, 64)
        with cached_proofs():
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
            with cached_proofs():
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
