"""Two processes that run one model: what they decode, and what ends them."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from click.testing import CliRunner

from specdec import SamplingParams, SpecDecoder
from specdec.cli import main, ranks
from specdec.engine.led import follow, parted
from specdec.engine.session import Bounds
from specdec.errors import ConfigError, RankError
from specdec.grammar import Grammar, GrammarCompiler
from specdec.parallel import (
    SECRET,
    Follower,
    Leader,
    Ranks,
    _address,
    _facts,
    _launched_size,
)
from specdec.utils.links import Link, accept_ranks, reach_rank_0
from specdec.utils.wire import decode, encode
from tests.byte_tokenizer import byte_tokenizer
from tests.models.folders import write_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: one that can be sharded, and two that cannot."""
    base = tmp_path_factory.mktemp("ranks")
    write_folder(base / "llama", bits=4, intermediate_size=128)
    write_folder(base / "wide", hidden_size=128, intermediate_size=1024)
    write_folder(base / "odd-heads", num_attention_heads=6, num_key_value_heads=3)
    write_folder(base / "no-shard", "gemma3")
    return base


#: What the program finds out on rank 0 where it is reached at all.
CHECKS = {
    *(f"{arch} bytes of a rank" for arch in ("llama", "qwen3_moe", "qwen3_5")),
    "llama prefixes",
    *(
        f"refusal: {why}"
        for why in (
            "cannot shard gemma3_text models",
            "6 attention heads and 3 key-value heads",
            "adapter_path does not",
            "prefix_cache does not",
        )
    ),
}


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        made = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        return [stack.enter_context(each).getsockname()[1] for each in made]


def hosts_of(count: int, folder: Path) -> dict[str, str]:
    """The environment of ranks of MLX's ring on this host."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(count)]))
    return {"MLX_HOSTFILE": str(hosts)}


def environment() -> dict[str, str]:
    secret = secrets.token_hex()  # another port for each run
    return {**os.environ, "PYTHONPATH": str(ROOT), SECRET: secret}


def test_ranks_decode_what_one_device_does(folder: Path, tmp_path: Path) -> None:
    """In float32: four architectures, and all kinds of drafts.

    The bits of all ranks are the same, and the tokens are those of the whole model,
    with rows that join, end and are cancelled; a planted fault is an error that says
    where. A sum that is left out, a head that is counted twice, a decision that each
    rank makes by its own clock, or a seed that is drawn twice shows here.
    """
    own = environment() | hosts_of(2, tmp_path)
    ranks = [
        begin(["tests.parallel.program", str(folder)], own | {"MLX_RANK": str(rank)})
        for rank in range(2)
    ]
    (output, errors), (followed, also) = (r.communicate(timeout=200) for r in ranks)
    assert not followed
    lines = output.splitlines()
    assert [line for line in lines if line.endswith("FAILS")] == [], errors
    holds = {line.removesuffix(": holds") for line in lines if line.endswith("holds")}
    assert holds >= CHECKS, output + errors
    other = [line for line in lines if not line.endswith(": holds")]
    numbers = re.compile(r"is \d+ here and (\d+|nothing) there")
    places = [numbers.sub("differs", each).split(": ") for each in other]
    assert [f"{place[0]}: {place[2]}" for place in places] == [
        "found: request 1, token 2 differs",
        "found: request 0, token 0 differs",
        "found: rows [0, 1] are rows [1, 0] there",
        "found: another configuration",
        "ended: request 0, token 0 differs",
    ]
    assert ranks[0].returncode == 1, also
    assert ranks[1].returncode == 1, "it has not heard of it"


@contextmanager
def killed(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill a process that has not ended with the block."""
    with process:
        try:
            yield
        finally:
            process.kill()


def lines_of(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    found: list[dict[str, Any]] = [json.loads(x) for x in file.read_text().splitlines()]
    return found


def begin(module: list[str], own: dict[str, str]) -> Any:
    return subprocess.Popen(
        [sys.executable, "-m", *module],
        cwd=ROOT,
        env=own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def command(folder: Path, prompts: list[dict[str, Any]], *more: str) -> list[str]:
    """Of ``specdec run``."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(p) + "\n" for p in prompts))
    target = str(folder / "llama")
    return ["specdec", "run", "--target", target, "--prompts", str(file), *more]


def listed(*what: str) -> list[str]:
    done = subprocess.run(["ps", *what], capture_output=True, text=True, check=False)
    return [line.strip() for line in done.stdout.splitlines()]


def rank_1(pid: int) -> int:
    """The rank that a command has started."""
    lines = [line.split(maxsplit=2) for line in listed("-Ao", "pid=,ppid=,command=")]
    (found,) = (
        int(own)
        for own, parent, command in lines
        if int(parent) == pid and command.endswith("-m specdec")
    )
    return found


def ended(pid: int) -> bool:
    """Whether a process has gone within seconds."""
    for _ in range(100):
        if not [s for s in listed("-o", "state=", "-p", str(pid)) if s[0] != "Z"]:
            return True
        time.sleep(0.1)
    return False


PROMPTS: list[dict[str, Any]] = [
    {"prompt": "Hello", "max_tokens": 3},
    {"prompt": "Name a river.", "max_tokens": 8, "temperature": 0.8, "seed": 3},
]


def texts(folder: Path) -> dict[int, str]:
    """What one process makes of the prompts."""
    decoder = SpecDecoder.from_pretrained(folder / "llama", "none")
    params = [SamplingParams().updated({**p}) for p in map(without_prompt, PROMPTS)]
    results = decoder.generate([p["prompt"] for p in PROMPTS], params)
    return {each.index: each.text for each in results}


def without_prompt(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "prompt"}


def test_a_command_under_mlx_launch(folder: Path, tmp_path: Path) -> None:
    """The same text as of one process, printed once; standard input is not read."""
    file = tmp_path / "out.jsonl"
    run = command(folder, PROMPTS, "--output", str(file), "--draft", "ngram")
    launch = [str(Path(sys.executable).with_name("mlx.launch")), "-n", "2"]
    done = subprocess.run(
        [*launch, "--backend", "ring", sys.executable, "-m", *run],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found = {line["index"]: line["text"] for line in lines_of(file)}
    assert found == texts(folder), done.stderr
    assert done.stdout.count("== [0]") == 1
    assert done.stderr.count("target:") == 1
    assert "llama, divided between 2 ranks" in done.stderr


@pytest.mark.parametrize("model", ["llama", "no-shard"])
def test_advice_on_devices(model: str, folder: Path, tmp_path: Path) -> None:
    """Rounds on two devices beside one; what cannot be divided loses no other advice.

    All options of the models must reach both processes, and errors of ranks this one.
    """
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nabd\n")
    arguments = [
        "advise", "--target", str(folder / model), "--draft", "ngram", "--prompts",
        str(prompts), "--max-tokens", "8", "--tensor-parallel", "2", "--batch", "1",
        "--batch", "2", "--ignore-chat-template",
    ]  # fmt: skip
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    division = found["division"]
    assert [rows for rows, _ in division["batches"]] == [1, 2]
    if model == "llama":
        assert not division["problem"]
        assert len(division["alone"]) == len(division["divided"]) == 2
        assert min(division["alone"] + division["divided"]) > 0
        assert "--replicas 2" in division["verdict"]
    else:
        assert "mlx-lm cannot shard gemma3_text models" in division["problem"]
        assert not division["divided"]
        assert found["verdict"]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_dies_ends_the_other(
    killed: int, folder: Path, tmp_path: Path
) -> None:
    """Within seconds, whatever it waits for; what had finished is in the file."""
    file = tmp_path / "out.jsonl"
    prompts = [PROMPTS[0], {"prompt": "abc", "max_tokens": 3000}]
    run = command(folder, prompts, "--output", str(file), "--quiet")
    with begin([*run, "--tensor-parallel", "2"], environment()) as process:
        while not lines_of(file):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        other = rank_1(process.pid)
        os.kill(other if killed else process.pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
    assert ended(other)
    assert [line["index"] for line in lines_of(file)] == [0]
    if killed:
        assert process.returncode == 1
        assert "specdec: error: rank 1 of 2 has ended" in errors
        assert "1 of 2 prompts finished; " in errors


def test_where_ranks_part() -> None:
    """The first token that differs, an end that one of them has, or the order."""
    row = (4, 10, (1, 2, 3), None)
    assert parted([row], [(4, 10, (1, 5, 3), None)]) == (
        "request 4, token 11 is 2 here and 5 there"
    )
    assert parted([row], [(4, 10, (1, 2), None)]).endswith(
        "12 is 3 here and nothing there"
    )
    assert parted([row], [(4, 10, (1, 2, 3, 9), None)]) == (
        "request 4, token 13: None here and 9 there"
    )
    assert parted([row], [(4, 10, (1, 2, 3), "stop")]).endswith(
        "None here and stop there"
    )
    assert parted([row], []) == "rows [4] are rows [] there"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[malloc] Unable to allocate 9 bytes."), "its memory is full"),
        (RuntimeError("a fault"), "RuntimeError: a fault"),
        (ConfigError("dtype is 3"), "dtype is 3"),
    ],
)
def test_what_rank_0_reports_of_another_s_error(error: Exception, said: str) -> None:
    """Catches a full device of another rank that looks like a fault of the program."""
    here, there = socket.socketpair()
    with here, there:
        follower = Follower.__new__(Follower)
        follower._link = Link(here)
        with pytest.raises(type(error)), follower.reporting():
            raise error
        kind, content = decode(Link(there, leads=True).receive(5))
    assert kind == "error"
    assert said in content


def test_grammars_are_compiled_beside_steps() -> None:
    """A follower that compiles in its turn holds all ranks up for seconds."""
    go, said = threading.Event(), list[str]()

    class Slow(GrammarCompiler):
        def _compiled(self, grammar: Grammar) -> Any:
            assert go.wait(60)
            return super()._compiled(grammar)

    class Rows:
        def step(self) -> list[Any]:
            said.append("step")
            go.set()  # while it compiles
            return []

        def add_encoded(self, prompt: str, params: SamplingParams) -> None:
            said.append("compiled" if bounds.grammar(params) else "")

    class Receives:
        def __init__(self) -> None:
            grammar = Grammar.regex("(yes|no)")
            params = SamplingParams(grammar=grammar)
            self.messages: list[Any] = [
                ["session", 0, []], ["grammar", grammar], ["step", 0],
                ["add", 0, "", params], ["end"],
            ]  # fmt: skip

        def receive(self) -> Any:
            return self.messages.pop(0)

        def reporting(self) -> Any:
            return nullcontext()

        def check(self, *_: object, **__: object) -> None: ...

    bounds = Bounds(300, grammars=Slow(byte_tokenizer(), 300, bounded=False))
    sent = list[object]()
    announced = GrammarCompiler(byte_tokenizer(), 300, announce=sent.append)
    announced.compile(Grammar.regex("a"))
    announced.compile(Grammar.regex("a"))
    assert len(sent) == 1
    follow(Receives(), Rows, bounds)  # type: ignore[arg-type]
    assert said == ["step", "compiled"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["bench", "acceptance-quick"], "bench runs on one device"),
        (["run", "--prompts", "-"], "leaves standard input open"),
        (["run"], "leaves standard input open"),
        (["run", "-p", "a", "--ray", "local"], "leave out mlx.launch"),
        (["serve", "--replicas", "2"], "--replicas and mlx.launch"),
    ],
)
def test_what_a_launcher_cannot_start(
    command: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of it would do everything twice, or wait for an end that never comes."""
    monkeypatch.setenv("MLX_RANK", "0")
    result = CliRunner().invoke(main, command)
    assert result.exit_code != 0
    assert said in result.output + str(result.exception)


def test_where_ranks_of_open_mpi_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host at its loopback; on several, a guess is another machine's."""
    for name in ("NCCL_HOST_IP", "MLX_JACCL_COORDINATOR", "MLX_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    assert (_address(), _launched_size()) == ("127.0.0.1", 4)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    with pytest.raises(RankError, match="set SPECDEC_RANKS_HOST"):
        _address()
    monkeypatch.setenv("SPECDEC_RANKS_HOST", "10.0.0.7")
    assert _address() == "10.0.0.7"


def test_memory_is_that_of_the_smallest_share() -> None:
    """A rank that has less, or shares a host, is asked for more than it has."""

    def peer(rank: int, gigabytes: int, host: str) -> Any:
        facts = encode(_facts() | {"memory_size": gigabytes * 10**9})
        link = SimpleNamespace(receive=lambda _: facts, other_host=host)
        return SimpleNamespace(rank=rank, link=link)

    leader: Any = object.__new__(Leader)
    leader.size = 4
    for sizes, least in (((9000, 8, 4), 4), ((9000, 8, 6000), 8)):
        leader._peers = [
            peer(rank, size, host)
            for rank, size, host in zip((1, 2, 3), sizes, "abc", strict=True)
        ]
        with patch("specdec.backend.memory_size", lambda: 500 * 10**9):
            assert leader._meet() == least * 10**9
    leader._peers = [peer(rank, 8, "a") for rank in (1, 2)]
    with patch("specdec.backend.memory_size", lambda: 500 * 10**9):
        assert leader._meet() == 4 * 10**9


@pytest.mark.parametrize("secret", [None, "short"])
def test_ranks_without_a_secret_are_refused(
    secret: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever connects first would be a rank."""
    monkeypatch.delenv(SECRET, raising=False)
    if secret:
        monkeypatch.setenv(SECRET, secret)
    for name, value in hosts_of(2, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLX_RANK", "0")
    with pytest.raises(RankError, match=r"export SPECDEC_RANKS_SECRET=\$\(openssl"):
        Ranks.join()


@pytest.mark.parametrize("named", [None, "1"])
def test_ranks_launch_without_cuda_graphs(
    named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX has read the variable before it is set, or a user's value is lost."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("MLX_USE_CUDA_GRAPHS", None)
    if named:
        os.environ["MLX_USE_CUDA_GRAPHS"] = named
    seen = []

    def init(**_: object) -> SimpleNamespace:
        seen.append(os.environ.get("MLX_USE_CUDA_GRAPHS"))
        return SimpleNamespace(rank=lambda: 1, size=lambda: 2)

    monkeypatch.setattr(mx.distributed, "init", init)
    rank = Follower.__new__(Follower)
    rank.rank, rank.size = 1, 2
    rank._join_devices([])
    assert seen == [named or "0"]


JOIN = "from specdec import Ranks\nRanks.join()\nprint('joined')"


@pytest.mark.parametrize("last", ["greeting", "facts", "versions"])
def test_a_rank_that_ends_before_the_ring_is_joined(last: str, tmp_path: Path) -> None:
    """MLX waits for it for ever, with Python's lock held."""
    own = environment() | hosts_of(2, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", JOIN],
        env=own | {"MLX_RANK": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with killed(process):
        link = reach_rank_0("127.0.0.1", own[SECRET].encode(), 1)
        if last != "greeting":
            other = {"mlx": "0"} if last == "versions" else {}
            link.send(encode(_facts() | other))
        if last == "facts":
            assert decode(link.receive(60))[0] == "memory"
            time.sleep(1)  # now it is in MLX's call
        link.close()
        output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (1, "")
    said = {
        "greeting": "rank 1 of 2 has ended before it had begun",
        "facts": "specdec: error: the ranks did not come together",
        "versions": "rank 1 has other versions",
    }
    assert said[last] in errors


def test_rank_0_that_ends_before_the_ring_is_joined(tmp_path: Path) -> None:
    """The other ranks would look for it, or wait for it, for minutes."""
    own = environment() | hosts_of(2, tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", JOIN],
        env=own | {"MLX_RANK": "1"},
        stdout=subprocess.PIPE,
    )
    with killed(process):
        link = accept_ranks("127.0.0.1", own[SECRET].encode(), 2)[1]
        assert "mlx" in decode(link.receive(60))
        link.send(encode(["memory", 10**9]))
        time.sleep(1)
        link.close()
        assert process.communicate(timeout=20)[0] == b""
    assert process.returncode == 1


def test_nobody_waits_for_a_rank_that_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that go on looking for rank 0 when the command has ended."""
    started: list[subprocess.Popen[bytes]] = []

    class Rank(subprocess.Popen[bytes]):
        def __init__(self, *_: object, **options: Any) -> None:
            program = [sys.executable, "-c", "import time; time.sleep(100)"]
            super().__init__(program, stdin=options["stdin"])
            started.append(self)

    def never(_: object) -> None:
        raise RankError("they do not meet")

    # What is set below goes again.
    for name in ("MLX_RANK", "MLX_HOSTFILE", "NCCL_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(subprocess, "Popen", Rank)
    monkeypatch.setattr(Ranks, "join", never)
    with pytest.raises(RankError, match="do not meet"):
        ranks.load(2, quiet=True)
    (rank,) = started
    assert rank.wait(20) == -signal.SIGKILL
