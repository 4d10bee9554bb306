"""Child process that renders chat templates; a script, never imported by the parent.

A chat template is a program from a model folder. The sandbox keeps Python's objects from it, but no
setting bounds its loops or the strings it builds (`{{ 'a' * 10**10 }}`, doubling a variable, nested
ranges), and a thread inside one long string operation cannot be stopped. A process can: the
operating system bounds its memory and processor time, and the parent its wall time. It needs only
the standard library and jinja2, so that it starts in a tenth of a second.

Reads a JSON object from each line of standard input and writes one: `{"text"}` or `{"error"}`. Ends
with its input, and after an answer with `is_last`: a process that ran out of memory is not reused.
"""

from __future__ import annotations

import datetime
import json
import math
import resource
import sys
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def main() -> None:
    for line in sys.stdin.buffer:
        answer = answer_to(json.loads(line))
        print(json.dumps(answer), flush=True)
        if answer.get("is_last"):
            return


def answer_to(request: dict[str, Any]) -> dict[str, object]:
    """Render one template within its own bounds."""
    limit_resources(request["max_memory_bytes"], request["max_cpu_s"])
    try:
        text = render(request["template"], request["variables"], request["max_output_chars"])
    except MemoryError:
        reason = f"it needs more than {request['max_memory_bytes']} bytes of memory"
        return {"error": reason, "is_last": True}
    except RecursionError:
        return {"error": "it recurses too deeply", "is_last": True}
    except Exception as error:  # of an expression, a filter, or Python's own compiler
        return {"error": str(error)[:500] or type(error).__name__}
    finally:
        limit_resources()
    return {"text": text}


def limit_resources(max_memory_bytes: int | None = None, max_cpu_s: int | None = None) -> None:
    """Set limits of the operating system on this process, if it can; None removes them.

    Only soft limits, which can be raised again: reading the next request is not the template's.
    """
    used_s = math.ceil(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    for kind, limit in (
        (resource.RLIMIT_AS, max_memory_bytes),
        (resource.RLIMIT_CPU, None if max_cpu_s is None else used_s + max_cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        _, ceiling = resource.getrlimit(kind)
        soft = ceiling
        if limit is not None and (ceiling == resource.RLIM_INFINITY or limit < ceiling):
            soft = limit
        resource.setrlimit(kind, (soft, ceiling))


def render(template: str, variables: dict[str, Any], max_output_chars: int) -> str:
    """Render a template, counting characters. Raises TemplateError if there are too many."""
    parts: list[str] = []
    num_chars = 0
    name_arguments(variables.get("messages"))
    for part in compiled(template).generate(**variables):
        num_chars += len(part)
        if num_chars > max_output_chars:
            raise TemplateError(f"it writes more than {max_output_chars} characters")
        parts.append(part)
    return "".join(parts)


class Arguments(dict[str, Any]):
    """A call's arguments: an object for templates that read it, JSON for those that print it."""

    def __str__(self) -> str:
        return to_json(self)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


def name_arguments(messages: Any) -> None:
    """Convert the arguments in messages to `Arguments`, in place."""
    for message in messages if isinstance(messages, list) else ():
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = Arguments(call["function"]["arguments"])


@lru_cache(maxsize=4)  # a process has one model, or a few
def compiled(template: str) -> Template:
    """Compile a template, cached: compiling takes longer than rendering."""
    return environment().from_string(template)


class Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox in which a template may also extend and shorten lists, as Kimi's do.

    They are this process's own copies, made for each request.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_change = isinstance(obj, list) and attr in ("append", "extend", "insert", "pop")
        return is_change or super().is_safe_attribute(obj, attr, value)


def environment() -> ImmutableSandboxedEnvironment:
    """Make the environment of published chat templates."""
    made = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


class GenerationBlock(Extension):
    """Renders the content of `{% generation %}...{% endgeneration %}`, a mark for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Write JSON unescaped, unlike Jinja's own filter, which escapes it for HTML."""
    return json.dumps(value, **({"ensure_ascii": False, "indent": indent} | options))


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


if __name__ == "__main__":
    main()
