"""Prompts of ``specdec run --ray``, decoded by the workers of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import errors
from ..config import EngineConfig
from ..errors import ConfigError, ServerError
from ..model_names import draft_for, target_name
from ..outputs import GenerationResult, RunStats, StreamEvent
from ..prompts import Encoding, Prompt, PromptRecord
from ..sampling_params import SamplingParams, per_prompt
from ..utils.printable import counted, one_line
from .stage import Worker

# Seconds that a cluster has to answer.
_REACHING = 2.0
# An HTTP/2 client begins with its preface and a SETTINGS frame (an empty one here). A
# server's first frame is also a SETTINGS frame. Ray speaks gRPC, which uses HTTP/2.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_FRAME_HEAD, _SETTINGS = 9, 4
#: A prompt of a job, with its index in the job and its parameters.
Asked = tuple[int, Prompt, SamplingParams]


class _Rows(Worker):
    """Decodes rows that a job has packed."""

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        asked: list[Asked] = [pickle.loads(each) for each in batch["asked"]]
        results = await asyncio.gather(*(self.decode(*each) for each in asked))
        return {"result": list(map(pickle.dumps, results))}


class RayJob:
    """A job on a Ray cluster, used as a context manager.

    Args:
        address: as for ``ray.init``: ``auto``, ``HOST:PORT`` of a cluster that this
            machine is part of, or ``local``, which starts one here.
        workers: processes that decode; ``None``: one for each GPU that Ray has, or for
            each machine.
        loading: arguments of :meth:`~specdec.SpecDecoder.from_pretrained`; the names
            must be valid on every machine.

    Attributes:
        target_name, draft_name: the models' names, for reports.
        by: a text that names the workers, once they decode.
        max_draft_tokens: the most tokens that a round proposes.
        stats: totals of the prompts that have ended; time counts from the start of the
            workers.

    Raises:
        ConfigError: there is no such cluster.
    """

    def __init__(self, address: str, workers: int | None, loading: Mapping[str, Any]):
        self._address = address
        self._workers = workers
        self._loading = _everywhere(loading)
        self.leader = None
        self.target_name = target_name(self._loading["target"])
        self._began = time.monotonic()
        spec = draft_for(self._loading["target"], self._loading["draft"])
        self.draft_name = None if spec is None else spec.name
        self.max_draft_tokens = self._loading["config"].max_draft_tokens
        self.stats = RunStats()
        self.by = ""

    def __enter__(self) -> RayJob:
        # A cluster started here sends no usage statistics.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        address = self._address
        try:
            _check_reachable(address)
            import ray

            with _nothing_shown():
                ray.init(
                    address,
                    log_to_driver=False,
                    logging_level="error",
                    **({"include_dashboard": False} if address == "local" else {}),
                )
        except Exception as error:  # Ray raises many kinds
            raise ConfigError(
                f"there is no Ray cluster at {address} ({one_line(str(error))}): "
                "start one with ray start --head, or use --ray local"
            ) from error
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()

    def events(
        self,
        indices: Sequence[int],
        records: Sequence[PromptRecord],
        requests: SamplingParams | list[SamplingParams],
        encoding: Encoding,
    ) -> Iterator[StreamEvent]:
        """Yield an event with the result of each prompt, as blocks of prompts end.

        Args:
            indices: indices of the records to decode.
            requests: how to decode them.
            encoding: as for :meth:`~specdec.SpecDecoder.generate`.

        Raises:
            SpecdecError: a worker cannot load the model, or the job failed.
        """
        import ray
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.CRITICAL + 1)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        gpus = int(ray.cluster_resources().get("GPU", 0))
        workers = self._workers or gpus or sum(n["Alive"] for n in ray.nodes())
        self.by = f", by {counted(workers, 'worker')} of Ray"
        # Blocks of several batches keep rows busy; several blocks keep workers busy.
        batch_size = self._loading["config"].batch_size
        size = max(1, min(4 * batch_size, -(-len(indices) // (2 * workers))))
        prompts = [records[index].prompt for index in indices]
        each = per_prompt(requests, len(indices))
        asked: Iterable[Asked] = zip(indices, prompts, each, strict=True)
        rows = [{"asked": pickle.dumps(one)} for one in asked]
        blocks = -(-len(rows) // size)
        dataset = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            _Rows,
            fn_constructor_args=(dict(self._loading), dict(encoding)),
            # With GPUs Ray wants a number. A block of fewer rows would be joined to the
            # next.
            batch_size=len(rows) // blocks,
            compute=ray.data.ActorPoolStrategy(
                # Rows of the next block take the places of rows that end.
                size=workers,
                max_concurrent_calls_per_actor=2,
            ),
            num_cpus=0 if gpus else 1,
            # An equal share for each worker: with 3 workers on 2 GPUs, two share one.
            num_gpus=1 / -(-workers // gpus) if gpus else 0,
        )
        left = set(indices)
        try:
            for block in dataset.iter_batches(batch_size=None, prefetch_batches=0):
                for data in block["result"]:
                    result: GenerationResult = pickle.loads(data)
                    left.remove(result.index)  # fails if a result comes twice
                    yield self._event(result)
        except (ray.exceptions.RayError, KeyError) as error:
            raise _error_of(error) from error
        if left:
            raise ServerError(f"{len(left)} prompts have no result: run with --resume")

    def _event(self, result: GenerationResult) -> StreamEvent:
        stats = self.stats
        stats.take_ended(result)
        stats.prefilled += result.prompt_tokens > 0
        stats.prompt_tokens += result.prompt_tokens
        stats.prefix_tokens += result.prefix_tokens
        stats.generated_tokens += result.generated_tokens
        stats.decode_tokens = stats.generated_tokens
        stats.decode_seconds = time.monotonic() - self._began
        return StreamEvent(
            index=result.index,
            text=result.text,
            token_ids=result.token_ids,
            result=result,
        )


def _check_reachable(address: str) -> None:
    """Try to connect to a cluster at a known address; Ray itself tries for minutes.

    Raises:
        OSError: nothing answers there, or something other than Ray.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _last_cluster() or address
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        there = host.strip("[]"), int(port)
        with socket.create_connection(there, _REACHING) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # TLS begins with a handshake, which is left to Ray
            connection.sendall(_HELLO)
            head = connection.makefile("rb").read(_FRAME_HEAD)
        if len(head) < _FRAME_HEAD or head[3] != _SETTINGS:
            raise OSError("something else answers there")


def _last_cluster() -> str:
    """The last address that Ray noted on this machine; its cluster may have ended."""
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
    try:
        return (folder / "ray_current_cluster").read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""


@contextmanager
def _nothing_shown() -> Iterator[None]:
    """Discard standard error within the block, also that of child processes.

    Ray's core writes debugging lines there; failures come as exceptions.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _everywhere(loading: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with absolute paths, as workers run in other folders."""
    arguments = dict(loading)
    for name in ("target", "draft", "adapter_path", "draft_adapter_path"):
        looked_up, plus, path = str(arguments.get(name) or "").rpartition("ngram+")
        if not looked_up and os.path.exists(path):
            arguments[name] = plus + os.path.abspath(path)
    config: EngineConfig = arguments["config"]
    if config.prefix_cache is not None:
        folder = os.path.abspath(config.prefix_cache)
        arguments["config"] = replace(config, prefix_cache=folder)
    return arguments


def _error_of(error: Exception) -> Exception:
    """The error of a failed job: the worker's own error, if there is one."""
    named = re.findall(r"specdec\.errors\.(\w+): (.*)", str(error))
    if named:
        kind, text = named[-1]
        return getattr(errors, kind, ServerError)(text)
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return ServerError(f"the Ray job failed: {one_line(lines[-1])}: run with --resume")
