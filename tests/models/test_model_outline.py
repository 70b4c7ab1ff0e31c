"""An outline has the shapes and types of the loaded model, and reads no weight."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from specdec.backend import BackendDefaults
from specdec.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from specdec.models import load, load_draft, loading
from specdec.models import model_outline as outlines
from specdec.models.conversions import weights_of
from specdec.models.model_outline import outline, outline_draft

from ..cache.small_models import MODELS
from ..conftest import SMALLEST
from .folders import write_folder
from .gguf_files import random_model, write_model

DTYPES = [None, "float32", "bfloat16"]


def shapes(model: Any) -> dict[str, tuple[tuple[int, ...], mx.Dtype]]:
    flat: Any = tree_flatten(model.parameters())
    return {name: (value.shape, value.dtype) for name, value in flat}


def held(model: Any) -> int:
    return sum(weights_of(model).arrays.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3"])
def test_a_folder(
    arch: str, bits: int | None, dtype: str | None, tmp_path: Path
) -> None:
    """A cast or the widening on a CPU forgotten, a packed layer missed."""
    write_folder(tmp_path / "m", arch, bits=bits)
    found = outline(tmp_path / "m", dtype=dtype)
    assert shapes(found.model) == shapes(load(tmp_path / "m", dtype=dtype).model)
    assert found.loading_bytes >= held(found.model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_1", "IQ4_NL"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3"])
def test_a_gguf_file(arch: str, kind: str, dtype: str | None, tmp_path: Path) -> None:
    model = random_model(arch)

    def kind_of(name: str) -> gguf.GGMLQuantizationType:
        vector = "norm" in name or name.endswith("bias")
        return KINDS["F32" if vector else kind]

    path = write_model(tmp_path / "m.gguf", arch, model, kinds=kind_of)
    found = outline(path, dtype=dtype)
    assert shapes(found.model) == shapes(load(path, dtype=dtype).model)


KINDS = {k.name: k for k in gguf.GGMLQuantizationType}


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("draft", ["self:4bit", "self:8bit"])
def test_a_draft_of_the_target(draft: str, bits: int | None, tmp_path: Path) -> None:
    write_folder(tmp_path / "m", bits=bits)
    found = outline_draft(draft, outline(tmp_path / "m"))
    loaded = load_draft(draft, load(tmp_path / "m"))
    assert shapes(found.model) == shapes(loaded.model)
    assert found.name == draft
    other = outline_draft(str(tmp_path / "m"), found)
    assert shapes(other.model) == shapes(load(tmp_path / "m").model)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_configuration_alone(where: str, bits: int | None, tmp_path: Path) -> None:
    """Packed as mlx-lm's conversion would pack it, in the type that it names."""
    write_folder(tmp_path / "m", bits=bits)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["torch_dtype"] = "float32"
    (tmp_path / "alone").mkdir()
    path = tmp_path / "alone" / "config.json"
    path.write_text(json.dumps(config))
    found = outline(path if where == "file" else path.parent)
    assert shapes(found.model) == shapes(load(tmp_path / "m").model)
    cast = outline(path, dtype="bfloat16")
    assert shapes(cast.model) == shapes(load(tmp_path / "m", dtype="bfloat16").model)


@pytest.mark.parametrize("name", [n for n in MODELS if n != "shared-kv-3n"])
def test_configurations_of_many_architectures(
    name: str, tmp_path: Path, tiny_model: Callable[..., Any]
) -> None:
    arch, arguments = MODELS[name]
    config = {
        "model_type": arch,
        "torch_dtype": "float32",
        **SMALLEST,
        **arguments,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = outline(tmp_path / "config.json")
    expected = shapes(tiny_model(arch, **arguments))
    expected.pop("lm_head.weight", None)  # what mlx-lm's loader takes out, if tied
    assert {**shapes(found.model)} | expected == shapes(found.model)


def test_no_weight_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", hidden_size=256, intermediate_size=2048)
    mx.synchronize()
    before = mx.get_active_memory()
    found = outline(tmp_path / "m", dtype="bfloat16")
    assert held(found.model) > 1 << 20
    assert mx.get_active_memory() - before < 1 << 16


def refusal(path: Path, **config: Any) -> str:
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as raised:
        outline(path)
    return str(raised.value)


def test_what_cannot_be_outlined(tmp_path: Path) -> None:
    """One line that says what to give instead."""
    with pytest.raises(ModelNotFoundError, match=r"give a folder, a \.gguf file"):
        outline("nothing-here")
    with pytest.raises(ModelNotFoundError, match="fetch it with hf download nobody/no"):
        outline("nobody/no-such-model")
    with pytest.raises(ModelNotFoundError, match="made from a target"):
        outline("self:4bit")
    with pytest.raises(ModelError, match=r"no config\.json"):
        outline(tmp_path)
    assert "names no model_type" in refusal(tmp_path, hidden_size=3)
    assert "not supported" in refusal(tmp_path, model_type="no-such-architecture")
    packed = refusal(
        tmp_path, model_type="llama", quantization_config={"quant_method": "gptq"}
    )
    assert "give the folder" in packed
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        outline(tmp_path / "config.json")
    arch, arguments = MODELS["shared-kv-3n"]
    assert "give the folder" in refusal(tmp_path, model_type=arch, **arguments)
    refused = tmp_path / "config.json"
    refused.write_text('{"model_type": "no-such-architecture"}')
    with pytest.raises(UnsupportedModelError, match="mlx-lm has to know"):
        outline(refused)


JOINING = BackendDefaults("cuda", read_bucket=64, static_shapes=True, kernels=True)


@pytest.mark.parametrize("switches", [None, JOINING], ids=["here", "joining"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [None, 4])
def test_loading_stays_within_what_is_planned(
    bits: int | None,
    dtype: str | None,
    switches: BackendDefaults | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Conversions hold two forms of a weight at a time, and unpacking more."""
    if switches is not None:
        for module in (loading, outlines):
            monkeypatch.setattr(module, "defaults", lambda: switches)
    changes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "vocab_size": 8192,
    }
    write_folder(tmp_path / "m", bits=bits, **changes)
    planned = outline(tmp_path / "m", dtype=dtype).loading_bytes
    gc.collect()  # what other tests left would be let go while this one loads
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load(tmp_path / "m", dtype=dtype)
    peak = mx.get_peak_memory() - before
    assert peak <= planned * 1.02 + (1 << 17)  # small arrays are rounded up
    assert planned <= 1.35 * peak
    assert held(loaded.model) <= planned
