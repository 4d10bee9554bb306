"""What this machine has, and what it is measured to do.

`memory` asks the system for sizes; `machine` names the machine and measures its rates; `measure`
measures what one expert costs; `store` keeps that until the machine or the model changes. Only
sizes are re-exported: the others bring torch and the expert mechanisms with them.
"""

from __future__ import annotations

from lowtide.hardware.memory import available_memory_bytes, resident_bytes, total_memory_bytes

__all__ = ["available_memory_bytes", "resident_bytes", "total_memory_bytes"]
