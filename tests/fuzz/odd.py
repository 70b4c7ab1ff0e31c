"""Odd values, and ways to spoil texts, trees, bytes and files."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e-300, 1e38, 1e39, 1e308, 255, 256, 65536, 100_000,
    2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30,
    10**400, float("nan"), float("inf"), float("-inf"), True, False,
)  # fmt: skip
TEXTS = (
    "", " ", "\n", "\0", "a\0b", "\ud800", "\udfff\ud800", "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07", "\u202eback", "\u2028", "\x85", "\r\nspecdec: error: no", "🙂",
    "é" * 300, "a" * 5000, "../../etc/passwd", "/dev/zero", "NaN", "null", "-1",
    "1e999", "9" * 400, "{{ 1 }}", "%s%n", "<|im_end|>", "<|im_start|>", "llama",
)  # fmt: skip

# What JSON texts hold in place of these, which json.dumps could not write.
_DEEP = '"@deep %d@"'
_DEPTHS = (100, 900, 1100, 20_000, 200_000)
_DIGITS = '"@digits@"'
MANY_DIGITS = "1" + "0" * 5000

TEMPLATES = (
    "{{ 'a' * 10**10 }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format('a') }}",
    "{{ [0] * 10**9 }}",
    "{{ 9**9**9 }}",
    "{{ range(10**9) | list | length }}",
    "{{ (messages * 10**7) | tojson }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ raise_exception('\x1b[31mno\n' * 1000) }}",
    "{{ raise_exception() }}",
    "{{ messages[99].content }}",
    "{{ nothing.at.all }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch ran') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ strftime_now('%Y' * 1000) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ '\ud800' }}",
    "{{ '\0' }}",
    "{% for m in messages",
    "{{ 1 / 0 }}",
    "{{ messages }}",
    "{{ messages.append(messages) }}{{ messages }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "{{" * 2000,
    "(" * 100_000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if a %}" * 500 + "{% endif %}" * 500,
    "",
    " ",
    "plain",
)


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """Something that JSON can hold, or that :func:`to_json` can write."""
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(NUMBERS)
    if draw < 0.75:
        return rng.choice(TEXTS)
    if draw < 0.8:
        return None
    if draw < 0.84:
        return f"@deep {rng.choice(_DEPTHS)}@"
    if draw < 0.86:
        return "@digits@"
    if depth > 2:
        return rng.choice(([], {}))
    some = range(rng.choice((0, 1, 2, 5)))
    if draw < 0.93:
        return [odd_value(rng, depth + 1) for _ in some]
    return {str(rng.choice(TEXTS)): odd_value(rng, depth + 1) for _ in some}


def to_json(value: Any) -> str:
    """JSON text, with what json.dumps does not write in it."""
    text = json.dumps(value)
    for depth in _DEPTHS:
        text = text.replace(_DEEP % depth, "[" * depth + "]" * depth)
    return text.replace(_DIGITS, MANY_DIGITS)


def spoil_tree(value: T, rng: random.Random, keys: Sequence[str] = ()) -> T:
    """A copy with one or a few places of it changed, removed or added.

    Args:
        keys: names worth adding, with odd values.
    """
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            break
        if keys and isinstance(value, dict) and rng.random() < 0.35:
            value[rng.choice(keys)] = odd_value(rng)
            continue
        holder, key = rng.choice(places)
        old, draw = holder[key], rng.random()
        if draw < 0.6:
            holder[key] = odd_value(rng)
        elif draw < 0.75:
            del holder[key]
        elif draw < 0.85:
            holder[key] = rng.choice(([old], {"a": old}, str(old), [old] * 300))
        elif isinstance(old, int | float):
            holder[key] = rng.choice((-old, old + 1, old * 2, old * 10**6, old - 1))
        elif isinstance(holder, list):
            holder.insert(key, odd_value(rng))
        else:
            holder[str(rng.choice(TEXTS))] = old
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = list(enumerate(value))[:20]
    for key, each in pairs:
        yield value, key
        yield from _places(each)


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, doubled, put in, or moved."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(changed) + 1)
        # Most of what can go wrong is in the beginning.
        at = min(at, rng.choice((16, 64, 512, len(changed))))
        what = rng.randrange(7)
        if what == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del changed[at:]
        elif what == 2:
            changed[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
        elif what == 3:
            size = rng.choice((1, 4, 8))
            changed[at : at + size] = b"\xff" * size
        elif what == 4:
            changed[at : at + 8] = rng.choice((2**63, 2**31, 10**6, 0)).to_bytes(
                8, "little"
            )
        elif what == 5:
            changed[at:at] = changed[at : at + 200]
        else:
            del changed[at : at + rng.choice((1, 8, 100))]
    return bytes(changed)


def spoil_text(text: str, rng: random.Random) -> bytes:
    """A text in another encoding, with bytes of no encoding, or nothing."""
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: spoil_bytes(text.encode("utf-8", "surrogatepass"), rng),
        lambda: spoil_bytes(text.encode("utf-8", "surrogatepass"), rng),
        lambda: text.encode("utf-16", "surrogatepass"),
        lambda: b"\xef\xbb\xbf" + text.encode("utf-8", "surrogatepass"),
        lambda: b"",
        lambda: b"\0" * 100,
        lambda: rng.choice((b"[", b'{"a":')) * rng.choice((900, 100_000)),
        lambda: text.encode("utf-8", "surrogatepass") * 2,
    )
    return rng.choice(ways)()


def plant(path: Path, rng: random.Random) -> None:
    """Put something in a file's place that is no such file."""
    if path.is_dir() and not path.is_symlink():
        return
    path.unlink(missing_ok=True)
    what = rng.randrange(8)
    if what == 0:
        os.mkfifo(path)
    elif what == 1:
        path.mkdir()
    elif what == 2:
        path.symlink_to("nowhere")
    elif what == 3:
        path.symlink_to(path.name)
    elif what == 4:
        path.symlink_to("/dev/zero")
    elif what == 5:
        path.touch()
    elif what == 6:
        path.touch()
        os.truncate(path, rng.choice((100, 2**33)))
    else:
        _socket(path)


def _socket(path: Path) -> None:
    # The name of a socket is short: bind it from its folder.
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as changed:
        os.chdir(path.parent)
        try:
            changed.bind(path.name)
        finally:
            os.chdir(here)
