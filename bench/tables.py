"""The comparison as rows: what is measured, how many times better pagebus is, and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OURS = "pagebus"


@dataclass(frozen=True)
class Metric:
    """A row. `path` leads to the value in an engine's results; `ours` does in those of pagebus, where it differs."""

    group: str  # the workload, or what else it is about
    name: str
    path: tuple[str, ...]
    higher: bool = False  # is better
    scale: float = 1.0
    ours: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """As a row is called."""
        return f"{self.group} {self.name}".strip()


def _workload(name: str, *path: str) -> tuple[str, ...]:
    return ("workloads", name, *path)


METRICS = (
    Metric("W1", "ms per token", _workload("W1", "ms_per_token", "p50")),
    Metric("W1", "times the floor", _workload("W1", "times_floor")),
    Metric("W1", "time to first token, ms", _workload("W1", "ttft_ms", "p50")),
    Metric("W2", "output tokens/s", _workload("W2", "tokens_per_second"), higher=True),
    Metric(
        "W2",
        "output tokens/s, one batch",
        _workload("W2 batch", "tokens_per_second"),
        higher=True,
        ours=_workload("W2", "tokens_per_second"),
    ),
    Metric("W2", "gap p50, ms", _workload("W2", "itl_ms", "p50")),
    Metric("W2", "gap p90, ms", _workload("W2", "itl_ms", "p90")),
    Metric("W2", "gap p99, ms", _workload("W2", "itl_ms", "p99")),
    Metric("W3", "requests/s", _workload("W3", "requests_per_second"), higher=True),
    Metric("W3", "time to first token p50, ms", _workload("W3", "ttft_ms", "p50")),
    Metric("W4", "tokens/s of the streams, quiet", _workload("W4", "long_prompts", "tokens_per_second_quiet"), True),
    Metric("W4", "tokens/s beside long prompts", _workload("W4", "long_prompts", "tokens_per_second_busy"), True),
    Metric("W4", "gap p99 beside long prompts, ms", _workload("W4", "long_prompts", "itl_ms_busy", "p99")),
    Metric("W4", "time to first token of these, s", _workload("W4", "long_prompts", "ttft_ms", "p50"), scale=1e-3),
    Metric("start", "to ready, s", ("ready_seconds",)),
    Metric("memory", "beyond weights and KV, MiB", ("memory", "beyond"), scale=2**-20),
)


@dataclass(frozen=True)
class Cell:
    """A value of an engine, and how many times better pagebus is."""

    value: float
    ratio: float | None  # None of pagebus itself, and where pagebus has no value
    cut: bool  # the workload had not ended when its time was over

    def __str__(self) -> str:
        text = figure(self.value) + ("\\*" if self.cut else "")
        return text if self.ratio is None else f"{text} ({figure(self.ratio)}x)"


def lookup(results: dict[str, Any], path: Sequence[str]) -> float | None:
    """The number at a path; None where there is none."""
    found: Any = results
    for key in path:
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    return float(found)


def cell(metric: Metric, name: str, engines: dict[str, dict[str, Any]]) -> Cell | None:
    """The cell of an engine; None where it has no value."""
    value = lookup(engines[name], metric.path)
    if value is None:
        return None
    cut = metric.path[0] == "workloads" and "cut_off" in engines[name]["workloads"][metric.path[1]]
    best = lookup(engines.get(OURS, {}), metric.ours or metric.path)
    if name == OURS or not best or not value:
        return Cell(value * metric.scale, None, cut)
    return Cell(value * metric.scale, best / value if metric.higher else value / best, cut)


def figure(value: float) -> str:
    """Three significant digits, thousands with commas."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def comparison(run: dict[str, Any], groups: Sequence[str] = ()) -> str:
    """A run of bench.compare as a table, all of it or some groups of rows, and what is to be known about it."""
    engines = run["engines"]
    shown = [name for name, results in engines.items() if "workloads" in results]
    rows = []
    for metric in METRICS:
        cells = [cell(metric, name, engines) for name in shown]
        if (not groups or metric.group in groups) and any(cells):
            rows.append([metric.title, *[str(found) if found else "" for found in cells]])
    table = markdown(["", *shown], rows)
    return "\n\n".join([table, *notes(run)]) if not groups else table


def notes(run: dict[str, Any]) -> list[str]:
    """What is to be known about a run: failures, engines left out, and what marks mean."""
    found = []
    for name, results in run["engines"].items():
        if "skipped" in results:
            found.append(f"{name} is not in the table: {results['skipped'].splitlines()[0]}.")
        for load, report in results.get("workloads", {}).items():
            if report.get("failed"):
                found.append(f"{name}, {load}: {report['failed']} requests failed: {report['first_error']}.")
    if any("cut_off" in report for r in run["engines"].values() for report in r.get("workloads", {}).values()):
        found.append(f"\\* Cut off after {run['limit_seconds']:.0f} s: what had been sent until then counts.")
    return found


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads as plain text too."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])
