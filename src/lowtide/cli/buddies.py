"""What `calibrate --buddies` is told, and what it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rich.table import Table

from lowtide.cli.options import Settings
from lowtide.errors import UsageError
from lowtide.lab.buddy_wish import BuddyWish
from lowtide.policies.buddy_lists import BuddyRule, Ranking

if TYPE_CHECKING:
    from lowtide.policies.buddy_profile import BuddyProfile

_OPTIONS = ("alpha", "list_size", "k_max", "smoothing", "ranking", "similarity")
_SIMILARITIES = (Ranking.OUTPUTS, Ranking.WEIGHTS)
_MAX_ROWS = 40
"""Rows of the table at most; of a model with more layers it shows some, evenly spread."""


def buddy_wish(settings: Settings) -> BuddyWish | None:
    """What is to be measured; None without `--buddies`. Raises UsageError."""
    given = [name for name in _OPTIONS if settings.is_given(name)]
    if not settings.flag("buddies"):
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise UsageError(f"{flag} is about buddies; add --buddies.")
        return None
    if settings.is_given("alpha") and settings.is_given("list_size"):
        raise UsageError("--list-size fits alpha to a size of lists; leave --alpha out.")
    rule = _rule(settings)
    rule.check(len(rule.alpha) if isinstance(rule.alpha, tuple) else 1)
    names = (settings.text("similarity") or "").split(",")
    return BuddyWish(
        rule,
        cast(float | None, settings["list_size"]),
        frozenset(_named(name, "--similarity", _SIMILARITIES) for name in names if name.strip()),
    )


def buddy_table(profile: BuddyProfile) -> Table:
    """A line for each layer: alpha, peers that reach it and those in a list (means), experts that
    no token chose, and how co-activation is spread."""
    from lowtide.lab.buddy_report import TOP_PEERS, layer_reports

    rule = profile.rule
    title = f"buddies by {rule.ranking.value}, at most {rule.k_max} of {profile.num_experts - 1}"
    table = Table(title=title, title_justify="left")
    for name in ("layer", "alpha", "reach it", "list", "unseen"):
        table.add_column(name, justify="right")
    for name in (f"top {TOP_PEERS}", "concentration", "affinity"):
        table.add_column(name, justify="right")
    reports = list(enumerate(layer_reports(profile)))
    for layer, report in reports[:: -(-len(reports) // _MAX_ROWS)]:
        table.add_row(
            str(layer),
            f"{report.alpha:.3g}",
            f"{report.reaches_alpha:.1f}",
            f"{report.list_length:.1f}",
            str(report.num_unseen),
            f"{report.top_peers:.0%}",
            f"{report.concentration:.3f}",
            f"{report.affinity:.3f}",
        )
    return table


def likeness_table(profile: BuddyProfile) -> Table | None:
    """Whether experts are alike, where that was measured, and whether co-activation tells."""
    from lowtide.lab.buddy_report import likeness

    reports = likeness(profile)
    if reports is None:
        return None
    table = Table(title="cosine of two experts' outputs", title_justify="left")
    for name in ("layer", "all pairs", "first buddy", "most alike", "follows co-activation"):
        table.add_column(name, justify="right")
    for layer in range(0, len(reports), -(-len(reports) // _MAX_ROWS)):
        report = reports[layer]
        cosines = (f"{each:.3f}" for each in report[:3])
        table.add_row(str(layer), *cosines, f"{report.correlation:.2f}")
    return table


def _rule(settings: Settings) -> BuddyRule:
    usual = BuddyRule()
    ranking, alpha = settings.text("ranking"), settings.text("alpha")
    k_max, smoothing = settings["k_max"], settings["smoothing"]
    return BuddyRule(
        usual.alpha if alpha is None else _alpha(alpha),
        usual.k_max if k_max is None else cast(int, k_max),
        usual.ranking if ranking is None else _named(ranking, "--ranking", tuple(Ranking)),
        usual.smoothing if smoothing is None else cast(float, smoothing),
    )


def _alpha(text: str) -> float | tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--alpha: expected a number, or one for each layer with commas between, not {text!r}."
        ) from None
    return values[0] if len(values) == 1 else values


def _named(text: str, flag: str, known: tuple[Ranking, ...]) -> Ranking:
    for ranking in known:
        if text.strip() == ranking.value:
            return ranking
    names = " or ".join(ranking.value for ranking in known)
    raise UsageError(f"{flag}: expected {names}, not {text.strip()!r}.")
