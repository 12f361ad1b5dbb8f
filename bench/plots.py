"""Plots and tables from results: `python -m bench.plots bench/results/*.json`.

Writes docs/plots/NAME.svg for each run of bench.compare, kernels, quantization and control_plane, and fills the tables
of docs/performance.md (see bench/page.py). The same results give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import page
from bench.tables import METRICS, OURS, Cell, Metric, cell, figure

PANELS = (
    "W1 ms per token",
    "W1 time to first token, ms",
    "W2 output tokens/s",
    "W2 gap p99, ms",
    "W3 requests/s",
    "W4 gap p99 beside long prompts, ms",
    "W4 tokens/s of the streams, quiet",
    "W4 time to first token of these, s",
)
COLUMNS = 2
OWN, OTHER, LIMIT, TEXT = "#1f5fa8", "#b9bec6", "#c0392b", "#333333"
STYLE = {
    "svg.hashsalt": "pagebus",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.bottom": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "xtick.bottom": False,
    "xtick.labelbottom": False,
    "ytick.left": False,
}


def compare_plot(run: dict[str, Any], file: Path) -> None:
    """A panel for each metric that has values, with a bar for each engine, its value and how far pagebus is ahead."""
    panels = [metric for title in PANELS for metric in METRICS if metric.title == title]
    shown = [(metric, bars) for metric in panels if (bars := _bars(metric, run["engines"]))]
    floor = 1e-6 * run["model"]["token_bytes"] / max(run["read_gb_per_second"].values())
    rows = -(-len(shown) // COLUMNS)
    height = sum(max(len(bars) for _, bars in shown[i : i + COLUMNS]) for i in range(0, len(shown), COLUMNS))
    with _figure(rows, COLUMNS, (9.0, 0.28 * height + 0.55 * rows), file) as axes:
        for axis, (metric, bars) in zip(axes, shown, strict=False):
            better = "more" if metric.higher else "less"
            axis.set_title(f"{metric.title} ({better} is better)")
            _bar_panel(axis, bars)
            if metric.title == "W1 ms per token":
                axis.axvline(floor, color=LIMIT, linewidth=1)
                axis.text(floor, -0.55, " reading the weights", color=LIMIT, fontsize=7.5, va="center")
        for axis in axes[len(shown) :]:
            axis.set_visible(False)


def _bars(metric: Metric, engines: dict[str, Any]) -> dict[str, Cell]:
    cells = {name: cell(metric, name, engines) for name, results in engines.items() if "workloads" in results}
    return {name: found for name, found in cells.items() if found is not None}


def _bar_panel(axis: Any, bars: dict[str, Cell], accent: str = OURS) -> None:
    """A bar for each name; those whose name begins with `accent` stand out."""
    names = list(bars)
    values = [bars[name].value for name in names]
    colours = [OWN if name.startswith(accent) else OTHER for name in names]
    axis.barh(range(len(names)), values, color=colours, height=0.68)
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.8)
    axis.set_xlim(0, 1.45 * max(values))
    for i, name in enumerate(names):
        ratio = bars[name].ratio
        label = figure(values[i]) + ("*" if bars[name].cut else "")
        label += "" if ratio is None else f"   {figure(ratio)}x"
        axis.text(values[i] + 0.02 * max(values), i, label, va="center")


def kernels_plot(results: dict[str, Any], file: Path) -> None:
    """What share of the slower limit, bandwidth or arithmetic, each kernel reaches."""
    lines = results["lines"]
    with _figure(1, 1, (7.0, 0.27 * len(lines) + 0.7), file) as axes:
        axis = axes[0]
        limits = results["limits"]
        axis.set_title(
            f"Share of the limit: {limits['bandwidth'] / 1e9:.1f} GB/s, {limits['peak'] / 1e9:.0f} GFLOP/s"
            f" ({results['isa']}, {results['threads']} threads, {results['dtype']})"
        )
        axis.barh(range(len(lines)), [line["share"] for line in lines], color=OWN, height=0.68)
        axis.set_yticks(range(len(lines)), [line["name"] for line in lines])
        axis.set_ylim(len(lines) - 0.4, -0.6)
        axis.set_xlim(0, 1.2 * max(1.0, *(line["share"] for line in lines)))
        axis.axvline(1, color=LIMIT, linewidth=1)
        for i, line in enumerate(lines):
            axis.text(line["share"] + 0.01, i, f"{line['share']:.0%}   {1e3 * line['seconds']:.2f} ms", va="center")


def quantizations_plot(results: dict[str, Any], file: Path) -> None:
    """Time of each kind of step by quantisation, and the loss."""
    lines = results["lines"]
    names = [results["base"], *[line["quantization"] for line in lines[1:]]]
    steps = list(lines[0]["steps"])
    with _figure(-(-(len(steps) + 1) // COLUMNS), COLUMNS, (9.0, 0.28 * 2 * len(lines) + 1.1), file) as axes:
        for axis, step in zip(axes, steps, strict=False):
            times = [line["steps"][step] for line in lines]
            axis.set_title(f"{step}: ms a step, times faster than {names[0]}")
            bars = {name: Cell(1e3 * t, times[0] / t, False) for name, t in zip(names, times, strict=True)}
            _bar_panel(axis, bars, names[0])
        axes[len(steps)].set_title("perplexity (less is better)")
        loss = {name: Cell(line["perplexity"], None, False) for name, line in zip(names, lines, strict=True)}
        _bar_panel(axes[len(steps)], loss, names[0])
        for axis in axes[len(steps) + 1 :]:
            axis.set_visible(False)


def control_plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Tokens and CPU of the control processes by number of streams."""
    panels = {"tokens_per_second": "tokens/s with a null worker", "control_us_per_token": "µs of CPU per token"}
    with _figure(1, COLUMNS, (9.0, 0.28 * len(rows) + 0.6), file) as axes:
        for axis, (key, title) in zip(axes, panels.items(), strict=True):
            axis.set_title(title)
            names = [f"{row['streams']:,} x {row['output_tokens']}" for row in rows]
            bars = {name: Cell(row[key], None, False) for name, row in zip(names, rows, strict=True)}
            _bar_panel(axis, bars, "")


class _figure:
    """Axes of a new figure, in rows; written when the context ends."""

    def __init__(self, rows: int, columns: int, inches: tuple[float, float], file: Path) -> None:
        import matplotlib

        matplotlib.use("svg")
        self._style = matplotlib.rc_context(STYLE)
        self._shape, self._inches, self._file = (rows, columns), inches, file

    def __enter__(self) -> list[Any]:
        from matplotlib import pyplot

        self._style.__enter__()
        self._made, axes = pyplot.subplots(*self._shape, figsize=self._inches, squeeze=False, layout="constrained")
        return list(axes.flat)

    def __exit__(self, kind: object, *_: object) -> None:
        from matplotlib import pyplot

        if kind is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._made.savefig(self._file, metadata={"Date": None, "Creator": None})
            lines = self._file.read_text().splitlines()
            self._file.write_text("\n".join(line.rstrip() for line in lines) + "\n")
        pyplot.close(self._made)
        self._style.__exit__(None, None, None)


def plot(results: Any, file: Path) -> bool:
    """Writes the plot of results of a known kind; False for others."""
    if isinstance(results, dict) and results.get("kind") == "compare":
        compare_plot(results, file)
    elif isinstance(results, dict) and "lines" in results and "limits" in results:
        kernels_plot(results, file)
    elif isinstance(results, dict) and "lines" in results and "base" in results:
        quantizations_plot(results, file)
    elif isinstance(results, list) and results and "control_us_per_token" in results[0]:
        control_plot(results, file)
    else:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Reads results, writes plots and tables; returns 1 when a file or the page cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="results of bench.compare, kernels, control_plane, ...")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where performance.md lies")
    args = parser.parse_args(argv)
    document = args.docs / "performance.md"
    try:
        results = {file.stem: json.loads(file.read_text()) for file in args.files}
        document.write_text(page.fill(document.read_text(), results))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, found in results.items():
        file = args.docs / "plots" / f"{name}.svg"
        if plot(found, file):
            print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
