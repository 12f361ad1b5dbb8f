"""Tables of results in the page about performance: between two marks, replaced whenever there are new results.

    <!-- table: NAME PART ... -->
    <!-- end -->

NAME is a results file without its ending. Of a comparison the parts are groups of rows (W1, W2, W3, W4, start, memory),
`engines` (what was run, and how) and `machine`; without parts it is all rows. Other results have no parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.tables import comparison, figure, markdown, notes

MARK = re.compile(r"(<!-- table: (\S+)((?: \S+)*) -->\n)(.*?)(<!-- end -->)", re.S)
CONTROL_PLANE = {
    "streams": "streams",
    "output_tokens": "tokens out",
    "tokens_per_second": "tokens/s",
    "requests_per_second": "requests/s",
    "control_us_per_token": "µs of CPU per token",
    "quiet_us_per_token": "on a quiet machine",
    "scheduler_core_us_per_step": "scheduler core, µs a step",
}


def fill(page: str, results: Mapping[str, Any]) -> str:
    """The page with the tables of those results; other tables stay. Raises ValueError for a mark that is not closed."""
    if page.count("<!-- table:") != len(MARK.findall(page)):
        raise ValueError("a '<!-- table: -->' has no '<!-- end -->'")

    def table(found: re.Match[str]) -> str:
        opening, name, parts, _, closing = found.groups()
        if name not in results:
            return found[0]
        return f"{opening}\n{text(results[name], parts.split())}\n\n{closing}"

    return MARK.sub(table, page)


def text(results: Any, parts: Sequence[str] = ()) -> str:
    """Results as Markdown, by what they look like."""
    if isinstance(results, dict) and results.get("kind") == "compare":
        special: dict[str, Callable[[dict[str, Any]], str]] = {"engines": engines, "machine": machine}
        groups = [part for part in parts if part not in special]
        found = [special[part](results) for part in parts if part in special]
        if groups or not parts:
            found.append(comparison(results, groups))
        return "\n\n".join(found)
    if isinstance(results, dict) and "lines" in results and "limits" in results:
        return kernels(results)
    if isinstance(results, dict) and "lines" in results and "base" in results:
        return quantizations(results)
    rows = results if isinstance(results, list) else next(value for value in results.values() if _is_rows(value))
    known = [key for key in CONTROL_PLANE if key in rows[0]]
    return rows_table(rows, {key: CONTROL_PLANE[key] for key in known} if known else None)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def engines(run: dict[str, Any]) -> str:
    """What was run, and how."""
    rows = [
        [name, results["version"], results["dtype"], f"`{results['settings']}`"]
        for name, results in run["engines"].items()
        if "workloads" in results
    ]
    return "\n\n".join([markdown(["", "version", "weights", "settings"], rows), *notes(run)])


def machine(run: dict[str, Any]) -> str:
    """One sentence about where and when."""
    about = run["machine"]
    processor = about["processor"]
    bandwidth = max(run["read_gb_per_second"].values())
    floor = 1e-6 * run["model"]["token_bytes"] / bandwidth
    name = processor.get("model name", "")
    family = f"family {processor.get('cpu family')}, model {processor.get('model')}"
    return (
        f"{run['date']}: {about['cores']} cores of {name or processor.get('vendor_id')} ({family};"
        f" {', '.join(about['flags'])}), {about['memory_gib']} GiB. {run['model']['name']} in {run['model']['dtype']}:"
        f" {run['model']['weight_bytes'] / 1e6:.0f} MB, read in {floor:.2f} ms at the {bandwidth:.1f} GB/s"
        f" measured in the same run."
    )


def kernels(results: dict[str, Any]) -> str:
    """The lines of bench.kernels."""
    rows = [
        [
            line["name"],
            f"{1e3 * line['seconds']:.2f}",
            f"{line['bytes'] / line['seconds'] / 1e9:.1f}",
            f"{line['flops'] / line['seconds'] / 1e9:.0f}",
            f"{line['share']:.0%}",
        ]
        for line in results["lines"]
    ]
    return markdown(["", "ms", "GB/s", "GFLOP/s", "of the limit"], rows)


def quantizations(results: dict[str, Any]) -> str:
    """The lines of bench.quantization; the first is what the others' steps are compared with."""
    lines = results["lines"]
    head = ["", "weights, MB", "perplexity", "same next token", "greedy agreement", "logit error"]
    rows = [
        [
            results["base"] if line is lines[0] else line["quantization"],
            f"{line['weight_bytes'] / 1e6:.0f}",
            f"{line['perplexity']:.3f}",
            f"{line['same_next']:.1%}",
            f"{line['agreement']:.1%}",
            f"{line['logit_error']:.4f}",
            *[
                f"{1e3 * seconds:.1f} ({lines[0]['steps'][step] / seconds:.2f}x)"
                for step, seconds in line["steps"].items()
            ],
        ]
        for line in lines
    ]
    return markdown([*head, *[f"{step}, ms" for step in lines[0]["steps"]]], rows)


def rows_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None) -> str:
    """Rows of plain values; without `columns` (key to title) all that are no lists or structures."""
    if columns is None:
        plain = {key: key.replace("_", " ") for row in rows for key, value in row.items() if _is_plain(value)}
        columns = plain
    return markdown(list(columns.values()), [[_plain(row.get(key, "")) for key in columns] for row in rows])


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _plain(value: Any) -> str:
    return figure(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
