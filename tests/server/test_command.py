"""``specdec serve`` and ``specdec chat``, as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from specdec import SamplingParams, SpecDecoder
from specdec.cli.serve import _show_stopping
from specdec.server import running
from specdec.server.config import ServerConfig
from tests.models.folders import write_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    write_folder(path, "llama")
    return path


def specdec(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "specdec", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": ""},
    )


def let_go(process: subprocess.Popen[str], *read: IO[str] | None) -> None:
    """End a process, and close its pipes.

    Args:
        read: its standard error, where no thread reads that to its end.
    """
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, *read):
        assert pipe is not None
        pipe.close()


def line_of(stream: IO[str] | None, pattern: str) -> str:
    """The first line that has the pattern; what comes after it is read, too."""
    assert stream is not None
    for line in stream:
        if match := re.search(pattern, line):
            threading.Thread(target=_drain, args=(stream,), daemon=True).start()
            return match.group()
    raise AssertionError("it ended before")


def _drain(stream: IO[str]) -> None:
    with stream:
        stream.read()


def test_serve_and_its_end(model: Path) -> None:
    """By curl, with the texts of generate; SIGTERM cuts what runs and ends well."""
    process = specdec(
        "serve", "--target", str(model), "--draft", "ngram", "--port", "0", "--temp",
        "0", "--stop-timeout", "0.2", "--name", "small",
    )  # fmt: skip
    try:
        url = line_of(process.stderr, r"http://\S+")
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
        curl = ["curl", "-sS", "-N", f"{url}/v1/chat/completions", "--json"]
        said = subprocess.run(
            [*curl, json.dumps(body)], capture_output=True, check=True
        )
        decoder = SpecDecoder.from_pretrained(model)
        (expected,) = decoder.generate(
            [body["messages"]],  # type: ignore[arg-type]
            SamplingParams(max_tokens=9),
        )
        (choice,) = json.loads(said.stdout)["choices"]
        assert choice["message"]["content"] == expected.text
        assert "<title>" in httpx.get(url).text
        long = {**body, "max_tokens": 100_000, "stream": True}
        with subprocess.Popen([*curl, json.dumps(long)], stdout=subprocess.PIPE) as one:
            assert one.stdout is not None
            assert one.stdout.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            text = one.stdout.read().decode()
        assert text.endswith("data: [DONE]\n\n")
        assert '"cut":"shutdown"' in text or '"finish_reason":"length"' in text
        assert process.wait(30) == 0
    finally:
        let_go(process)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """It is lost, or it prints where the program was.

    In the background of a script, where SIGINT is ignored when the server begins, and
    with an answer that nobody reads, which it would wait for.
    """
    # Greedily it never ends, and it is longer than what a connection holds.
    write_folder(tmp_path / "long", "llama", max_position_embeddings=20_000)
    model = f"--target {tmp_path / 'long'} --draft none --temp 0"
    command = f"{sys.executable} -m specdec serve {model} --port 0"
    script = subprocess.Popen(
        ["bash", "-c", f"{command} --stop-timeout 600 & echo $!; wait $!; echo $?"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": ""},
    )
    assert script.stdout is not None
    assert script.stderr is not None
    server = int(script.stdout.readline())
    try:
        for line in script.stderr:
            if match := re.search(r"http://(\S+):(\d+)", line):
                break
        assert match
        body = b'{"prompt": "a", "max_tokens": 9999, "stream": true, "logprobs": 20}'
        kind = b"Content-Type: application/json\r\nContent-Length: %d" % len(body)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + kind
        with socket.create_connection((match[1], int(match[2]))) as client:
            client.sendall(head + b"\r\n\r\n" + body)
            assert client.recv(1)
            os.kill(server, signal.SIGTERM)
            assert "stopping: 1 answer has up to 600" in script.stderr.readline()
            os.kill(server, signal.SIGINT)
            assert int(script.stdout.readline()) == 128 + signal.SIGINT
        assert script.stderr.read() == ""
    finally:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        script.wait()
        script.stdout.close()
        script.stderr.close()


def test_two_sigterms_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout`` sends two: answers would be cut. A later one is impatience."""
    ended, now = list[int](), 0.0
    app = Starlette()

    def at(seconds: float, number: int) -> list[int]:
        nonlocal now
        now = seconds
        web.handle_exit(number, None)
        return ended

    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(signal, "raise_signal", ended.append)
    web = running._Web(uvicorn.Config(app), app, lambda: None, lambda pending: None)
    assert at(7.0, signal.SIGTERM) == []
    assert web.should_exit
    assert at(7.4, signal.SIGTERM) == []
    assert at(7.4, signal.SIGINT) == [signal.SIGINT]
    assert at(7.6, signal.SIGTERM) == [signal.SIGINT, signal.SIGTERM]


def test_an_idle_server_says_that_it_stops(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C that seems to do nothing, for the second that the end takes."""
    for answers, said in ((0, "stopping\n"), (1, "stopping: 1 answer has up to ")):
        _show_stopping(ServerConfig(), answers, quiet=False)
        assert capsys.readouterr().err.startswith(f"specdec: {said}")


def test_chat(model: Path, tmp_path: Path) -> None:
    """Turns build on each other; Ctrl-C stops an answer, and the next one comes."""
    saved = tmp_path / "talk.jsonl"
    process = specdec(
        "chat", "--target", str(model), "--draft", "ngram", "--max-tokens", "400"
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write("/system Be brief.\nHi\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdin.write(
            f"/clear\nAnd \\\nthere?\n/stats\n/nothing\n/save {saved}\n"
        )
        process.stdin.close()
        text = process.stdout.read()
        assert process.wait(60) == 0
        assert process.stderr is not None
        notes = process.stderr.read()
    finally:
        let_go(process, process.stderr)
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == "And \nthere?"
    decoder = SpecDecoder.from_pretrained(model)
    (expected,) = decoder.generate([messages[:2]], SamplingParams(max_tokens=400))
    assert messages[2]["content"] == expected.text
    assert text
    assert notes.count(" a second") == 2
    assert int(notes.partition(" tokens")[0].split()[-1]) < 800
    assert "there is no /nothing" in notes
