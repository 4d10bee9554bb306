"""A bundled model with another chat template, or with none."""

from __future__ import annotations

import json
from pathlib import Path

from lowtide.model_folder.demos import DEMO_FOLDER


def templated_demo(folder: Path, chat_template: str | None) -> Path:
    """Makes `folder` what demo:autoregressive is but for its chat template; None: it has none."""
    config_name = "tokenizer_config.json"
    for file in (DEMO_FOLDER / "autoregressive").iterdir():
        if file.name != config_name:
            (folder / file.name).symlink_to(file)
    config = json.loads((DEMO_FOLDER / "autoregressive" / config_name).read_text())
    del config["chat_template"]
    given = {} if chat_template is None else {"chat_template": chat_template}
    (folder / config_name).write_text(json.dumps(config | given))
    return folder
