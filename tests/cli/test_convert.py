"""``specdec convert`` passes its arguments on and says what comes next."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from specdec import backend
from specdec.errors import ModelNotFoundError

from .conftest import Specdec


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def convert(file: str, out_dir: str, *, bits: int | None) -> None:
        if file == "missing.gguf":
            raise ModelNotFoundError("missing.gguf: no such file")
        calls.append((file, out_dir, bits))

    module = ModuleType("specdec.models")
    module.convert = convert  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "specdec.models", module)
    return calls


@pytest.mark.parametrize(
    ("options", "bits"), [([], None), (["--bits", "4"], 4), (["--bits", "16"], 16)]
)
def test_arguments(
    specdec: Specdec, calls: list[tuple[Any, ...]], options: list[str], bits: int | None
) -> None:
    result = specdec("convert", "m.gguf", "out", *options)
    assert result.exit_code == 0
    assert calls == [("m.gguf", "out", bits)]
    assert result.stdout == ""
    wrote, *notes = result.stderr.splitlines()
    assert wrote == "wrote out: specdec run --target out"
    on_cpu = backend.defaults().name == "cpu"
    assert any("--bits 16" in n for n in notes) == (on_cpu and bits != 16)


def test_failure(specdec: Specdec, calls: list[tuple[Any, ...]]) -> None:
    result = specdec("convert", "missing.gguf", "out")
    assert result.exit_code == 1
    assert result.stderr == "specdec: error: missing.gguf: no such file\n"


def test_the_default_target_by_its_name(
    specdec: Specdec, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one name that every other command knows."""
    monkeypatch.setattr("specdec.model_names.default_target", lambda: "its/file.gguf")
    assert specdec("convert", "SmolLM2-135M-Instruct", "out").exit_code == 0
    assert calls == [("its/file.gguf", "out", None)]
