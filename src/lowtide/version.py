"""The version: of results that are kept, too, as another may compute or measure differently."""

from __future__ import annotations

__version__ = "0.1.0"
