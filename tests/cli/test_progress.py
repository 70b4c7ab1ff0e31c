"""Progress on a terminal and in a log."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner

from specdec.backend import defaults
from specdec.cli import main
from specdec.cli.progress import LINE_SECONDS, Progress, Share
from specdec.cli.sink import Sink
from specdec.decoder import SpecDecoder
from specdec.errors import SpecdecError
from specdec.outputs import StreamEvent
from specdec.prompts import PromptRecord


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_every_so_often_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with Progress("prompt", 3, clock=clock) as progress:
        progress.add(1, note="9 tokens")
        assert capsys.readouterr().err == "", "what is quick needs no line"
        clock.now += LINE_SECONDS
        progress.add(0, note="12 tokens")
        progress.add(1, note="13 tokens")
        clock.now += LINE_SECONDS
        progress.show(0, 1, what="plain")
    assert capsys.readouterr().err == (
        "specdec: 1 of 3 prompts, 12 tokens, about 20 seconds left\n"
        "specdec: plain, 0 of 1 prompt\n"
    )


def test_a_line_comes_though_nothing_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill of many rows is one thing that is done, minutes later."""
    monkeypatch.setattr("specdec.cli.progress.LOOK_SECONDS", 0.005)
    clock, said = Clock(), ""
    with Progress("prompt", 3, clock=clock) as progress:
        progress.add(0, what="prefill", note="no token yet")
        clock.now += LINE_SECONDS
        until = time.monotonic() + 60
        while not said and time.monotonic() < until:
            time.sleep(0.005)
            said = capsys.readouterr().err
        before = threading.active_count()
    assert said == "specdec: prefill, 0 of 3 prompts, no token yet\n"
    assert threading.active_count() == before - 1


def test_no_line_comes_within_a_line_of_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both in one pipe: a word of the answer was broken by the line."""
    clock = Clock()
    with Progress("prompt", 1, clock=clock) as progress:
        sink = Sink([PromptRecord("a")], None, progress.aside)
        for text in ("Bon", "", "jour\n", "Sal"):
            sink.take(StreamEvent(index=0, text=text, token_ids=[1]))
            clock.now += LINE_SECONDS
            progress.show(0)
            shown = capsys.readouterr()
            assert shown.out == text
            assert shown.err == "specdec: 0 of 1 prompt\n" * text.endswith("\n")
        # Nor while a text is written that takes long.
        looks = threading.Thread(target=progress.show, args=(0,))
        with progress.aside("ut\n"):
            looks.start()
            looks.join(0.05)
            assert looks.is_alive()
        looks.join(60)
        assert capsys.readouterr().err == "specdec: 0 of 1 prompt\n"


def test_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """From the mean of what is done, not from what was done last."""
    clock = Clock()
    with Progress("set", 61, clock=clock) as progress:
        clock.now += LINE_SECONDS
        progress.add(0)
        clock.now += 2 * LINE_SECONDS
        progress.add(1)
        clock.now += 3 * LINE_SECONDS
        progress.add(30)
        clock.now += LINE_SECONDS
        progress.add(30)
    assert capsys.readouterr().err == (
        "specdec: 0 of 61 sets\nspecdec: 1 of 61 sets, about 30 minutes left\n"
        "specdec: 31 of 61 sets, about 58 seconds left\n"
        "specdec: 61 of 61 sets\n"
    )


@pytest.mark.parametrize(
    ("command", "work"),
    [
        ("verify", "decoding 2 prompts with the engine, then one by one without it"),
        (
            "verify --draft a/D --temp 1 --verification block",
            "decoding 2 prompts 256 times, to compare the tokens with the target's",
        ),
        (
            "advise --draft a/D --json",
            "decoding 2 prompts, then timing forwards at batch 1, 8",
        ),
    ],
)
def test_what_takes_minutes_is_announced(
    command: str, work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is announced though the model is absent, or after it, or in the JSON."""
    decoder = MagicMock()

    def fail(*_: Any, **__: Any) -> Any:
        raise SpecdecError("it fails")

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    words = [*command.split(), "--target", "a/T", "--prompts", str(prompts)]
    monkeypatch.setattr(SpecDecoder, "from_pretrained", fail)
    assert CliRunner().invoke(main, words).output == "specdec: error: it fails\n"
    decoder.stream = fail
    monkeypatch.setattr("specdec.tools.parity.certify", fail)
    monkeypatch.setattr(SpecDecoder, "from_pretrained", lambda **_: decoder)
    result = CliRunner().invoke(main, words)
    *_, note, error = result.stderr.splitlines()
    assert note.startswith(f"specdec: note: {work}")
    assert note.endswith("; on a CPU this can take minutes") == (
        defaults().name == "cpu"
    )
    assert error == "specdec: error: it fails"
    assert result.stdout == ""
    quiet = CliRunner().invoke(main, [*words, "--quiet"])
    assert quiet.output == "specdec: error: it fails\n"


def test_what_an_earlier_run_has_done_took_no_time() -> None:
    """A recipe that is continued would seem to end at once."""
    clock = Clock()
    with Progress("part", 10, done=6, quiet=True, clock=clock) as progress:
        clock.now += 60
        progress.show(7)
        assert progress.seconds_left(clock.now) == pytest.approx(180)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [(100,) * 64, range(40, 232, 3), [30, 250] * 32, [90, 100, 110, 400] * 16],
    ids=["alike", "even", "two kinds", "some long"],
)
def test_the_time_left_of_a_run(
    lengths: Iterable[int], terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a third, from the first prompts to the middle: short ones finish first.

    A step takes as long for every batch, so that the last rows are slower.
    """
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    drawn = list(lengths)
    random.Random(0).shuffle(drawn)
    clock, waiting = Clock(), deque(enumerate(drawn))
    rows: dict[int, int] = {}
    began, said = clock.now, []
    share = Share(len(drawn), 512)
    with Progress("prompt", len(drawn), quiet=not terminal, clock=clock) as progress:
        while waiting or rows:
            while waiting and len(rows) < 8:
                index, rows[index] = waiting[0][0], 0
                waiting.popleft()
            clock.now += 0.25
            for index in list(rows):
                rows[index] += 1
                done = rows[index] == drawn[index]
                share.take(index, 1, done=done)
                progress.add(done, share=share)
                if done:
                    del rows[index]
            left = progress.seconds_left(clock.now)
            if 8 <= progress.done <= len(drawn) / 2:
                assert left is not None
                said.append((clock.now, left))
    assert len(said) > 100
    for at, left in said:
        assert left == pytest.approx(clock.now - at, rel=1 / 3)
    assert clock.now - began > 100


def test_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("tqdm.tqdm.mininterval", 0, raising=False)
    clock = Clock()
    with Progress("row", clock=clock) as progress:
        clock.now += LINE_SECONDS
        progress.show(2, 4, what="speculative")
        progress.show(0, 8, what="plain", note="3 tokens")
    err = capsys.readouterr().err
    assert "specdec:" not in err
    assert "speculative:  50%" in err
    assert "2/4" in err
    assert "plain:   0%" in err
    assert "0/8" in err
    assert "3 tokens" in err


def test_a_bar_asks_what_is_new(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a long prefill nothing else says that it goes on."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("tqdm.tqdm.mininterval", 0, raising=False)
    monkeypatch.setattr("specdec.cli.progress.LOOK_SECONDS", 0.001)
    asked = Event()

    def note() -> str:
        if notes:
            return notes.pop(0)
        asked.set()
        return "more tokens prefilled"

    notes = ["0 tokens prefilled"]
    with Progress("prompt", 8) as progress:
        progress.add(0, what="prefill", note=note)
        assert asked.wait(60)
    err = capsys.readouterr().err
    assert "0 tokens prefilled" in err
    assert "more tokens prefilled" in err
