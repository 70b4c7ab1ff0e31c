"""Metrics of requests and of the engine, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.async_server import Server
from ..outputs import GenerationResult

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counts and times of one server.

    Args:
        engine: the engine whose totals are shown.
        waiting: gives the number of requests that have no row yet.
        prefix_bytes: gives the bytes that the prefix store holds in memory.
    """

    def __init__(
        self,
        engine: Server,
        waiting: Callable[[], int],
        prefix_bytes: Callable[[], int],
    ):
        self.registry = CollectorRegistry()
        self.registry.register(_Totals(engine, waiting, prefix_bytes))
        self._requests = Counter(
            "specdec_requests",
            "Requests that have ended, by endpoint and outcome.",
            ["endpoint", "outcome"],
            registry=self.registry,
        )
        self._first = Histogram(
            "specdec_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._each = Histogram(
            "specdec_time_per_token_seconds",
            "Mean time of a row's tokens after its first.",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._gaps = Histogram(
            "specdec_token_gap_seconds",
            "From tokens of a row to its next ones: prompts that join make it longer.",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._seconds = Histogram(
            "specdec_request_seconds",
            "From a request's arrival to its end.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def first_token(self, seconds: float) -> None:
        """Count a row's first token."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        """Count the time since a row's tokens before."""
        self._gaps.observe(seconds)

    def ended(self, result: GenerationResult) -> None:
        """Count a row that has ended."""
        if result.tokens_per_second:
            self._each.observe(1 / result.tokens_per_second)

    def answered(self, endpoint: str, outcome: str, seconds: float) -> None:
        """Count a request that has ended, well or not."""
        self._requests.labels(endpoint, outcome).inc()
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Totals(Collector):
    """The engine's own counts."""

    def __init__(
        self,
        engine: Server,
        waiting: Callable[[], int],
        prefix_bytes: Callable[[], int],
    ):
        self._engine, self._waiting, self._bytes = engine, waiting, prefix_bytes

    def collect(self) -> Iterator[Metric]:
        stats, load = self._engine.stats, self._engine.load
        for name, text, number in (
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("prefix_tokens", "Tokens of prompts that were found in the prefix cache.",
             stats.prefix_tokens),
            ("generated_tokens", "Tokens generated.", stats.generated_tokens),
            ("drafted_tokens", "Tokens that the draft proposed.", stats.drafted),
            ("accepted_tokens", "Drafted tokens that were accepted.", stats.accepted),
            ("rounds", "Rounds of the batch.", stats.rounds),
            ("warmup_seconds", "Time spent on compiling kernels, before the first "
             "request.", stats.warmup_seconds),
            ("prefill_seconds", "Time spent on prompts.", stats.prefill_seconds),
            ("decode_seconds", "Time spent on rounds.", stats.decode_seconds),
        ):  # fmt: skip
            yield CounterMetricFamily(f"specdec_{name}", text, value=number)
        for name, text, counts in (
            ("drafted", "Rounds that drafted at least so many tokens.",
             stats.num_draft_tokens_per_pos),
            ("accepted", "Rounds that accepted at least so many tokens.",
             stats.num_accepted_tokens_per_pos),
        ):  # fmt: skip
            family = CounterMetricFamily(
                f"specdec_{name}_by_position", text, labels=["position"]
            )
            for position, count in enumerate(counts, 1):
                family.add_metric([str(position)], count)
            yield family
        for name, text, number in (
            ("rows_running", "Rows that decode or are prefilled.", load.running),
            ("requests_waiting", "Requests without a row.", self._waiting()),
            ("kv_cache_bytes", "Keys and values of the target.", load.cache_bytes),
            ("prefix_cache_bytes", "Prefixes kept in memory.", self._bytes()),
            ("peak_memory_bytes", "MLX's peak.", stats.peak_memory_bytes),
            ("acceptance_length", "Mean tokens per row and round.",
             stats.acceptance_length),
        ):  # fmt: skip
            yield GaugeMetricFamily(f"specdec_{name}", text, value=number)
