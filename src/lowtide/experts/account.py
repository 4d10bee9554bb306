"""An engine's counters of experts as sums, for a table, JSON and metrics."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.config import format_size

Account = Mapping[str, Mapping[str, float]]
"""Counts by what is counted, the sum first."""


def account_of(stats: Mapping[str, float]) -> Account:
    """Return the counters as sums; the first number of rows, moves and prefetched is the total.

    rows: pairs of row and expert that routers chose, by where the expert was.
    moves: experts that the placement asked to become resident.
    prefetched: experts brought before their layer asked for them.
    link, disk: bytes and experts, all of one size; bytes of abandoned reads are counted apart.
    slots: only if their memory moves. Those now are the planned ones and those lent by sequences
      and passes, less those given to them or to the system; experts_moved were copied out of slots
      that were given up.
    host_slots: the same of host memory beside a device.
    """
    return {
        **_slots(stats, "slots", "num_slots", "num_residents_moved"),
        **_slots(stats, "host_slots", "num_host_slots", "num_host_residents_moved"),
        "rows": {
            "asked": stats.get("num_expert_rows", 0),
            "device": stats.get("num_device_rows", 0),
            "host": stats.get("num_host_rows", 0),
            "disk": stats.get("num_disk_rows", 0),
            "substituted": stats.get("num_substituted_rows", 0),
        },
        "moves": {
            "asked": stats.get("num_moves_asked", 0),
            "done": stats.get("num_moves_done", 0),
            "dropped": stats.get("num_moves_dropped", 0),
            "waiting": stats.get("num_moves_waiting", 0),
        },
        "prefetched": {
            "begun": stats.get("num_prefetched", 0),
            "used": stats.get("num_prefetches_used", 0),
            "dropped": stats.get("num_prefetches_dropped", 0),
            "waiting": stats.get("num_prefetches_waiting", 0),
        },
        "link": {"bytes": stats.get("link_bytes", 0), "experts": stats.get("num_copies", 0)},
        "disk": {
            "bytes": stats.get("read_bytes", 0),
            "experts": stats.get("num_read", 0),
            "given_up_bytes": stats.get("given_up_bytes", 0),
        },
    }


def account_rows(stats: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Return the account in words: what is counted, the sum, and its parts."""
    account = account_of(stats)
    rows = []
    for name in ("rows", "moves", "prefetched"):
        (_, total), *parts = account[name].items()
        rows.append((name, f"{total:,}", " + ".join(f"{count:,} {part}" for part, count in parts)))
    for name in ("link", "disk"):
        counts = account[name]
        given_up = counts.get("given_up_bytes", 0)
        whole, num_experts = counts["bytes"] - given_up, counts["experts"]
        each = format_size(round(whole / num_experts)) if num_experts else format_size(0)
        told = f"{num_experts:,} experts x {each}"
        if given_up:
            told += f" + {format_size(round(given_up))} of reads given up"
        rows.append((f"over the {name}", format_size(round(counts["bytes"])), told))
    for name in ("slots", "host_slots"):
        if name in account:
            now, planned, lent, given, moved = (f"{n:,}" for n in account[name].values())
            told = f"{planned} planned + {lent} lent - {given} given, {moved} experts moved"
            rows.append((name.replace("_", " "), now, told))
    return rows


def _slots(stats: Mapping[str, float], name: str, num_slots: str, num_moved: str) -> Account:
    """Return the account of a tier's slots by `name`; empty if their memory does not move."""
    if num_slots not in stats:
        return {}
    now, lent, given = stats[num_slots], stats[f"{num_slots}_lent"], stats[f"{num_slots}_given"]
    return {
        name: {
            "now": now,
            "planned": now - lent + given,
            "lent": lent,
            "given": given,
            "experts_moved": stats[num_moved],
        }
    }
