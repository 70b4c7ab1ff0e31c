"""Jobs of many machines, by two workers of Ray; skipped where Ray is missing.

Ray takes 350 MB and starts in 10 seconds, so that continuous integration does without;
``scripts/soak --ray`` installs it and runs these, and many kills after them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.cli import main
from tests.models.folders import write_folder

pytest.importorskip("ray", reason="the extra ray is not installed: scripts/soak --ray")
pa = pytest.importorskip("pyarrow")

from specdec.ray import SpecDecodeStage  # noqa: E402
from tests.ray_soak import Job, kill_workers  # noqa: E402

PARAMS = SamplingParams(max_tokens=9, temperature=1.0, seed=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small"
    write_folder(path, "llama")
    return path


def staged(model: Path, batch: Any, **options: Any) -> list[dict[str, Any]]:
    """Rows of a batch with their results, without a cluster."""
    rows: list[dict[str, Any]] = table_of(model, batch, **options).to_pylist()
    return rows


def table_of(model: Path, batch: Any, **options: Any) -> Any:
    """The same as a table."""

    async def call() -> Any:
        settings = {"params": PARAMS, "config": EngineConfig(batch_size=4), **options}
        stage = SpecDecodeStage(str(model), **settings)
        try:
            return await stage(batch)
        finally:
            if stage._server is not None:
                await stage._server.aclose()

    return asyncio.run(call())


def test_a_stage_gives_what_one_machine_gives(model: Path) -> None:
    """A seed of another row, settings that are lost, a row that fails with its batch.

    Numpy's columns have floats and NaN for numbers and nulls.
    """
    prompts = [f"prompt {i} " * (1 + i % 3) for i in range(10)]
    rows: list[dict[str, Any]] = [
        {"index": i, "prompt": prompt, "id": f"n{i}", "max_tokens": None, "seed": None}
        for i, prompt in enumerate(prompts)
    ]
    rows[2]["max_tokens"], rows[6]["seed"] = 3, 77
    rows[4]["prompt"] = "too long " * 600
    each = [
        PARAMS.updated(
            {"seed": row["seed"] or 4 + i, "max_tokens": row["max_tokens"] or 9}
        )
        for i, row in enumerate(rows)
    ]
    del each[4]
    decoder = SpecDecoder.from_pretrained(model)
    expected = decoder.generate(prompts[:4] + prompts[5:], each)
    table = pa.Table.from_pylist(rows)
    frame = table.to_pandas()
    for batch in (table, {name: frame[name].to_numpy() for name in frame}):
        results = staged(model, batch)
        assert [row["id"] for row in results] == [row["id"] for row in rows]
        assert [row["index"] for row in results] == list(range(10))
        failed = results.pop(4)
        assert failed["finish_reason"] == "error"
        assert "shorten it" in failed["error"]
        for row, result in zip(results, expected, strict=True):
            line = result.to_dict()
            assert {**line, **row}.keys() - line.keys() == {"id", "max_tokens"}
            for key in ("text", "token_ids", "seed", "finish_reason", "stop_token"):
                assert row[key] == line[key]


def test_rows_that_cannot_be_asked_for(model: Path) -> None:
    """All rows with the same draws; an exception that ends the worker's whole block."""
    said = [{"role": "user", "content": "b"}]
    rows = [
        {"prompt": "a", "messages": None},
        {"prompt": None, "messages": said},
        {"prompt": None, "messages": None},
    ]
    table = pa.Table.from_pylist(rows)
    first, second, third = staged(model, table)
    assert "add a column index" in first["error"]
    assert "add a column index" in second["error"]
    assert "neither prompt nor messages" in third["error"]
    params = SamplingParams(max_tokens=2)
    greedy = staged(model, pa.Table.from_pylist(rows), params=params)
    assert [row["error"] for row in greedy[:2]] == [None, None]
    odd = [
        {"prompt": "a", "index": "x", "max_tokens": "2"},
        {"prompt": "a", "index": "", "max_tokens": None},
        {"prompt": "a", "index": None, "max_tokens": "many"},
    ]
    for row in staged(model, pa.Table.from_pylist(odd), params=params):
        assert row["error"]
    assert staged(model, table.slice(0, 0)) == []


def test_columns_keep_their_types(model: Path) -> None:
    """A column that is empty in a block would not fit the same one of another."""
    columns = {
        "note": pa.array([None, None], pa.string()),
        "small": pa.array([1, 2], pa.int8()),
        "sizes": pa.array([[1.5], None], pa.list_(pa.float32())),
    }
    table = pa.table({"index": [0, 1], "prompt": ["a", "b"], **columns})
    results = table_of(model, table)
    for name in columns:
        assert results.column(name).equals(table.column(name))


STAGED = """
import sys, ray, ray.data
from specdec import SamplingParams
from specdec.ray import SpecDecodeStage
ray.init("local", include_dashboard=False, num_gpus=2)
ray.data.DataContext.get_current().execution_options.preserve_order = True
rows = [{"index": i, "prompt": f"prompt {i}"} for i in range(24)]
params = SamplingParams(max_tokens=9, temperature=1.0, seed=4)
ray.data.from_items(rows, override_num_blocks=6).map_batches(
    SpecDecodeStage,
    fn_constructor_kwargs={"target": sys.argv[1], "params": params},
    batch_size=4,
    batch_format="pyarrow",
    compute=ray.data.ActorPoolStrategy(size=2),
    num_gpus=1,
).write_json(sys.argv[2])
"""


def test_a_dataset(model: Path, tmp_path: Path) -> None:
    """Blocks out of order, types that differ from block to block."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": ""}
    subprocess.run(
        [sys.executable, "-c", STAGED, str(model), str(tmp_path)],
        check=True,
        capture_output=True,
        env=environment,
        timeout=300,
    )
    files = sorted(tmp_path.iterdir())
    text = "".join(file.read_text("utf-8") for file in files)
    lines = [json.loads(line) for line in text.splitlines()]
    decoder = SpecDecoder.from_pretrained(model)
    expected = decoder.generate([f"prompt {i}" for i in range(24)], PARAMS)
    assert [line["index"] for line in lines] == list(range(24))
    assert [line["text"] for line in lines] == [each.text for each in expected]


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_job(gpus: int, model: Path, tmp_path: Path) -> None:
    """Ray refuses what it takes without GPUs; prompts are as many as no block has."""
    prompts = [f"prompt {i}" for i in range(7)]
    (tmp_path / "p.txt").write_text("\n".join(prompts), "utf-8")
    paths = {"target": model, "prompts": tmp_path / "p.txt", "output": tmp_path / "o"}
    sizes = {"ray": "local", "ray-workers": 2, "batch": 1, "max-tokens": 5}
    subprocess.run(
        [sys.executable, "-m", "specdec", "run", "--quiet"]
        + [f"--{name}={value}" for name, value in [*paths.items(), *sizes.items()]],
        check=True,
        env={**os.environ, "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": gpus})},
        timeout=300,
    )
    lines = map(json.loads, (tmp_path / "o").read_text("utf-8").splitlines())
    decoder = SpecDecoder.from_pretrained(model)
    expected = decoder.generate(prompts, SamplingParams(max_tokens=5))
    texts = {line["index"]: line["text"] for line in lines}
    assert [texts[i] for i in range(7)] == [each.text for each in expected]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.slow
def test_workers_that_are_killed(tmp_path: Path) -> None:
    """A prompt that is lost or doubled; the long form is ``scripts/soak --ray``."""
    job = Job(tmp_path, prompts=60, tokens=150)
    kill_workers(job, tmp_path / "out.jsonl", 3, random.Random(1))


def test_a_cluster_that_is_not_there(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own lines for minutes; an option that is taken for the address.

    So would be what listens and says nothing, or speaks HTTP.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}"
    asked = []
    silent, other = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    silent_at, other_at = (
        f"127.0.0.1:{each.getsockname()[1]}" for each in (silent, other)
    )

    def answer() -> None:
        connection, _ = other.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.recv(1000)
        connection.close()

    answering = threading.Thread(target=answer)
    answering.start()
    monkeypatch.setattr("specdec.ray.job._REACHING", 0.5)

    def found(address: str, **_: object) -> None:
        asked.append(address)
        raise ConnectionError("no cluster")

    monkeypatch.setattr("ray.init", found)
    command = ["run", "--target", str(model), "--prompt", "a"]
    for address, why in (
        ([nobody], "refused"),
        ([silent_at], "timed out"),
        ([other_at], "something else answers there"),
        ([], "no cluster"),
    ):
        done = CliRunner().invoke(main, [*command, "--ray", *address, "--quiet"])
        assert done.exit_code == 2
        (line,) = (each for each in done.output.splitlines() if "error" in each)
        assert re.search(rf"there is no Ray cluster at .* \(.*{why}", line)
    assert asked == ["auto"]
    answering.join()
    silent.close()
    other.close()


def test_a_model_that_no_worker_finds(tmp_path: Path) -> None:
    """Tracebacks of Ray's, or workers that try for ever."""
    arguments = ["--prompt", "a", "--prompt", "b", "--ray", "local", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "specdec", "run", "--target", str(tmp_path), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": ""},
        timeout=300,
    )
    assert done.returncode in (1, 2)
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith("specdec: error: ")
    assert str(tmp_path) in line
