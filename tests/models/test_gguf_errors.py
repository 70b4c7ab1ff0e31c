"""A GGUF file that cannot be used is refused in one line that says why."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.errors import (
    ModelError,
    ModelNameError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from specdec.models import load
from specdec.models.gguf import load_gguf
from specdec.models.model_outline import outline

from .gguf_files import (
    VOCAB,
    Vocabulary,
    byte_level,
    file_tensors,
    metadata,
    random_model,
    write_gguf,
    write_model,
)

# What there is to do, after a message's reason.
REMEDY = re.compile(
    r"[:;,] (download it again|convert it (again )?with|use (an? |one |another )"
    r"|check the path|join them with)"
)


def refusal(path: Path, kind: type[ModelError]) -> str:
    with pytest.raises(ModelError) as caught:
        load(str(path))
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert REMEDY.search(message), "the way out"
    return message


def llama(folder: Path, **options: Any) -> Path:
    """A file of a small model, with these options of :func:`write_model`."""
    return write_model(folder / "m.gguf", "llama", random_model("llama"), **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return llama(tmp_path_factory.mktemp("gguf")).read_bytes()


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNameError, match=r"no model at .*: there is no such file"):
        load(tmp_path / "no.gguf")
    with pytest.raises(ModelNotFoundError, match="No such file"):
        load_gguf(tmp_path / "no.gguf")


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content in (b"", b"GG", b"\x80\x02 not a model", b"FUGG" * 100):
        path.write_bytes(content)
        assert "not a GGUF file" in refusal(path, ModelError)


def test_cut_short_anywhere(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for length in (*range(4, 200, 7), *range(200, len(whole), 4001), len(whole) - 1):
        path.write_bytes(whole[:length])
        said = refusal(path, ModelError)
        assert "cut short or corrupt" in said, length
        assert "buffer" not in said, length  # in Python's words


def test_damage_never_ends_in_a_traceback(whole: bytes, tmp_path: Path) -> None:
    """Overwrite eight bytes of the header, here and there: an error of ours, or none.

    A byte of a weight, a name or a token may well go unnoticed.
    """
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(0)
    messages = []
    for _ in range(150):
        at = int(rng.integers(4, 12_000))
        path.write_bytes(whole[:at] + rng.bytes(8) + whole[at + 8 :])
        try:
            load(str(path))
        except ModelError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    ("kind", "alignment"), [("<I", 0), ("<I", 3_000_000_000), ("<i", -32)]
)
def test_nonsense_alignment(kind: str, alignment: int, tmp_path: Path) -> None:
    """A negative one puts tensors before where they are."""
    path = llama(tmp_path)
    content = path.read_bytes()
    key = b"llama.block_count"
    at = content.index(key)
    # The same length, so nothing else moves.
    named = b"general.alignment"
    assert len(named) == len(key)
    type_id = struct.pack("<I", {"<I": 4, "<i": 5}[kind])
    path.write_bytes(
        content[:at]
        + named
        + type_id
        + struct.pack(kind, alignment)
        + content[at + len(key) + 8 :]
    )
    assert "cut short or corrupt" in refusal(path, ModelError)


def test_versions(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for version in (1, 4, 3 << 24):  # the last: version 3, big endian
        path.write_bytes(whole[:4] + struct.pack("<I", version) + whole[8:])
        assert f"version {version}" in refusal(path, UnsupportedModelError)
    path.write_bytes(whole[:4] + struct.pack("<I", 2) + whole[8:])
    assert load(str(path)).config["model_type"] == "llama"


def test_unknown_tensor_type(tmp_path: Path) -> None:
    path = llama(tmp_path)
    content = path.read_bytes()
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8  # one axis: count, length
    path.write_bytes(content[:at] + struct.pack("<I", 999) + content[at + 4 :])
    message = refusal(path, UnsupportedModelError)
    assert "type 999" in message
    assert "output_norm.weight" in message


@pytest.mark.parametrize(
    ("arch", "values", "named"),
    [
        ("mamba", {}, "'mamba'"),
        ("qwen2", {"qwen2.expert_count": 8}, "mixture of experts"),
    ],
)
def test_the_model_is_judged_before_its_tokenizer(
    arch: str, values: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """Another tokenizer would not help whoever has such a file."""
    path = write_model(
        tmp_path / "m.gguf",
        arch,
        random_model("llama"),
        vocabulary=byte_level("tekken"),
        values=values,
    )
    assert named in refusal(path, UnsupportedModelError)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ggml.bos_token_id", "one"),
        ("ggml.bos_token_id", "1"),
        ("ggml.eos_token_id", [1, 2]),
        ("ggml.eot_token_id", "1"),
        ("ggml.scores", 3),
        ("ggml.scores", ["high"] * VOCAB),
        ("ggml.tokens", list(range(VOCAB))),
        ("ggml.tokens", "abc"),
        ("ggml.token_type", ["normal"] * VOCAB),
        ("ggml.token_type", 1),
        ("ggml.merges", [1, 2]),
        ("ggml.merges", "a b"),
        ("ggml.pre", 7),
        ("ggml.model", 7),
        ("ggml.add_bos_token", "false"),
        ("ggml.add_space_prefix", "false"),
        ("chat_template", 7),
        ("chat_template", ["a", "b"]),
    ],
)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_tokenizer_metadata_of_another_type(
    model: str, key: str, value: Any, tmp_path: Path
) -> None:
    """Seen at once: not as a traceback, nor when a chat begins."""
    vocabulary = byte_level()
    vocabulary.model = model
    vocabulary.extra[f"tokenizer.{key}"] = value  # over what is there
    path = llama(tmp_path, vocabulary=vocabulary)
    refusal(path, UnsupportedModelError if key == "ggml.model" else ModelError)


def test_a_part_of_a_sharded_file(tmp_path: Path) -> None:
    path = llama(
        tmp_path,
        values={"split.count": 3, "split.no": 0},
    )
    message = refusal(path, UnsupportedModelError)
    assert "3 parts of a sharded GGUF" in message
    assert "--merge" in message


@pytest.mark.parametrize(
    ("arch", "values", "named"),
    [
        ("qwen2", {"qwen2.expert_count": 8}, "mixture of experts"),
        ("llama", {"llama.rope.dimension_count": 8}, "part of the head"),
        ("qwen3", {"qwen3.attention.value_length": 8}, "another width"),
        ("gemma3", {"gemma3.final_logit_softcapping": 30.0}, "soft-capped"),
        ("qwen2", {"qwen2.attention.key_length": 8}, "head width"),
        ("llama", {"llama.attention.head_count_kv": [2, 1]}, "layer to layer"),
        (
            "llama",
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            "'longrope'",
        ),
        (
            "gemma3",
            {
                "gemma3.attention.sliding_window_pattern": [
                    *(True, False, True, True, False, True, True)
                ]
            },
            "fixed period",
        ),
    ],
)
def test_features_are_refused_by_name(
    arch: str, values: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "m.gguf", arch, random_model(arch), values=values)
    assert named in refusal(path, UnsupportedModelError)


def test_rope_factors_that_are_not_llama_3s(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.full(8, 2.0, np.float32)}
    path = llama(tmp_path, tensors=factors)
    assert "RoPE factors" in refusal(path, UnsupportedModelError)


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.ffn_gate_inp.weight",
        "blk.0.attn_q.bias",
        "mm.0.weight",
        "blk.x.y",
        "a" * 5000,
    ],
    ids=lambda name: name[:30],
)
def test_a_tensor_that_no_layer_takes(name: str, tmp_path: Path) -> None:
    """Ignored, or a message as long as its name."""
    extra = {name: np.zeros((64, 64), np.float32)}
    path = llama(tmp_path, tensors=extra)
    message = refusal(path, UnsupportedModelError)
    assert name[:30] in message
    assert "llama" in message
    assert len(message) < 600


@pytest.mark.parametrize(
    "name", ["blk.1.ffn_up.weight", "output_norm.weight", "token_embd.weight"]
)
def test_a_tensor_that_is_missing(name: str, tmp_path: Path) -> None:
    model = random_model("llama")
    tensors = file_tensors("llama", model)
    del tensors[name]
    args: Any = model.args
    path = write_gguf(
        tmp_path / "m.gguf", "llama", tensors, metadata("llama", vars(args))
    )
    refusal(path, ModelError)


@pytest.mark.parametrize(
    "key",
    ["block_count", "embedding_length", "attention.layer_norm_rms_epsilon"],
)
def test_metadata_that_is_missing(key: str, tmp_path: Path) -> None:
    model = random_model("llama")
    args: Any = model.args
    values = metadata("llama", vars(args))
    del values[f"llama.{key}"]
    path = write_gguf(
        tmp_path / "m.gguf", "llama", file_tensors("llama", model), values
    )
    assert f"llama.{key}" in refusal(path, ModelError)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count", 0),
        ("attention.head_count", "four"),
        ("embedding_length", 32),
        ("block_count", 3),
        ("feed_forward_length", 100),
        ("attention.head_count_kv", 4),
    ],
)
def test_metadata_that_no_weights_fit(key: str, value: Any, tmp_path: Path) -> None:
    path = llama(
        tmp_path,
        values={f"llama.{key}": value},
    )
    with pytest.raises(ModelError) as caught:
        load(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 100_000),
        ("embedding_length", 2**31),
        ("feed_forward_length", 2**31),
        ("attention.head_count", 2**31),
        ("attention.head_count_kv", 2**31),
        ("attention.key_length", 2**31),
        ("context_length", 2**32 - 1),
    ],
)
@pytest.mark.parametrize("opened", [load, outline])
def test_sizes_are_compared_before_layers_are_built(
    key: str,
    value: int,
    opened: Callable[[str], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100,000 layers took gigabytes before they were found not to be in the file."""
    model = random_model("llama")

    def build(*_: object) -> None:
        pytest.fail("layers are built")

    monkeypatch.setattr("mlx_lm.models.llama.Model.__init__", build)
    values = {f"llama.{key}": value, "llama.attention.value_length": value}
    if key != "attention.key_length":
        del values["llama.attention.value_length"]
    path = write_model(
        tmp_path / "m.gguf",
        "llama",
        model,
        values=values,
        tensors={"rope_freqs.weight": np.ones(8, np.float32)},
    )
    with pytest.raises(ModelError) as caught:
        opened(str(path))
    assert str(path) in str(caught.value)


def header(pairs: Sequence[bytes], tensors: Sequence[bytes] = ()) -> bytes:
    """A file's beginning: pairs of its metadata, and entries of its table."""
    counts = struct.pack("<IQQ", 3, len(tensors), len(pairs))
    return b"GGUF" + counts + b"".join(pairs) + b"".join(tensors)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, *shape: int) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + axes + struct.pack("<IQ", 0, 0)


ARRAY_OF_BYTES = text("a") + struct.pack("<IIQ", 9, 0, 1 << 25)
ARRAYS_OF_NOTHING = text("a") + struct.pack("<IIQ", 9, 9, 1 << 24)
LONG_STRING = text("a") + struct.pack("<IQ", 8, 1 << 28)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (header([ARRAY_OF_BYTES]), "arrays of more than 8388608 values"),
        (header([ARRAYS_OF_NOTHING]), "arrays of more than 8388608 values"),
        (header([LONG_STRING]), "its header has more than 134217728 bytes"),
        (header([text("a") + struct.pack("<IB", 0, 1)] * 2), "a is there twice"),
        (header([], [tensor("a", 4), tensor("a", 4)]), "a is there twice"),
        (header([], [tensor("a", 4, 0)]), "has the shape"),
        (header([], [tensor("a")]), "tensor a has 0 axes"),
        (header([], [tensor("a", 1, 1, 1, 1, 1)]), "tensor a has 5 axes"),
        (header([], [tensor("a", 1, 1 << 31)]), "has the shape"),
    ],
)
def test_headers_of_files_with_holes(
    content: bytes, words: str, tmp_path: Path
) -> None:
    """What a file claims is not there just because the file is long."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    os.truncate(path, 1 << 32)
    assert words in refusal(path, ModelError)


def test_a_piece_without_end(tmp_path: Path) -> None:
    """The merges of a piece are looked for in time that is the square of its length."""
    vocabulary = Vocabulary(model="llama", pre="default")
    vocabulary.add("x")
    vocabulary.add("x" * 600, 1)
    path = llama(tmp_path, vocabulary=vocabulary)
    assert "a SentencePiece token of 600 characters" in refusal(path, ModelError)


@pytest.mark.timeout(60)
def test_a_file_that_never_comes(tmp_path: Path) -> None:
    """A FIFO waits for a writer."""
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelNotFoundError, match="it is not a plain file; check the"):
        load(tmp_path / "m.gguf")
