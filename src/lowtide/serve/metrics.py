"""`/metrics` for Prometheus: vLLM's names with the prefix `lowtide:`.

So vLLM's dashboards only need another prefix. Metrics of experts and of the queue are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from lowtide.serve.request_log import Served
from lowtide.serve.service import Service

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

_GAUGES = {
    "num_requests_running": ("num_requests_running", "Requests that run."),
    "num_requests_waiting": ("num_requests_waiting", "Requests that wait for room."),
    "num_tokens_waiting": ("num_tokens_waiting", "Prompt tokens of requests that wait."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of the KV cache that running requests use."),
    "hit_rate": ("expert_hit_rate", "Share of the experts asked for that were resident."),
    "num_moves_waiting": ("expert_moves_waiting", "Experts that are to become resident."),
    "num_prefetches_waiting": ("expert_prefetches_waiting", "Prefetched experts not used yet."),
}
"""Name of a present value, the queue's or one in `stats()` -> its Prometheus name, description."""

_ENGINE_COUNTERS = {
    "num_hits": ("expert_cache_hits", "Experts that a pass asked for and were resident."),
    "num_misses": ("expert_cache_misses", "Experts that a pass asked for and were not resident."),
    "num_evicted": ("expert_evictions", "Experts that gave up their place."),
    "num_expert_rows": ("expert_rows", "Rows of experts; the next four are its parts."),
    "num_device_rows": ("expert_rows_device", "Rows of experts run on the device."),
    "num_host_rows": ("expert_rows_host", "Rows of experts run by the host from its memory."),
    "num_disk_rows": ("expert_rows_disk", "Rows of experts that were read from disk for them."),
    "num_substituted_rows": ("expert_rows_substituted", "Rows that another expert ran instead."),
    "num_moves_asked": ("expert_moves_asked", "Experts that the policy asked to become resident."),
    "num_moves_done": ("expert_moves_done", "Of these, experts that are or became so."),
    "num_moves_dropped": ("expert_moves_dropped", "Of these, experts that will not."),
    "num_prefetched": ("expert_prefetches", "Experts brought before their layer asked for them."),
    "num_prefetches_used": ("expert_prefetches_used", "Of these, experts that were then used."),
    "num_prefetches_dropped": ("expert_prefetches_dropped", "Of these, experts that were not."),
    "num_copies": ("expert_link_copies", "Experts that crossed the link to the device."),
    "link_bytes": ("expert_link_bytes", "Bytes of these."),
    "num_read": ("expert_reads", "Experts read from disk to be used."),
    "read_bytes": ("expert_read_bytes", "Bytes of experts read from disk."),
    "given_up_bytes": ("expert_given_up_bytes", "Of these, bytes of reads that were given up."),
    "wait_s": ("expert_wait_seconds", "Seconds that a pass waited for reads."),
    "num_ahead": ("expert_reads_ahead_used", "Experts that a pass used, read ahead of its demand."),
    "num_late": ("expert_reads_ahead_late", "Those of them that a pass waited for all the same."),
    "num_wasted": ("expert_reads_ahead_dropped", "Experts read ahead that no pass asked for."),
    "forwards": ("forward_passes", "Passes that read prompts or write answers."),
    "generation_s": ("forward_seconds", "Seconds in these passes."),
}
"""Name of a counter in `stats()` -> its Prometheus name and description."""


class Metrics:
    """Counts a service's answers in a registry of its own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        self._labels = {"model_name": service.model_name}
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts that were read.")
        self._new = self._counter("generation_tokens", "Tokens of answers.")
        self._ended = Counter(
            "lowtide:request_success",
            "Requests that ended, by why.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._first = self._histogram("time_to_first_token_seconds", "Until the first token.")
        self._each = self._histogram(
            "request_time_per_output_token_seconds", "Mean of a request's tokens after its first."
        )
        self._total = self._histogram("e2e_request_latency_seconds", "Until the request's end.")
        self._queue = self._histogram("request_queue_time_seconds", "Before the first pass.")
        self._prefill = self._histogram("request_prefill_time_seconds", "From then to a token.")
        self._decode = self._histogram("request_decode_time_seconds", "From then to the end.")
        service.on_served.append(self._note)

    def page(self, stats: Mapping[str, float]) -> bytes:
        """Return all metrics in Prometheus' format, with present values of engine and queue."""
        now = CollectorRegistry()
        now.register(_LiveMetrics(self._service, stats))
        return generate_latest(self.registry) + generate_latest(now)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"lowtide:{name}", help_text, ["model_name"], registry=self.registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(
            f"lowtide:{name}", help_text, ["model_name"], registry=self.registry, buckets=_SECONDS
        )

    def _note(self, served: Served) -> None:
        labels = self._labels
        self._ended.labels(**labels, finished_reason=served.reason).inc()
        if served.first_s is None:
            return
        self._prompt.labels(**labels).inc(served.num_prompt)
        self._new.labels(**labels).inc(served.num_new)
        self._queue.labels(**labels).observe(served.queue_s)
        self._first.labels(**labels).observe(served.first_s)
        self._prefill.labels(**labels).observe(served.first_s - served.queue_s)
        self._decode.labels(**labels).observe(served.total_s - served.first_s)
        self._total.labels(**labels).observe(served.total_s)
        if served.num_new > 1:
            each_s = (served.total_s - served.first_s) / (served.num_new - 1)
            self._each.labels(**labels).observe(each_s)


class _LiveMetrics(Collector):
    """Collector of values read on demand: the queue and the engine's own counters."""

    def __init__(self, service: Service, stats: Mapping[str, float]) -> None:
        self._service = service
        self._stats = stats

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        admission = self._service.admission
        values = {
            **self._stats,
            "num_requests_running": admission.num_running,
            "num_requests_waiting": admission.num_waiting,
            "num_tokens_waiting": admission.num_waiting_tokens,
        }
        for key, (name, help_text) in _GAUGES.items():
            if key in values:
                yield self._labelled(GaugeMetricFamily, name, help_text, values[key])
        refused = ("num_requests_refused", "Requests refused because the queue was full.")
        yield self._labelled(CounterMetricFamily, *refused, admission.num_refused)
        for key, (name, help_text) in _ENGINE_COUNTERS.items():
            if key in self._stats:
                yield self._labelled(CounterMetricFamily, name, help_text, self._stats[key])

    def _labelled(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        help_text: str,
        value: float,
    ) -> CounterMetricFamily | GaugeMetricFamily:
        family = kind(f"lowtide:{name}", help_text, labels=["model_name"])
        family.add_metric([self._service.model_name], value)
        return family
