"""The measured parts of README.md and docs/: what each shows, whole runs, rows a peer wins too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lowtide.lab.bench import Spread
from lowtide.plan import OWN_FORMAT
from reporting import memory
from reporting.data import parts
from reporting.forms import reads
from reporting.fronts import front_picture
from reporting.locality import locality
from reporting.pages import Block
from reporting.papers import dali, dali_numbers, tide
from reporting.presets import hindsight, policies, prefetch, validated
from reporting.quality import buddies, buddies_full
from reporting.results import Line, Results
from reporting.tables import (
    Cell,
    Row,
    giga,
    is_tie,
    links,
    not_measured,
    number,
    percent,
    ratio,
    shown,
    turns_of,
    with_range,
)

README = Path("README.md")
PAGES = (
    README,
    *(
        Path(f"docs/{name}.md")
        for name in (
            "buddymoe",
            "evidence",
            "formats",
            "gains",
            "measured",
            "memory",
            "policies",
            "quality",
            "scale",
        )
    ),
)
"""Pages to rewrite, relative to the repository."""
_LARGER = {
    "bf16": "bfloat16, 1.3 times the memory",
    "q4": "4 bits, all in memory",
    "mapped": "Q4_0, 1.3 times a limit",
}

_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")  # llama.cpp's, of one request in memory

PICTURES: Mapping[Path, Callable[[Results], str | None]] = {
    Path("docs/buddymoe.svg"): front_picture,
}
"""Pictures to draw, by path; a function returns None where there is nothing to draw."""


def blocks(results: Results, page: Path) -> Mapping[str, Block]:
    """Return every part that a page may have, by the name in its mark.

    Those of `report.toml` are data; those below compare lines with each other.
    """
    made = {
        "expected-speed": expected_speed,
        "kernels": kernels,
        "offload": offload,
        "ar-decode": ar_decode,
        "beside-llama-cpp": beside_llama_cpp,
        "larger-than-memory": larger_than_memory,
        "buddies": buddies,
        "buddies-full": buddies_full,
        "policies": policies,
        "dali": dali,
        "dali-numbers": dali_numbers,
        "tide": tide,
        "hindsight": hindsight,
        "locality": locality,
        "prefetch": prefetch,
        "validated": validated,
        "longest": memory.longest,
        "parts": memory.parts,
        "every-expert": memory.every_expert,
        "moving-memory": memory.moving_memory,
    }
    return {
        **parts(results, page),
        **{name: partial(make, results, page) for name, make in made.items()},
    }


def expected_speed(results: Results, page: Path) -> str:
    """Show the possible gain: a GGUF file larger than memory, here and in llama.cpp."""
    lanes = {line["lane"]: line for line in _larger_lines(results, "mapped")}
    ours, other = lanes.get("lowtide"), lanes.get("llama.cpp")
    if ours is None or other is None:
        return not_measured("larger_than_memory")
    own, theirs = Spread.of(ours["each_decode"]), Spread.of(other["each_decode"])
    tie = ", a tie" if is_tie(own, theirs) else ""
    machine = ours["machine"]
    return (
        "A Q4_0 GGUF file of Qwen3-30B-A3B's layers, 1.3 times as large as free memory: lowtide "
        f"writes {with_range(own)} tokens/s, llama.cpp {with_range(theirs)}{tie}, on "
        f"{machine['num_cores']} cores of {machine['cpu']} "
        f"(lines {links([ours, other], page)}, [measured](#measured))."
    )


def kernels(results: Results, page: Path) -> str:
    """Experts of few rows: share of the speed of reading, and time over bfloat16's beside it."""
    timed = _timed(results, "cpu_kernels", "experts", "of_ceiling")
    lines = {_kernels_key(line): line for line, _ in timed}
    shares = {_kernels_key(line): turns for line, turns in timed}
    counts = sorted({line["num_rows"] for line, _ in timed})
    rows: dict[tuple[str, int, str], tuple[list[Line], list[Cell]]] = {}
    for key, line in lines.items():
        shape, threads, name, count, way = key
        if way != name:
            continue
        plain = lines[shape, threads, name, count, "bf16"]
        sources, cells = rows.setdefault((shape, threads, name), ([], [""] * len(counts)))
        sources += [line, plain]
        share = shares[key]
        range_of = f"{percent(share.median)} ({percent(share.least)} to {percent(share.most)})"
        over = ratio(Spread.of(plain["each_GBps"]), Spread.of(line["each_GBps"]))
        cells[counts.index(count)] = range_of if name == "bf16" else f"{range_of}; {over}"
    named = [(of, (key[0], str(key[1]), key[2], *cells)) for key, (of, cells) in rows.items()]
    head = ("experts", "threads", "format", *map(_num_rows, counts))
    return shown("cpu_kernels", head, named, page)


def _num_rows(count: int) -> Cell:
    return "1 row" if count == 1 else f"{count} rows"


def _kernels_key(line: Line) -> tuple[str, int, str, int, str]:
    names = ("shape", "num_threads", "format", "num_rows", "kernels")
    shape, threads, form, rows, way = (line[name] for name in names)
    return shape, threads, form, rows, way


def offload(results: Results, page: Path) -> str:
    """Every budget, and accelerate's disk offload at one of them, cold and warm."""
    peer = "transformers with accelerate's disk offload"
    head = ("budget for", "engine", "weights", "tokens/s", "reads", "experts in memory", "resident")
    ours = _timed(results, "offload", "lowtide", "tokens_per_s")
    own = {_share(line): turns for line, turns in ours if _weights(line) == OWN_FORMAT}
    rows: list[Row] = []
    for line, turns in ours:
        cells = (_share(line), "lowtide", _weights(line), with_range(turns), reads(line))
        rows.append(([line], (*cells, percent(line["resident_share"]), _peak(line), "")))
    for line, turns in _timed(results, "offload", peer, "tokens_per_s"):
        share, engine = _share(line), f"{peer}, page cache {line['page_cache']}"
        cells = (share, engine, OWN_FORMAT, with_range(turns), "")
        over = ratio(own[share], turns) if share in own else ""
        rows.append(([line], (*cells, percent(line["resident_share"]), _peak(line), over)))
    return shown("offload", (*head, "lowtide over it"), rows, page)


def ar_decode(results: Results, page: Path) -> str:
    """One request: lowtide, transformers, llama.cpp; in memory, in llama.cpp's types, from disk."""
    head = ("", "engine", "prompt, tokens/s", "decoding, tokens/s", "lowtide over it; with int8")
    timed = _timed(results, "ar_decode", None, "decode")
    rows = []
    for line, decoding in timed:
        what, lane = line["what"], line["lane"]
        ours = [
            turns
            for other, turns in timed
            if other["what"] == what and other["lane"] in ("lowtide", "lowtide, int8")
        ]
        is_ours = lane.startswith("lowtide")
        over = "" if is_ours else "; ".join(ratio(each, decoding) for each in ours)
        cells = (with_range(Spread.of(line["each_prefill"])), with_range(decoding), over)
        rows.append(([line], (what, lane, *cells)))
    return shown("ar_decode", head, rows, page)


def beside_llama_cpp(results: Results, page: Path) -> str:
    """Compare one request in llama.cpp's types with llama.cpp itself, in a sentence."""
    run = results.newest("ar_decode", with_lines_of=_TYPES)
    lanes = {what: _decoding(run.of(what)) for what in _TYPES}
    exact, int8 = (_over_llama_cpp(lanes, lane) for lane in ("lowtide", "lowtide, int8"))
    return (
        "Where a GGUF file of 4 or 8 bits fits into memory, lowtide decodes one request "
        f"{exact} times as fast as llama.cpp with exact products (`--activations own`), and {int8} "
        "times as fast with `--activations int8`, which rounds rows as llama.cpp does (with types "
        "of four bits and fewer lowtide does so by default) "
        f"(lines {links([line for what in _TYPES for line in run.of(what)], page)}, "
        "[measured](#measured))."
    )


def _over_llama_cpp(lanes: Mapping[str, Mapping[str, Spread]], lane: str) -> str:
    """List a lane's speed over llama.cpp's, by type."""
    return ", ".join(f"{ratio(of[lane], of['llama.cpp'])} ({what})" for what, of in lanes.items())


def _decoding(lines: Sequence[Line]) -> dict[str, Spread]:
    """Decoding's tokens per second by lane."""
    return {line["lane"]: Spread.of(line["each_decode"]) for line in lines}


def larger_than_memory(results: Results, page: Path) -> str:
    """A model of 1.3 times the machine's memory: lowtide and llama.cpp on the same weights."""
    head = ("weights", "engine", "limit", "experts in memory", "first answer, tokens/s")
    head += ("later prompts, tokens/s", "later answers, tokens/s", "lowtide over it; with int8")
    rows: list[Row] = []
    for what, weights in _LARGER.items():
        lanes = _larger_lines(results, what)
        ours = [Spread.of(line["each_decode"]) for line in lanes if line["lane"] != "llama.cpp"]
        for line in lanes:
            prompt, answer = Spread.of(line["each_prefill"]), Spread.of(line["each_decode"])
            is_ours = line["lane"] != "llama.cpp"
            over = "" if is_ours else "; ".join(ratio(each, answer) for each in ours)
            first = number(line["first_decode_tokens_per_s"])
            cells = (weights, _engine(line), _limit(line), percent(line["resident_share"]), first)
            rows.append(([line], (*cells, with_range(prompt), with_range(answer), over)))
    peers = [line for lines, _ in rows for line in lines if line["lane"] == "llama.cpp"]
    parts = [shown("larger_than_memory", head, rows, page), *_as_built(peers, page)]
    return "\n\n".join(parts)


def _larger_lines(results: Results, what: str) -> Sequence[Line]:
    """The last lanes of a part that all started cold, under a limit that stood for all of them."""
    found: Sequence[Line] = ()
    for run in sorted(results.runs, key=lambda run: run.ended):
        if run.first["benchmark"] != "larger_than_memory":
            continue
        lanes = {line["lane"]: line for line in run.of(what) if "each_decode" in line.row}.values()
        if lanes and all(map(_is_under_its_limit, lanes)):
            found = list(lanes)
    return found


def _is_under_its_limit(line: Line) -> bool:
    is_cold = "first_decode_tokens_per_s" in line.row
    return line.counts and is_cold and line.row.get("limit") != "none"


def _limit(line: Line) -> Cell:
    """Show the limit that was set, and the memory available while answers were timed."""
    least, most = (number(line[f"room_{which}_bytes"] / 1e9) for which in ("least", "most"))
    return f"{giga(line['limit_bytes'])} ({least} to {most})"


def _as_built(lines: Sequence[Line], page: Path) -> list[str]:
    """Return llama.cpp's build for each way in which it ran."""
    ways: dict[str, list[Line]] = {}
    for line in lines:
        packed = "repacked" if line["repacks"] else "not repacked"
        flags = line.row.get("build_flags", "flags that its line does not say")
        way = (
            f"llama-cpp-python {line['version']}, built with {flags}, "
            f"{line['num_threads']} threads, flash attention "
            f"{line['flash_attention']}, weights {packed}"
        )
        ways.setdefault(way, []).append(line)
    told = "; ".join(f"{way} (line {links(own, page)})" for way, own in ways.items())
    return [f"llama.cpp is {told}."] if told else []


def _timed(
    results: Results, benchmark: str, what: str | None, name: str
) -> list[tuple[Line, Spread]]:
    """Lines of a script's newest run that have `name` in turns, with these; what: None for all."""
    if not results.has(benchmark):
        return []
    lines = [line for line in results.newest(benchmark).lines if what in (None, line["what"])]
    timed = [(line, turns_of(line, name)) for line in lines]
    return [(line, turns) for line, turns in timed if turns is not None]


def _engine(line: Line) -> Cell:
    return line["lane"] if line["lane"] in ("lowtide", "llama.cpp") else f"lowtide, {line['lane']}"


def _weights(line: Line) -> Cell:
    return str(line["weights"])


def _share(line: Line) -> Cell:
    share = line["experts_in_memory"]
    return "the least that runs" if share == "least" else percent(share)


def _peak(line: Line) -> Cell:
    return giga(line["peak_resident_bytes"])
