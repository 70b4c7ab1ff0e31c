"""Folders of the prefix store: entries that are not what they say."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from specdec.prefix_cache.entries import place_key
from specdec.prefix_cache.files import digest

from .case import Case, World, fail, kind, specdec, specdec_works
from .folders import sound_folder
from .odd import TEXTS, odd_value, plant, spoil_bytes, spoil_text, spoil_tree, to_json

# Longer than a block of 256 tokens, so that entries stand on one another.
BEGIN = "the ab 12 don't " * 45
PROMPTS = (BEGIN + "1 2 3", BEGIN + "x")
ASK = ("--max-tokens", "8", "--draft", "none", "--quiet")


def answers_alone(world: World) -> dict[str, str]:
    """What each prompt gives without a store."""
    return {prompt: specdec_works(*_command(world, prompt)).out for prompt in PROMPTS}


def sound_store(world: World) -> Path:
    """The folder that cases spoil copies of: what both prompts leave."""
    folder = world.folder / "store"
    for prompt in PROMPTS:
        specdec_works(*_command(world, prompt, folder))
    assert len(list(folder.iterdir())) > 2
    return folder


def _command(world: World, prompt: str, store: Path | None = None) -> list[str]:
    target = str(world.once(sound_folder))
    command = ["run", "--target", target, "--prompt", prompt, *ASK]
    return command if store is None else [*command, "--prefix-cache", str(store)]


def signed(path: Path, data: bytes, place: str | None = None) -> None:
    """Put an entry in another's place, under the name that its digest asks for.

    Args:
        place: of its tokens, where it has other ones.
    """
    form, own, _ = path.name.split("-")
    path.unlink()
    name = f"{form}-{place or own}-{digest(data)}.safetensors"
    (path.parent / name).write_bytes(data)


def spoil_header(path: Path, rng: random.Random) -> None:
    """A sound entry gets a header that is odd, and a digest that is right.

    Not what it says its bytes are for: who can sign an entry can forge one.
    """
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, payload = json.loads(data[8 : 8 + length]), data[8 + length :]
    draw = rng.random()
    text, place = None, None
    if draw < 0.35:
        header["__metadata__"] = spoil_tree(header["__metadata__"], rng)
        fields = header["__metadata__"]
        try:
            place = place_key(fields["parent"], [*map(int, fields["tokens"].split())])
        except (KeyError, TypeError, AttributeError, ValueError):
            place = None
    elif draw < 0.55:
        header["__metadata__"]["model"] = rng.choice((*TEXTS, odd_value(rng)))
    elif draw < 0.85:
        name = rng.choice([key for key in header if key != "__metadata__"])
        array: Any = header[name]
        change = rng.randrange(5)
        if change == 0:
            del header[name]
        elif change == 1:
            header[rng.choice(("9.9", "a", "0.-1", "0.0.0", "1e3.0", "0"))] = array
            del header[name]
        elif change == 2:
            array["shape"] = rng.choice((array["shape"][::-1], [], [1], [2**40, 1]))
        elif change == 3:
            array["dtype"] = rng.choice(("I32", "U32", "F16", "BF16", "X", "BOOL"))
        else:
            header[name] = spoil_tree(array, rng)
    else:
        text = rng.choice("[{") * rng.choice((900, 100_000))
    encoded = (to_json(header) if text is None else text).encode()
    signed(path, len(encoded).to_bytes(8, "little") + encoded + payload, place)


def spoil_folder(folder: Path, rng: random.Random) -> None:
    """Spoil an entry or two, or put other things beside them."""
    for path in rng.sample(sorted(folder.iterdir()), rng.choice((1, 1, 2))):
        draw = rng.random()
        if draw < 0.55:
            spoil_header(path, rng)
        elif draw < 0.65:
            # Numbers under a digest of their own are forged, not spoilt.
            data = path.read_bytes()
            end = 8 + int.from_bytes(data[:8], "little")
            spoilt = spoil_bytes(data[:end], rng)[: 2**20]
            signed(path, spoilt + data[end:])
        elif draw < 0.75:
            path.write_bytes(spoil_bytes(path.read_bytes(), rng))
        elif draw < 0.82:
            plant(path, rng)
        elif draw < 0.9:
            hex_ = f"{rng.getrandbits(128):032x}"
            new = folder / rng.choice(
                (
                    f"block-{hex_}-{hex_}.safetensors",
                    f"ring-{hex_}-{hex_}.safetensors",
                    f".{hex_}.specdec-tmp",
                    "notes.txt",
                    "\x1b[31m",
                )
            )
            new.write_bytes(spoil_text('{"a": 1}', rng))
            if rng.random() < 0.5:
                plant(new, rng)
        else:
            path.unlink()


@kind
def prefix_folder(case: Case) -> None:
    """A spoilt folder gives the tokens that a run without one gives."""
    rng, world = case.rng, case.world
    expected = world.once(answers_alone)
    folder = case.place / "store"
    shutil.copytree(world.once(sound_store), folder)
    spoil_folder(folder, rng)
    if rng.random() < 0.4:
        command = rng.choice(("list", "list", "verify", "clear"))
        # What is damaged is listed on standard output.
        printed = specdec("cache", command, folder, quietly=command == "verify").out
        if not all(line.isprintable() for line in printed.split("\n")):
            fail(f"cache {command} prints {printed!r}")
    prompt, before = rng.choice(PROMPTS), _listed(folder)
    answer = specdec(*_command(world, prompt, folder))
    if answer.code != 0:
        fail(f"a run with a spoilt store fails: {answer.err}")
    if answer.out != expected[prompt]:
        difference = f"{answer.out!r}, not {expected[prompt]!r}"
        folders = f"before {before}, after {_listed(folder)}"
        fail(f"other tokens with a spoilt store: {difference}: {answer.err}: {folders}")


def _listed(folder: Path) -> list[tuple[str, int]]:
    return sorted((path.name, path.lstat().st_size) for path in folder.iterdir())
