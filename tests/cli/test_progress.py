"""Progress on a terminal and in a log."""

from __future__ import annotations

import threading
import time

import pytest

from specdec.cli.progress import LINE_SECONDS, Progress


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
        "specdec: 1 of 3 prompts, 12 tokens\nspecdec: plain, 0 of 1 prompt\n"
    )


def test_a_line_comes_though_nothing_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill of many rows is one thing that is done, minutes later."""
    monkeypatch.setattr("specdec.cli.progress.LOOK_SECONDS", 0.005)
    clock, told = Clock(), ""
    with Progress("prompt", 3, clock=clock) as progress:
        progress.add(0, what="prefill", note="no token yet")
        clock.now += LINE_SECONDS
        until = time.monotonic() + 60
        while not told and time.monotonic() < until:
            time.sleep(0.005)
            told = capsys.readouterr().err
        before = threading.active_count()
    assert told == "specdec: prefill, 0 of 3 prompts, no token yet\n"
    assert threading.active_count() == before - 1


def test_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """From the mean of what is done, not from what was done last."""
    clock = Clock()
    with Progress("set", 61, time_left=True, clock=clock) as progress:
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


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress("prompt", 3, quiet=True, clock=clock) as progress:
        clock.now += LINE_SECONDS
        progress.add(1)
    assert capsys.readouterr() == ("", "")


def test_what_begins_is_shown_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar that says nothing for as long as the first part takes."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress("prompt", 8) as progress:
        progress.add(0, what="prefill")
        assert "prefill:   0%" in capsys.readouterr().err
        progress.add(0, note="1.0 tokens/s")
        assert "1.0 tokens/s" in capsys.readouterr().err


def test_a_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("tqdm.tqdm.mininterval", 0, raising=False)
    clock = Clock()
    with Progress("row", clock=clock) as progress:
        clock.now += LINE_SECONDS
        progress.show(2, 4, what="speculative")
        progress._bar.refresh()
        progress.show(0, 8, what="plain", note="3 tokens")
        progress._bar.refresh()
    err = capsys.readouterr().err
    assert "specdec:" not in err
    assert "speculative:  50%" in err
    assert "2/4" in err
    assert "plain:   0%" in err
    assert "0/8" in err
    assert "3 tokens" in err
