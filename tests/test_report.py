"""Pages say what the results say: parts are rewritten alike, and what cannot be judged refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from reporting.ages import aged
from reporting.blocks import PAGES, PICTURES, blocks
from reporting.fronts import Axis, front_picture
from reporting.pages import part_names, rewritten
from reporting.results import Results, ResultsError
from reporting.tables import captions, number, ratio

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
        "together_tokens_per_s": 858.48,
        "one_by_one_tokens_per_s": 139.92,
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


def test_a_part_is_rewritten_and_nothing_else(tmp_path: Path) -> None:
    results = _results(tmp_path, _row())
    once = rewritten(_page("batching"), blocks(results, Path("README.md")))
    assert once.startswith("Before.\n") and once.endswith("After.\n")
    assert "858" in once and "old" not in once
    assert "[1](docs/results/2026-11-22-batching.jsonl#L1)" in once
    assert "on commit 0123456789ab, 2 cores of A CPU, 25 GB" in once
    assert rewritten(once, blocks(results, Path("README.md"))) == once


def test_links_of_a_page_in_a_folder_go_up(tmp_path: Path) -> None:
    page = blocks(_results(tmp_path, _row()), Path("docs/policies.md"))["batching"]()
    assert "[1](../docs/results/2026-11-22-batching.jsonl#L1)" in page


def test_the_newest_clean_run_is_shown(tmp_path: Path) -> None:
    older = _row(date="2026-11-20T10:00:00+00:00", commit="aaaaaaaaaaaa", ratio=1.0)
    dirty = _row(date="2026-11-23T10:00:00+00:00", commit="bbbbbbbbbbbb+", ratio=2.0)
    run = _results(tmp_path, older, _row(), dirty).newest("batching", model="demo:chat")
    assert [line["ratio"] for line in run.lines] == [6.1354]


def _lane(name: str, lost: float, **changes: Any) -> dict[str, Any]:
    estimate = {"mean": lost, "error": 0.01}
    cell = {"model": "demo:chat", "tier": "disk", "resident_share": 0.375}
    row = {"loss": estimate, "loss_difference": estimate, "kl": estimate, "is_on_front": lost == 0}
    shares = {"agreement": {"mean": 1 - lost}, "accuracy": {"mean": 0.5}}
    speeds = {"speed_up": 1 + lost, "bytes_per_pass": 1e6 * (1 - lost)}
    own = {"policy_options": {} if name == "exact" else {"miss": name.split()[0]}}
    row |= {**shares, **speeds, **own, "counts": {"num_misses": 4.0, "wait_s": 0.002}}
    return _row(benchmark="buddy", what=name, **cell, **row) | changes


def test_what_substitution_costs_is_told_by_lane_and_by_claim(tmp_path: Path) -> None:
    page = Path("docs/quality.md")
    assert "Not measured yet" in blocks(_results(tmp_path, _row()), page)["buddies"]()
    cell = {"model": "demo:chat", "tier": "disk", "resident_share": 0.375}
    claims = [
        _row(benchmark="buddy", what="expected", **cell, claim="it helps", is_met=is_met) | at
        for is_met, at in ((True, {}), (False, {"tier": "link"}), (False, {"tier": "link"}))
    ]
    lanes = [
        _lane("exact", 0.0),
        _lane("buddy rho 2", 0.25),
        _lane("far", 0.5, resident_share=0.75),
    ]
    redundancy = _row(benchmark="buddy", what="redundancy")
    told = blocks(_results(tmp_path, redundancy, *lanes, *claims), page)["buddies"]()
    assert "| exact \\* | 0.000 ± 0.010 |" in told and "far" not in told
    assert "| buddy rho 2 | 0.250 ± 0.010 | 0.250 | 75% | 50% | 1.25 | 75% | 0.500 |" in told
    assert "fewest bytes" not in told  # of two lanes none are few
    assert told.startswith("![") and "demo:chat`, disk, 38%" in told
    assert "| it helps | 1 of 2 |" in told


def test_those_that_move_least_say_what_there_is_to_gain(tmp_path: Path) -> None:
    lanes = [_lane("exact", 0.0), *(_lane(f"drop rho {n}", n / 10) for n in range(1, 6))]
    told = blocks(_results(tmp_path, *lanes), Path("docs/quality.md"))["buddies"]()
    assert (
        "The 3 lanes that move the fewest bytes, 50% to 70% of exact's, write 1.30 to 1.50" in told
    )


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
    root = ElementTree.fromstring(drawn)
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    titles = [each[0].text for each in circles if len(each)]
    by_speed = ["exact: 1, 0 nats", "buddy <rho 2>: 0.9, 0.25 nats", "late rho 2: 1.5, 0.5 nats"]
    by_bytes = ["exact: 0, 0 nats", "buddy <rho 2>: 0.25, 0.25 nats", "late rho 2: 0.5, 0.5 nats"]
    assert titles == [*by_speed, *by_bytes, "exact: 1, 0 nats", "exact: 0, 0 nats"]
    words = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert words.count("demo:chat, disk, 38% resident") == 2
    assert words.count("late rho 2") == 2  # names are those of the front alone
    assert words.count("buddy <rho 2>") == 1


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (-0.07, 0.3), (0.9, 2.4), (3.0, 700.0)])
def test_ticks_are_few_round_and_within(low: float, high: float) -> None:
    axis = Axis(low, high, 0.0, 100.0)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 7 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert axis.at(low) == 0 and axis.at(high) == 100


def test_formats_profiles_and_decisions_are_told(tmp_path: Path) -> None:
    page, estimate = Path("docs/formats.md"), {"mean": 0.5, "error": 0.25}
    empty = blocks(_results(tmp_path, _row()), page)
    for name in ("formats", "buddy-profiles", "buddy-decisions", "buddies-full"):
        assert "Not measured yet" in empty[name]()
    lane = {"model": "m", "budget_share": 0.25, "weight_bytes": 5e6, "resident_share": 0.5}
    lane |= dict.fromkeys(("loss", "loss_difference", "kl", "agreement", "accuracy"), estimate)
    lane |= {"read_bytes_per_pass": 1e6, "each_tokens_per_s": [10.0, 30.0, 20.0]}
    alike = {"pairs": 0.1, "first_buddy": 0.2, "most_alike": 0.3}
    layer = {"model": "m", "layer": 1, "num_experts": 32, "likeness": alike}
    layer |= dict.fromkeys(("concentration", "affinity_nats", "most_chosen", "least_chosen"), 0.5)
    layer |= {"peers_of_alpha": {"0.5": 2.0, "0.75": 3.0, "0.95": 9.0, "0.99": 20.0}}
    time = {"lane": "late", "tier": "beside a device", "num_rows": 32}
    time |= {"substitute_us": 40.4, "both_us": 60.0, "settle_us": 9.0}
    full = {"model": "m", "resident_share": 0.375, "tokens_per_s": 2.0, "speed_up": 1.2}
    full |= {"read_bytes_per_token": 1e9, "waited_ms_per_miss": 3.0, "substitution_us": 12.0}
    full |= {"share_of_layers": 0.0123, "layers_speed_up": 1.5}
    told = blocks(
        _results(
            tmp_path,
            _row(benchmark="format quality", what="q4", **lane),
            _row(benchmark="buddy profile", what="layer", **layer),
            _row(benchmark="buddy time", what="substitution", **time),
            _row(benchmark="buddy full", what="ours rho 4", **full),
        ),
        page,
    )
    assert "| `m` | 25% of the experts as stored | q4 | 5.00 | 50% | 0.500 |" in told["formats"]()
    assert "| 1.00 | 20.0 (10.0 to 30.0) |" in told["formats"]()
    assert "| 0.100; 0.200; 0.300 | 2.0, 3.0, 9.0, 20.0 of 31 |" in told["buddy-profiles"]()
    assert "| late | beside a device | 32 | 40 | 60 | 9 |" in told["buddy-decisions"]()
    assert (
        "| m | 38% | ours rho 4 | 2.00 | 1.20 | 1.50 | 1.00 | 3.00 | 12 | 1.23% |"
        in told["buddies-full"]()
    )


def _number_of(place: str, here: float, **changes: Any) -> dict[str, Any]:
    row = {"benchmark": "dali", "what": "number", "place": place, "of": "over HybriMoE"}
    return _row(**row, published=2.0, here=here, num_cases=2, least=1.0, most=3.0, **changes)


def test_numbers_of_a_paper_are_in_order_without_experiments(tmp_path: Path) -> None:
    page = Path("docs/policies.md")
    assert "Not measured yet" in blocks(_results(tmp_path, _row()), page)["dali-numbers"]()
    tried = _number_of("Figure 12", 2.0) | {"what": "experiment", "experiment": "it is slow"}
    numbers = [_number_of("Table 4", 1.8), _number_of("Figure 12", 1.0), tried]
    numbers += [_number_of("Figure 14", 2.0) | {"what": "fitted"}]
    _, _, *told = blocks(_results(tmp_path, *numbers), page)["dali-numbers"]().splitlines()
    assert told[0].startswith(
        "| Figure 12 | over HybriMoE | 2.00 | 1.00 (1.00 to 3.00) | 0.50 | [2]("
    )
    assert told[1].startswith("| Figure 14 | over HybriMoE | 2.00 | 2.00 | 1.00, fitted | [4](")
    assert told[2].startswith("| Table 4 |") and not told[3]


def test_what_planning_takes_is_told_beside_what_a_share_wants(tmp_path: Path) -> None:
    page = Path("docs/policies.md")
    numbers = [
        _number_of("Table 6", 0.01, planned_us=us, layer_us=900.0)
        | {"of": f"dali, {length} tokens", "published": 0.1}
        for length, us in ((32, 9.0), (64, 10.0))
    ]
    other = numbers[0] | {"what": "experiment", "experiment": "it is slow", "planned_us": 500.0}
    told = blocks(_results(tmp_path, *numbers, other), page)["dali-numbers"]()
    assert told.endswith("`dali`'s shares want 100 to 100 us, where it takes 9.00 to 10.0 here.")
    without = blocks(_results(tmp_path, _number_of("Table 4", 1.8)), page)["dali-numbers"]()
    assert "Planning" not in without


def _raced(what: str, lane: str, speed: float) -> dict[str, Any]:
    each = [0.9 * speed, speed, 1.1 * speed]
    return _row(benchmark="ar_decode", what=what, lane=lane, each_prefill=each, each_decode=each)


def test_the_readme_says_how_it_stands_beside_llama_cpp(tmp_path: Path) -> None:
    lanes = {"lowtide": 50.0, "llama.cpp": 100.0, "lowtide, int8": 80.0}
    rows = [
        _raced(what, lane, (1 + number_of) * speed if lane == "lowtide" else speed)
        for number_of, what in enumerate(("Q8_0", "Q4_0", "Q4_K_M"))
        for lane, speed in lanes.items()
    ]
    alone = _raced("in memory", "lowtide", 90.0) | {"date": "2026-11-23T10:00:00+00:00"}
    results = _results(tmp_path, *rows, alone | {"commit": "ffffffffffff"})
    made = blocks(results, Path("README.md"))
    told = made["beside-llama-cpp"]()
    assert "llama.cpp decodes one autoregressive request" in told
    assert "0.67 to 2.00 times as fast" in told and "has 0.80 (Q4_K_M)" in told
    assert "lines [1](docs/results/2026-11-22-batching.jsonl#L1) to [9](" in told
    assert "90.0" in made["ar-decode"]() and "Q8_0" not in made["ar-decode"]()
    with pytest.raises(ResultsError, match="with Q8_0"):
        blocks(_results(tmp_path, alone), Path("README.md"))["beside-llama-cpp"]()


def test_kernels_stand_beside_those_of_bfloat16(tmp_path: Path) -> None:
    of_run = {"benchmark": "cpu_kernels", "what": "experts", "shape": "A", "num_threads": 2}
    rates = {("q4", 1): (8.0, 4.0), ("q4", 8): (2.0, 3.0), ("bf16", 1): (10.0, 10.0)}
    rows = [
        _row(**of_run, format=name, num_rows=count, kernels=way, GBps=rate, of_ceiling=rate / 10)
        for (name, count), (own, plain) in rates.items()
        for way, rate in {"bf16": plain, name: own, "torch": 1.0}.items()
    ]
    head, _, *told = blocks(_results(tmp_path, *rows), Path("README.md"))["kernels"]().splitlines()
    assert head == "| experts | threads | format | 1 row | 8 rows | line |"
    assert told[0].startswith("| A | 2 | q4 | 80% (0.50) | 20% (1.50) | [2](")
    assert told[1].startswith("| A | 2 | bf16 | 100% (1.00) |  | [")


def test_the_readme_says_what_speed_to_expect(tmp_path: Path) -> None:
    of_run = {"benchmark": "full size", "settings": {"host_memory": "12GiB"}, "what": "lowtide"}
    speeds = (("own", 1.25), ("own", 1.5), ("q4", 9.0))
    rows = [_row(**of_run, weights=weights, tokens_per_s=speed) for weights, speed in speeds]
    told = blocks(_results(tmp_path, *rows), Path("README.md"))["expected-speed"]()
    assert "writes 1.50 tokens/s in 12 GiB on 2 cores of A CPU, 25 GB (line [2](docs/" in told


def test_the_simulator_stands_beside_the_runtime(tmp_path: Path) -> None:
    page = Path("docs/policies.md")
    assert "Not measured yet" in blocks(_results(tmp_path, _row()), page)["validated"]()
    times = {"predicted_ms": 10.3, "measured_ms": 10.0, "least_ms": 9.0, "most_ms": 11.5}
    counts = {
        "hits": {"predicted": 4, "measured": [4, 4]},
        "moved": {"predicted": 2, "measured": [2, 3]},
    }
    row = {"benchmark": "simulate", "what": "validate", "error": 0.03, "holds": True, **times}
    rows = [
        _row(**row, policy=name, settings={"home": home}, **counts)
        for home, name in (("host", "tide waits"), ("disk", "lru"))
    ]
    told = blocks(_results(tmp_path, *rows), page)["validated"]()
    assert "| `tide`, waits | 10.3 | 10 (9 to 11.5) | 1.030 | yes | other moved |" in told
    assert told.index("emulated device") < told.index("`tide`") < told.index("on disk") < len(told)


def test_what_predictors_foretell_and_gain(tmp_path: Path) -> None:
    page = Path("docs/policies.md")
    assert "Not measured yet" in blocks(_results(tmp_path, _row()), page)["prefetch"]()
    facts = {"benchmark": "prefetch", "settings": {"model": "demo:chat"}, "predictor": "raw gate"}
    tops = {"top_1": 0.5, "top_2": 0.6, "top_4": 0.7, "top_8": 0.8}
    gain = {"residents": 8, "num_prefetch": 4, "foresight": "recorded", "gain": 1.05}
    rows = [
        _row(**facts, what="accuracy", **tops),
        _row(**facts, what="end to end", **gain, wasted_share=0.25),
    ]
    told = blocks(_results(tmp_path, *rows), page)["prefetch"]()
    assert "| demo:chat | raw gate | 50% | 60% | 70% | 80% |" in told
    assert "| demo:chat | 8 | 4 | raw gate | recorded | 1.050 | 25% |" in told


def test_the_page_has_the_demos_own_numbers() -> None:
    text = (REPOSITORY / "docs" / "measured.md").read_text(encoding="utf-8")
    for name in ("autoregressive", "diffusion"):
        path = f"src/lowtide/demo/{name}/metrics.json"
        metrics = json.loads((REPOSITORY / path).read_text(encoding="utf-8"))
        shares = [value for key, value in metrics.items() if "accuracy" in key]
        assert shares and f"](../{path})" in text
        for share in shares:  # kept to four digits, of which the page has three
            assert any(f"{100 * share + off:.1f}%" in text for off in (0.0, 0.01)), share
    assert f"cosine similarity is {metrics['routing_step_cosine']}" in text


def test_shares_of_the_oracle_are_counted(tmp_path: Path) -> None:
    page = Path("docs/policies.md")
    names = ("lowtide", "dali", "hybrimoe", "fiddler", "tide", "lru")
    cells = {
        share: {
            "of_oracle": dict.fromkeys(names, speed),
            "of_most_hits": dict.fromkeys(names, 0.75),
            "over_best_other": {"lowtide": lead},
        }
        for share, speed, lead in (("0.25", 0.8, 0.96), ("0.5", 1.25, 1.5))
    }
    facts = {"benchmark": "hindsight", "what": "shares", "trace": "a run", "by_share": cells}
    rows = [_row(**facts, routing=one, machine_profile="m") for one in ("recorded", "synthetic")]
    told = blocks(_results(tmp_path, *rows), page)["hindsight"]()
    assert "`lowtide` has 0.80 to 1.25 of the oracle's tokens/s (geometric mean 1.00)" in told
    assert "at least 0.9 in 1 of 2 cells; it is the fastest in 1, 0.9600 to 1.50 times" in told
    assert "| a run | m | 0.80, 1.25 |" in told


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
    results = _results(tmp_path, _row(ratio=None))
    with pytest.raises(ResultsError, match="has no 'ratio'"):
        rewritten(_page("batching"), blocks(results, Path("README.md")))


def test_unknown_and_unclosed_parts_are_refused(tmp_path: Path) -> None:
    made = blocks(_results(tmp_path, _row()), Path("README.md"))
    with pytest.raises(ResultsError, match="No block is called 'speed'"):
        rewritten(_page("speed"), made)
    with pytest.raises(ResultsError, match="without its partner"):
        rewritten("<!-- measured: batching -->\n", made)


def test_a_lead_within_the_spread_is_a_tie() -> None:
    assert ratio([10.0, 12.0, 11.0], [9.0, 10.5, 10.0]) == "1.10, a tie"
    assert ratio([10.0, 12.0, 11.0], [5.0, 5.5, 5.2]) == "2.12"
    assert [number(value) for value in (1234.5, 99.96, 9.994, 0.5)] == [
        "1,234", "100.0", "9.99", "0.50",
    ]  # fmt: skip


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


def test_a_caption_names_the_machine_of_each_run(tmp_path: Path) -> None:
    other = _row(machine=_row()["machine"] | {"cpu": "Another CPU"})
    newer = other | {"commit": "ba9876543210"}
    said = captions(_results(tmp_path, _row(), other, newer).lines)
    assert "22 on commit 0123456789ab, 2 cores of A CPU, 25 GB; " in said  # the same commit twice
    both = "on commit 0123456789ab, 2026-11-22 on commit ba9876543210"
    assert f"; 2026-11-22 {both}, 2 cores of Another CPU, 25 GB; load" in said
