"""Damaged prefix entries, made by a seeded generator from sound ones.

Three families: *bytes* keep the name, whose digest they contradict; *headers* and
*arrays* get a name with the right digest (headers with the right place, too), so that
nothing but what they say is wrong. Values of arrays are never changed under a right
digest: whoever does that writes an entry of his own.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec.prefix_cache.entries import place_key
from specdec.prefix_cache.files import digest

Header = dict[str, Any]
ODD: tuple[Any, ...] = (
    None, True, -1, 1.5, "", "x", "9" * 5000, "-1", "1e3", "\ud800", "٣", [], [1],
    ["0"], {}, {"a": 1}, 2**70, "0" * 32, "f" * 31,
)  # fmt: skip
TYPES = ("F64", "F32", "F16", "BF16", "I32", "U32", "U8", "BOOL", "f32", "", "F8_E4M3")


def split(data: bytes) -> tuple[bytes, bytes]:
    """The header of a safetensors file, and what follows it."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def joined(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


class Damage:
    """One way to damage an entry, drawn by ``seed``.

    Attributes:
        path: where the damaged entry is now.
        moved: whether it is of another prompt now, which nobody asks for.
    """

    def __init__(self, path: Path, seed: int):
        self.draw = random.Random(seed)
        self.path = path
        self.kind, self.place, _ = path.name.split("-")
        self.data = path.read_bytes()
        families = (self.bytes, self.header, self.array, self.layout, self.no_file)
        family = self.draw.choices(families, (3, 4, 5, 2, 1))[0]
        family()
        self.moved = self.path.name.split("-")[1] != path.name.split("-")[1]

    def _write(self, data: bytes, *, under_its_digest: bool) -> None:
        self.path.unlink()
        if under_its_digest:
            name = f"{self.kind}-{self.place}-{digest(data)}.safetensors"
            self.path = self.path.with_name(name)
        self.path.write_bytes(data)

    def bytes(self) -> None:
        draw, data = self.draw, bytearray(self.data)
        at = draw.randrange(len(data))
        how = draw.randrange(7)
        if how == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            del data[at:]
        elif how == 2:
            data += draw.randbytes(draw.randint(1, 50))
        elif how == 3:
            data = bytearray(draw.randbytes(draw.randint(0, 200)))
        elif how == 4:
            data[:8] = draw.choice((0, 1, 2**24 + 1, 2**63, 2**64 - 1)).to_bytes(
                8, "little"
            )
        elif how == 5:
            del data[at : at + draw.randint(1, 9)]
        else:
            data[at:] = bytes(len(data) - at)
            data[-1] ^= 1
        other_values = how in (0, 6)
        right = draw.random() < 0.3 and not other_values
        self._write(bytes(data), under_its_digest=right)

    def header(self) -> None:
        """Something odd where a text belongs, or no header at all."""
        draw = self.draw
        text, body = split(self.data)
        header = json.loads(text)
        fields = header["__metadata__"]
        how = draw.randrange(8)
        if how == 0:
            text = draw.choice((
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b'{"__metadata__":' + b"[" * 90_000,
                b"\xff\xfe" + text,
                b"[]", b"{}", b"null", b"NaN", b"3", b'"a"', b" " * 20,
                b'{"__metadata__": []}', b'{"__metadata__": null}',
            ))  # fmt: skip
        elif how == 1:
            del fields[draw.choice(sorted(fields))]
        elif how == 2:
            fields["more"] = draw.choice(ODD)
        elif how == 3:  # of a file that lies where it says
            fields["parent"] = draw.choice(ODD)
        elif how == 4:
            start = int(fields["start"])
            fields["start"] = str(start + draw.choice((-8, -1, 1, 8, 10**18)))
        elif how == 5:
            fields["slack"] = draw.choice(("-1", "1", "7", "999999", str(10**18)))
        elif how == 6:
            tokens = fields["tokens"].split()
            fields["tokens"] = " ".join(
                draw.choice((tokens[:-1], [*tokens, "5"], ["-3", *tokens], tokens * 3))
            )
        else:
            name, value = draw.choice(sorted(fields)), draw.choice(ODD)
            # Any text is the name of a model.
            fields[name] = [] if name == "model" and type(value) is str else value
        if how:
            text = json.dumps(header).encode()
            # A ring at its right place under other tokens is just another entry.
            if how != 6 or self.kind == "block":
                self._find_place(fields)
        if how == 5 and self.kind == "ring" and fields["slack"] in ("1", "7"):
            self.data = joined(text, body)  # perhaps what it was: then another fault
            self.bytes()
            return
        self._write(joined(text, body), under_its_digest=True)

    def _find_place(self, fields: Header) -> None:
        try:
            tokens = [int(token) for token in fields["tokens"].split()]
            self.place = place_key(fields["parent"], tokens)
        except (KeyError, ValueError, AttributeError, TypeError):
            pass

    def array(self) -> None:
        """One array is not what the model's caches store."""
        draw = self.draw
        text, body = split(self.data)
        header = json.loads(text)
        names = sorted(set(header) - {"__metadata__"})
        name = draw.choice(names)
        entry = header[name]
        begin, end = entry["data_offsets"]
        how = draw.randrange(9)
        if how == 0:
            entry["dtype"] = draw.choice([t for t in TYPES if t != entry["dtype"]])
        elif how == 1:
            at = draw.randrange(4)
            entry["shape"][at] += draw.choice((-1, 1, 2**20, 2**40))
        elif how == 2:  # as many values in another shape
            shape = entry["shape"]
            entry["shape"] = draw.choice(
                ([shape[0], *shape[:0:-1]], shape[1:], [*shape, 1], [2, *shape[1:]])
            )
            if entry["shape"] == shape:
                entry["shape"] = [shape[1] * shape[2] * shape[3]]
        elif how == 3:
            other = draw.choice(
                ["a.b", "0", "0.0.0", "-1.0", "99.0", "0.99", "", f" {name}", "٣.0"]
            )
            header[other] = header.pop(name)
        elif how == 4:
            entry[draw.choice(("dtype", "shape", "data_offsets"))] = draw.choice(ODD)
        elif how == 5:
            header[name] = draw.choice(ODD)
        elif how == 6:
            entry["data_offsets"] = draw.choice((
                [begin, end + 4], [begin + 4, end], [-4, end], [end, begin],
                [begin, 2**62], [0.0, 4.0], ["0", "4"], [begin], [begin, end, end],
            ))  # fmt: skip
        elif how == 7:
            entry["shape"] = [draw.choice(ODD), *entry["shape"][1:]]
        else:
            del entry[draw.choice(sorted(entry))]
        self._write(joined(json.dumps(header).encode(), body), under_its_digest=True)

    def layout(self) -> None:
        """Arrays are missing, too many, or lie upon each other."""
        draw = self.draw
        text, body = split(self.data)
        header = json.loads(text)
        arrays = {k: v for k, v in header.items() if k != "__metadata__"}
        how = draw.randrange(5)
        if how == 0:  # the last one in the file goes, bytes and all
            last = max(arrays, key=lambda name: arrays[name]["data_offsets"])
            body = body[: arrays[last]["data_offsets"][0]]
            del header[last]
        elif how == 1:
            n = len(body)
            header["7.0"] = {"dtype": "F32", "shape": [1], "data_offsets": [n, n + 4]}
            body += bytes(4)
        elif how == 2:
            one, two = draw.sample(sorted(arrays), 2)
            header[one]["data_offsets"] = header[two]["data_offsets"]
        elif how == 3:  # one takes a number of the next
            order = sorted(arrays.values(), key=lambda a: a["data_offsets"])
            at = draw.randrange(len(order) - 1)
            order[at]["data_offsets"][1] += 4
            order[at + 1]["data_offsets"][0] += 4
        else:
            body = draw.choice((b"", body[:-4], body + bytes(4)))
        self._write(joined(json.dumps(header).encode(), body), under_its_digest=True)

    def no_file(self) -> None:
        """Something else that bears the name."""
        self.path.unlink()
        makers: list[Callable[[Path], None]] = [
            os.mkfifo,
            os.mkdir,
            lambda path: path.symlink_to(path),
            lambda path: path.symlink_to("/dev/zero"),
        ]
        self.draw.choice(makers)(self.path)
