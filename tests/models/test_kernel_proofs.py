"""Proofs on disk: what one process proved, the next does not try again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from specdec import backend
from specdec.backend import BackendDefaults
from specdec.cuda import choices, decode_attention, proofs, skinny_matmul
from specdec.cuda.expert_matmul import (
    PiecewiseQuantizedSwitchLinear,
    PiecewiseSwitchLinear,
)
from specdec.models import kernel_proofs, loading
from specdec.models.kernel_proofs import cached_proofs
from specdec.utils.wire import decode, encode

FILE = Path("specdec", "kernels.json")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_proofs.proof_key.cache_clear()
    yield tmp_path
    kernel_proofs.proof_key.cache_clear()


class Check:
    """A proof that counts how often it runs."""

    def __init__(self, *found: bool | Exception):
        self.runs = 0
        self._found = found

    def __call__(self) -> bool:
        found = self._found[self.runs]
        self.runs += 1
        if isinstance(found, Exception):
            raise found
        return found


def test_a_proof_is_kept_and_a_failure_is_not(home: Path) -> None:
    """A device that was busy once would be slow for good."""
    right, wrong = Check(True), Check(False, RuntimeError("no compiler"), True)
    for _ in range(3):  # as of three processes
        with cached_proofs():
            assert proofs.holds("right", right)
            proofs.holds("wrong", wrong)
    assert (right.runs, wrong.runs) == (1, 3)
    with cached_proofs():
        assert proofs.holds("wrong", wrong)
        assert not proofs.holds("another", Check(False))
    # Elsewhere nothing is looked up: a test of a proof would test the file.
    assert not proofs.holds("right", Check(False))


@pytest.mark.parametrize("fact", ["specdec", "mlx", "device", "source"])
def test_a_proof_is_of_a_device_its_versions_and_a_source(
    home: Path, monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    """Catches a kernel that was proven on another GPU, or before it was changed."""
    with cached_proofs():
        assert proofs.holds("kernel", Check(True))
    if fact == "source":
        monkeypatch.setattr(proofs, "sources", lambda: "changed")
    else:
        described = {**backend.describe(), fact: "another"}
        monkeypatch.setattr(backend, "describe", lambda: described)
    kernel_proofs.proof_key.cache_clear()
    with cached_proofs():
        assert not proofs.holds("kernel", Check(False))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 1}',
        '{"version": 1, "found": ["kernel"]}',
        '{"version": 2, "found": {"KEY": {"kernel": true}}}',
        '{"version": 1, "found": {"KEY": "kernel"}}',
        '{"version": 1, "found": {"KEY": ["kernel"]}}',
        '{"version": 1, "found": {"KEY": {"kernel": 1}}}',
        '{"version": 1, "found": {"KEY": {"kernel": "true"}}}',
        '{"version": 1, "found": {"other": {"kernel": true}}}',
    ],
)
def test_broken_and_foreign_files_prove_nothing(home: Path, text: str) -> None:
    """A kernel must not be trusted because a file is odd; the file is mended."""
    file = home / FILE
    file.parent.mkdir()
    file.write_text(text.replace("KEY", kernel_proofs.proof_key()), "utf-8")
    check = Check(True)
    for _ in range(2):
        with cached_proofs():
            assert proofs.holds("kernel", check)
    assert check.runs == 1
    kept = json.loads(file.read_text("utf-8"))["found"][kernel_proofs.proof_key()]
    assert kept["kernel"] is True


class Rank:
    """One of two ranks, which hear what rank 0 decides."""

    sent: bytes

    def __init__(self, rank: int):
        self.rank = rank

    def decide(self, what: str, make: Callable[[], Any]) -> Any:
        if self.rank == 0:
            Rank.sent = encode([what, make()])
        decision = decode(Rank.sent)
        assert decision[0] == what
        return decision[1]


@pytest.mark.parametrize("rank_0_is_faster", [False, True])
def test_ranks_take_the_kernels_that_are_fastest_on_rank_0(
    *,
    rank_0_is_faster: bool,
    home: Path,
    tiny_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches ranks that time nothing, or that round unsharded parts differently."""
    kernels = BackendDefaults("cuda", read_bucket=64, static_shapes=True, kernels=True)
    monkeypatch.setattr(loading, "defaults", lambda: kernels)
    monkeypatch.setattr(skinny_matmul.proven, "_agrees", lambda *_, **__: True)
    monkeypatch.setattr(decode_attention.proven, "_agrees", lambda *_, **__: True)
    monkeypatch.setenv("MLX_RANK", "0")
    faster: list[bool] = [rank_0_is_faster, not rank_0_is_faster]
    timed = 0

    def seconds(rank: int) -> Callable[..., float]:
        def run(*_: object) -> float:
            nonlocal timed
            timed += 1
            ours = timed % 6 in (1, 2, 3)
            return 1.0 if ours == faster[rank] else 2.0

        return run

    taken = []
    for rank in range(2):
        monkeypatch.setattr(skinny_matmul.proven, "verdicts", {})
        monkeypatch.setattr(decode_attention.proven, "verdicts", {})
        monkeypatch.setattr(choices, "_ours", {})
        monkeypatch.setattr(choices, "_seconds", seconds(rank))
        model = tiny_model("llama", seed=0, head_dim=64)
        model.set_dtype(mx.bfloat16)
        loading.fit(model)
        assert timed == (30 if rank else 0)
        ranks: Any = Rank(rank)
        loading.choose_kernels(model, ranks)
        weight = model.model.layers[0].mlp.down_proj.weight
        taken.append(skinny_matmul.takes(mx.zeros((8, 64), mx.bfloat16), weight, None))
    assert timed == 30
    assert taken == [rank_0_is_faster] * 2


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("Failed to compile: x.cu(17): error\nmore"), "x.cu(17): error)"),
        (ValueError(), "(ValueError)"),
        (None, "(its results differ from MLX's)"),
    ],
)
def test_the_first_kernel_that_is_not_used_is_reported(
    error: Exception | None,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a kernel that is refused in silence; a GPU that is too old: one line."""
    monkeypatch.setattr(proofs, "_reported", False)

    def refused() -> bool:
        if error is not None:
            raise error
        return False

    assert proofs.holds("commit", Check(True))
    assert not proofs.holds("attention of 64 bf16", refused)
    assert not proofs.holds("skinny bf16", refused)
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "'attention of 64 bf16'" in record.getMessage()
    assert why in record.getMessage()
    assert "\n" not in record.getMessage()


def test_layers_of_experts_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model whose prefills of many tokens end the run on CUDA."""
    kernels = BackendDefaults("cuda", read_bucket=64, static_shapes=True, kernels=True)
    monkeypatch.setattr(loading, "defaults", lambda: kernels)
    model = nn.Sequential(SwitchLinear(8, 8, 2), QuantizedSwitchLinear(64, 8, 2))
    loading.fit(model)
    assert isinstance(model.layers[0], PiecewiseSwitchLinear)
    assert isinstance(model.layers[1], PiecewiseQuantizedSwitchLinear)
