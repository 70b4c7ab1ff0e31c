"""``convert``: a folder that mlx-lm itself loads, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from specdec.errors import (
    ConfigError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from specdec.models import convert, load
from specdec.models import convert as convert_function
from specdec.models.gguf import load_gguf
from specdec.models.precision import widen_packed

from .gguf_files import (
    Vocabulary,
    byte_level,
    random_model,
    write_model,
)
from .test_gguf_tokenizer import SPM_TEXTS, TEXTS, sentencepiece_vocabulary

KIND = gguf.GGMLQuantizationType
TOKENS = mx.array([[7, 300, 12, 44, 5, 91, 200, 7]])


def mixed(name: str) -> KIND:
    """As real files are: several quantizations, one of which MLX cannot pack."""
    if "token_embd" in name:
        return KIND.Q8_0
    return KIND.Q5_0 if "ffn_down" in name else KIND.Q4_0


def write(path: Path, arch: str = "llama", **options: Any) -> Path:
    if arch == "qwen2":
        options.setdefault("vocabulary", byte_level("qwen2"))
    return write_model(path / "m.gguf", arch, random_model(arch), **options)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("kinds", [mixed, lambda name: KIND.F16])
def test_as_stored(arch: str, kinds: Any, tmp_path: Path) -> None:
    source = write(tmp_path, arch, kinds=kinds)
    out = convert(source, tmp_path / "new" / "out")
    assert out == tmp_path / "new" / "out"
    stored, _, _ = load_gguf(source)
    model, _ = mlx_lm.load(str(out))[:2]
    assert mx.array_equal(model(TOKENS), stored(TOKENS))
    ours: Any = dict(tree_flatten(stored.parameters()))
    theirs: Any = dict(tree_flatten(model.parameters()))
    assert ours.keys() == theirs.keys()
    assert all(ours[k].dtype == theirs[k].dtype for k in ours)
    again, loaded = load(str(out)), load(str(source))
    assert mx.array_equal(again.model(TOKENS), loaded.model(TOKENS))
    assert again.tokenizer.eos_token_ids == loaded.tokenizer.eos_token_ids


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_bits(bits: int, group_size: int, tmp_path: Path) -> None:
    source = write(tmp_path, kinds=mixed)
    (tmp_path / "out").mkdir()
    out = convert(source, tmp_path / "out", bits, group_size=group_size)
    model, _ = mlx_lm.load(str(out))[:2]
    plain = load(str(source), dtype="float16").model
    for path, layer in model.named_modules():
        if not hasattr(layer, "bits"):
            continue
        assert layer.bits == bits
        # 96 columns: 64 does not divide them.
        small = group_size == 32 or path.endswith("down_proj")
        assert layer.group_size == (32 if small else 64)
    gate: Any = model.layers[0].mlp.gate_proj
    expected = mx.quantize(plain.layers[0].mlp.gate_proj.weight, group_size, bits)
    assert mx.array_equal(gate.weight, expected[0])
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"]["bits"] == bits
    assert config["quantization"] == config["quantization_config"]
    widen_packed(model)
    assert mx.array_equal(load(str(out)).model(TOKENS), model(TOKENS))


def test_bits_16_is_not_quantized(tmp_path: Path) -> None:
    source = write(tmp_path, "qwen3", kinds=mixed)
    out = convert(source, tmp_path / "out", 16)
    model, _ = mlx_lm.load(str(out))[:2]
    flat: Any = tree_flatten(model.parameters())
    assert {value.dtype for _, value in flat} == {mx.bfloat16}
    assert "quantization" not in json.loads((out / "config.json").read_text())
    plain = load(str(source), dtype="bfloat16").model
    assert mx.array_equal(model(TOKENS), plain(TOKENS))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "vocabulary",
    [
        *(byte_level(pre) for pre in ("smollm", "qwen2", "llama-bpe", "gpt-2")),
        *(sentencepiece_vocabulary(space_prefix=space) for space in (True, False)),
    ],
    ids=["smollm", "qwen2", "llama-bpe", "gpt-2", "spm-prefix", "spm"],
)
def test_tokenizer_is_the_same(
    arch: str, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    """For every pair: transformers puts its own in for Qwen 2, whatever is there."""
    source = write(tmp_path, arch, vocabulary=vocabulary)
    if arch == "qwen2" and vocabulary.pre != "qwen2":
        with pytest.raises(UnsupportedModelError, match="use the GGUF file itself"):
            convert(source, tmp_path / "out")
        assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]
        return
    out = convert(source, tmp_path / "out")
    assert (out / "tokenizer.json").is_file()
    assert (out / "tokenizer_config.json").is_file()
    ours = load(str(source)).tokenizer
    _, theirs = mlx_lm.load(str(out))[:2]
    assert theirs.get_vocab() == ours.get_vocab()
    assert theirs.eos_token_ids == ours.eos_token_ids
    assert theirs.bos_token_id == ours.bos_token_id
    assert theirs.has_chat_template == ours.has_chat_template
    for text in (*TEXTS, *SPM_TEXTS):
        tokens = ours.encode(text)
        assert theirs.encode(text) == tokens
        assert theirs.decode(tokens) == ours.decode(tokens)
    if ours.has_chat_template:
        messages = [{"role": "user", "content": "ab"}]
        expected = ours.apply_chat_template(messages)
        assert theirs.apply_chat_template(messages) == expected


def test_a_taken_folder_is_left_alone(tmp_path: Path) -> None:
    source = write(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ModelError, match="out is not empty"):
        convert(source, tmp_path / "out")
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["mine.txt"]
    with pytest.raises(ModelError, match=r"mine\.txt is a file"):
        convert(source, tmp_path / "out" / "mine.txt")


def test_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    module = sys.modules[convert_function.__module__]

    def full(config: Any, path: Path) -> None:
        assert (path.parent / "model.safetensors").is_file()
        raise OSError(28, "No space left on device")

    source = write(tmp_path)
    monkeypatch.setattr(module, "save_config", full)
    with pytest.raises(ModelError, match="No space left on device") as caught:
        convert(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]


def test_a_folder_relative_to_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell in a folder that is replaced sees none of the new one's files."""
    source = write(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", "../here", tmp_path / "here"):
        with pytest.raises(ModelError, match="here is the current folder"):
            convert(source, out)
    out = convert("../m.gguf", "../there")
    assert out.is_absolute()
    assert out == (tmp_path / "there").resolve()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert convert("m.gguf", "empty/../empty").name == "empty"
    names = sorted(f.name for f in tmp_path.iterdir())
    assert names == ["empty", "here", "m.gguf", "there"]


def test_what_cannot_be_written_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model takes minutes to read."""
    import sys

    def loaded(*args: Any) -> None:
        raise AssertionError("loaded")

    module = sys.modules[convert_function.__module__]
    monkeypatch.setattr(module, "load_gguf", loaded)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for out in (file / "out", file / "a" / "b", tmp_path / "loop" / "x", "a\0b"):
        with pytest.raises(ModelError, match="cannot write") as caught:
            convert(file, out)
        assert "name another folder" in str(caught.value)
        assert "\0" not in str(caught.value)
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    with pytest.raises(ModelError, match="is not writable"):
        convert(file, tmp_path / "a" / "b")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["loop", "m.gguf"]


def test_bad_values(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4, 8 or 16"):
        convert("m.gguf", tmp_path / "out", 5)
    with pytest.raises(ConfigError, match="32, 64 or 128"):
        convert("m.gguf", tmp_path / "out", 4, group_size=48)
    with pytest.raises(ModelNotFoundError, match="No such file"):
        convert(tmp_path / "no.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
