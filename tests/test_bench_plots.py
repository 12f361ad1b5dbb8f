"""Plots and tables made of results: the same bytes for the same results, and a page that is filled in place."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from bench import page, plots

RESULTS = Path(__file__).parent / "bench_results.json"
KERNELS = {
    "isa": "avx2",
    "threads": 2,
    "dtype": "bfloat16",
    "limits": {"bandwidth": 14e9, "peak": 96e9},
    "lines": [
        {"name": "gemm, 1 rows", "seconds": 0.02, "bytes": 212e6, "flops": 212e6, "share": 0.76},
        {"name": "gemm, 32 rows", "seconds": 0.1, "bytes": 212e6, "flops": 6.8e9, "share": 0.71},
    ],
}
QUANTIZATION = {
    "threads": 1,
    "base": "bfloat16",
    "lines": [
        {
            "quantization": kind,
            "weight_bytes": size,
            "perplexity": loss,
            "same_next": 0.985,
            "agreement": 0.75,
            "logit_error": 0.02,
            "steps": {"1 row": seconds, "32 rows": 0.08},
        }
        for kind, size, loss, seconds in (("none", 269030016, 20.5, 0.02), ("int8", 143000000, 20.75, 0.0125))
    ],
}
CONTROL = [
    {
        "streams": 32,
        "output_tokens": 128,
        "tokens_per_second": 52000,
        "cpu_us_per_token": {"api": 9.5},
        "control_us_per_token": 19.25,
    }
]
PAGE = """# Title

<!-- table: run W1 -->
old
<!-- end -->

Text between.

<!-- table: other W2 -->
kept
<!-- end -->
"""


def recorded() -> dict[str, Any]:
    run: dict[str, Any] = json.loads(RESULTS.read_text())
    return run


def test_a_page_is_filled_between_its_marks() -> None:
    filled = page.fill(PAGE, {"run": recorded()})
    assert "old" not in filled
    assert "| W1 ms per token " in filled
    assert "W2 output" not in filled
    assert filled.endswith("\n\nText between.\n\n<!-- table: other W2 -->\nkept\n<!-- end -->\n")
    assert page.fill(filled, {"run": recorded()}) == filled


def test_a_mark_that_is_not_closed_is_an_error() -> None:
    with pytest.raises(ValueError, match="no '<!-- end -->'"):
        page.fill("<!-- table: run -->\n| |\n", {"run": recorded()})


def test_engines_and_machine_are_told() -> None:
    text = page.text(recorded(), ["machine", "engines"])
    assert "2 cores of AuthenticAMD" in text
    assert "100 MB, read in 8.00 ms at the 12.5 GB/s" in text
    assert "| llama.cpp | 11434 | bfloat16 | `llama-server` |" in " ".join(text.split())
    assert "W1 ms per token" not in text


def test_other_results_have_tables_too() -> None:
    kernels = page.text(KERNELS).splitlines()
    assert [word.strip() for word in kernels[2].split("|")[1:-1]] == ["gemm, 1 rows", "20.00", "10.6", "11", "76%"]
    control = page.text(CONTROL).splitlines()
    assert [word.strip() for word in control[0].split("|")[1:-1]] == [
        "streams",
        "tokens out",
        "tokens/s",
        "µs of CPU per token",
    ]
    assert [word.strip() for word in control[2].split("|")[1:-1]] == ["32", "128", "52,000", "19.2"]
    quantised = page.text(QUANTIZATION).splitlines()
    cells = [word.strip() for word in quantised[3].split("|")[1:-1]]
    assert cells == ["int8", "143", "20.750", "98.5%", "75.0%", "0.0200", "12.5 (1.60x)", "80.0 (1.00x)"]
    assert "| bfloat16 | 269 " in " ".join(quantised[2].split())
    rows = page.text({"text": "x", "rows": [{"name": "int8", "perplexity": 12.345, "more": [1]}]}).splitlines()
    assert [word.strip() for word in rows[2].split("|")[1:-1]] == ["int8", "12.3"]


def test_the_same_results_give_the_same_plots(tmp_path: Path) -> None:
    shutil.copy(RESULTS, tmp_path / "run.json")
    (tmp_path / "kernels.json").write_text(json.dumps(KERNELS))
    (tmp_path / "control.json").write_text(json.dumps(CONTROL))
    (tmp_path / "quantization.json").write_text(json.dumps(QUANTIZATION))
    (tmp_path / "other.json").write_text(json.dumps([{"x": 1}]))
    made = []
    for name in ("one", "two"):
        docs = tmp_path / name
        docs.mkdir()
        (docs / "performance.md").write_text(PAGE)
        files = [str(tmp_path / f"{stem}.json") for stem in ("run", "kernels", "control", "quantization", "other")]
        assert plots.main([*files, "--docs", str(docs)]) == 0
        assert {file.stem for file in (docs / "plots").iterdir()} == {"run", "kernels", "control", "quantization"}
        made.append({file.name: file.read_bytes() for file in docs.rglob("*.*")})
    assert made[0] == made[1]
    text = "".join(ElementTree.fromstring(made[0]["run.svg"]).itertext())
    for words in ("W1 ms per token (less is better)", "25.0   2.50x", "8,400*   80.0x", "reading the weights"):
        assert words in text
    assert "vllm" not in text
    assert "12.5   1.60x" in "".join(ElementTree.fromstring(made[0]["quantization.svg"]).itertext())
    assert "32 x 128" in "".join(ElementTree.fromstring(made[0]["control.svg"]).itertext())
    assert "76%   20.00 ms" in "".join(ElementTree.fromstring(made[0]["kernels.svg"]).itertext())


def test_unusable_results_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "performance.md").write_text(PAGE)
    assert plots.main([str(tmp_path / "broken.json"), "--docs", str(tmp_path)]) == 1
    assert plots.main([str(tmp_path / "none.json"), "--docs", str(tmp_path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert (tmp_path / "performance.md").read_text() == PAGE
