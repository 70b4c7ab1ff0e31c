"""Messages about missing packages fit the way in which specdec was installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.utils import extras


def installed(
    monkeypatch: pytest.MonkeyPatch, prefix: Path, by: str, source: str | None = None
) -> None:
    """Let specdec seem an installed copy of ``source``."""
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(extras, "in_checkout", lambda: False)
    texts = {"INSTALLER": f"{by}\n"}
    if source is not None:
        texts["direct_url.json"] = json.dumps({"url": source, "dir_info": {}})
    files = SimpleNamespace(read_text=texts.get)
    monkeypatch.setattr(metadata, "distribution", lambda _: files)


def test_an_extra_is_named_as_it_can_be_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who has a wheel has no checkout; an environment of uv has no pip."""
    assert extras.install("gguf").endswith("pip install '.[gguf]' in a checkout")
    installed(monkeypatch, tmp_path, "pip")
    assert extras.install("gguf") == "pip install 'mlx-specdec[gguf]'"
    installed(monkeypatch, tmp_path, "uv")
    assert extras.install("gguf") == "uv pip install 'mlx-specdec[gguf]'"
    (tmp_path / "uv-receipt.toml").touch()
    tool = f"uv pip install --python {tmp_path} 'mlx-specdec[gguf]'"
    assert extras.install("gguf") == tool


def test_a_copy_of_a_checkout_is_installed_from_it_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``pip install '.[cpu]'`` makes a copy; no index has the other packages."""
    checkout = tmp_path / "a checkout"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    wheel = tmp_path / "mlx_specdec-1-py3-none-any.whl"
    wheel.touch()
    for source in (checkout, wheel):
        installed(monkeypatch, tmp_path, "pip", source.as_uri())
        assert extras.install("gguf") == f"pip install '{source}[gguf]'"
    for gone in ((tmp_path / "gone").as_uri(), "https://a.example/x.whl"):
        installed(monkeypatch, tmp_path, "pip", gone)
        assert extras.install("gguf") == "pip install 'mlx-specdec[gguf]'"


@pytest.mark.parametrize(
    "program", ["from specdec import SpecDecoder", "import specdec.ray"]
)
def test_every_way_in_names_the_way_out(program: str) -> None:
    """The stage for Ray imported MLX before anything could say what is missing."""
    program = f"import sys; sys.modules['mlx'] = None; {program}"
    made = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert made.stderr.splitlines()[-1].startswith(
        "ImportError: MLX has no backend here"
    )


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '"a"', "5", "null", '{"url": 5}', '{"url": null}', '{"url": "file://["}',
     '{"url": "file:///%00"}', '{"url": "file:///' + "a" * 9999 + '"}', "[" * 9999],
)  # fmt: skip
def test_a_damaged_record_of_the_source(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The message about a missing package would be a traceback."""
    installed(monkeypatch, tmp_path, "pip")
    texts = {"INSTALLER": "pip\n", "direct_url.json": text}
    files = SimpleNamespace(read_text=texts.get)
    monkeypatch.setattr(metadata, "distribution", lambda _: files)
    assert extras.install("gguf") == "pip install 'mlx-specdec[gguf]'"
