"""q4: weights in 4 bits, 4.5 with scales and zeros. See `quantised.py`."""

from __future__ import annotations

from lowtide.formats.quantised import Quantised

FORMATS = (Quantised(4),)
