#!/usr/bin/env python3
"""An agent's conversation: tokens computed and time to first token, turn by turn.

The same conversation with specdec and ``mlx_lm.server``, over HTTP. Every request has
the system turn, the tools and all turns so far: a server's own answers, and results of
tools that are the same for all.

    scripts/agent.py MODEL_FOLDER --out benchmarks/results/agent-cpu
"""

from __future__ import annotations

import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
_NAMES = ("read_file", "write_file", "list_folder", "search", "run_tests", "ask_user")
#: mlx_lm.server gets the BLAS that specdec has.
_MLX_LM = """
from specdec.utils.process import prepare_process
prepare_process()
from mlx_lm.server import main
main()
"""
_SERVERS = {
    "specdec": ["-m", "specdec", "serve", "--target"],
    "specdec, answers not kept": ["-m", "specdec", "serve", "--no-prefix-answers",
                                  "--target"],
    "mlx_lm.server": ["-c", _MLX_LM, "--model"],
}  # fmt: skip


def _tools() -> list[dict[str, Any]]:
    properties = {
        name: {"type": "string", "description": f"The {name} that the call is about."}
        for name in ("path", "pattern", "reason")
    }
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    return [
        {"type": "function", "function": {"name": name, "description":
         f"Calls {name} in the folder of the project.", "parameters": schema}}
        for name in _NAMES
    ]  # fmt: skip


@contextmanager
def _serving(command: list[str], model: str) -> Iterator[str]:
    """The address of a server that has answered once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, *command, model, "--port", str(port)]
    process = subprocess.Popen(program, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        while process.poll() is None:
            try:
                _ask(url, [{"role": "user", "content": "Hi"}], 1)
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _ask(
    url: str, messages: list[dict[str, str]], most: int, **more: Any
) -> tuple[str, Any]:
    """An answer's text, and what it took."""
    body = {"messages": messages, "max_tokens": most, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, **more}  # fmt: skip
    text, first, begin = "", 0.0, time.perf_counter()
    with httpx.stream("POST", url, json=body, timeout=600) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
            if text and not first:
                first = time.perf_counter() - begin
            usage = chunk.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    prompt, cached = usage["prompt_tokens"], details.get("cached_tokens", 0)
    return text, {"prompt": prompt, "computed": prompt - cached,
                  "first": round(first, 4)}  # fmt: skip


@click.command()
@click.argument("model")
@click.option("--turns", default=30, show_default=True)
@click.option("--max-tokens", default=16, show_default=True)
@click.option("--out")
def main(model: str, turns: int, max_tokens: int, out: str | None) -> None:
    """Compare the servers, turn by turn."""
    from benchmarks.common import header_of, write_report
    from specdec.utils.tables import markdown_table

    rng, words = random.Random(1), (ROOT / "docs" / "caches.md").read_text().split()

    def some(count: int) -> str:
        at = rng.randrange(len(words) - count)
        return " ".join(words[at : at + count])

    system = {"role": "system", "content": f"You write programs. {some(200)}"}
    results = [some(20) for _ in range(turns)]
    talks = {name: [system] for name in _SERVERS}
    took: dict[str, list[Any]] = {name: [] for name in _SERVERS}
    texts: dict[str, list[str]] = {name: [] for name in _SERVERS}
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(_serving(command, model))
            for name, command in _SERVERS.items()
        }
        for turn, result in enumerate(results):
            for name, url in urls.items():
                message = {"role": "user", "content": result}
                if turn:
                    message |= {"role": "tool", "tool_call_id": f"call_{turn}"}
                talks[name].append(message)
                text, facts = _ask(url, talks[name], max_tokens, tools=_tools())
                talks[name].append({"role": "assistant", "content": text})
                took[name].append(facts)
                texts[name].append(text)
    same = sum(len(set(each)) == 1 for each in zip(*texts.values(), strict=True))
    rows = []
    for name, turns_of in took.items():
        later, seconds = turns_of[1:], sorted(each["first"] for each in turns_of[1:])
        rows.append([
            name, turns_of[-1]["prompt"], turns_of[0]["computed"],
            f"{statistics.mean(each['computed'] for each in later):.1f}",
            f"{1000 * statistics.median(seconds):.0f}", f"{1000 * seconds[-1]:.0f}",
        ])  # fmt: skip
    head = ["server", "tokens of the last prompt", "computed, first turn",
            "computed, later turns (mean)", "first token, later turns (ms, median)",
            "first token (ms, slowest)"]  # fmt: skip
    body = (
        f"{turns} turns with {len(_NAMES)} tools, up to {max_tokens} tokens an answer; "
        f"greedy. {same} answers are the same everywhere.\n\n"
        f"{markdown_table(head, rows)}\n"
    )
    title = "An agent's conversation, turn by turn"
    words = [Path(each).name for each in sys.argv[1:]]
    raw = {**header_of(title), "command": " ".join(["scripts/agent.py", *words])}
    write_report(out, {**raw, "servers": took}, body)


if __name__ == "__main__":
    main()
