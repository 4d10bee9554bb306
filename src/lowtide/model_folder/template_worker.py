"""The child process that renders one chat template; a script, never imported by the parent.

A chat template is a program out of a model folder. The sandbox takes Python's objects away from
it, but no setting bounds its loops or the strings it builds (`{{ 'a' * 10**10 }}`, doubling a
variable, nested ranges), and a thread inside one long string operation cannot be stopped. A
process can: the operating system bounds its memory and processor time, and the parent its wall
time. Needs the standard library and jinja2 only, so that it starts in a tenth of a second.

Reads one JSON object from standard input, writes one: `{"text"}` or `{"error"}`.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# What expressions and filters raise for values of a wrong kind.
_FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def main() -> None:
    request = json.load(sys.stdin)
    limit_resources(request["max_memory_bytes"], request["max_cpu_s"])
    try:
        text = render(request["template"], request["variables"], request["max_output_chars"])
        answer = {"text": text}
    except MemoryError:
        answer = {"error": f"it needs more than {request['max_memory_bytes']} bytes of memory"}
    except RecursionError:
        answer = {"error": "it recurses too deeply"}
    except (TemplateError, *_FAULTS) as error:
        answer = {"error": str(error)[:500] or type(error).__name__}
    json.dump(answer, sys.stdout)


def limit_resources(max_memory_bytes: int, max_cpu_s: int) -> None:
    """Asks the operating system to stop this process at these bounds, where it can."""
    try:
        import resource
    except ImportError:  # Windows: the parent's wall-clock limit is what remains
        return
    used_s = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    for kind, limit in (
        (resource.RLIMIT_AS, max_memory_bytes),
        (resource.RLIMIT_CPU, used_s + max_cpu_s),
        (resource.RLIMIT_CORE, 0),
    ):
        _, ceiling = resource.getrlimit(kind)
        if ceiling == resource.RLIM_INFINITY or limit < ceiling:
            resource.setrlimit(kind, (limit, limit))


def render(template: str, variables: dict[str, Any], max_output_chars: int) -> str:
    """The text of a template, counted as it comes. Raises TemplateError when it grows too long."""
    parts: list[str] = []
    num_chars = 0
    for part in environment().from_string(template).generate(**variables):
        num_chars += len(part)
        if num_chars > max_output_chars:
            raise TemplateError(f"it writes more than {max_output_chars} characters")
        parts.append(part)
    return "".join(parts)


def environment() -> ImmutableSandboxedEnvironment:
    """The dialect that published chat templates are written in."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlock],
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training: here, its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as it is, where Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


if __name__ == "__main__":
    main()
