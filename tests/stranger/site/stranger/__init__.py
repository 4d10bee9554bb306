"""A distribution of somebody else, which adds to lowtide by entry points."""
