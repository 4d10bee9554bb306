"""The measured parts of README.md and docs/: what each shows, whole runs, rows a peer wins too."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from reporting import evidence, memory
from reporting.fronts import front_picture
from reporting.pages import Block
from reporting.papers import dali, dali_numbers, tide
from reporting.presets import hindsight, policies, prefetch, validated
from reporting.quality import buddies, buddies_full, decisions, formats, profiles
from reporting.results import Line, Results, Run
from reporting.tables import (
    Cell,
    caption,
    captions,
    giga,
    link,
    median_and_spread,
    number,
    percent,
    ratio,
    table,
)

README = Path("README.md")
PAGES = (
    README,
    *(
        Path(f"docs/{name}.md")
        for name in ("buddymoe", "evidence", "formats", "measured", "memory", "policies", "quality")
    ),
)
"""What is rewritten, relative to the repository."""
_LARGER = {
    "bf16": "bfloat16, 1.3 times the memory",
    "q4": "4 bits, all in memory",
    "mapped": "Q4_0, 1.3 times a limit",
}

_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")  # llama.cpp's, of one request in memory

PICTURES: Mapping[Path, Callable[[Results], str | None]] = {
    Path("docs/buddymoe.svg"): front_picture,
}
"""What is drawn, where there is something to draw."""


def blocks(results: Results, page: Path) -> Mapping[str, Block]:
    """Every part that a page may have, by the name in its mark."""
    made = {
        "expected-speed": expected_speed,
        "full-size": full_size,
        "block-pass": block_pass,
        "kernels": kernels,
        "offload": offload,
        "decode": decode,
        "ar-decode": ar_decode,
        "beside-llama-cpp": beside_llama_cpp,
        "larger-than-memory": larger_than_memory,
        "batching": batching,
        "buddies": buddies,
        "buddies-full": buddies_full,
        "buddy-decisions": decisions,
        "buddy-profiles": profiles,
        "formats": formats,
        "policies": policies,
        "dali": dali,
        "dali-numbers": dali_numbers,
        "tide": tide,
        "evidence-mosaic": evidence.mosaic,
        "evidence-tide": evidence.tide,
        "evidence-dali": evidence.dali,
        "evidence-buddymoe": evidence.buddymoe,
        "hindsight": hindsight,
        "prefetch": prefetch,
        "validated": validated,
        "longest": memory.longest,
        "planned": memory.planned,
        "parts": memory.parts,
        "reserved": memory.reserved,
        "steps": memory.steps,
        "every-expert": memory.every_expert,
        "elastic": memory.elastic,
    }
    return {name: partial(make, results, page) for name, make in made.items()}


def expected_speed(results: Results, page: Path) -> str:
    """What there is to gain: a GGUF file larger than memory, here and in llama.cpp."""
    newest = results.newest_lines("larger_than_memory", "mapped", ("lane",))
    lanes = {line["lane"]: line for line in newest if line.row.get("limit") != "none"}
    ours, other = lanes["lowtide"], lanes["llama.cpp"]
    speeds = [number(statistics.median(line["each_decode"])) for line in (ours, other)]
    machine = ours["machine"]
    return (
        "A Q4_0 GGUF file of Qwen3-30B-A3B's layers, 1.3 times the memory: lowtide writes "
        f"{speeds[0]} tokens/s, llama.cpp {speeds[1]}, on {machine['num_cores']} cores of "
        f"{machine['cpu']} (lines {link(ours, page)} and {link(other, page)}, "
        "[measured](#measured))."
    )


def full_size(results: Results, page: Path) -> str:
    """A model of 30 GiB in 12: each policy that was run."""
    run = results.newest("full size", host_memory="12GiB")
    head = ("policy", "weights", "tokens/s", "s per pass", "found in memory", "reads", "resident")
    rows = [
        (
            line,
            (
                f"`{line['policy']}`",
                _weights(line),
                number(line["tokens_per_s"]),
                number(line["s_per_forward"]),
                percent(line["hit_rate"]),
                _reads(line),
                f"{giga(line['peak_resident_bytes'])} of {giga(line['allowed_bytes'])}",
            ),
        )
        for line in run.of("lowtide")
    ]
    return _with_caption(run, table(head, rows, page))


def block_pass(results: Results, page: Path) -> str:
    """A pass over one diffusion block in each kind of weights, beside what its bytes take."""
    run = results.newest("block pass")
    head = ("weights", "pass, s", "its bytes", "reading them, s", "over that", "over the first")
    rows = [
        (
            line,
            (
                line["weights"],
                median_and_spread(line["each_s"]),
                giga(line["bytes_per_pass"]),
                number(line["bound_s"]),
                number(line["over_bound"]),
                number(line["over_first"]),
            ),
        )
        for line in run.of("block pass")
    ]
    return _with_caption(run, table(head, rows, page))


def kernels(results: Results, page: Path) -> str:
    """Experts of few rows: share of the speed of reading, and time over bfloat16's beside it."""
    run = results.newest("cpu_kernels")
    lines = {_kernels_key(line): line for line in run.of("experts")}
    counts = sorted({line["num_rows"] for line in lines.values()})
    rows: dict[tuple[str, int, str], tuple[Line, list[Cell]]] = {}
    for (shape, threads, name, count, way), line in lines.items():
        if way != name:
            continue
        _, cells = rows.setdefault((shape, threads, name), (line, [""] * len(counts)))
        over = lines[shape, threads, name, count, "bf16"]["GBps"] / line["GBps"]
        cells[counts.index(count)] = f"{percent(line['of_ceiling'])} ({number(over)})"
    named = [(line, (key[0], str(key[1]), key[2], *cells)) for key, (line, cells) in rows.items()]
    head = ("experts", "threads", "format", *map(_num_rows, counts))
    return _with_caption(run, table(head, named, page))


def _num_rows(count: int) -> Cell:
    return "1 row" if count == 1 else f"{count} rows"


def _kernels_key(line: Line) -> tuple[str, int, str, int, str]:
    names = ("shape", "num_threads", "format", "num_rows", "kernels")
    shape, threads, form, rows, way = (line[name] for name in names)
    return shape, threads, form, rows, way


def offload(results: Results, page: Path) -> str:
    """Every budget, and accelerate's disk offload at one of them."""
    run = results.newest("offload")
    head = ("budget for", "engine", "weights", "tokens/s", "reads", "resident")
    rows = []
    for line in run.of("lowtide"):
        speed = number(line["tokens_per_s"])
        cells = (_share(line), "lowtide", _weights(line), speed, _reads(line), _peak(line))
        rows.append((line, cells))
    for line in run.of("transformers with accelerate's disk offload"):
        cells = (_share(line), line["what"], "own", number(line["tokens_per_s"]), "", _peak(line))
        rows.append((line, cells))
    return _with_caption(run, table(head, rows, page))


def decode(results: Results, page: Path) -> str:
    """The exact KV cache against computing everything again, by length of the answer."""
    run = results.newest("decode")
    head = ("new tokens", "cached, tokens/s", "recomputed, tokens/s", "ratio", "the same tokens")
    rows = [
        (
            line,
            (
                f"{line['num_new']:,}",
                number(line["cached_tokens_per_s"]),
                number(line["recompute_tokens_per_s"]),
                number(line["ratio"]),
                "yes" if line["same_tokens"] else "no",
            ),
        )
        for line in run.of("decode")
    ]
    return _with_caption(run, table(head, rows, page))


def ar_decode(results: Results, page: Path) -> str:
    """One request: lowtide, transformers, llama.cpp; in memory, in llama.cpp's types, from disk."""
    run = results.newest("ar_decode")
    head = ("", "engine", "prompt, tokens/s", "decoding, tokens/s", "lowtide over it; with int8")
    rows: list[tuple[Line, tuple[Cell, ...]]] = []
    raced = dict.fromkeys(line["what"] for line in run.lines if "each_decode" in line.row)
    for what in raced:
        lanes = run.of(what)
        decoding_of = {line["lane"]: line["each_decode"] for line in lanes}
        ours = [decoding_of[lane] for lane in ("lowtide", "lowtide, int8") if lane in decoding_of]
        for line in lanes:
            is_ours = line["lane"].startswith("lowtide")
            over = "" if is_ours else "; ".join(ratio(each, line["each_decode"]) for each in ours)
            prefill, decoding = line["each_prefill"], line["each_decode"]
            cells = (median_and_spread(prefill), median_and_spread(decoding), over)
            rows.append((line, (what, line["lane"], *cells)))
    return _with_caption(run, table(head, rows, page))


def beside_llama_cpp(results: Results, page: Path) -> str:
    """How one request in llama.cpp's types stands beside it: an item of a list."""
    run = results.newest("ar_decode", with_lines_of=_TYPES)
    speeds = {what: _medians(run.of(what)) for what in _TYPES}
    over_exact = [of["llama.cpp"] / of["lowtide"] for of in speeds.values()]
    rounded = {of["lowtide, int8"] / of["llama.cpp"]: what for what, of in speeds.items()}
    least, most = min(rounded), max(rounded)
    first, last = run.of(_TYPES[0])[0], run.of(_TYPES[-1])[-1]
    return (
        "- Where a GGUF file of 4 or 8 bits fits into memory, llama.cpp decodes one request "
        f"{min(over_exact):.2f} to {max(over_exact):.2f} times as fast as lowtide with exact "
        "products; with `--activations int8`, which rounds rows as llama.cpp does, lowtide has "
        f"{least:.2f} ({rounded[least]}) to {most:.2f} ({rounded[most]}) times its speed "
        f"(lines {link(first, page)} to {link(last, page)}, [measured](#measured))."
    )


def _medians(lines: Sequence[Line]) -> dict[str, float]:
    """Decoding's tokens per second by lane."""
    return {line["lane"]: statistics.median(line["each_decode"]) for line in lines}


def larger_than_memory(results: Results, page: Path) -> str:
    """A model of 1.3 times the machine's memory: lowtide and llama.cpp on the same weights."""
    head = ("weights", "engine", "prompt, tokens/s", "decoding, tokens/s", "resident", "over it")
    rows: list[tuple[Line, tuple[Cell, ...]]] = []
    for what, weights in _LARGER.items():
        newest = results.newest_lines("larger_than_memory", what, ("lane",))
        lanes = [line for line in newest if line.row.get("limit") != "none"]
        ours = [line["each_decode"] for line in lanes if line["lane"] != "llama.cpp"]
        for line in lanes:
            is_ours = line["lane"] != "llama.cpp"
            over = "" if is_ours else "; ".join(ratio(each, line["each_decode"]) for each in ours)
            prefill, decoding = line["each_prefill"], line["each_decode"]
            speeds = (median_and_spread(prefill), median_and_spread(decoding))
            rows.append((line, (weights, _engine(line), *speeds, _peak(line), over)))
    return f"{table(head, rows, page)}\n\n{captions([line for line, _ in rows])}"


def batching(results: Results, page: Path) -> str:
    """Requests at once and one after another."""
    run = results.newest("batching", model="demo:chat")
    head = ("requests", "at once, tokens/s", "one by one, tokens/s", "ratio", "ceiling", "same ids")
    rows = [
        (
            line,
            (
                f"{line['settings']['num_requests']}",
                number(line["together_tokens_per_s"]),
                number(line["one_by_one_tokens_per_s"]),
                number(line["ratio"]),
                number(line["ceiling_ratio"]),
                f"{line['num_same_ids']} in {line['settings']['dtype']}",
            ),
        )
        for line in run.of("batching")
    ]
    return _with_caption(run, table(head, rows, page))


def _engine(line: Line) -> Cell:
    return line["lane"] if line["lane"] in ("lowtide", "llama.cpp") else f"lowtide, {line['lane']}"


def _reads(line: Line) -> Cell:
    rate = line["miss_read_GBps"]
    if rate is None:
        return "none"
    return f"{number(rate)} GB/s, {percent(line['share_of_read_ceiling'])} of the ceiling"


def _weights(line: Line) -> Cell:
    return str(line.row.get("weights", "own"))  # older lines know no others


def _share(line: Line) -> Cell:
    share = line["experts_in_memory"]
    return "the least that runs" if share == "least" else percent(share)


def _peak(line: Line) -> Cell:
    return giga(line["peak_resident_bytes"])


def _with_caption(run: Run, text: str) -> str:
    return f"{text}\n\n{caption(run)}"
