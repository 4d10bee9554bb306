"""`lowtide plan`: the memory table, before any weight is read."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout

from lowtide.cli.command import takes
from lowtide.cli.generate import ModelName
from lowtide.cli.opening import make_plan
from lowtide.cli.options import Group, Settings
from lowtide.cli.outlook import outlook
from lowtide.cli.report import json_line, plan_object, plan_table
from lowtide.cli.screen import stdout_console

PROMPTS = {
    True: "prompts of generate and chat go through the model's chat template (--raw: as they are)",
    False: "no chat template: prompts are continued as they are",
}


@takes(Group.ENGINE, Group.HUB, Group.OUTPUT)
def plan(model: ModelName, *, settings: Settings) -> None:
    """Show what a model needs and what it would get here, and why."""
    with redirect_stdout(sys.stderr):
        memory, has_template = make_plan(model, settings)
    if settings.flag("json"):
        print(json_line({**plan_object(memory), "chat_template": has_template}))
    else:
        console = stdout_console()
        console.print(plan_table(memory))
        console.print(outlook(memory, model))
        if has_template is not None:
            console.print(PROMPTS[has_template])
