"""Version of lowtide; stored with results, since another may compute or measure differently."""

from __future__ import annotations

__version__ = "0.1.0"
