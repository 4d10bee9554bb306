"""q8: weights in 8 bits, 8.5 with scales and zeros. See `quantised.py`."""

from __future__ import annotations

from lowtide.formats.quantised import Quantised

FORMATS = (Quantised(8),)
