"""Real signals to real processes: a first Ctrl-C, and a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import click
import pytest

from specdec.cli import main
from specdec.cli.interrupts import Interrupts, RequestsToEnd

from .signals import drop, interrupted

PATIENCE = 60  # seconds until a process that hangs is a failure

# The command line with a decoder that needs no model. ``stuck`` never returns, nor
# lets Python look at signals, as a forward of a long prompt does for a while.
BEGIN = """
import atexit, ctypes, sys, threading, time
from types import ModuleType
from specdec.cli import interrupts, main
from specdec.outputs import StreamEvent
from tests.cli.conftest import FakeDecoder, result_of

def stuck():
    c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    c.pthread_mutex_init(mutex, None)
    c.pthread_mutex_lock(mutex)
    held = mutex.raw

    def watch():
        while mutex.raw == held:  # it changes when somebody waits for it
            time.sleep(0.001)
        ready()

    threading.Thread(target=watch, daemon=True).start()
    c.pthread_mutex_lock(mutex)

def ready():
    print("ready", file=sys.stderr, flush=True)

def at_work():
    ready()
    while True:
        time.sleep(0.01)

class Decoder(FakeDecoder):
    def _stream(self, prompts):
        yield StreamEvent(index=1, text="", token_ids=[], result=result_of(1, "b", "B"))
        wait()

module = ModuleType("specdec.decoder")
module.SpecDecoder = Decoder()
sys.modules["specdec.decoder"] = module
"""
RUN = """
main(["run", "--quiet", "-p", "a", "-p", "b", "--output", sys.argv[1]])
"""

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as ends:
        yield partial(started, tmp_path, ends)


def started(tmp_path: Path, ends: ExitStack, code: str) -> subprocess.Popen[str]:
    """A process that has said that it is ready; it lives as long as the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + code, str(tmp_path / "out.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore it, and their children do.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    ends.enter_context(process)
    # Whatever the test waits for ends with it.
    end = threading.Timer(PATIENCE, process.kill)
    ends.callback(process.kill)
    ends.callback(end.cancel)
    end.start()
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    return process


@pytest.mark.parametrize("wait", ["at_work", "stuck"])
def test_the_first_keeps_what_has_finished(
    start: Start, tmp_path: Path, wait: str
) -> None:
    """Whether Python hears of it or a forward has to be waited for."""
    process = start(f"wait = {wait}" + RUN)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert out == "== [1] b\nB\n\n"
    path = tmp_path / "out.jsonl"
    lines = path.read_text("utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["B"]
    assert err == (
        f"specdec: interrupted: 1 of 2 prompts finished; {path} has the results, "
        "and --resume continues\n"
    )


def test_the_second_ends_it_at_once(start: Start) -> None:
    """Though the main thread hears of neither, and nobody would speak for it."""
    process = start("interrupts.PATIENCE = 1e6\nwait = stuck" + RUN)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    # Two that come together can be one.
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert process.communicate(timeout=PATIENCE) == ("", "specdec: interrupted\n")
    assert process.returncode == 130


# Has Ctrl-C come at the first import of a module that is not small.
EARLY = """
import os, runpy, signal, sys

class Early:
    def find_spec(self, name, path=None, target=None):
        small = ("specdec", "specdec.__main__", "specdec.utils", "specdec.utils.ctrl_c")
        if name.startswith("specdec") and name not in small:
            print(name, flush=True)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Early())
sys.argv = ["specdec", "--version"]
runpy.run_module("specdec", run_name="__main__")
"""


def test_one_while_the_command_is_imported() -> None:
    """A traceback, for who stops a command that was a mistake."""
    done = subprocess.run(
        [sys.executable, "-c", EARLY],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stderr) == (130, "specdec: interrupted\n")
    assert done.stdout.startswith("specdec.utils.process")


@pytest.mark.parametrize("cleaning", ["at_work", "stuck"])
def test_the_second_ends_what_the_first_has_not(start: Start, cleaning: str) -> None:
    """An interpreter that ends, for whatever reason it takes its time."""
    code = f"interrupts.PATIENCE = 1e6\nwait = at_work\natexit.register({cleaning})"
    process = start(code + RUN)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert "ready\n" in process.stderr  # up to the line, or to the end of a process
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT


def test_a_handler_of_a_command_has_the_time_it_takes(start: Start) -> None:
    """Training ends with its step, and keeps it; a second Ctrl-C does not wait."""
    code = """
import signal
interrupts.PATIENCE = 0.01
def command(**options):
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    ready()
    while not came:
        time.sleep(0.01)
    time.sleep(0.5)  # the thread would have ended it long ago
    ready()
    while {wait}:
        time.sleep(0.01)
    signal.signal(signal.SIGINT, before)
    print("kept")
    raise KeyboardInterrupt
main.commands["estimate"].callback = command
main(["estimate", "--context", "9"])
"""
    process = start(code.replace("{wait}", "False"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "kept\n")
    assert err.split() == ["ready", "specdec:", "interrupted"]
    process = start(code.replace("{wait}", "True"))
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE) == ("", "specdec: interrupted\n")
    assert process.returncode == 130


def test_commands_that_keep_nothing_say_so(start: Start) -> None:
    process = start(
        """
main.commands["estimate"].callback = lambda **options: stuck()
main(["estimate", "--context", "9"])
"""
    )
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE) == ("", "specdec: interrupted\n")
    assert process.returncode == 130


def test_a_process_that_ignores_it_goes_on(start: Start) -> None:
    """As ``nohup`` and a shell's background jobs do."""
    process = start(
        """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
def command(**options):
    ready()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    print("done")
main.commands["estimate"].callback = command
main(["estimate", "--context", "9"])
"""
    )
    assert process.communicate(timeout=PATIENCE) == ("done\n", "")
    assert process.returncode == 0


@pytest.mark.usefixtures("heeded")
def test_nothing_is_left_over_in_a_process_that_goes_on() -> None:
    """Tests and notebooks call the command line within theirs."""
    before = signal.getsignal(signal.SIGINT)
    threads = set(threading.enumerate())
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
        started = set(threading.enumerate()) - threads
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1
    for thread in started:
        thread.join()


@pytest.fixture
def requests(heeded: None) -> Iterator[RequestsToEnd]:
    """Of a command line that listens; its handlers are gone after it."""
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts, click.Context(main, obj=interrupts):
        with RequestsToEnd() as found:
            yield found
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_that_python_drops_is_remembered(
    requests: RequestsToEnd, number: signal.Signals
) -> None:
    """A loop that looks ends, though nothing was raised in it."""
    assert not interrupted(requests.check)
    drop(number)
    assert interrupted(requests.check)
    assert interrupted(requests.check)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_first_request_raises_and_the_second_does_not(
    requests: RequestsToEnd, first: signal.Signals
) -> None:
    """What a command does because of the first is done to its end."""
    assert interrupted(signal.raise_signal, first)
    assert not interrupted(signal.raise_signal, signal.SIGTERM)
    assert not interrupted(signal.raise_signal, signal.SIGTERM)
    assert interrupted(requests.check)


@pytest.mark.usefixtures("heeded")
def test_a_ctrl_c_counts_when_the_main_thread_has_heard() -> None:
    """Else its exception came into the saving that the check has set off."""
    with Interrupts() as interrupts, click.Context(main, obj=interrupts):
        requests = RequestsToEnd()
        interrupts._came.set()  # as the thread does, at once
        assert not interrupted(requests.check)
        assert interrupted(signal.raise_signal, signal.SIGINT)
        assert interrupted(requests.check)


def test_requests_where_nothing_listens_for_ctrl_c() -> None:
    """Called from a program with Ctrl-C of its own; SIGTERM counts all the same."""
    with click.Context(main), RequestsToEnd() as requests:
        assert not interrupted(requests.check)
        drop(signal.SIGTERM)
        assert interrupted(requests.check)
