"""Files of prompts: lines that are none, and what becomes of those beside them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .case import Answer, Case, World, check_line, fail, kind, specdec, specdec_works
from .folders import sound_folder
from .odd import odd_value, plant, spoil_bytes, spoil_text, spoil_tree, to_json

PROMPTS = ("12 the", "ab don't", "the the 1")
KEYS = ("id", "task_id", "question_id", "prompt", "question", "messages", "turns",
        "system", "max_tokens", "category")  # fmt: skip
ASK = ("--max-tokens", "4", "--quiet", "--draft", "none")


def texts_alone(world: World) -> dict[str, str]:
    """What each good prompt gives in a run of its own."""
    target, alone = world.once(sound_folder), {}
    with TemporaryDirectory() as folder:
        path, output = Path(folder, "prompts.jsonl"), Path(folder, "out.jsonl")
        for prompt in PROMPTS:
            path.write_text(to_json({"prompt": prompt}), "utf-8")
            asked = ("--target", target, "--prompts", path, "--output", output)
            specdec_works("run", *asked, *ASK)
            alone[prompt] = json.loads(output.read_bytes())["text"].rstrip("\n")
    return alone


def good_line(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A prompt, and a line that holds it in one of the ways."""
    prompt = rng.choice(PROMPTS)
    message = {"role": "user", "content": prompt}
    line: dict[str, Any] = rng.choice(
        (
            {"prompt": prompt},
            {"question": prompt},
            {"turns": [prompt, "more"]},
            {"messages": [message]},
        )
    )
    if rng.random() < 0.5:
        line["id"] = rng.choice((1, "a", 1.5, [1], {"a": 1}))
    return prompt, line


def not_json(token: str) -> None:
    fail(f"the output has {token}, which is no JSON")


@kind
def prompt_file(case: Case) -> None:
    """Lines of JSON, most of them good, through ``specdec run``."""
    rng, world = case.rng, case.world
    expected = world.once(texts_alone)
    lines, good = [], {}
    for number in range(rng.choice((1, 2, 3))):
        prompt, line = good_line(rng)
        good[number] = prompt
        lines.append(json.dumps(line))
    draw = rng.random()
    if draw < 0.5:  # what may be anything, and the run goes on
        number = rng.randrange(len(lines))
        line = json.loads(lines[number])
        line[rng.choice(("id", "task_id", "question_id", "category", "more"))] = (
            odd_value(rng)
        )
        lines[number] = to_json(line)
    elif draw < 0.9:
        _, line = good_line(rng)
        at = rng.randrange(len(lines) + 1)
        good = {n + (n >= at): p for n, p in good.items()}
        lines.insert(at, to_json(spoil_tree(line, rng, KEYS)))
    text = rng.choice(("\n", "\n", "\r\n", "\r")).join(lines)
    data = text.encode("utf-8", "surrogatepass")
    if draw >= 0.9:
        data, good = spoil_text(text, rng), {}
    path = case.place / rng.choice(("prompts.jsonl", "prompts.jsonl", "prompts.txt"))
    path.write_bytes(data)
    if rng.random() < 0.03:
        plant(path, rng)
        good = {}
    output = case.place / "out.jsonl"
    more: tuple[str, ...] = ()
    if rng.random() < 0.1:
        more = ("--system-prompt", rng.choice(("be brief", "\udcff", "", "\x1b[1m")))
        good = {}
    target = world.once(sound_folder)
    answer = specdec(
        "run", "--target", target, "--prompts", path, "--output", output, *ASK, *more
    )
    if path.suffix == ".jsonl":
        data = output.read_bytes() if output.exists() else b""
        check_output(answer, data, good, expected)


def check_output(
    answer: Answer, data: bytes, good: dict[int, str], expected: dict[str, str]
) -> None:
    """Every good prompt has its tokens, unless the file was refused as a whole."""
    rows = [json.loads(line, parse_constant=not_json) for line in data.splitlines()]
    for row in rows:
        if row.get("error"):
            check_line(row["error"])
    if answer.code == 2 or (answer.code == 1 and not rows):
        return
    # Of a conversation, the answer to the prompt; its other turns say more.
    by_index = {row["index"]: row for row in rows if not row.get("turn")}
    for index, prompt in good.items():
        if index not in by_index:
            fail(f"prompt {index} has no result: {answer.err}")
        if by_index[index]["text"].rstrip("\n") != expected[prompt]:
            fail(
                f"prompt {index} has other tokens than {expected[prompt]!r} beside a "
                f"bad one: {by_index[index]}: {answer.err}"
            )


def sound_output(world: World) -> list[str]:
    """The lines that a whole run leaves."""
    path = world.folder / "whole.jsonl"
    specdec_works(*_all_prompts(world, path))
    return path.read_text("utf-8").splitlines()


def _all_prompts(world: World, output: Path) -> list[str | Path]:
    words = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    target = world.once(sound_folder)
    return ["run", "--target", target, *words, "--output", output, *ASK]


@kind
def resumed_file(case: Case) -> None:
    """A spoilt file of results becomes whole, or stays as it is and is refused."""
    rng, world = case.rng, case.world
    sound = world.once(sound_output)
    lines = list(sound)
    for _ in range(rng.choice((1, 1, 3))):
        at, draw = rng.randrange(len(lines)), rng.random()
        if draw < 0.3:
            row = json.loads(rng.choice(sound))
            keys = ("index", "token_ids", "settings")
            lines[at] = to_json(spoil_tree(row, rng, keys))
        elif draw < 0.5:
            lines.insert(rng.randrange(len(lines) + 1), lines[at])
        elif draw < 0.7:
            lines[at] = "\0" * rng.choice((1, 4096)) + lines[at]
        elif draw < 0.85:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        elif len(lines) > 1:
            del lines[at]
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    data += rng.choice((b"", b"\n", b"\n" + b"\0" * 99))
    if rng.random() < 0.2:
        data = spoil_bytes(data, rng)
    output = case.place / "out.jsonl"
    output.write_bytes(data)
    answer = specdec(*_all_prompts(world, output), "--resume")
    after = output.read_bytes()
    if answer.code == 2:
        if after != data:
            fail(f"a file that is refused was changed: {answer.err}")
        return
    rows = [json.loads(line, parse_constant=not_json) for line in after.splitlines()]
    if sorted(row["index"] for row in rows) != [*range(len(PROMPTS))]:
        fail(f"results are missing or there twice: {[row['index'] for row in rows]}")
