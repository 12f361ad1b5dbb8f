"""What /metrics shows, under the names dashboards for vLLM know, old ones and new ones.

Requests are measured here, where they are answered; a request is one prompt, whatever its n. Of a request that was
aborted or failed the tokens delivered until then count. The group that serves a request is not known here: these
series carry engine "0". With several api processes PROMETHEUS_MULTIPROC_DIR adds them up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, GCCollector, Metric, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from services.api.engine_metrics import EngineCollector
from services.api.histogram import BatchHistogram, PendingCounter, PendingHistogram
from shared.engine import EngineState, Sample, SampleDelta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_COUNT = (1, 2, 5, 10, 20)
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
_LABELS = ("model_name", "engine")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
ALIASES = {"vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds"}


class Metrics:
    """The metrics of one api process."""

    def __init__(self, state: EngineState) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._state = state
        self._engine = EngineCollector(state)
        self._children: dict[str, Children] = {}

        def histogram(name: str, text: str, buckets: Iterable[float]) -> BatchHistogram:
            return BatchHistogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=tuple(buckets))

        def counter(name: str, text: str, labels: Iterable[str] = _LABELS) -> Counter:
            return Counter(name, text, tuple(labels), registry=self.registry)

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Between two tokens of a sample.", _PER_TOKEN)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "A request's mean time per token after the first.", _PER_TOKEN
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", _LATENCY)
        self.request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_output = histogram("request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self.params_n = histogram("request_params_n", "The n of a request.", _COUNT)
        self.params_max_tokens = histogram("request_params_max_tokens", "The max_tokens of a request.", _TOKENS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that yielded a token.")
        self.generation_tokens = counter("vllm:generation_tokens", "Output tokens.")
        self.success = counter("vllm:request_success", "Requests ended, by reason.", (*_LABELS, "finished_reason"))
        self.refused = counter("pagebus:requests_refused", "Requests answered with an error at the door.", ("reason",))
        self.http = counter("http_requests", "HTTP requests.", ("handler", "method", "status"))

    def tick(self, now: float) -> None:
        """To be called about once a second."""
        self._engine.tick(now)
        self._flush()

    def _flush(self) -> None:
        for children in self._children.values():
            children.flush()

    def begin(self, model: str, prompt_tokens: int, n: int, max_tokens: int, arrival: float) -> Record:
        """A request has been handed to the engine; `arrival`: its time.monotonic()."""
        children = self._children.get(model)
        if children is None:
            children = self._children[model] = Children(self, model)
        return Record(children, prompt_tokens, n, max_tokens, arrival)

    def count_http(self, handler: str, method: str, status: int) -> None:
        """An HTTP request has been answered; the status is counted by its class, as "2xx"."""
        self.http.labels(handler, method if method in _METHODS else "other", f"{status // 100}xx").inc()

    def render(self) -> bytes:
        """The text for Prometheus."""
        self._flush()
        registry = self.registry
        if os.environ.get(MULTIPROCESS_VARIABLE):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(_Page(registry, self._engine))


class _Page(Collector):
    """Everything to be shown: the requests' metrics with their aliases, the engine's, the process's own."""

    def __init__(self, registry: CollectorRegistry, engine: EngineCollector) -> None:
        own = CollectorRegistry()
        ProcessCollector(registry=own)
        GCCollector(registry=own)
        self._parts: list[Collector] = [registry, engine, own]

    def collect(self) -> Iterator[Metric]:
        for part in self._parts:
            for metric in part.collect():
                yield metric
                if alias := ALIASES.get(metric.name):
                    yield _renamed(metric, alias)


def _renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, metric.documentation, metric.type)
    copy.samples = [sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in metric.samples]
    return copy


class Children:
    """The series of one model name."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        labels = (model, "0")
        self.ttft = metrics.ttft.labels(*labels)
        self.itl = PendingHistogram(metrics.itl.labels(*labels))
        self.per_token = metrics.per_token.labels(*labels)
        self.e2e = metrics.e2e.labels(*labels)
        self.request_prompt = metrics.request_prompt.labels(*labels)
        self.request_output = metrics.request_output.labels(*labels)
        self.params_n = metrics.params_n.labels(*labels)
        self.params_max_tokens = metrics.params_max_tokens.labels(*labels)
        self.prompt_tokens = metrics.prompt_tokens.labels(*labels)
        self.generation_tokens = PendingCounter(metrics.generation_tokens.labels(*labels))
        self.success = {
            reason: metrics.success.labels(*labels, reason) for reason in ("stop", "length", "abort", "error")
        }

    def flush(self) -> None:
        """Hands on what gathers per token."""
        self.itl.flush()
        self.generation_tokens.flush()


class Record:
    """One request's measurements."""

    __slots__ = ("_arrival", "_children", "_first", "_last", "_max_tokens", "_n", "_open", "_prompt_tokens", "_tokens")

    def __init__(self, children: Children, prompt_tokens: int, n: int, max_tokens: int, arrival: float) -> None:
        self._children = children
        self._prompt_tokens = prompt_tokens
        self._n = n
        self._max_tokens = max_tokens
        self._arrival = arrival
        self._first = 0.0  # when the first token came
        self._last = [0.0] * n  # when each sample's last token came
        self._tokens = 0
        self._open = True

    def deltas(self, deltas: list[SampleDelta]) -> None:
        """New tokens, as they arrive; choice `i` is sample `i % n`."""
        now, tokens, latest = time.monotonic(), 0, self._last
        for delta in deltas:
            if count := len(delta.ids):
                tokens += count
                sample = delta.index % self._n
                if last := latest[sample]:
                    self._children.itl.observe((now - last) / count, count)
                latest[sample] = now
        self._add(tokens, now)

    def samples(self, samples: list[Sample]) -> None:
        """The end of a request that was not watched token by token: its gaps count at their mean."""
        now = time.monotonic()
        seen, total = self._tokens, sum(len(sample.ids) for sample in samples)
        if self._first and total > seen:
            self._children.itl.observe((now - self._first) / (total - seen), total - seen)
        self._last = [now] * self._n
        self._add(total - seen, now)

    def _add(self, tokens: int, now: float) -> None:
        if not tokens:
            return
        if not self._first:
            self._first = now
            self._children.ttft.observe(now - self._arrival)
            self._children.prompt_tokens.inc(self._prompt_tokens)
        self._tokens += tokens
        self._children.generation_tokens.value += tokens

    @property
    def untouched(self) -> bool:
        """No token has come yet."""
        return not self._tokens

    def drop(self) -> None:
        """The request was refused: it counts as that, not as ended."""
        self._open = False

    def finish(self, reason: str) -> None:
        """The request has ended: "stop", "length", "abort" or "error". Only the first call counts."""
        if not self._open:
            return
        self._open = False
        children, now = self._children, time.monotonic()
        children.success[reason].inc()
        children.e2e.observe(now - self._arrival)
        children.request_prompt.observe(self._prompt_tokens)
        children.request_output.observe(self._tokens)
        children.params_n.observe(self._n)
        children.params_max_tokens.observe(self._max_tokens)
        per_sample = self._tokens / self._n
        if per_sample > 1:
            children.per_token.observe((max(self._last) - self._first) / (per_sample - 1))
