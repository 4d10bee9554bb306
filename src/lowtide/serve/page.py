"""Status page at `/`: model, memory, speed, and the resource that limits it."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping

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
    """Render the status page, which reloads every five seconds."""
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
        f"{service.plan._repr_html_()}"
        "<p>/v1/chat/completions · /v1/completions · /v1/responses · /v1/messages · /api/chat · "
        "/metrics · /v1/lowtide/plan · /v1/lowtide/stats</p></html>"
    )


def _facts(service: Service, stats: Mapping[str, float]) -> dict[str, str]:
    admission, prediction = service.admission, service.llm.plan.prediction
    predicted, measured, binding = "not measured yet", "nothing yet", "the device"
    hit_rate = stats["hit_rate"]
    if prediction is not None and prediction.speed is not None:
        least, likely, most = prediction.speed
        predicted = f"{likely:.1f} tokens/s ({least:.1f} to {most:.1f})"
    if stats.get("committed_tokens"):
        measured = f"{stats['tokens_per_s']:.1f} tokens/s of passes, prompts included"
    if prediction is not None and prediction.read_bytes:
        binding = f"the disk: {prediction.read_bytes_per_token / 2**20:.1f} MiB a token"
    elif prediction is not None:
        binding = "memory and processor: all weights are resident"
    return {
        "state": service.state,
        "architecture": service.llm.config.architecture,
        "context": f"{service.context:,} tokens",
        "requests": f"{admission.num_running} running, {admission.num_waiting} waiting",
        "speed predicted": predicted,
        "speed measured": measured,
        "hit rate of experts": f"{hit_rate:.1%}" if math.isfinite(hit_rate) else "it has none",
        "what binds": binding,
    }
