"""A stage of Ray Data that decodes rows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import EngineConfig
from ..decoder import SpecDecoder
from ..engine.async_server import Server
from ..errors import ConfigError, MemoryLimitError, PromptError
from ..outputs import GenerationResult
from ..prompts import Encoding, Prompt, templates
from ..sampling_params import JSON_SETTINGS, SamplingParams, require_params
from ..utils.printable import quoted

_WHOLE = frozenset(("seed", "max_tokens", "min_tokens", "top_k", "num_draft_tokens"))
#: pyarrow's names for the types of columns that may be empty in a whole block.
_TYPES = {
    "stop_reason": "string",
    "stop_token": "int64",
    "error": "string",
    "seed": "int64",
    "kv_bits": "int64",
    "time_to_first_token": "float64",
}
_LISTS = {"token_ids": "int64", "acceptance_by_position": "float64"}


class Worker:
    """A model in a Ray worker process; rows of all blocks decode together."""

    def __init__(self, loading: Mapping[str, Any], encoding: Encoding):
        templates.start()
        self._decoder = SpecDecoder.from_pretrained(**loading)
        self._encoding = encoding
        self._server: Server | None = None

    async def decode(
        self, index: int, prompt: Prompt, params: SamplingParams
    ) -> GenerationResult:
        """Decode a row; the result has the error if its prompt cannot be served."""
        if self._server is None:
            self._server = self._decoder.serve()
            await self._server.__aenter__()
        try:
            result = await self._server.generate(prompt, params, **self._encoding)
        except (PromptError, ConfigError, MemoryLimitError) as error:
            text = prompt if isinstance(prompt, str) else ""
            return GenerationResult.refused(index, text, str(error))
        return replace(result, index=index)


class SpecDecodeStage(Worker):
    """Decodes rows of a Ray dataset: ``dataset.map_batches(SpecDecodeStage, ...)``.

    A row has ``prompt`` (a text, or token ids) or ``messages``. It may have settings of
    its own, such as ``max_tokens`` or ``seed``: fields of
    :class:`~specdec.SamplingParams`; null means not set. Its other columns stay. It
    gets the columns of a line of ``specdec run --output``. A row that cannot be decoded
    gets an ``error``, and the others go on.

    All rows of a batch go to the decoder at once. So ``batch_size`` is a few times the
    rows that decode together. With GPUs Ray refuses ``None``, a whole block.

    Args:
        target, draft: names of models, as for
            :meth:`~specdec.SpecDecoder.from_pretrained`.
        params: parameters of all rows. Row ``i`` draws with seed ``params.seed + i``,
            where ``i`` is its column ``index``.
        config: batch size, draft length, prefix cache of each worker.
        encoding: options such as ``system_prompt``, as for
            :meth:`~specdec.SpecDecoder.generate`.
        loading: further arguments of :meth:`~specdec.SpecDecoder.from_pretrained`.

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

    async def __call__(self, batch: Any) -> Any:
        """The rows of a batch with their results, in their order."""
        columns_in: dict[str, Any] = {}
        if hasattr(batch, "to_pydict"):  # a pyarrow table, whose columns have types
            table: Any = batch
            columns_in = {name: table.column(name) for name in table.column_names}
            batch = table.to_pydict()
        columns = {name: list(map(_plain, batch[name])) for name in batch}
        rows = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        results = await asyncio.gather(*map(self._row, range(len(rows)), rows))
        return _table({**columns, **columns_in}, results)

    async def _row(self, at: int, row: Mapping[str, Any]) -> GenerationResult:
        number, index = at, None
        prompt = row.get("prompt")
        if prompt is None:
            prompt = row.get("messages")
        try:
            if (index_in := row.get("index")) is not None:
                if type(_whole(index_in)) is not int:
                    raise ConfigError(
                        f"index is {quoted(index_in)}: give a whole number"
                    )
                number = index = _whole(index_in)
            if prompt is None:
                raise PromptError("the row has neither prompt nor messages")
            params = self._params_of(row, index)
        except (PromptError, ConfigError) as error:
            text = prompt if isinstance(prompt, str) else ""
            return GenerationResult.refused(number, text, str(error))
        return await self.decode(number, prompt, params)

    def _params_of(self, row: Mapping[str, Any], index: Any) -> SamplingParams:
        values = {name: row[name] for name in JSON_SETTINGS & row.keys()}
        settings = {
            name: _whole(value) if name in _WHOLE else value
            for name, value in values.items()
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
    """Turn a whole float into an int: numpy has floats in int columns with nulls."""
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _plain(value: Any) -> Any:
    """A value of a batch as plain JSON, without keys that only other rows have."""
    if isinstance(value, float) and math.isnan(value):
        return None  # numpy has no null
    if hasattr(value, "tolist"):  # a numpy value
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _table(columns: Mapping[str, Any], results: Sequence[GenerationResult]) -> Any:
    """A pyarrow table, with the same column types for every block.

    Args:
        columns: the columns that stay: lists, or pyarrow columns.
    """
    import pyarrow as pa

    lines = [result.to_dict() for result in results]
    logprobs = any("logprobs" in line for line in lines)
    columns_out = {
        name: pa.array(values) if isinstance(values, list) else values
        for name, values in columns.items()
    }
    names = GenerationResult.refused(0, "", "").to_dict()
    for name in (*names, *["logprobs"] * logprobs):
        kind = None
        if name in _TYPES:
            kind = getattr(pa, _TYPES[name])()
        elif name in _LISTS:
            kind = pa.list_(getattr(pa, _LISTS[name])())
        columns_out[name] = pa.array([line.get(name) for line in lines], type=kind)
    return pa.table(columns_out)
