"""Tokenizers of bytes with the marks and templates of published models, for tests of output."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import tokenizers

from lowtide.model_folder.chat_template import ChatTemplates
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.model_writing.synth_tokenizer import tokenizer_json

EOS = 300
THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
HARMONY += ("<|end|>", "<|return|>", "<|call|>")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")
DEEPSEEK += ("<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
KIMI_MARKS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>")
KIMI_MARKS += ("<|tool_call_end|>", "<|tool_call_argument_begin|>")
GLM_MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")
GLM_MARKS += ("</arg_value>",)
MINIMAX_MARKS = ("<minimax:tool_call>", "</minimax:tool_call>")
LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
GEMMA_MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")


@cache
def make_tokenizer(
    marks: Sequence[str] = (), special: Sequence[str] = (), template: str = "{{ tools }}"
) -> Tokenizer:
    """One with further tokens, of which the `special` ones are no text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer_json(EOS))
    backend.add_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in marks])
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, {"eos_token": "<|endoftext|>"}, ChatTemplates(template))


class CallFormat(NamedTuple):
    """A published form of calls: a tokenizer, and how a call and several are written."""

    name: str
    tokenizer: Tokenizer
    one: Callable[[str, dict[str, object]], str]
    begin: str = ""
    between: str = "\n"
    end: str = ""
    prompt: str = ""

    def text(self, *calls: tuple[str, dict[str, object]]) -> str:
        """Calls as the model writes them."""
        return self.begin + self.between.join(self.one(*call) for call in calls) + self.end


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tagged(name: str, arguments: dict[str, object]) -> str:
    call = _json({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def _xml(name: str, arguments: dict[str, object]) -> str:
    values = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
        "</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _deepseek(name: str, arguments: dict[str, object]) -> str:
    return f"{DEEPSEEK[2]}{name}{DEEPSEEK[4]}{_json(arguments)}{DEEPSEEK[3]}"


def _old_deepseek(name: str, arguments: dict[str, object]) -> str:
    code = f"```json\n{_json(arguments)}\n```"
    return f"{DEEPSEEK[2]}function{DEEPSEEK[4]}{name}\n{code}{DEEPSEEK[3]}"


def _mistral(name: str, arguments: dict[str, object]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}"


def _old_mistral(name: str, arguments: dict[str, object]) -> str:
    return _json({"name": name, "arguments": arguments})


def _harmony(name: str, arguments: dict[str, object]) -> str:
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{header}<|message|>{_json(arguments)}<|call|>"


def _kimi(name: str, arguments: dict[str, object]) -> str:
    told = f"{KIMI_MARKS[2]}functions.{name}:0{KIMI_MARKS[4]}"
    return f"{told}{_json(arguments)}{KIMI_MARKS[3]}"


def _glm(name: str, arguments: dict[str, object]) -> str:
    """As version 4.6, each part on a line of its own."""
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else _json(value)}"
        "</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def _glm_47(name: str, arguments: dict[str, object]) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value if isinstance(value, str) else _json(value)}"
        "</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{values}</tool_call>"


def _minimax(name: str, arguments: dict[str, object]) -> str:
    values = "".join(
        f'<parameter name="{key}">{value if isinstance(value, str) else _json(value)}</parameter>\n'
        for key, value in arguments.items()
    )
    return f'<invoke name="{name}">\n{values}</invoke>\n'


def _lfm2(name: str, arguments: dict[str, object]) -> str:
    values = ", ".join(f"{key}={python_literal(value)}" for key, value in arguments.items())
    return f"{name}({values})"


def python_literal(value: object) -> str:
    """Write a value as Python does, with double quotes around texts."""
    if isinstance(value, str):
        return _json(value)
    if isinstance(value, list):
        return f"[{', '.join(map(python_literal, value))}]"
    if isinstance(value, dict):
        members = (f"{_json(key)}: {python_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(members)}}}"
    return str(value)


def _gemma(name: str, arguments: dict[str, object]) -> str:
    values = ",".join(f"{key}:{gemma_literal(value)}" for key, value in arguments.items())
    return f"<|tool_call>call:{name}{{{values}}}<tool_call|>"


def gemma_literal(value: object) -> str:
    """Write a value as Gemma 4's template does."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(gemma_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma_literal(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


QWEN = CallFormat("qwen", make_tokenizer(("<tool_call>", "</tool_call>", *THINK)), _tagged)
PLAIN = CallFormat("no tokens", make_tokenizer(template="{{ tools }}<tool_call>"), _tagged)
CODER = CallFormat(
    "qwen3 coder",
    make_tokenizer(("<tool_call>", "</tool_call>"), template="{{ tools }}<tool_call><function=x>"),
    _xml,
)
DEEPSEEK_31 = CallFormat(
    "deepseek 3.1", make_tokenizer((*THINK, *DEEPSEEK)), _deepseek, DEEPSEEK[0], "", DEEPSEEK[1]
)
DEEPSEEK_3 = CallFormat(
    "deepseek 3",
    make_tokenizer(DEEPSEEK, template=f"{{{{ tools }}}}{DEEPSEEK[0]}```json"),
    _old_deepseek,
    DEEPSEEK[0],
    "\n",
    DEEPSEEK[1],
)
MISTRAL = CallFormat(
    "mistral",
    make_tokenizer(special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    _mistral,
    between="",
)
OLD_MISTRAL = CallFormat(
    "old mistral",
    make_tokenizer(special=("[TOOL_CALLS]",)),
    _old_mistral,
    "[TOOL_CALLS][",
    ", ",
    "]",
)
GPT_OSS = CallFormat(
    "gpt-oss", make_tokenizer(special=HARMONY), _harmony, prompt="<|start|>assistant"
)
KIMI = CallFormat(
    "kimi",
    make_tokenizer(THINK, KIMI_MARKS, template=f"{{{{ tools }}}}{KIMI_MARKS[0]}"),
    _kimi,
    KIMI_MARKS[0],
    "",
    KIMI_MARKS[1],
)
GLM = CallFormat(
    "glm 4.6",
    make_tokenizer((*GLM_MARKS, *THINK), template="{{ tools }}<tool_call>x\n<arg_key>"),
    _glm,
)
GLM_47 = CallFormat(
    "glm 4.7",
    make_tokenizer(("<tool_call>", "</tool_call>", *THINK), template="{{ tools }}<arg_key>"),
    _glm_47,
    between="",
)
MINIMAX = CallFormat(
    "minimax",
    make_tokenizer((*MINIMAX_MARKS, *THINK), template="{{ tools }}<minimax:tool_call>"),
    _minimax,
    "<minimax:tool_call>\n",
    "",
    "</minimax:tool_call>",
)
LFM2 = CallFormat(
    "lfm2",
    make_tokenizer(THINK, LFM2_MARKS),
    _lfm2,
    "<|tool_call_start|>[",
    ", ",
    "]<|tool_call_end|>",
)
GEMMA = CallFormat(
    "gemma 4", make_tokenizer(GEMMA_MARKS, template="{{ tools }}<|tool_call>"), _gemma, between=""
)
IN_XML = (CODER, GLM, GLM_47, MINIMAX)
HELD = (*IN_XML, LFM2, GEMMA)
"""Those whose calls are told once they are complete."""

INLINE = (QWEN, PLAIN, CODER, DEEPSEEK_31, DEEPSEEK_3, MISTRAL, OLD_MISTRAL)
INLINE += (KIMI, GLM, GLM_47, MINIMAX, LFM2, GEMMA)
FORMATS = (*INLINE, GPT_OSS)
