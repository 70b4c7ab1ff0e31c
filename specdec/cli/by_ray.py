"""``specdec run --ray``: a job's prompts, decoded by the workers of a Ray cluster."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ..config import EngineConfig
from ..outputs import StreamEvent
from ..prompts import Encoding, Prompt

if TYPE_CHECKING:
    from ..sampling_params import SamplingParams


class RayJob:
    """Prompts on their way.

    Args:
        address: of the cluster, which is entered.
        workers: processes that decode; ``None``: one for each GPU, or machine.
        loading: arguments of :meth:`~specdec.SpecDecoder.from_pretrained`.

    Raises:
        click.ClickException: Ray is not installed.
        ConfigError: there is no such cluster.
    """

    def __init__(self, address: str, workers: int | None, loading: Mapping[str, Any]):
        if not importlib.util.find_spec("ray"):
            raise click.ClickException(
                "--ray needs more packages: pip install '.[ray]' in a checkout"
            )
        from ..ray import Cluster

        self._loading = _everywhere(loading)
        self._cluster = click.get_current_context().with_resource(
            Cluster(address, workers)
        )
        self._began = time.monotonic()
        self._prompts = self._tokens = self._drafted = self._accepted = 0

    def events(
        self,
        indices: Sequence[int],
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        encoding: Encoding,
    ) -> Iterator[StreamEvent]:
        """An event for each prompt, with its result."""
        from ..ray import Asked

        asked = list(map(Asked, indices, prompts, params))
        rows = self._loading["config"].batch_size
        for result in self._cluster.run(asked, self._loading, encoding, rows):
            self._prompts += 1
            self._tokens += result.generated_tokens
            self._drafted += result.drafted
            self._accepted += result.accepted
            yield StreamEvent(
                index=result.index,
                text=result.text,
                token_ids=result.token_ids,
                result=result,
            )

    def under_way(self) -> dict[str, str]:
        """What progress says."""
        return {"note": f"{self._tokens} tokens, {self._rate:.1f} tokens/s"}

    def summary(self) -> str:
        """What was done, in lines."""
        seconds = time.monotonic() - self._began
        lines = {
            "target": str(self._loading["target"] or "the default one"),
            "draft": str(self._loading["draft"] or "the target's own, if it has one"),
            "decoded": f"{self._prompts} prompts, {self._tokens} tokens in "
            f"{seconds:.1f} s, workers' start included: {self._rate:.1f} tokens/s",
        }
        if self._drafted:
            lines["acceptance"] = f"rate {self._accepted / self._drafted:.3f}"
        return "\n".join(f"{key + ':':<13}{value}" for key, value in lines.items())

    @property
    def _rate(self) -> float:
        return self._tokens / (time.monotonic() - self._began)


def _everywhere(loading: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with whole paths: workers run in other folders."""
    found = dict(loading)
    for name in ("target", "draft", "adapter_path", "draft_adapter_path"):
        looked_up, plus, path = str(found.get(name) or "").rpartition("ngram+")
        if not looked_up and os.path.exists(path):
            found[name] = plus + os.path.abspath(path)
    config: EngineConfig = found["config"]
    if config.prefix_cache is not None:
        folder = os.path.abspath(config.prefix_cache)
        found["config"] = replace(config, prefix_cache=folder)
    return found
