"""Conversations in a batch: each turn after its own answer, whatever runs beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec import ConfigError, PromptError, SamplingParams
from specdec.cli import main
from specdec.engine.conversation import Conversation, converse, user
from tests.models.folders import write_folder
from tests.server.harness import tiny_decoder

TURNS = [("And then?", "Why?"), (), ("Go on",)]
PROMPTS = [
    "Tell me of rivers, please",
    "Name one",
    "What is a lake, and what is a sea?",
]


def test_turns_are_what_they_are_alone(tmp_path: Path) -> None:
    """An answer that goes to another conversation, or a turn that comes too early."""
    decoder = tiny_decoder(tmp_path, batch_size=2)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=4)
    events = list(decoder.stream(PROMPTS, params, system_prompt="Be kind", turns=TURNS))
    results = {(e.index, e.turn): e.result for e in events if e.result is not None}
    assert sorted(results) == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    texts: dict[tuple[int, int], str] = {}
    for event in events:
        key = event.index, event.turn
        texts[key] = texts.get(key, "") + event.text
    for i, (prompt, turns) in enumerate(zip(PROMPTS, TURNS, strict=True)):
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for turn in range(len(turns) + 1):
            alone = SamplingParams(max_tokens=12, temperature=0.8, seed=4 + i)
            (expected,) = decoder.generate([messages], alone, system_prompt="Be kind")
            result = results[i, turn]
            assert result.text == expected.text == texts[i, turn]
            assert (result.index, result.turn) == (i, turn)
            assert not turn or result.prefix_tokens
            if turn < len(turns):
                messages += [
                    {"role": "assistant", "content": expected.text},
                    {"role": "user", "content": turns[turn]},
                ]
    with pytest.raises(PromptError, match="turns follow a string"):
        decoder.stream([[1, 2]], turns=[("a",)])
    with pytest.raises(ConfigError, match="2 lists of turns for 1 prompts"):
        decoder.stream(["a"], turns=[(), ()])
    for wrong in ("And then?", [5], None):
        answers: Any = [wrong]
        with pytest.raises(ConfigError, match="give a list of texts for each prompt"):
            decoder.stream(["a"], turns=answers)


def test_a_conversation_that_is_over_is_let_go(tmp_path: Path) -> None:
    """A job of many would hold all that was said, to its end."""
    decoder = tiny_decoder(tmp_path)
    session, params = decoder.session(), SamplingParams(max_tokens=3)
    talks = {
        session.add(user("Hello"), params): Conversation(i, user("Hello"), left, params)
        for i, left in enumerate([[], ["And then?"]])
    }
    turns = [(e.index, e.turn) for e in converse(session, talks, {}) if e.result]
    assert turns == [(0, 0), (1, 0), (1, 1)]
    assert not talks


def test_an_answer_without_text_does_not_end_a_conversation(tmp_path: Path) -> None:
    """Its last turns would be lost to a model that once has nothing to say."""
    decoder = tiny_decoder(tmp_path)
    (first,) = decoder.generate(["Hello"], max_tokens=1)
    params = SamplingParams(max_tokens=3, stop_token_ids=tuple(first.token_ids))
    events = decoder.stream(["Hello"], params, turns=[["And then?"]])
    silent, answer = [e.result for e in events if e.result is not None]
    assert (silent.text, silent.finish_reason) == ("", "stop")
    assert (answer.turn, answer.error) == (1, None)


def test_a_turn_that_does_not_fit_is_an_error_of_its_own(tmp_path: Path) -> None:
    """The others go on; what was answered before is there."""
    decoder = tiny_decoder(tmp_path)
    turns = [("word " * 9000, "more"), ("Go on",)]
    results = [
        e.result
        for e in decoder.stream(PROMPTS[:2], SamplingParams(max_tokens=3), turns=turns)
        if e.result is not None
    ]
    ends = sorted((r.index, r.turn, r.error is not None) for r in results)
    assert ends == [(0, 0, False), (0, 1, True), (1, 0, False), (1, 1, False)]
    (failed,) = [r.error for r in results if r.error is not None]
    assert "turn 2: " in failed


def test_run_writes_results_by_turn(tmp_path: Path) -> None:
    """Text in the order of prompts and turns; JSON lines that say which is which."""
    write_folder(tmp_path / "small", "llama")
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": "a", "turns": ["One", "Two"]}, {"prompt": "Three"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = CliRunner().invoke(
        main,
        ["run", "--target", str(tmp_path / "small"), "--prompts", str(prompts),
         "--output", str(out), "--max-tokens", "4"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    heads = [line for line in done.stdout.split("\n") if line.startswith("== [")]
    assert heads == ["== [0.0] One", "== [0.1] Two", "== [1] Three"]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(r["index"], r.get("turn"), r.get("id")) for r in records} == {
        (0, 0, "a"), (0, 1, "a"), (1, None, None),
    }  # fmt: skip
    refused = CliRunner().invoke(
        main, ["run", "--prompts", str(prompts), "--ignore-chat-template"]
    )
    assert refused.exit_code == 2
    assert "--ignore-chat-template" in refused.output
