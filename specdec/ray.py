"""Many machines for one job: a stage for Ray Data, and jobs of ``specdec run --ray``.

::

    import ray
    from specdec import SamplingParams
    from specdec.ray import SpecDecodeStage

    prompts = ray.data.read_json("prompts.jsonl")  # columns prompt, index, ...
    results = prompts.map_batches(
        SpecDecodeStage,
        fn_constructor_kwargs={
            "target": "MODEL",
            "params": SamplingParams(max_tokens=256, temperature=0.7, seed=1),
        },
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=8),
        num_gpus=1,
    )
    results.write_json("results")

Ray starts a worker again that ends, and gives its blocks to it or to another one. A row
is a function of its prompt, its parameters and its seed, so it does not matter which
worker decodes it, how often it begins, or which rows are beside it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from . import errors, templates
from .config import EngineConfig
from .decoder import SpecDecoder
from .engine.async_server import Server
from .errors import ConfigError, MemoryLimitError, PromptError, ServerError
from .outputs import GenerationResult
from .prompts import Encoding, Prompt
from .sampling_params import SamplingParams, require_params
from .utils.printable import one_line, quoted

__all__ = ["SpecDecodeStage"]

#: Columns that set a row's own parameters.
_SETTINGS = frozenset(each.name for each in fields(SamplingParams)) - {
    "grammar",
    "logits_processors",
    "sampler",
}
_WHOLE = frozenset(("seed", "max_tokens", "min_tokens", "top_k", "num_draft_tokens"))
#: Types of columns that may be empty in a whole block, by their names in pyarrow.
_TYPES = {
    "stop_reason": "string",
    "stop_token": "int64",
    "error": "string",
    "seed": "int64",
    "kv_bits": "int64",
    "time_to_first_token": "float64",
}
_LISTS = {"token_ids": "int64", "acceptance_by_position": "float64"}


class _Worker:
    """A model in a process of Ray's; rows of all blocks decode together."""

    def __init__(self, loading: Mapping[str, Any], encoding: Encoding):
        templates.start()
        self._decoder = SpecDecoder.from_pretrained(**loading)
        self._encoding = encoding
        self._server: Server | None = None

    async def _decode(
        self, index: int, prompt: Prompt, params: SamplingParams
    ) -> GenerationResult:
        """A row's result; a prompt that cannot be served gives one with the error."""
        if self._server is None:
            self._server = self._decoder.serve()
            await self._server.__aenter__()
        try:
            result = await self._server.generate(prompt, params, **self._encoding)
        except (PromptError, ConfigError, MemoryLimitError) as error:
            text = prompt if isinstance(prompt, str) else ""
            return GenerationResult.refused(index, text, str(error))
        return replace(result, index=index)


class SpecDecodeStage(_Worker):
    """Decodes rows of a Ray dataset: ``dataset.map_batches(SpecDecodeStage, ...)``.

    A row has ``prompt`` (a text, or token ids) or ``messages``, and may have settings
    of its own, such as ``max_tokens`` or ``seed``: fields of
    :class:`~specdec.SamplingParams`; null is none. Its other columns stay. It gets the
    columns of a line of ``specdec run --output``. One that cannot be decoded has its
    ``error``, and the others go on.

    All rows of a batch are given to the decoder at once: ``batch_size=None``, a block,
    keeps its rows full for longest.

    Args:
        target, draft: names of models, as for
            :meth:`~specdec.SpecDecoder.from_pretrained`.
        params: of all rows. Row ``i`` draws with seed ``params.seed + i``, where ``i``
            is its column ``index``.
        config: batch size, draft length, prefix cache of each worker.
        encoding: ``system_prompt`` and its like, as for
            :meth:`~specdec.SpecDecoder.generate`.
        loading: more for :meth:`~specdec.SpecDecoder.from_pretrained`.

    Raises:
        SpecdecError: the model cannot be loaded.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        params: SamplingParams | None = None,
        config: EngineConfig | None = None,
        encoding: Encoding | None = None,
        **loading: Any,
    ):
        self._params = require_params(params or SamplingParams())
        chosen = {"target": target, "draft": draft, "config": config, **loading}
        super().__init__(chosen, encoding or {})

    async def __call__(self, batch: Mapping[str, Any]) -> Any:
        """The rows of a batch with their results, in their order."""
        if hasattr(batch, "to_pydict"):  # pyarrow's
            batch = batch.to_pydict()
        columns = {name: list(map(_plain, batch[name])) for name in batch}
        rows = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        results = await asyncio.gather(*map(self._row, range(len(rows)), rows))
        return _table(columns, results)

    async def _row(self, at: int, row: Mapping[str, Any]) -> GenerationResult:
        number, index = at, None
        prompt = row.get("prompt")
        if prompt is None:
            prompt = row.get("messages")
        try:
            if (given := row.get("index")) is not None:
                if type(_whole(given)) is not int:
                    raise ConfigError(f"index is {quoted(given)}: give a whole number")
                number = index = _whole(given)
            if prompt is None:
                raise PromptError("the row has neither prompt nor messages")
            params = self._params_of(row, index)
        except (PromptError, ConfigError) as error:
            text = prompt if isinstance(prompt, str) else ""
            return GenerationResult.refused(number, text, str(error))
        return await self._decode(number, prompt, params)

    def _params_of(self, row: Mapping[str, Any], index: Any) -> SamplingParams:
        found = {name: row[name] for name in _SETTINGS & row.keys()}
        settings = {
            name: _whole(value) if name in _WHOLE else value
            for name, value in found.items()
            if value is not None
        }
        params = self._params.updated(settings)
        if "seed" in settings or params.seed is None or not params.draws:
            return params
        if index is None:
            raise ConfigError(
                "one seed is given for all rows: add a column index, or a column seed"
            )
        return replace(params, seed=params.seed + index)


def _whole(value: Any) -> Any:
    """A column of whole numbers with nulls has floats in numpy."""
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _plain(value: Any) -> Any:
    """A value of a batch as JSON has it, without keys that other rows have."""
    if isinstance(value, float) and math.isnan(value):
        return None  # numpy has no null
    if hasattr(value, "tolist"):  # numpy's
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _table(
    columns: Mapping[str, list[Any]], results: Sequence[GenerationResult]
) -> Any:
    """A table of pyarrow's; blocks have the same types whatever their rows are."""
    import pyarrow as pa

    lines = [result.to_dict() for result in results]
    logprobs = any("logprobs" in line for line in lines)
    made = {name: pa.array(values) for name, values in columns.items()}
    names = GenerationResult.refused(0, "", "").to_dict()
    for name in (*names, *["logprobs"] * logprobs):
        kind = None
        if name in _TYPES:
            kind = getattr(pa, _TYPES[name])()
        elif name in _LISTS:
            kind = pa.list_(getattr(pa, _LISTS[name])())
        made[name] = pa.array([line.get(name) for line in lines], type=kind)
    return pa.table(made)


# -- jobs of ``specdec run --ray`` --------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A prompt of a job, with its place in it."""

    index: int
    prompt: Prompt
    params: SamplingParams


class _Job(_Worker):
    """Decodes what a job's driver has packed."""

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        asked: list[Asked] = [pickle.loads(each) for each in batch["asked"]]
        results = await asyncio.gather(
            *(self._decode(each.index, each.prompt, each.params) for each in asked)
        )
        return {"result": list(map(pickle.dumps, results))}


class Cluster:
    """A Ray cluster that decodes a job; to be entered.

    Args:
        address: as ``ray.init`` has it: ``auto``, ``HOST:PORT`` of a cluster that this
            machine is part of, or ``local``, which starts one here.
        workers: processes that decode; ``None``: one for each GPU that Ray has, or for
            each machine.

    Raises:
        ConfigError: there is no such cluster.
    """

    def __init__(self, address: str, workers: int | None = None):
        self._address = address
        self._workers = workers

    def __enter__(self) -> Cluster:
        # A cluster that is started here reports to nobody.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Lines of its core, for its authors; what fails comes as an exception.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        import ray

        try:
            ray.init(
                self._address,
                log_to_driver=False,
                logging_level="error",
                **({"include_dashboard": False} if self._address == "local" else {}),
            )
        except Exception as error:  # of many kinds
            raise ConfigError(
                f"there is no Ray cluster at {self._address} ({one_line(str(error))}): "
                "start one with ray start --head, or say --ray local"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()

    def run(
        self,
        asked: Sequence[Asked],
        loading: Mapping[str, Any],
        encoding: Encoding,
        batch_size: int,
    ) -> Iterator[GenerationResult]:
        """Results as blocks of prompts end; each prompt has one.

        Args:
            asked: what is decoded.
            loading: arguments of :meth:`~specdec.SpecDecoder.from_pretrained`, which
                have to name a model on every machine.
            encoding: as for :meth:`~specdec.SpecDecoder.generate`.
            batch_size: rows of a worker.

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
        # Blocks of several batches keep rows busy; several blocks keep workers busy.
        size = max(1, min(4 * batch_size, -(-len(asked) // (2 * workers))))
        rows = [{"asked": pickle.dumps(each)} for each in asked]
        dataset = ray.data.from_items(
            rows, override_num_blocks=-(-len(rows) // size)
        ).map_batches(
            _Job,
            fn_constructor_args=(dict(loading), dict(encoding)),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(
                # Rows of the next block take the places of those that end.
                size=workers,
                max_concurrent_calls_per_actor=2,
            ),
            num_cpus=0 if gpus else 1,
            # As many on each: of 3 workers on 2 GPUs, two share one.
            num_gpus=1 / -(-workers // gpus) if gpus else 0,
        )
        left = {each.index for each in asked}
        try:
            for block in dataset.iter_batches(batch_size=None, prefetch_batches=0):
                for data in block["result"]:
                    result: GenerationResult = pickle.loads(data)
                    left.remove(result.index)  # one that comes twice is a defect
                    yield result
        except (ray.exceptions.RayError, KeyError) as error:
            raise _error_of(error) from error
        if left:
            raise ServerError(f"{len(left)} prompts have no result: run with --resume")


def _error_of(error: Exception) -> Exception:
    """What a failed job says, by the worker's own error where there is one."""
    found = re.findall(r"specdec\.errors\.(\w+): (.*)", str(error))
    if found:
        kind, text = found[-1]
        return getattr(errors, kind, ServerError)(text)
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return ServerError(f"the Ray job failed: {one_line(lines[-1])}: run with --resume")
