"""Pages say what the results say: parts are rewritten alike, and what cannot be judged refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from reporting.ages import aged
from reporting.blocks import PAGES, PICTURES, blocks
from reporting.claims import Claim
from reporting.data import specification
from reporting.fronts import Mark, Panel, front_picture, panels_of
from reporting.pages import part_names, rewritten
from reporting.results import Line, Results, ResultsError
from reporting.tables import by_machine, links, number, ratio, table, turns_of

from lowtide.lab.bench import Spread

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = Path("docs/results")


def _row(**changes: Any) -> dict[str, Any]:
    row = {
        "benchmark": "batching",
        "what": "batching",
        "settings": {"model": "demo:chat", "num_requests": 32, "dtype": "float32"},
        "machine": {"cpu": "A CPU", "num_cores": 2, "memory_bytes": 25_000_000_000},
        "commit": "0123456789ab",
        "date": "2026-11-22T10:00:00+00:00",
        "each_together_tokens_per_s": [858.48, 850.0, 900.0],
        "each_one_by_one_tokens_per_s": [139.92, 130.0, 150.0],
        "ratio": 6.1354,
        "ceiling_ratio": 17.241,
        "num_same_ids": 32,
    }
    return {name: value for name, value in (row | changes).items() if value is not None}


def _results(folder: Path, *rows: dict[str, Any]) -> Results:
    (folder / RESULTS).mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / RESULTS / "2026-11-22-batching.jsonl").write_text(text)
    return Results.load(RESULTS, folder)


def _page(name: str) -> str:
    return f"Before.\n<!-- measured: {name} -->\nold\n<!-- end of measured -->\nAfter.\n"


def test_pages_say_what_the_results_say() -> None:
    results = Results.load(RESULTS, REPOSITORY)
    for page in PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        assert part_names(text), page
        assert rewritten(text, blocks(results, page)) == text, "run `make report`"
    for path, draw in PICTURES.items():
        picture = draw(results)
        assert picture is None or (REPOSITORY / path).read_text() == picture, "run `make report`"


def test_every_part_is_on_a_page_and_all_lines_are_of_a_claim() -> None:
    found = {
        name
        for page in PAGES
        for name in part_names((REPOSITORY / page).read_text(encoding="utf-8"))
    }
    assert set(blocks(Results([]), PAGES[0])) == found
    claims = [claim for each in specification()["claims"].values() for claim in each]
    assert {claim["lines"] for claim in claims if "lines" in claim} == set(specification()["lines"])


def test_a_part_is_rewritten_and_nothing_else(tmp_path: Path) -> None:
    results = _results(tmp_path, _row())
    once = rewritten(_page("batching"), blocks(results, Path("README.md")))
    assert once.startswith("Before.\n") and once.endswith("After.\n")
    assert "858 (850 to 900) | 140 (130 to 150) | 6.14 |" in once and "old" not in once
    assert "[1](docs/results/2026-11-22-batching.jsonl#L1)" in once
    assert "on commit 0123456789ab, 2 cores of A CPU, 25 GB" in once
    assert rewritten(once, blocks(results, Path("README.md"))) == once


def test_a_number_is_reproduced_by_its_effect_once_and_held_out(tmp_path: Path) -> None:
    """Two values near one are not near where what they differ by is what was published."""
    one = {"benchmark": "dali", "what": "number", "neutral": 1.0, "num_cases": 1}
    rows = [
        _row(**one, place="Figure 12", of="a", published=1.3, here=1.28),
        _row(**one, place="Figure 12", of="b", published=1.09, here=1.02),
        _row(**one, place="Figure 13", of="c", published=1.3, here=1.3, repeats="Figure 12, a"),
        _row(**{**one, "neutral": 0.0}, place="Table 8", of="d", published=0.14, here=0.01),
        _row(**{**one, "what": "fitted"}, place="Table 4", of="e", published=20.0, here=20.0),
    ]
    page = blocks(_results(tmp_path, *rows), Path("docs/policies.md"))["dali-numbers"]()
    assert "Of 3 held-out numbers, all in one setting, **1 are reproduced**" in page
    assert "(Figure 12 1 of 2, Table 8 0 of 1). 1 that the machine was fitted to and 1 that" in page
    verdicts = [row.split(" | ")[5] for row in page.splitlines() if row.startswith(("| F", "| T"))]
    assert verdicts == ["reproduced", "differs", "says Figure 12, a again", "fitted", "differs"]
    page = blocks(_results(tmp_path, *rows), Path("docs/evidence.md"))["evidence-dali"]()
    assert "| Figure 12 | 2 | a 0.93, b 0.22 | 1 of 2 reproduced |" in page
    assert page.endswith(", Table 4, Table 6, Table 9 (`make bench ONLY=dali`).")


def test_a_claim_is_reproduced_in_the_published_range_or_near_it() -> None:
    def claim(*values: float, test: str = "mean") -> Claim:
        lines = [Line(Path("x.jsonl"), 1, {})]
        return Claim("a", "1.2 to 1.4", 1.2, 1.4, values, lines, "why", "make it", test=test)

    assert claim(1.3).cells == ("a", "1.2 to 1.4", "1.30", "reproduced", "why", "`make it`")
    assert claim(1.18).is_reproduced and not claim(1.16).is_reproduced
    assert claim(1.45).is_reproduced and not claim(1.47).is_reproduced
    assert claim(1.0, 1.6).is_reproduced and not claim(1.0, 1.6, test="all").is_reproduced
    assert claim(1.0, 1.3, test="most").is_reproduced


def test_a_claims_command_says_the_processor_time_of_its_runs(tmp_path: Path) -> None:
    one = {"benchmark": "dali", "what": "number", "neutral": 1.0, "num_cases": 1, "of": "a"}
    values = {"place": "Figure 12", "published": 1.3, "here": 1.28}
    rows = [_row(**one, **values, processor_s=20.5), _row(**one, **values, processor_s=31.4)]
    other = {"commit": "ba9876543210", "settings": {"part": "other"}, "processor_s": 7.0}
    results = _results(tmp_path, *rows, _row(**one, **values, **other), _row())
    page = blocks(results, Path("docs/evidence.md"))["evidence-dali"]()
    assert "| `make bench ONLY=dali`, 31 s |" in page  # of the whole run, by its last line
    both, older = results.lines[1:3], results.lines[3:]
    assert results.processor_s("dali", both) == 38.4  # of two runs
    assert results.processor_s("dali", older) is None  # of another script
    assert results.processor_s("batching", older) is None  # its line does not say it


def test_the_newest_clean_run_is_shown(tmp_path: Path) -> None:
    older = _row(date="2026-11-20T10:00:00+00:00", commit="aaaaaaaaaaaa", ratio=1.0)
    dirty = _row(date="2026-11-23T10:00:00+00:00", commit="bbbbbbbbbbbb+", ratio=2.0)
    run = _results(tmp_path, older, _row(), dirty).newest("batching", model="demo:chat")
    assert [line["ratio"] for line in run.lines] == [6.1354]


def _lane(name: str, lost: float, **changes: Any) -> dict[str, Any]:
    estimate = {"mean": lost, "error": 0.01}
    cell = {"model": "demo:chat", "tier": "disk", "resident_share": 0.375}
    row = {"loss": estimate, "loss_difference": estimate, "kl": estimate}
    shares = {"agreement": {"mean": 1 - lost}, "accuracy": {"mean": 0.5}}
    speeds = {"speed_up": 1 + lost, "bytes_per_pass": 1e6 * (1 - lost)}
    own = {"policy_options": {} if name == "exact" else {"miss": name.split()[0]}}
    turns = {"tokens_per_s": 10.0, "least": 9.0, "most": 11.0, "num_turns": 8}
    row |= {**shares, **speeds, **own, **turns}
    return _row(benchmark="buddy", what=name, **cell, **row) | changes


def test_the_front_is_drawn_by_speed_and_by_bytes(tmp_path: Path) -> None:
    assert front_picture(_results(tmp_path, _row())) is None
    claim = _row(benchmark="buddy", what="expected", resident_share=0.375, speed_up=1.0)
    assert front_picture(_results(tmp_path, claim)) is None
    lanes = [
        _lane("exact", 0.0),
        _lane("buddy <rho 2>", 0.25, speed_up=0.9),
        _lane("late rho 2", 0.5),
        _lane("drop far", 0.5, resident_share=0.75),
        _lane("exact", 0.0, tier="link"),
    ]
    drawn = front_picture(_results(tmp_path, *lanes, claim))
    assert drawn is not None and drawn == front_picture(_results(tmp_path, *lanes, claim))
    words = [each.text for each in ElementTree.fromstring(drawn).iter() if each.text]
    assert words.count("demo:chat, disk, 38% resident") == 2
    assert words.count("late rho 2") == 2  # names are those of the front alone
    assert words.count("buddy <rho 2>") == 1
    by_speed, by_bytes, *_ = panels_of(_results(tmp_path, *lanes, claim).lines)
    assert [mark.gain.median for mark in by_speed.marks] == pytest.approx([1.0, 0.9, 1.5])
    assert by_speed.marks[2].gain == pytest.approx((1.5, 1.35, 1.65))
    assert [mark.gain.median for mark in by_bytes.marks] == [0.0, 0.25, 0.5]
    few = [lane | {"num_turns": 7} for lane in lanes]
    assert [panel.gain for panel in panels_of(_results(tmp_path, *few, claim).lines)] == [
        by_bytes.gain,
        by_bytes.gain,
    ]


def test_no_lane_within_the_spread_of_another_is_named() -> None:
    def named(*marks: Mark) -> list[str]:
        return [mark.name for mark in Panel("a", "tokens/s", marks).front]

    exact = Mark("exact", "exact", Spread.of([0.9, 1.0, 1.1]), 0.0, 0.0)
    slower = Mark("slower", "drop", Spread.of([0.8, 0.9, 1.0]), 0.2, 0.01)
    faster = Mark("faster", "buddy", Spread.of([1.2, 1.3, 1.4]), 0.2, 0.01)
    assert named(exact, slower, faster) == ["exact", "faster"]
    as_fast = faster._replace(name="as fast", gain=Spread.of([1.3, 1.4, 1.5]))
    assert named(exact, faster, as_fast) == ["exact"]
    # As good as exact by what was measured, and faster for sure: exact is not named either.
    assert named(exact, faster._replace(lost=0.03, error=0.02)) == ["faster"]
    draw = np.random.default_rng(0)
    alike = [
        Mark(f"{lane}", "buddy", Spread.of(draw.normal(1, 0.1, 8)), draw.normal(0.3, 0.02), 0.02)
        for lane in range(16)
    ]
    assert named(*alike) == []


def test_lines_of_no_commit_are_refused(tmp_path: Path) -> None:
    results = _results(tmp_path, _row(commit="0123456789ab+"))
    with pytest.raises(ResultsError, match="differed from commit 0123456789ab"):
        results.newest("batching")


@pytest.mark.parametrize("name", ["commit", "machine", "date", "what", "settings"])
def test_a_line_that_says_too_little_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ResultsError, match=rf"batching.jsonl:2 does not say {name}"):
        _results(tmp_path, _row(), _row(**{name: None}))


@pytest.mark.parametrize(
    ("name", "value"), [("machine", 5), ("commit", 5), ("settings", ["x"]), ("date", {"day": 1})]
)
def test_a_line_that_says_it_in_another_form_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(ResultsError, match=rf"batching.jsonl:1 does not say {name} \(a"):
        _results(tmp_path, _row(**{name: value}))


def test_a_machine_without_its_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="does not say machine.memory_bytes"):
        _results(tmp_path, _row(machine={"cpu": "A CPU", "num_cores": 2}))


def test_a_damaged_file_is_refused_by_line(tmp_path: Path) -> None:
    _results(tmp_path, _row())
    path = tmp_path / RESULTS / "2026-11-22-batching.jsonl"
    path.write_text(path.read_text() + '{"benchmark": \n')
    with pytest.raises(ResultsError, match=r"batching.jsonl:2 is not JSON"):
        Results.load(RESULTS, tmp_path)
    path.write_text("3\n")
    with pytest.raises(ResultsError, match=r"batching.jsonl:1 does not say benchmark"):
        Results.load(RESULTS, tmp_path)
    path.write_bytes(b"\xff\n")
    with pytest.raises(ResultsError, match=r"batching.jsonl is not text in UTF-8"):
        Results.load(RESULTS, tmp_path)


def test_a_line_without_a_value_that_is_shown_is_refused(tmp_path: Path) -> None:
    results = _results(tmp_path, _row(ceiling_ratio=None))
    with pytest.raises(ResultsError, match="has no 'ceiling_ratio'"):
        rewritten(_page("batching"), blocks(results, Path("README.md")))


def test_unknown_and_unclosed_parts_are_refused(tmp_path: Path) -> None:
    made = blocks(_results(tmp_path, _row()), Path("README.md"))
    with pytest.raises(ResultsError, match="No block is called 'speed'"):
        rewritten(_page("speed"), made)
    with pytest.raises(ResultsError, match="without its partner"):
        rewritten("<!-- measured: batching -->\n", made)


def test_a_lead_within_the_spread_is_a_tie() -> None:
    ours = Spread.of([10.0, 12.0, 11.0])
    assert ratio(ours, Spread.of([9.0, 10.5, 10.0])) == "1.10, a tie"
    assert ratio(ours, Spread.of([5.0, 5.5, 5.2])) == "2.12"
    assert [number(value) for value in (1234.5, 99.96, 9.994, 0.5)] == [
        "1,234", "100.0", "9.99", "0.50",
    ]  # fmt: skip


def test_what_was_timed_has_three_turns_or_is_not_shown(tmp_path: Path) -> None:
    few = _row(each_together_tokens_per_s=[858.48, 850.0])
    page = blocks(_results(tmp_path, few), Path("README.md"))
    assert page["batching"]().startswith("Not measured yet in 3 turns or more: `make bench ONLY=b")
    [line] = _results(tmp_path, _row(tokens_per_s=2.0, least=1.0, most=3.0, num_turns=2)).lines
    assert turns_of(line, "tokens_per_s") is None is turns_of(line, "decode")
    [line] = _results(tmp_path, line.row | {"num_turns": 3}).lines
    assert turns_of(line, "tokens_per_s") == (2.0, 1.0, 3.0)


def test_refused_lines_and_those_of_other_arguments_are_not_shown(tmp_path: Path) -> None:
    settings = _row()["settings"] | {"num_requests": 31}
    for row in (_row(refused="the limit moved"), _row(settings=settings)):
        results = _results(tmp_path, row)
        assert not results.has("batching") and not results.newest_lines("batching", "batching", ())
    with pytest.raises(ResultsError, match="as no call in benchmarks/bench.py"):
        results.newest("batching")


def test_a_table_has_one_machine_and_links_all_lines(tmp_path: Path) -> None:
    other = _row(machine=_row()["machine"] | {"cpu": "Another CPU"})
    lines = _results(tmp_path, *[_row()] * 4, other, _row()).lines
    rows = [([*lines[:4], lines[5]], ("a",)), ([lines[4]], ("b",))]
    first, first_caption, second, second_caption = by_machine(["x"], rows, Path("x")).split("\n\n")
    assert (
        "| a | [1](" in first and ") to [4](" in first and ", [6](" in first and "| b " not in first
    )
    assert "cores of A CPU" in first_caption and "| b | [5](" in second
    assert "cores of Another CPU" in second_caption
    with pytest.raises(ResultsError, match="2 cores of A CPU, 25 GB; 2 cores of Another"):
        table(["x"], rows, Path("x"))
    apart = _results(tmp_path, *[_row()] * 9).lines[::2]
    assert links(apart, Path("x")).startswith("5 of [1](")
    assert links(apart[:3], Path("x")).count(", [") == 2


def _mapped(lane: str, **changes: Any) -> dict[str, Any]:
    speeds = {name: [1.0, 1.2, 1.1] for name in ("each_decode", "each_prefill")}
    row = {"first_decode_tokens_per_s": 0.5, "limit": "balloon", "limit_bytes": 7e9, **speeds}
    row |= {"room_least_bytes": 6.9e9, "room_most_bytes": 7.1e9, "resident_share": 0.5}
    built = {"version": "1", "num_threads": 2, "flash_attention": "disabled", "repacks": False}
    settings = {"num_prompt": 128, "num_new": 24, "repeats": 8}
    named = {"benchmark": "larger_than_memory", "what": "mapped", "lane": lane}
    return _row(**named, settings=settings, **row, **built) | changes


def test_a_model_larger_than_memory_is_shown_under_a_limit_that_stood(tmp_path: Path) -> None:
    ours, other = _mapped("lowtide", each_decode=[9.0, 8.0, 10.0]), _mapped("llama.cpp")
    made = blocks(_results(tmp_path, ours, other), Path("README.md"))
    assert "| llama.cpp |" in made["larger-than-memory"]()
    tied = blocks(_results(tmp_path, ours, _mapped("llama.cpp", each_decode=[8, 9, 9])), Path("x"))
    assert "a tie, on" in tied["expected-speed"]()
    for lost in ({"refused": "it moved"}, {"first_decode_tokens_per_s": None}, {"limit": "none"}):
        row = {name: value for name, value in (other | lost).items() if value is not None}
        gone = blocks(_results(tmp_path, ours, row), Path("README.md"))
        assert gone["larger-than-memory"]().startswith("Not measured yet")
        assert gone["expected-speed"]().startswith("Not measured yet")


def test_ages_name_what_is_behind_unknown_or_refused(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "src/lowtide").mkdir(parents=True)
    subprocess.run([*git, "init", "-q"], check=True)
    commits = []
    for text in ("1", "2"):
        (tmp_path / "src/lowtide/code.py").write_text(text)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-qm", text], check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True)
        commits.append(head.stdout.decode()[:12])
    results = _results(
        tmp_path,
        _row(commit=commits[0]),
        _row(commit=commits[1]),
        _row(commit="cccccccccccc"),
        _row(commit=commits[1] + "+"),
    )
    behind, unknown, refused = aged(tmp_path, results)
    assert ":1 batching: 1 commits behind" in behind
    assert ":3 batching: commit cccccccccccc is not known here" in unknown
    assert ":4 batching: refused" in refused
