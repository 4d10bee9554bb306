"""Pages whose numbers are those of `docs/results/`, and no others."""
