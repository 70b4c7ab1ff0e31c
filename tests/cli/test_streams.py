"""Standard streams that are closed or full: one line, and nothing lost in silence."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.cli.output import show_warnings
from specdec.prefix_cache.disk import DiskTier
from specdec.utils.warm_up import WarmUp
from tests.prefix_cache.entries import write_chain

from .conftest import Specdec


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
@pytest.mark.parametrize(
    ("streams", "code", "line"),
    [
        (">/dev/full", 1, "error: standard output cannot be written: No space left on"),
        (">&-", 1, "error: standard output cannot be written: Bad file descriptor"),
        ("2>&-", 0, ""),
        ("2>/dev/full", 0, ""),
        ("<&- >&- 2>&-", 1, ""),
    ],
)
def test_output_that_cannot_be_written(
    streams: str, code: int, line: str, tmp_path: Path
) -> None:
    """A traceback of the interpreter's flush, or an error without a sentence.

    Where nobody can read messages, nothing fails for them.
    """
    note = tmp_path / f"block-{'0' * 32}-{'0' * 32}.safetensors"
    note.write_text("")  # about which there is a line on standard error
    done = _shell(f"cache list {tmp_path} {streams}")
    assert done.returncode == code
    lines = [each for each in done.stderr.splitlines() if "of no use" not in each]
    assert len(lines) == bool(line)
    assert "".join(lines).startswith(f"specdec: {line}" if line else "")


def test_a_closed_output_whose_number_a_library_has_taken(tmp_path: Path) -> None:
    """Results that are dropped with exit code 0."""
    program = (
        "import os; from specdec.cli import main; "
        "[os.open(os.devnull, os.O_RDWR) for _ in range(3)]; "
        f"main(['cache', 'list', {str(tmp_path)!r}])"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program],
        check=False,
    )
    assert done.returncode == 1


def test_standard_input_that_is_closed() -> None:
    """``None`` has no ``isatty``."""
    done = _shell("run --target o/n <&-")
    assert done.returncode == 2
    assert done.stderr.startswith("specdec: error: standard input: no prompts in it")
    assert len(done.stderr.splitlines()) == 1


def test_an_error_on_a_closed_standard_error() -> None:
    """The exit code still says so."""
    assert _shell("rnu 2>&-").returncode == 2
    assert _shell("rnu 2>/dev/full").returncode == 2


def _shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m specdec {command}"],
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_a_file_says_is_shown_on_one_line(
    specdec: Specdec, tmp_path: Path
) -> None:
    """The name of a model in an entry's header moves the cursor, or makes up lines."""
    disk = DiskTier(tmp_path, 1 << 30)
    write_chain(disk, range(8), model="a\x1b[2Jb\nspecdec: error: c" + "d" * 5000)
    disk.close()
    result = specdec("cache", "list", str(tmp_path))
    first, last = result.stdout.splitlines()
    assert first.startswith("55555555  a?[2Jb specdec: error: cddd")
    assert len(first) < 400
    assert last.startswith("2 entries, ")


def test_a_warning_is_one_printable_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card names the target that its draft was made for."""
    logger = logging.getLogger("specdec")
    monkeypatch.setattr(logger, "handlers", [])
    show_warnings()
    logging.getLogger("specdec.models").warning("made for %s", "a\x1b[0m\nb\u202e")
    assert capsys.readouterr().err == "specdec: warning: made for a?[0m b?\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_that_passes_gives_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """Catches a line for each kernel: a terminal has one that changes, a log two."""
    logger = logging.getLogger("specdec")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    show_warnings()
    now = 0.0

    def compile_one() -> None:
        nonlocal now
        now += 3.5

    WarmUp(lambda: now).run([compile_one] * 4)
    note = "specdec: note: "
    passing = [f"{note}compiling kernels for this GPU: {i} of 4" for i in (2, 3, 4)]
    last = f"{note}kernels for this GPU were compiled in 14.0 seconds\n"
    shown = capsys.readouterr().err
    if terminal:
        assert shown == "\r\x1b[K".join([*passing, last])
    else:
        assert shown == f"{passing[0]}\n{last}"
