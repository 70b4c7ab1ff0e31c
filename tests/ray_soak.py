"""Workers of Ray that are killed: ``python -m tests.ray_soak --kills 20``.

A job of ``specdec run --ray local`` has two workers on the CPU. One of them is killed
again and again, at random moments, while it loads or decodes; then the whole job is
killed once, and resumed. Every prompt has one result in the end, the one of a run in
one process. ``tests/test_ray.py`` runs a short form. Linux alone: it finds processes in
/proc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.models.folders import write_folder

_MARK = "SPECDEC_RAY_SOAK"
_PATIENCE = 600
_RAY = ("--ray", "local", "--ray-workers", "2", "--batch", "2")


def processes(mark: str, title: bytes = b"") -> list[int]:
    """Processes with a mark in their environment and a title; only those of ours."""
    processes = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            ours = f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes()
            if ours and title in (entry / "cmdline").read_bytes():
                processes.append(int(entry.name))
    return processes


def end_all(mark: str) -> None:
    """Kill what a killed driver has left."""
    while left := processes(mark):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Results of a file of ``--output``, whole lines alone."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


class Job:
    """Prompts, how to decode them, and what they give in one process."""

    def __init__(self, folder: Path, prompts: int, tokens: int):
        self.model, self.prompts = folder / "small", folder / "prompts.jsonl"
        write_folder(self.model, "llama")
        rows: list[dict[str, Any]] = [
            {
                "prompt": f"{i} " * (1 + i % 7),
                "id": f"n{i}",
                "max_tokens": tokens - i % 9,
            }
            for i in range(prompts)
        ]
        rows[5]["seed"] = 77
        rows[3]["prompt"] = "too long " * 600  # is refused; the others go on
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.expected = folder / "expected.jsonl"
        # Many rows at once, and few in the job, so that it lasts: texts are the same.
        alone = self.start(self.expected, "--batch", "32")
        alone.communicate(timeout=_PATIENCE)
        assert alone.returncode == 1

    def start(self, output: Path, *more: str, mark: str = "") -> subprocess.Popen[str]:
        """Decode, with two workers where ``--ray`` is asked for."""
        return subprocess.Popen(
            [sys.executable, "-m", "specdec", "run", "--target", str(self.model),
             "--draft", "ngram", "--prompts", str(self.prompts), "--output",
             str(output), "--temp", "1", "--seed", "3", "--quiet", *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, _MARK: mark, "PYTHONWARNINGS": ""},
        )  # fmt: skip

    def check(self, output: Path) -> None:
        """Every prompt has one result, the expected one."""
        mine, expected = lines_of(output), lines_of(self.expected)
        assert len({line["index"] for line in mine}) == len(mine) == len(expected)
        keys = ("id", "text", "token_ids", "finish_reason", "seed", "error")
        assert [[line[key] for key in keys] for line in sorted(mine, key=_index)] == [
            [line[key] for key in keys] for line in sorted(expected, key=_index)
        ]


def _index(line: dict[str, Any]) -> int:
    return int(line["index"])


def kill_workers(job: Job, output: Path, kills: int, rng: random.Random) -> int:
    """Run the job while its workers are killed; how many results were there by then."""
    mark = uuid.uuid4().hex
    process = job.start(output, *_RAY, mark=mark)
    try:
        end = time.monotonic() + _PATIENCE
        for number in range(kills):
            # In turns one that loads, and one that decodes; Ray's titles say which.
            loads = number % 2 == 0
            title = b"ray::MapWorker(MapBatches(_Rows))" + (
                b".__init__" if loads else b".submit"
            )
            # Some blocks end before the next kill.
            age = rng.uniform(0, 3 if loads else 12)
            seen: dict[int, float] = {}
            while True:
                if process.poll() is not None:
                    raise AssertionError(f"it ended: {process.communicate()[1]}")
                assert time.monotonic() < end
                now = time.monotonic()
                for pid in processes(mark, title):
                    seen.setdefault(pid, now)
                old = [pid for pid, since in seen.items() if now - since >= age]
                if old:
                    with suppress(ProcessLookupError):
                        os.kill(rng.choice(old), signal.SIGKILL)
                        break
                    seen.clear()
                time.sleep(0.05)
            what = "loaded" if loads else "decoded"
            print(f"kill {number + 1}, of one that {what}", flush=True)
        finished = len(lines_of(output))
        _, said = process.communicate(timeout=_PATIENCE)
        assert process.returncode == 1, said
        assert said.count("specdec: error: ") == 1, said
        job.check(output)
        return finished
    finally:
        process.kill()
        process.communicate()
        end_all(mark)


def kill_the_job(job: Job, output: Path) -> int:
    """Kill the job when it has some results, and resume it; how many it had."""
    mark = uuid.uuid4().hex
    process = job.start(output, *_RAY, mark=mark)
    try:
        while len(lines_of(output)) < 5:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
        end_all(mark)
    done = len(lines_of(output))
    mark = uuid.uuid4().hex
    process = job.start(output, *_RAY, "--resume", mark=mark)
    try:
        _, said = process.communicate(timeout=_PATIENCE)
        assert process.returncode == 1, said
    finally:
        process.kill()
        end_all(mark)
    job.check(output)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["kills", "resume"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        job = Job(folder, arguments.prompts, arguments.tokens)
        if arguments.only != "resume":
            rng = random.Random(arguments.seed)
            done = kill_workers(job, folder / "a.jsonl", arguments.kills, rng)
            print(f"{done} of {arguments.prompts} prompts had ended by the last kill")
            print(f"all have one result after {time.monotonic() - began:.0f} s")
        if arguments.only != "kills":
            done = kill_the_job(job, folder / "b.jsonl")
            print(f"the job was killed when {done} prompts had ended, and resumed")


if __name__ == "__main__":
    main()
