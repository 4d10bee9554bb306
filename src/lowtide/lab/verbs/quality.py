"""`lowtide quality`: compare the quality and speed of settings with the exact run."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.table import Table
from rich.text import Text

from lowtide.cli.command import takes
from lowtide.cli.generate import ModelName
from lowtide.cli.opening import find_model
from lowtide.cli.options import OPTIONS, Settings
from lowtide.cli.report import json_line
from lowtide.cli.screen import ProgressBars, stdout_console
from lowtide.cli.text_file import read_text
from lowtide.config import format_size
from lowtide.engine.opening.weight_formats import FormatRequest
from lowtide.errors import UsageError
from lowtide.files.json_file import meant
from lowtide.lab.quality_questions import ChoiceQuestion, read_questions
from lowtide.lab.quality_settings import BUDDYMOE, RESIDENTS, QualitySetting, curve_settings
from lowtide.option import Group, in_words
from lowtide.policies.presets import options_of, preset_names
from lowtide.version import __version__

if TYPE_CHECKING:
    from lowtide.engine.opening.facts import ModelFacts
    from lowtide.lab.quality import QualityReport, QualityWork, Row

DEFAULT_MAX_TOKENS = 64
MAX_SETTINGS = 512

_TRAFFIC = {"read_bytes": "disk/pass", "link_bytes": "link/pass"}
"""Engine counters and the names of their columns."""

_MODEL_OPTIONS = {
    option.name: option
    for option in OPTIONS
    if option.group is Group.ENGINE
    and option.name not in ("policy", "policy_option", "device_option", "config_override")
}


_FORMATS = ("format", "expert_dtype", "dense_dtype")


@takes(
    Group.ENGINE,
    Group.HUB,
    Group.QUALITY,
    "text",
    "plot",
    "max_tokens",
    "seed",
    "repeats",
    Group.OUTPUT,
    help_texts={
        "text": "Text file to score.",
        "plot": "Draw every setting's speed and loss into this file.",
        "max_tokens": f"Tokens written to time a setting; 0: no timing. Default: "
        f"{DEFAULT_MAX_TOKENS}.",
        "repeats": "How often each setting writes. Default: 3.",
    },
)
def quality(model: ModelName, *, settings: Settings) -> None:
    """Compare the quality and speed of settings such as --format q4 with the exact run.

    A text, or multiple choice, is scored in decoding's own passes. Then settings take turns at
    writing --max-tokens tokens, --repeats times (--max-tokens 0: no timing). Every --setting is a
    row, and so is the exact run at every budget.
    """
    options = settings.engine_options()
    policy, own = str(options.pop("policy")), options.pop("policy_options", {})
    grid = parse_settings(cast("list[str]", settings["setting"] or []))
    rows = [QualitySetting(policy, cast("dict[str, str]", own)), *grid]
    if settings.flag("save_curve"):
        rows += curve_settings(rows[0].policy_options if policy == BUDDYMOE else {})
    questions = settings.text("choices")
    asked = [] if questions is None else read_questions(Path(questions))
    is_text = not asked or settings.text("text") is not None
    if settings.flag("save_curve") and not is_text:
        raise UsageError("--save-curve measures on a text: give --text FILE beside --choices.")
    text = read_text(model, settings) if is_text else None
    shares = str(settings["mask_ratios"]).split(",")
    ratios = tuple(_share(share, "--mask-ratios") for share in shares)
    with redirect_stdout(sys.stderr):
        report, curve = _measured(model, settings, options, rows, text, ratios, asked)
        # What took hours is kept and shown as far as it can be, and a failure told afterwards.
        of_curve = _failure(partial(_keep_curve, report, curve))
        of_picture = _failure(partial(_draw, report, settings.text("plot")))
    curve_path = None if of_curve is not None else curve
    if settings.flag("json"):
        path = None if curve_path is None else str(curve_path)
        found = {"model": model, "version": __version__, "curve_path": path}
        print(json_line({**found, **report.as_dict()}))
    else:
        _print(model, report)
        if curve_path is not None:
            stdout_console().print(f"wrote the curve of mass and KL to {curve_path}")
    for failure in (of_curve, of_picture):
        if failure is not None:
            raise failure


def parse_settings(texts: Sequence[str]) -> list[QualitySetting]:
    """Make rows from `NAME=VALUE NAME=VALUE ...`, one per combination of repeated names.

    Raises UsageError for a word that is not a pair, an unknown option or a bad value.
    """
    found = [setting for text in texts for setting in _combinations(text)]
    if len(found) > MAX_SETTINGS:
        raise UsageError(f"--setting makes {len(found)} rows; {MAX_SETTINGS} at most.")
    return found


def _combinations(text: str) -> Iterator[QualitySetting]:
    values: dict[str, list[str]] = {}
    for pair in text.split():
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise UsageError(f"--setting: {pair!r} is not NAME=VALUE, such as format=q4.")
        values.setdefault(name, []).append(value)
    for chosen in itertools.product(*values.values()):
        yield _setting(dict(zip(values, chosen, strict=True)))


def _setting(values: dict[str, str]) -> QualitySetting:
    source = "--setting"
    residents = values.pop(RESIDENTS, None)
    options = {
        n: _MODEL_OPTIONS[n].parse(v, f"{source} {n}")
        for n, v in values.items()
        if n in _MODEL_OPTIONS
    }
    try:
        FormatRequest.of(*(cast("str | None", options.get(name)) for name in _FORMATS))
    except UsageError as error:
        words = {name: f"{source} {name}" for name in options}
        raise type(error)(in_words(str(error), words)) from error
    own = {n: v for n, v in values.items() if n not in _MODEL_OPTIONS and n != "policy"}
    policy = values.get("policy", "auto")
    known = options_of(policy) if policy in preset_names() else own
    for name in own:
        if name not in known:
            near = meant(name, [RESIDENTS, "policy", *_MODEL_OPTIONS, *known])
            raise UsageError(
                f"{source}: {name!r} is not an option of a model, nor of the policy {policy}.{near}"
            )
    return QualitySetting(
        policy,
        own,
        options,
        None if residents is None else _share(residents, f"{source} {RESIDENTS}"),
    )


def _share(text: str, source: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{source}: expected a share, not {text!r}.") from None


def _measured(
    model: str,
    settings: Settings,
    options: dict[str, object],
    rows: Sequence[QualitySetting],
    text: str | None,
    ratios: tuple[float, ...],
    asked: Sequence[ChoiceQuestion],
) -> tuple[QualityReport, Path | None]:
    """Measure; return the report and the path for its curve, if it is kept.

    Outputs that cannot be written are refused before anything is measured.
    """
    folder = str(find_model(model, settings))
    from lowtide.cli.plotting import check_plot
    from lowtide.engine.opening.config import EngineConfig
    from lowtide.engine.opening.model import open_model
    from lowtide.lab.quality import quality as measure
    from lowtide.lab.quality_curve import curve_path

    picture = settings.text("plot")
    if picture is not None:
        check_plot(Path(picture))
    opened = open_model(folder, EngineConfig(**options))  # type: ignore[arg-type]
    path = (
        curve_path(opened.facts, opened.options.asked.calibration)
        if settings.flag("save_curve")
        else None
    )
    context = opened.memory.context.num_tokens
    work = _work(opened.facts, context, settings, text, ratios, asked)
    with ProgressBars() as progress:
        report = measure(folder, rows, work, progress=progress, **options)
    return report, path


def _failure(keep: Callable[[], None]) -> Exception | None:
    """Call `keep` and return its exception, if any, for the caller to raise."""
    try:
        keep()
    except Exception as error:
        return error
    return None


def _keep_curve(report: QualityReport, path: Path | None) -> None:
    from lowtide.lab.quality_curve import keep_curve, measured_curve

    if path is not None:
        keep_curve(path, measured_curve(report))


def _draw(report: QualityReport, path: str | None) -> None:
    from lowtide.lab.quality_plot import plot

    if path is not None:
        plot(report, Path(path))


def _work(
    facts: ModelFacts,
    context: int,
    settings: Settings,
    text: str | None,
    ratios: tuple[float, ...],
    asked: Sequence[ChoiceQuestion],
) -> QualityWork:
    from lowtide.lab.quality import QualityWork
    from lowtide.lab.quality_choices import Questions
    from lowtide.lab.quality_text import Scope

    given = settings["max_tokens"] if settings.is_given("max_tokens") else DEFAULT_MAX_TOKENS
    repeats = cast(int, settings["repeats"])
    scope = Scope(cast(int, settings["tokens"]), cast(int, settings["window"]), ratios)
    questions = None
    if asked:
        questions = Questions(asked, facts.tokenizer, facts.config, context)
    work = QualityWork(
        questions=questions, max_tokens=cast(int, given), repeats=repeats, scope=scope
    )
    return work if text is None else work.with_text(facts.tokenizer, text)


def _print(model: str, report: QualityReport) -> None:
    console = stdout_console()
    if sentence := _sentence(report):
        console.print(Text(sentence))
    console.print(_table(model, report))
    for line in _notes(report):
        console.print(Text(line))


def _sentence(report: QualityReport) -> str:
    """Say how often the settings agree with the first one, and how the loss changes."""
    reference, *others = report.rows
    found = [(row.setting.label, row.comparison) for row in others if row.comparison is not None]
    if not found:
        return ""
    who = f"{found[0][0]} agrees" if len(found) == 1 else f"These {len(found)} settings agree"
    agreed = _range([compared.agreement.mean for _, compared in found], "{:.0%}")
    lost = _range([compared.loss_difference.mean for _, compared in found], "{:+.3f}")
    return (
        f"{who} with {reference.setting.label} on {agreed} of tokens; the loss of a token changes "
        f"by {lost} nats."
    )


def _range(values: Sequence[float], form: str) -> str:
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least} to {most}"


def _table(model: str, report: QualityReport) -> Table:
    from lowtide.lab.quality_plot import points

    title = f"{model}, {report.device}, lowtide {__version__}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("setting", min_width=10)  # wraps, so that numbers need not
    for name in _columns(report):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    best = iter(points(report.rows))
    for row in report.rows:
        if row.reason:
            table.add_row(row.setting.label, "cannot run")
            continue
        mark = " *" if next(best).is_best else ""
        table.add_row(row.setting.label + mark, *_cells(report, row))
    return table


def _columns(report: QualityReport) -> list[str]:
    columns = ["tokens/s"]
    if report.sample is not None:
        loss = "masked loss" if report.has_masks else "perplexity"
        columns += [loss, "nats lost", "±", "KL", "agree", "right"]
        columns += ["mass moved"] if _is_replaced(report) else []
        columns += [name for counter, name in _TRAFFIC.items() if _is_moved(report, counter)]
    if any(row.choices is not None for row in report.rows):
        columns += ["choices", "per byte"]
    return columns


def _cells(report: QualityReport, row: Row) -> list[str]:
    speed = row.tokens_per_s
    cells = ["" if speed is None else f"{speed:.1f}"]
    if row.comparison is not None and row.passes is not None:
        compared, passes = row.comparison, row.passes
        loss = compared.loss.mean if report.has_masks else compared.perplexity
        error = compared.loss_difference.error
        cells += [
            f"{loss:.3f}",
            f"{compared.loss_difference.mean:+.4f}",
            "" if error is None else f"{error:.4f}",
            f"{compared.kl.mean:.4f}",
            f"{compared.agreement.mean:.1%}",
            f"{compared.accuracy.mean:.1%}",
        ]
        cells += [f"{row.moved_share:.2%}"] if _is_replaced(report) else []
        cells += [
            format_size(round(passes.per_pass(counter)))
            for counter in _TRAFFIC
            if _is_moved(report, counter)
        ]
    if row.choices is not None:
        accuracy = row.choices.accuracy
        cells += [f"{accuracy.raw.mean:.1%}", f"{accuracy.normalised.mean:.1%}"]
    return cells


def _is_replaced(report: QualityReport) -> bool:
    return any(row.passes is not None and row.passes.replaced is not None for row in report.rows)


def _is_moved(report: QualityReport, counter: str) -> bool:
    return any(row.passes is not None and row.passes.per_pass(counter) for row in report.rows)


def _notes(report: QualityReport) -> list[str]:
    rows = report.rows
    notes = [f"{row.setting.label} cannot run: {row.reason}" for row in rows if row.reason]
    notes.append(
        f"Against {rows[0].setting.label}; * = best trade-off: no other setting beats it on both "
        "speed and loss."
    )
    sample = report.sample
    if sample is not None:
        windows = "1 window" if len(sample.scored) == 1 else f"{len(sample.scored)} windows"
        text = f"{sample.num_tokens} tokens of the text in {windows}"
        if sample.mask_ratios:
            ratios = ", ".join(f"{ratio:g}" for ratio in sample.mask_ratios)
            text += f", each under masks of {ratios}"
        notes.append(f"{text}; ± is one standard error of the difference, token by token.")
    choices = rows[0].choices
    if choices is not None:
        cut = f", {choices.num_cut} without their beginning" if choices.num_cut else ""
        notes.append(f"{len(choices.log_likelihood)} questions{cut}.")
    return notes
