"""Several models behind one port: which one answers, and which one goes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import httpx
import pytest

from specdec import ConfigError, EngineConfig, SpecDecoder
from specdec.cli.models_file import read_models
from specdec.server.config import ServerConfig
from specdec.server.models import Models, Offer, make_models
from specdec.server.replicas import ReplicaCommand
from tests.models.folders import write_folder
from tests.server.harness import Running, until
from tests.server.test_command import let_go, line_of, specdec
from tests.server.test_replicas import direct, fake


def waiting(index: int, path: str) -> ReplicaCommand:
    """A process that waits until there is room."""
    return replace(fake(index, path), environment={"FAKE_LOADABLE": ""})


@contextmanager
def served(
    *sizes: int, nbytes: int = 10, start: Any = waiting, seconds: float = 60
) -> Iterator[tuple[httpx.Client, Models]]:
    """Processes that stand for models a, b, ... of these sizes."""
    offers = [Offer(name, size) for name, size in zip("abcd", sizes, strict=False)]
    models = Models(offers, start, nbytes, seconds)
    server = Running(make_models(models, ServerConfig()))
    server.start()
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client, models
    finally:
        server.stop()


def ask(client: httpx.Client, model: str | None, prompt: str = "x") -> httpx.Response:
    body = {"prompt": prompt} | ({} if model is None else {"model": model})
    return client.post("/v1/completions", json=body)


def stepping(client: httpx.Client) -> Any:
    """An answer of the first model that goes on until it is told to end."""
    body = {"prompt": "step", "model": "a"}
    return client.stream("POST", "/v1/completions", json=body)


def loaded(client: httpx.Client) -> str:
    data = client.get("/v1/models").json()["data"]
    return "".join(each["id"] for each in data if each["loaded"])


def test_the_model_that_is_named_answers() -> None:
    """Another one, one that is loaded for nothing, or one that nobody named."""
    with served(4, 4) as (client, models):
        assert client.get("/health").status_code == 200
        assert loaded(client) == ""
        b = ask(client, "b").json()["pid"]
        assert loaded(client) == "b"
        for path in ("/v1/embeddings", "/v1/nothing"):
            answer = client.post(path, json={"model": "a", "input": "x"})
            assert answer.status_code == 404
            assert "there is no" in answer.json()["error"]["message"]
        for answer in (ask(client, "c"), client.get("/v1/models/c")):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "model_not_found"
            assert "use a or b" in answer.json()["error"]["message"]
        assert loaded(client) == "b"
        a = ask(client, None).json()["pid"]  # the first one
        assert a != b
        assert ask(client, "default_model").json()["pid"] == a
        assert ask(client, "a").json()["pid"] == a
        assert ask(client, "b").json()["pid"] == b
        assert client.get("/v1/models/a").json()["loaded"]
        assert [each.starts for each in models.all] == [1, 1]


def test_the_end_of_the_server_ends_its_models(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning for each that its next request starts it again: there is none."""
    with served(4, 4) as (client, _):
        ask(client, "a")
        ask(client, "b")
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_what_was_unused_longest_makes_room() -> None:
    """A model that is loaded although there is no room, or the wrong one that goes."""
    with served(4, 4, 4, nbytes=8) as (client, models):
        for model, there in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"),
                             ("b", "bc"), ("c", "bc"), ("a", "ac")):  # fmt: skip
            assert ask(client, model).status_code == 203
            assert loaded(client) == there, (model, there)
            running = sum(each.process is not None for each in models.all)
            assert running == 2 or there == "a"


def test_a_running_answer_is_not_cut() -> None:
    """The one who waits gets its model when the answer has ended."""
    with served(6, 6) as (client, models):
        with stepping(client) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "data: 0"
            answers: list[httpx.Response] = []
            waits = threading.Thread(target=lambda: answers.append(ask(client, "b")))
            waits.start()
            until(lambda: models.all[1].running == 1)
            with direct(models.all[0]) as replica:
                replica.post("/v1/go", json={"step": 1})
                assert [next(lines), next(lines)] == ["", "data: 1"]
                assert not answers
                assert models.all[1].client is None
                replica.post("/v1/go", json={"step": -1})
            assert "".join(lines) == ""
        waits.join(60)
        assert answers[0].status_code == 203
        assert loaded(client) == "b"


def test_who_waits_too_long_is_told() -> None:
    """A request that waits for room for ever, or a process that takes it afterwards."""
    with served(6, 6, seconds=0.5) as (client, models):
        with stepping(client) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "data: 0"
            answer = ask(client, "b")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_memory"
            until(lambda: models.all[1].process is None)
        assert loaded(client) == "a"


def test_one_that_cannot_be_loaded(tmp_path: Path) -> None:
    """It is tried again at its next request; the others go on, and none has to go."""
    gate = tmp_path / "go"

    def start(index: int, path: str) -> ReplicaCommand:
        program = [sys.executable, "-c", "raise SystemExit(3)"]
        return (
            ReplicaCommand(program, {}, b"")
            if index and not gate.exists()
            else waiting(index, path)
        )

    with served(4, 4, nbytes=4, start=start) as (client, models):
        a = ask(client, "a").json()["pid"]
        answer = ask(client, "b")
        assert answer.status_code == 500
        assert "cannot be loaded (exit code 3)" in answer.json()["error"]["message"]
        assert ask(client, "a").json()["pid"] == a
        gate.touch()
        assert ask(client, "b").status_code == 203
        # One that ends by itself comes back, too.
        process = models.all[1].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: models.all[1].client is None)
        assert ask(client, "b").json()["pid"] != process.pid


def test_one_that_cannot_be_started() -> None:
    """The request waits for ever, and the program is tried twenty times a second."""

    def start(index: int, path: str) -> ReplicaCommand:
        return ReplicaCommand(["/nothing/here"], {}, b"")

    with served(4, start=start) as (client, models):
        answer = ask(client, "a")
        assert answer.status_code == 500
        assert "No such file" in answer.json()["error"]["message"]
        assert models.all[0].starts == 1


def test_one_model_may_load_longer_than_another() -> None:
    """The second has to be downloaded, and is killed after the time of the first."""
    with served(4, 4) as (client, models):
        assert ask(client, "a").status_code == 203
        assert models.all[0].patience is not None
        assert models.all[1].patience is None


def test_the_end_ends_all() -> None:
    """A process that is left over, with the memory of a GPU."""
    with served(4, 4) as (client, models):
        pids = [ask(client, model).json()["pid"] for model in "ab"]
        loop = models._tasks[0].get_loop()
        asyncio.run_coroutine_threadsafe(models.stop(1), loop).result(60)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# -- the file -----------------------------------------------------------------------


COMMON = {"config": EngineConfig(batch_size=3, memory_limit=10**9), "dtype": "float32"}


def test_a_file_of_models(tmp_path: Path) -> None:
    """What the command line says is said for all, and each model may say otherwise."""
    file = tmp_path / "models.toml"
    file.write_text(
        '[models.small]\ntarget = "a/b"\n[models."large one"]\ntarget = "a/c"\n'
        'draft = "a/d"\nmemory_limit = "2GB"\nbatch = 5\nnum_draft_tokens = 4\n'
    )
    small, large = read_models(str(file), COMMON).values()
    assert (small["target"], small["draft"], small["dtype"]) == ("a/b", None, "float32")
    assert small["config"] == EngineConfig(batch_size=3)
    assert (large["target"], large["draft"]) == ("a/c", "a/d")
    assert large["config"] == EngineConfig(
        batch_size=5, memory_limit=2 * 10**9, num_draft_tokens=4
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it names no model: write a table [models.NAME]"),
        ("[models]", "it names no model"),
        ("[models.a]", "target is missing"),
        ("[models.a]\ntarget = 3", "models.a.target is 3"),
        ('[models.a]\ntraget = "y"', "no setting traget: did you mean target?"),
        ('[models.a]\ntarget = "x"\nzzz = 1', "no setting zzz: it has target"),
        ("[models]\na = 3", "models.a is 3"),
        ('[models.a]\ntarget = "x"\nbatch = 0', "models.a: batch_size is 0"),
        ('[models.a]\ntarget = "x"\nmemory_limit = "much"', "models.a: "),
        ('[models.a]\ntarget = "no-such"', "models.a: no model at no-such: give"),
        ('[models.a]\ntarget = "x/y"\ndraft = "ngarm"', "models.a: no model at ngarm"),
        ("[", "models.toml"),
        (None, "there is no such file"),
    ],
)
def test_files_that_cannot_be(text: str | None, message: str, tmp_path: Path) -> None:
    """One line that names the file and the place."""
    file = tmp_path / "models.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises((click.UsageError, ConfigError)) as raised:
        read_models(str(file), COMMON)
    said = getattr(raised.value, "message", str(raised.value))
    assert message in said
    assert said.startswith(f"--models {file}")


def test_serve_models(tmp_path: Path) -> None:
    """Two models by their names, with the texts that each generates alone.

    One that cannot be loaded takes the place of another for nothing.
    """
    for name, layers in (("one", 1), ("two", 2)):
        write_folder(tmp_path / name, "llama", num_hidden_layers=layers,
                     max_position_embeddings=256 * layers)  # fmt: skip
    file = tmp_path / "models.toml"
    file.write_text(
        "".join(
            f'[models.{name}]\ntarget = "{tmp_path / name}"\nmemory_limit = "1.5GB"\n'
            for name in ("one", "two", "empty")
        )
        + '[models.none]\ntarget = "no/such-model"\n'
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_bytes(
        (tmp_path / "one" / "config.json").read_bytes()
    )
    process = specdec("serve", "--models", str(file), "--port", "0", "--temp", "0",
                      "--memory-limit", "2GB")  # fmt: skip
    try:
        url = line_of(process.stderr, r"http://\S+")
        # Clients plan their prompts by it before they ask anything.
        data = httpx.get(f"{url}/v1/models").json()["data"]
        contexts = {each["id"]: each["max_model_len"] for each in data}
        assert contexts == {"one": 256, "two": 512, "empty": 256, "none": None}
        for name in ("one", "two", "one"):
            decoder = SpecDecoder.from_pretrained(tmp_path / name)
            (expected,) = decoder.generate(
                ["Hi"], max_tokens=9, ignore_chat_template=True
            )
            body = {"model": name, "prompt": "Hi", "max_tokens": 9}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=100).json()
            assert answer["choices"][0]["text"] == expected.text
            assert answer["model"] == name
        for name in ("empty", "none"):
            body = {"model": name, "prompt": "Hi", "max_tokens": 9}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=100).json()
            assert answer["error"]["code"] == "model_not_loaded"
            data = httpx.get(f"{url}/v1/models").json()["data"]
            assert [each["id"] for each in data if each["loaded"]] == ["one"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        let_go(process)
