"""What the prefix store saves, and what it costs: first tokens, bytes, disk rates.

``first-tokens`` decodes prompts that share a prefix, again and again: without a
store, with one that is empty, from memory, from disk, and with other endings.
``storage`` puts one long row of random keys and values into a store, dense and
in 4 bits, and reads it back, beside plain files of as many bytes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks.common import Script, header_of, write_report
from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.cache import BatchKVCache, BatchQuantizedKVCache
from specdec.errors import ConfigError
from specdec.prefix_cache.session import ModelPrefixes
from specdec.prefix_cache.store import PrefixStore
from specdec.tools.bench.models import DTYPES, load_model, token_level
from specdec.tools.bench.tables import markdown_table

GB = 1e9


@contextmanager
def scratch(parent: str | None) -> Iterator[Path]:
    """A folder that goes again."""
    folder = Path(tempfile.mkdtemp(prefix="prefix-benchmark-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def forget_pages(folder: Path) -> bool:
    """Have the system forget what it holds of the files; whether it could."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return True


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@click.group()
def main() -> None:
    """Measure the prefix store."""


# -- first tokens ------------------------------------------------------------


@main.command("first-tokens", cls=Script)
@click.option("--target", default="random:tiny", show_default=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16")
@click.option("--num-prompts", type=int, default=8, show_default=True)
@click.option("--shared", type=int, default=4096, show_default=True)
@click.option("--own", type=int, default=64, show_default=True)
@click.option("--folder", help="On the disk to measure; removed after the run.")
@click.option("--out")
def first_tokens(
    target: str,
    dtype: str,
    num_prompts: int,
    shared: int,
    own: int,
    folder: str | None,
    out: str | None,
) -> None:
    """Seconds until the first tokens of prompts that share a prefix."""
    loaded = load_model(target, dtype)
    model: Any = loaded.model
    vocab_size = int(model(mx.array([[0]])).shape[-1])
    draw = np.random.default_rng(0)
    stem = draw.integers(0, vocab_size, shared).tolist()

    def prompts() -> list[list[int]]:
        return [
            stem + draw.integers(0, vocab_size, own).tolist()
            for _ in range(num_prompts)
        ]

    first, others = prompts(), prompts()
    raw = header_of("Prefix store: seconds until the first tokens")
    rounds: dict[str, dict[str, Any]] = {}
    with scratch(folder) as at:

        def decoder(**options: Any) -> SpecDecoder:
            config = EngineConfig(batch_size=num_prompts, **options)
            return SpecDecoder(token_level(model), config=config)

        def measure(name: str, using: SpecDecoder, given: list[list[int]]) -> None:
            start = time.perf_counter()
            results = using.generate(given, SamplingParams(max_tokens=2))
            rounds[name] = {
                "first_token_s": [r.time_to_first_token for r in results],
                "total_s": time.perf_counter() - start,
                "prefix_tokens": [r.prefix_tokens for r in results],
                "tokens": [r.token_ids for r in results],
            }

        # Shapes and kernels are new once; that is not what is measured.
        decoder().generate([p[: own + 8] for p in first], SamplingParams(max_tokens=2))
        measure("without a store", decoder(), first)
        stored = decoder(prefix_cache=at, prefix_cache_memory=4 * 10**9)
        measure("first round, nothing stored", stored, first)
        measure("second round, the same prompts", stored, first)
        measure("other endings, from memory", stored, others)
        assert stored.prefix_store is not None
        stored.prefix_store.close()
        raw["folder_bytes"], raw["memory_bytes"] = (
            size_of(at),
            stored.prefix_store.nbytes,
        )
        raw["pages_forgotten"] = forget_pages(at)
        again = decoder(prefix_cache=at, prefix_cache_memory=4 * 10**9)
        measure("a new decoder, from disk", again, first)
        assert again.prefix_store is not None
        again.prefix_store.close()
    raw["rounds"] = rounds
    cold = statistics.median(rounds["first round, nothing stored"]["first_token_s"])
    plain = rounds["without a store"]["tokens"]
    rows = []
    for name, record in rounds.items():
        median = statistics.median(record["first_token_s"])
        same = "" if "other" in name[:5] else record["tokens"] == plain
        rows.append(
            [
                name,
                f"{median:.3f}",
                f"{cold / median:.1f}",
                f"{statistics.median(record['prefix_tokens']):.0f}",
                {True: "yes", False: "no", "": ""}[same],
            ]
        )
    table = markdown_table(
        ["round", "first token, s", "times sooner", "tokens reused", "same tokens"],
        rows,
    )
    cold_pages = ", forgotten by the page cache before they were read"
    body = (
        f"{num_prompts} prompts at once, {shared} tokens shared and {own} of their own "
        f"each; medians over prompts.\n\n{table}\n"
        f"Stored: {raw['memory_bytes'] / GB:.2f} GB in memory, "
        f"{raw['folder_bytes'] / GB:.2f} GB on disk"
        f"{cold_pages * raw['pages_forgotten']}.\n"
    )
    write_report(out, raw, body)


# -- storage -------------------------------------------------------------------


@main.command("storage", cls=Script)
@click.option(
    "--geometry",
    default="16:4:256",
    show_default=True,
    metavar="LAYERS:KV_HEADS:DIM",
    help="Layers that keep all tokens; the default is that of a 27B hybrid model.",
)
@click.option("--tokens", type=int, default=50_000, show_default=True)
@click.option("--folder", help="On the disk to measure; removed after the run.")
@click.option("--out")
def storage(geometry: str, tokens: int, folder: str | None, out: str | None) -> None:
    """Bytes of a long prefix, and how fast it is written and read."""
    try:
        layers, heads, dim = map(int, geometry.split(":"))
    except ValueError:
        raise ConfigError(
            f"--geometry {geometry}: write LAYERS:KV_HEADS:DIM, such as 16:4:256"
        ) from None
    raw = header_of("Prefix store: bytes and rates of a long prefix")
    raw["stored"] = {}
    rows = []
    kinds: dict[str, Callable[[], Any]] = {
        "16 bits": lambda: BatchKVCache(1, max_length=tokens),
        "4 bits": lambda: BatchQuantizedKVCache(1, bits=4, max_length=tokens),
    }
    for name, make in kinds.items():
        with scratch(folder) as at:
            record = _store_and_read(
                [make() for _ in range(layers)], tokens, heads, dim, at
            )
        with scratch(folder) as at:
            record |= _plain_file(at, record["disk_bytes"])
        raw["stored"][name] = record
        rates = (
            record["disk_bytes"] / GB / record[key]
            for key in ("write_s", "plain_write_s", "read_s", "plain_read_s")
        )
        rows.append(
            [
                name,
                f"{record['memory_bytes'] / GB:.2f}",
                f"{record['disk_bytes'] / GB:.2f}",
                *(f"{rate:.2f}" for rate in rates),
                f"{record['refill_s']:.2f}",
            ]
        )
    table = markdown_table(
        [
            "keys and values",
            "memory, GB",
            "disk, GB",
            "written, GB/s",
            "plain file written",
            "read, GB/s",
            "plain file read",
            "row rebuilt, s",
        ],
        rows,
    )
    body = (
        f"{tokens} tokens, {layers} layers of {heads} key heads of {dim}, random "
        "values.\n\n"
        f"{table}\nWritten: cut out of the caches, packed, hashed, and synced to the "
        "disk file by file. Read: from disk (pages forgotten before), hashed and "
        "unpacked. A plain file of as many bytes is written in blocks of 16 MiB and "
        "synced once, then read in the same blocks.\n"
    )
    write_report(out, raw, body)


def _store_and_read(
    caches: list[Any], tokens: int, heads: int, dim: int, at: Path
) -> dict[str, Any]:
    step = 5_000
    for start in range(0, tokens, step):
        n = min(step, tokens - start)
        for cache in caches:
            keys, values = (
                mx.random.normal((1, heads, n, dim), mx.bfloat16) for _ in range(2)
            )
            cache.update_and_fetch(keys, values)
            mx.eval(cache.state)
    prompt = list(range(tokens))
    stand_in = nn.Linear(1, 1)

    def prefixes(store: PrefixStore) -> ModelPrefixes:
        return ModelPrefixes(store, stand_in, "random", lambda: caches)

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        start = time.perf_counter()
        result = work()
        return time.perf_counter() - start, result

    def write() -> int:
        store = PrefixStore(memory=2**50, folder=at, disk=2**50)
        session = prefixes(store).begin([prompt], max_write=tokens)
        session.record(caches, [0], [tokens], tokens)
        store.close()
        return store.nbytes

    record: dict[str, Any] = {"cache_bytes": sum(c.nbytes for c in caches)}
    record["write_s"], record["memory_bytes"] = timed(write)
    record["disk_bytes"], record["files"] = size_of(at), len(list(at.iterdir()))
    record["pages_forgotten"] = forget_pages(at)
    again = prefixes(PrefixStore(memory=0, folder=at, disk=2**50))
    session = again.begin([prompt], max_write=tokens)
    record["read_s"], _ = timed(lambda: list(session.find()))
    assert session.reused == [tokens], session.reused
    record["refill_s"], made = timed(lambda: session.refill(caches))
    for old, new in zip(caches, made, strict=True):
        same = _arrays(old, tokens), _arrays(new, tokens)
        assert all(mx.array_equal(a, b) for a, b in zip(*same, strict=True))
    return record


def _arrays(cache: Any, tokens: int) -> list[mx.array]:
    parts: list[Any] = [cache.keys, cache.values]
    arrays = [a for p in parts for a in (p if isinstance(p, tuple) else [p])]
    return [a[:, :, :tokens] for a in arrays]


def _plain_file(at: Path, nbytes: int) -> dict[str, float]:
    block = os.urandom(16 << 20)
    path = at / "plain"
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(-(-nbytes // len(block))):
            file.write(block)
        file.truncate(nbytes)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter() - start
    forget_pages(at)
    start = time.perf_counter()
    with path.open("rb") as file:
        while file.read(len(block)):
            pass
    return {"plain_write_s": written, "plain_read_s": time.perf_counter() - start}


if __name__ == "__main__":
    main()
