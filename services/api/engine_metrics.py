"""The engine's own figures: read from the scheduler's last Stats whenever /metrics is asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.engine import EngineState
from shared.messages import GroupStats, Stats

WINDOW_SECONDS = 10.0
_LABELS = ("model_name", "engine")

GAUGES: dict[str, tuple[str, Callable[[GroupStats], float]]] = {
    "vllm:num_requests_running": ("Requests being computed.", lambda g: g.running),
    "vllm:num_requests_waiting": ("Requests waiting for their turn.", lambda g: g.waiting),
    "vllm:num_requests_swapped": ("Requests whose KV blocks are in host memory.", lambda g: g.swapped),
    "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", lambda g: g.kv_usage),
    "vllm:gpu_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", lambda g: g.kv_usage),
    "vllm:cpu_cache_usage_perc": ("Share of host KV blocks in use, 0 to 1; there are none yet.", lambda g: 0.0),
    "vllm:kv_offload_cpu_cache_usage_perc": (
        "Share of host KV blocks in use, 0 to 1; there are none yet.",
        lambda g: 0.0,
    ),
    "vllm:prefix_cache_hit_rate": (
        "Share of prompt tokens read from the prefix cache since the scheduler started.",
        lambda g: g.prefix_hits / g.prefix_queries if g.prefix_queries else 0.0,
    ),
    "pagebus:group_ready": ("1 if the worker group can serve.", lambda g: float(g.ready)),
    "pagebus:step_stalled_seconds": ("How long the worker group has owed a step's result.", lambda g: g.stalled),
}
COUNTERS: dict[str, tuple[str, Callable[[GroupStats], float]]] = {
    "vllm:num_preemptions": ("Requests preempted.", lambda g: g.preemptions),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda g: g.prefix_queries),
    "vllm:prefix_cache_hits": ("Prompt tokens read from the prefix cache.", lambda g: g.prefix_hits),
    "pagebus:steps": ("Steps run.", lambda g: g.steps),
    "pagebus:step_tokens": ("Tokens computed in steps.", lambda g: g.step_tokens),
    "pagebus:idle_seconds": ("How long workers waited for the next step while there was work.", lambda g: g.idle),
}
WHOLE: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "pagebus:requests_parked": ("Requests waiting for any worker group.", lambda s: s.parked),
    "pagebus:tokenizers": ("Live tokenizer processes.", lambda s: s.tokenizers),
    "pagebus:workers": ("Live worker processes.", lambda s: s.workers),
}


class EngineCollector(Collector):
    """Gauges and counters by worker group; the label `engine` is the group's number."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._window: deque[tuple[float, int, dict[int, int]]] = deque()  # time, epoch, tokens by group

    def tick(self, now: float) -> None:
        """Notes how far each group has come, for the throughput; `now`: seconds of a monotonic clock."""
        if (stats := self._state.stats) is None:
            return
        self._window.append((now, stats.epoch, {g.group: g.generation_tokens for g in stats.groups}))
        while self._window[0][1] != stats.epoch or now - self._window[0][0] > WINDOW_SECONDS:
            self._window.popleft()

    def throughput(self, group: int) -> float:
        """Output tokens per second of a group over the last `WINDOW_SECONDS`."""
        if len(self._window) < 2:
            return 0.0
        (start, _, before), (end, _, after) = self._window[0], self._window[-1]
        tokens = max(0, after.get(group, 0) - before.get(group, 0))  # a group that started anew counts from 0
        return tokens / (end - start)

    def collect(self) -> Iterator[Metric]:
        """All families; none before the scheduler has been heard."""
        state = self._state
        yield GaugeMetricFamily("pagebus:ready", "1 if the server can serve.", float(state.ready))
        if state.stats is None or state.engine is None:
            return
        model, groups = state.engine.names[0], state.stats.groups
        for families, kind in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
            for name, (text, read) in families.items():
                family = kind(name, text, labels=_LABELS)
                for group in groups:
                    family.add_metric((model, str(group.group)), read(group))
                yield family
        rate = GaugeMetricFamily(
            "vllm:generation_throughput_tokens_per_sec", "Output tokens per second, lately.", labels=_LABELS
        )
        for group in groups:
            rate.add_metric((model, str(group.group)), self.throughput(group.group))
        yield rate
        for name, (text, value) in WHOLE.items():
            yield GaugeMetricFamily(name, text, value(state.stats))
        yield CounterMetricFamily(
            "pagebus:schedule_seconds", "CPU time spent in the scheduler's core.", state.stats.schedule_seconds
        )
        yield self._cache_config(model, groups)

    def _cache_config(self, model: str, groups: list[GroupStats]) -> Metric:
        engine, info = self._state.engine, self._state.model
        assert engine is not None
        labels = ("block_size", "num_gpu_blocks", "num_cpu_blocks", "cache_dtype", "enable_prefix_caching")
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's configuration.",
            labels=(*_LABELS, *labels, "gpu_memory_utilization"),
        )
        dtype = info.dtype if info else engine.dtype
        share = str(engine.gpu_memory_utilization or 0.9)
        for group in groups:
            values = (
                str(group.block_size),
                str(group.num_blocks),
                "0",
                dtype,
                str(engine.enable_prefix_caching),
                share,
            )
            family.add_metric((model, str(group.group), *values), 1.0)
        return family
