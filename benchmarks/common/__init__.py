"""What the benchmark scripts share: records, memory limits, ceilings, runs and the peer."""
