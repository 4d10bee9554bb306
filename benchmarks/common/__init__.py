"""Shared modules of the benchmarks: records, memory limits, ceilings, runs and the peer."""
