"""GGUF files: metadata, tensor table, counts and bytes that are not as they must be."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import _tiny_model
from tests.models.gguf_files import VOCAB, byte_level, file_tensors, metadata

from .case import Case, World, fail, kind, specdec, specdec_works
from .odd import MANY_DIGITS, NUMBERS, TEMPLATES, TEXTS, plant, spoil_bytes

# Value types of the format.
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMS = {
    U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?",
    U64: "Q", I64: "q", F64: "d",
}  # fmt: skip
HUGE = (2**16, 2**20, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
# A sparse file of that size takes no room on the disk.
SPARSE = 2**33
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
ASK = ("--prompt", "12 the", "--max-tokens", "6", "--quiet")
MORE_KEYS = (
    "general.alignment", "general.architecture", "split.count", "llama.expert_count",
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.freq_base",
    "llama.attention.key_length", "llama.attention.value_length", "llama.vocab_size",
    "llama.rope.scaling.original_context_length", "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id", "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.pre", "tokenizer.ggml.model",
    "tokenizer.ggml.scores", "tokenizer.chat_template", "general.name",
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A metadatum: its type, and the bytes of its value."""

    key: bytes
    type: int
    value: bytes


@dataclass(frozen=True)
class Tensor:
    """A line of the tensor table; ``shape`` is as the file has it."""

    name: bytes
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class Parts:
    """A file, taken apart; ``counts`` replace those of the table and the metadata."""

    pairs: list[Pair]
    tensors: list[Tensor]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    counts: tuple[int | None, int | None] = (None, None)

    def encode(self) -> bytes:
        tensors, pairs = self.counts
        head = self.magic + struct.pack("<I", self.version)
        head += _u64(len(self.tensors) if tensors is None else tensors)
        head += _u64(len(self.pairs) if pairs is None else pairs)
        for pair in self.pairs:
            head += _text(pair.key) + struct.pack("<I", pair.type) + pair.value
        for tensor in self.tensors:
            head += _text(tensor.name) + struct.pack("<I", len(tensor.shape))
            head += b"".join(map(_u64, tensor.shape))
            head += struct.pack("<I", tensor.type) + _u64(tensor.offset)
        return head + bytes(-len(head) % 32) + self.data


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value % 2**64)


def _text(text: bytes) -> bytes:
    return _u64(len(text)) + text


def encoded(value: Any) -> tuple[int, bytes]:
    """The type and the bytes of a value, as converters choose them."""
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return (
            (U32, struct.pack("<I", value))
            if 0 <= value < 2**32
            else (I64, b"\xff" * 8)
        )
    if isinstance(value, float):
        return F32, np.float32(value).tobytes()
    if isinstance(value, str):
        return STRING, _text(value.encode("utf-8", "surrogatepass"))
    items = [encoded(each) for each in value]
    type_ = items[0][0] if items else STRING
    body = b"".join(item for _, item in items)
    return ARRAY, struct.pack("<I", type_) + _u64(len(items)) + body


def sound_file(world: World) -> Parts:
    """The file that cases spoil: a small random model that runs."""
    model = _tiny_model("llama", **SIZES)
    vocabulary = byte_level()
    values = {
        "general.architecture": "llama",
        **metadata("llama", vars(model.args)),
        "tokenizer.ggml.model": vocabulary.model,
        "tokenizer.ggml.pre": vocabulary.pre,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.merges": vocabulary.merges,
        **vocabulary.extra,
    }
    pairs = [Pair(key.encode(), *encoded(value)) for key, value in values.items()]
    tensors, data = [], b""
    for name, array in file_tensors("llama", model).items():
        tensors.append(Tensor(name.encode(), array.shape[::-1], 0, len(data)))
        data += array.astype(np.float32).tobytes()
        data += bytes(-len(data) % 32)
    return Parts(pairs, tensors, data)


def odd_pair(rng: random.Random, key: bytes) -> Pair:
    """A metadatum of any type."""
    draw = rng.random()
    if draw < 0.4:
        type_ = rng.choice([*FORMS])
        return Pair(key, type_, _odd_scalar(rng, type_))
    if draw < 0.6:
        text = rng.choice((*TEXTS, MANY_DIGITS, rng.choice(TEMPLATES)))
        return Pair(key, STRING, _text(text.encode("utf-8", "surrogatepass")))
    if draw < 0.7:
        return Pair(key, rng.choice((13, 99, 2**31)), rng.randbytes(8))
    if draw < 0.8:  # an array, with its count
        type_ = rng.choice([*FORMS])
        n = rng.choice((0, 1, 3, 2000))
        items = b"".join(_odd_scalar(rng, type_) for _ in range(n))
        count = rng.choice((n, n, n, n + 1, *HUGE))
        return Pair(key, ARRAY, struct.pack("<I", type_) + _u64(count) + items)
    if draw < 0.9:  # arrays in arrays
        depth = rng.choice((2, 50, 1000, 30_000))
        one = struct.pack("<I", ARRAY) + _u64(1)
        return Pair(key, ARRAY, one * depth + struct.pack("<I", U8) + _u64(0))
    texts = [rng.choice(TEXTS).encode("utf-8", "surrogatepass") for _ in range(320)]
    body = b"".join(map(_text, texts))
    return Pair(key, ARRAY, struct.pack("<I", STRING) + _u64(len(texts)) + body)


def _odd_scalar(rng: random.Random, type_: int) -> bytes:
    form = FORMS[type_]
    if form in "fd":
        value = rng.choice([n for n in NUMBERS if isinstance(n, float)])
        clipped = value if form == "d" or abs(value) < 1e38 else 1e38
        packed: bytes = struct.pack("<" + form, clipped)
        return packed
    size = struct.calcsize("<" + form)
    number = int(rng.choice([n for n in NUMBERS if isinstance(n, int)]))
    return (number % (1 << 8 * size)).to_bytes(size, "little")


def spoil_pairs(parts: Parts, rng: random.Random) -> Parts:
    """Metadata changed, added, doubled or removed."""
    pairs = list(parts.pairs)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, draw = rng.randrange(len(pairs)), rng.random()
        old = pairs[at]
        if draw < 0.35:
            pairs[at] = odd_pair(rng, old.key)
        elif draw < 0.55 and old.type in FORMS:
            pairs[at] = replace(old, value=_odd_scalar(rng, old.type))
        elif draw < 0.65:
            del pairs[at]
        elif draw < 0.7:
            pairs.insert(at, old)
        elif draw < 0.75:
            key = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
            pairs[at] = replace(old, key=key)
        elif draw < 0.85:
            template = rng.choice(TEMPLATES).encode("utf-8", "surrogatepass")
            pairs = [p for p in pairs if p.key != b"tokenizer.chat_template"]
            pairs.append(Pair(b"tokenizer.chat_template", STRING, _text(template)))
        else:
            pairs.append(odd_pair(rng, rng.choice(MORE_KEYS).encode()))
    return replace(parts, pairs=pairs)


def spoil_tensors(parts: Parts, rng: random.Random) -> Parts:
    """Lines of the tensor table changed, doubled or removed."""
    tensors = list(parts.tensors)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(tensors))
        old = tensors[at]
        axis = rng.randrange(max(len(old.shape), 1))
        sizes = list(old.shape)
        if sizes:
            sizes[axis] = rng.choice((0, 1, sizes[axis] * 2, sizes[axis] + 1, *HUGE))
        tensors[at] = rng.choice(
            (
                replace(old, shape=tuple(sizes)),
                replace(old, shape=(*old.shape, rng.choice((0, 1, 2, 2**40)))),
                replace(old, shape=old.shape[::-1]),
                replace(old, shape=()),
                replace(old, shape=(1,) * rng.choice((3, 4, 5, 1000))),
                replace(old, type=rng.choice((1, 2, 8, 12, 14, 30, 4, 31, 99, 2**31))),
                replace(old, offset=rng.choice((1, 7, len(parts.data), *HUGE))),
                replace(old, offset=-rng.choice((32, 64, 1024, 2**20))),
                replace(old, name=rng.choice(tensors).name),
                replace(old, name=rng.choice(TEXTS).encode("utf-8", "surrogatepass")),
            )
        )
        if rng.random() < 0.15:
            del tensors[at]
        elif rng.random() < 0.1:
            tensors.append(replace(old, name=rng.choice((old.name, b"more.weight"))))
    return replace(parts, tensors=tensors)


def spoil_counts(parts: Parts, rng: random.Random) -> Parts:
    """A header that promises something else than what comes."""
    counts = (0, 1, len(parts.tensors) + 1, len(parts.pairs) - 1, *HUGE)
    return rng.choice(
        (
            replace(parts, counts=(rng.choice(counts), None)),
            replace(parts, counts=(None, rng.choice(counts))),
            replace(parts, version=rng.choice((0, 1, 2, 4, 3 << 24, 2**32 - 1))),
            replace(parts, magic=rng.choice((b"FUGG", b"gguf", b"\0\0\0\0"))),
        )
    )


def more_layers(parts: Parts, rng: random.Random) -> Parts:
    """A model of many times the layers and widths that it has weights for."""
    names = ("block_count", "embedding_length", "feed_forward_length", "context_length",
             "attention.head_count", "attention.head_count_kv")  # fmt: skip
    key = f"llama.{rng.choice(names)}".encode()
    value = rng.choice((0, 1, 3, 1000, 100_000, 2**31 - 1, 2**31, 2**32 - 1))
    pair = Pair(key, U32, struct.pack("<I", value))
    return replace(parts, pairs=[pair if p.key == key else p for p in parts.pairs])


@kind
def gguf_file(case: Case) -> None:
    """A target or a draft in a malformed GGUF file."""
    rng, parts = case.rng, case.world.once(sound_file)
    path = case.place / "model.gguf"
    ways = (spoil_pairs, spoil_pairs, spoil_tensors, spoil_counts, more_layers)
    sparse = False
    if rng.random() < 0.75:
        parts = rng.choice(ways)(parts, rng)
        data = parts.encode()
    elif rng.random() < 0.7:
        data = spoil_bytes(parts.encode(), rng)
    else:  # an array that has room in a file with a hole
        many = struct.pack("<I", rng.choice((U8, F32, U64, BOOL))) + _u64(2**30)
        data = replace(parts, pairs=[Pair(b"general.tags", ARRAY, many)]).encode()
        sparse = True
    path.write_bytes(data)
    if sparse:
        with path.open("r+b") as file:
            file.truncate(SPARSE)
    elif rng.random() < 0.04:
        plant(path, rng)
    use_model(case, path)


def use_model(case: Case, path: Path) -> None:
    """Give a model to one of the commands that take one."""
    rng = case.rng
    draw = rng.random()
    if draw < 0.6:
        specdec("run", "--target", path, "--draft", "none", *ASK)
    elif draw < 0.75:
        target = case.world.once(sound_gguf)
        drafting = ("--draft", path, "--num-draft-tokens", "2")
        answer = specdec("run", "--target", target, *drafting, *ASK)
        if answer.code == 0 and answer.out != case.world.once(text_alone):
            fail(f"other tokens with a draft: {answer}")
    elif draw < 0.9 or path.is_dir():
        ways: tuple[tuple[str, ...], ...] = ((), ("--json",), ("--batch", "50000000"))
        more = rng.choice(ways)
        specdec("estimate", "--target", path, "--context", "64", *more)
    else:
        specdec("convert", path, case.place / "converted")


def text_alone(world: World) -> str:
    """What the sound file gives without a draft."""
    target = world.once(sound_gguf)
    return specdec_works("run", "--target", target, "--draft", "none", *ASK).out


def sound_gguf(world: World) -> Path:
    """The file as it is before anything is spoilt."""
    path = world.folder / "sound.gguf"
    path.write_bytes(world.once(sound_file).encode())
    return path
