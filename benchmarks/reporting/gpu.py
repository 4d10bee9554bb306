"""Parts of `docs/measured.md` about a GPU: kernels beside a copy, layers of experts by policy."""

from __future__ import annotations

from pathlib import Path

from reporting.results import Line, Results
from reporting.tables import Row, number, percent, shown, turns_of, with_range

_KERNELS = {"kernel": "bfloat16", "q8 kernel": "q8", "q4 kernel": "q4", "MXFP4 kernel": "MXFP4"}


def kernels(results: Results, page: Path) -> str:
    """A layer's products in each format, beside what a copy on the GPU reads and writes."""
    head = ("weights", "tokens", "experts", "us a layer", "GB/s of weights", "of a device copy")
    rows: list[Row] = []
    for line in _lines(results):
        turns = turns_of(line, "layer_us")
        if line["what"] in _KERNELS and turns is not None:
            shares = (number(line["GBps"]), percent(line["of_device_copy"]))
            asked = (f"{line['num_tokens']}", number(line["experts_hit"]))
            rows.append(([line], (_KERNELS[line["what"]], *asked, with_range(turns), *shares)))
    return shown("gpu", head, rows, page, "make gpu")


def layers(results: Results, page: Path) -> str:
    """Steps of a block through layers of experts, a share of them resident, by policy."""
    head = (
        "policy",
        "resident",
        "tokens/s",
        "over its bound",
        "hits",
        "link",
        "on the host a step",
    )
    rows: list[Row] = []
    for line in _lines(results):
        turns = turns_of(line, "moe_tokens_per_s")
        if line["what"] == "hybrid" and turns is not None:
            bound = f"{number(line['of_bound'])} ({line['bound_by']})"
            moved = (f"{number(line['link_GBps'])} GB/s", number(line["host_experts_per_step"]))
            resident = f"{line['residents_per_layer']} of 256"
            did = (bound, percent(line["hit_rate"]), *moved)
            rows.append(([line], (line["preset"], resident, with_range(turns), *did)))
    return shown("gpu", head, rows, page, "make gpu")


def _lines(results: Results) -> tuple[Line, ...]:
    """Of the newest `make gpu`."""
    has_lines = results.has("gpu", stage="short")
    return results.newest("gpu", stage="short").lines if has_lines else ()
