"""The page at `/`: what runs, in what memory, how fast, and what binds it."""

from __future__ import annotations

import html
from collections.abc import Mapping

from lowtide.plan import SpeedRange
from lowtide.serve.service import Service

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 48rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { border-bottom: 1px solid #ccc; padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left }
"""


def page_of(service: Service, stats: Mapping[str, float]) -> str:
    """The page as it is now; it asks again every five seconds."""
    name = html.escape(service.model_name)
    rows = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(value)}</td></tr>"
        for key, value in _facts(service, stats).items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{name} · lowtide</title>"
        '<meta http-equiv="refresh" content="5">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>{name}</h1><table>{rows}</table>"
        f"{service.llm.plan._repr_html_()}"
        "<p>/v1/chat/completions · /v1/completions · /v1/responses · /v1/messages · /api/chat · "
        "/metrics · /v1/lowtide/plan · /v1/lowtide/stats</p></html>"
    )


def _facts(service: Service, stats: Mapping[str, float]) -> dict[str, str]:
    admission, prediction = service.admission, service.llm.plan.prediction
    speed = None if prediction is None else prediction.speed
    return {
        "state": "draining" if service.is_draining else "ready",
        "architecture": service.llm.config.architecture,
        "context": f"{service.context:,} tokens",
        "requests": f"{admission.num_running} running, {admission.num_waiting} waiting",
        "speed predicted": "not measured (lowtide doctor)" if speed is None else _shown(speed),
        "speed measured": _measured(stats),
        "hit rate of experts": f"{stats.get('hit_rate', 1.0):.1%}",
        "what binds": _bound(service),
    }


def _shown(speed: SpeedRange) -> str:
    return f"{speed.likely:.1f} tokens/s ({speed.least:.1f} to {speed.most:.1f})"


def _measured(stats: Mapping[str, float]) -> str:
    if not stats.get("committed_tokens"):
        return "nothing yet"
    return f"{stats['tokens_per_s']:.1f} tokens/s of passes, prompts included"


def _bound(service: Service) -> str:
    """What a pass waits for, as far as the plan knows."""
    prediction = service.llm.plan.prediction
    if prediction is None:
        return "the device"
    if not prediction.read_bytes:
        return "memory and processor: every expert is resident"
    return f"the disk: {prediction.read_bytes_per_token / 2**20:.1f} MiB a token"
