"""Servers under an open-loop load: random arrivals, which do not wait for answers.

Each server runs as a process of its own. It is warmed up and gets the same requests at
the same times, at one rate after the other. Clients stream, so that the times of tokens
are known.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import click
import httpx

from benchmarks.common import Script, header_of, write_report
from specdec.errors import ConfigError
from specdec.model_names import short
from specdec.prompts import read_prompts
from specdec.utils.tables import markdown_table, percentile

_START_SECONDS = 900
SYSTEMS = ("specdec", "plain", "mlx-lm")


@dataclass(frozen=True)
class Answer:
    """A client's measurements of a request.

    Args:
        asked: the clock's time of the request, in seconds.
        first, last: seconds from then to the first and to the last text.
        tokens: generated tokens; 0 if the request failed.
    """

    asked: float
    first: float
    last: float
    tokens: int


def command_of(system: str, port: int, options: dict[str, Any]) -> list[str]:
    """The command that starts a server."""
    target, batch = options["target"], str(options["batch"])
    if system == "mlx-lm":
        return [
            sys.executable, "-m", "mlx_lm.server", "--model", target,
            "--port", str(port), "--decode-concurrency", batch,
            # mlx-lm decodes at least as many rows, whatever --decode-concurrency says.
            "--prompt-concurrency", str(min(8, int(batch))),
            "--max-tokens", str(options["max_tokens"]), "--log-level", "ERROR",
        ]  # fmt: skip
    draft = "none" if system == "plain" else options["draft"]
    return [
        sys.executable, "-m", "specdec", "serve", "--target", target,
        "--draft", draft, "--batch", batch, "--port", str(port), "--temp", "0",
        "--max-waiting", "100000", "--request-timeout", "86400", "--quiet",
    ]  # fmt: skip


async def ask(client: httpx.AsyncClient, prompt: Any, max_tokens: int) -> Answer:
    """Send a request, and read the streamed answer."""
    is_text = isinstance(prompt, str)
    messages = [{"role": "user", "content": prompt}] if is_text else prompt
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = time.perf_counter()
    first = last = 0.0
    tokens = 0
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise httpx.HTTPError(response.text)
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    delta = choice.get("delta") or {}
                    if any(delta.get(k) for k in ("content", "reasoning",
                                                  "reasoning_content")):  # fmt: skip
                        last = time.perf_counter()
                        first = first or last
    except httpx.HTTPError as error:
        print(f"a request failed: {error!r}", file=sys.stderr)
        return Answer(asked, 0.0, 0.0, 0)
    end = time.perf_counter()
    return Answer(asked, (first or end) - asked, (last or end) - asked, tokens)


async def warm_up(client: httpx.AsyncClient, prompts: list[Any]) -> None:
    """Send four requests one by one, then up to 32 at once."""
    for prompt in prompts[:4]:
        await ask(client, prompt, 8)
    await asyncio.gather(*(ask(client, p, 32) for p in prompts[:32]))


async def load(
    client: httpx.AsyncClient,
    prompts: list[Any],
    arrivals: list[float],
    max_tokens: int,
) -> tuple[float, list[Answer]]:
    """Send all requests at their times; return the seconds taken and the answers."""
    began = time.perf_counter()

    async def one(i: int) -> Answer:
        await asyncio.sleep(arrivals[i])
        return await ask(client, prompts[i % len(prompts)], max_tokens)

    answers = await asyncio.gather(*(one(i) for i in range(len(arrivals))))
    return time.perf_counter() - began, answers


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise ConfigError("the server did not start: its messages are above")


def arrivals_at(rate: float, requests: int, seed: int) -> list[float]:
    """Times in seconds of requests that arrive independently (Poisson)."""
    rng = random.Random(seed)
    return [0.0, *accumulate(rng.expovariate(rate) for _ in range(requests - 1))]


def measure(
    system: str, prompts: list[Any], rates: dict[float, list[float]], options: Any
) -> list[dict[str, Any]]:
    """Start a server, load it at each rate in turn, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = command_of(system, port, options)
    # mlx-lm logs every request to these streams.
    quiet = subprocess.DEVNULL if system == "mlx-lm" else None

    async def loads() -> list[dict[str, Any]]:
        limits, found = httpx.Limits(max_connections=None), []
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as c:
            await warm_up(c, prompts)
            for rate, arrivals in rates.items():
                done = await load(c, prompts, arrivals, options["max_tokens"])
                found.append({"rate": rate, "system": system, **summary(*done)})
                print(found[-1], file=sys.stderr, flush=True)
        return found

    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        try:
            wait_for(url, process)
            return asyncio.run(loads())
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def summary(seconds: float, answers: list[Answer]) -> dict[str, Any]:
    """Throughput and latencies of a load; neither if all requests failed."""
    failed = sum(not a.tokens for a in answers)
    counts = {"requests": len(answers), "failed": failed}
    if failed == len(answers):
        return counts
    firsts = [a.first for a in answers if a.tokens]
    each = [(a.last - a.first) / (a.tokens - 1) for a in answers if a.tokens > 1]
    tokens = sum(a.tokens for a in answers)
    return {
        **counts,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "first_p50": percentile(firsts, 50),
        "first_p99": percentile(firsts, 99),
        "token_p50": percentile(each, 50),
        "token_p99": percentile(each, 99),
    }


def row_of(run: dict[str, Any]) -> list[str]:
    """A row of the report's table."""
    measured = [""] * 5
    if "seconds" in run:
        measured = [
            f"{run['tokens_per_second']:.1f}",
            *(f"{1000 * run[k]:.0f}" for k in ("first_p50", "first_p99")),
            *(f"{1000 * run[k]:.1f}" for k in ("token_p50", "token_p99")),
        ]
    return [f"{run['rate']:g}", run["system"], *measured, str(run["failed"])]


@click.command(cls=Script)
@click.option("--target", required=True, help="MLX model folder or hub id.")
@click.option("--draft", default="ngram", show_default=True)
@click.option("--prompts", "file", required=True, help="As for specdec run.")
@click.option("--rate", type=float, multiple=True, default=(4.0,), show_default=True,
              help="Requests a second, on average; repeat it for more.")  # fmt: skip
@click.option("--requests", type=int, default=100, show_default=True)
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--batch", type=int, default=32, show_default=True)
@click.option("--system", "systems", multiple=True, default=SYSTEMS,
              type=click.Choice(SYSTEMS), show_default=True)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", metavar="FILE")
def main(
    file: str,
    rate: tuple[float, ...],
    requests: int,
    systems: tuple[str, ...],
    seed: int,
    out: str | None,
    **options: Any,
) -> None:
    """Time to first token, time per token and throughput of servers under load."""
    prompts = list(read_prompts(file))
    raw = header_of("Servers under an open-loop load")
    raw |= {"options": {**options, "requests": requests}, "runs": []}
    rates = {each: arrivals_at(each, requests, seed) for each in sorted(rate)}
    for system in systems:
        raw["runs"] += measure(system, prompts, rates, options)
    raw["runs"].sort(key=lambda run: run["rate"])
    header = ("requests/s", "server", "tokens/s", "first token p50 (ms)", "p99",
              "per token p50 (ms)", "p99", "failed")  # fmt: skip
    text = (
        f"{requests} requests of up to {options['max_tokens']} tokens at Poisson "
        f"arrivals, {options['batch']} rows, target {short(options['target'])}, draft "
        f"{short(options['draft'])}.\n\n"
    )
    write_report(
        out, raw, text + markdown_table(header, [*map(row_of, raw["runs"])]) + "\n"
    )


if __name__ == "__main__":
    main()
