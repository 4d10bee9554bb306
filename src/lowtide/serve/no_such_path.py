"""Messages for unknown paths: where the API is, or what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

_OPENAI = ("/chat/completions", "/completions", "/responses", "/models", "/embeddings")
_ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens", "/messages", "/messages/count_tokens")
_OLLAMA = ("/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/embed", "/api/version")

_BASES: Mapping[tuple[str, ...], tuple[str, str]] = {
    _OPENAI: ("OpenAI", "/v1"),
    _ANTHROPIC: ("Anthropic", ""),
    _OLLAMA: ("Ollama", ""),
}
"""Ends of an API's paths -> the API and the path of its base address."""

_NOT_SERVED: Mapping[str, str] = {
    "/apply-template": "templates are applied to the messages of /v1/chat/completions",
    "/audio/speech": "models write text here",
    "/audio/transcriptions": "models read text here",
    "/completion": "llama.cpp's own API is not served; ask /v1/completions",
    "/detokenize": "ask /v1/completions with the token ids as prompt and echo",
    "/images/generations": "models write text here",
    "/infill": "no model here fills in; ask /v1/completions",
    "/moderations": "no model here moderates",
    "/props": "the model's facts are at /v1/models and /v1/lowtide/plan",
    "/rerank": "no model here ranks; give this client another server for it",
    "/score": "ask /v1/completions with echo and logprobs",
    "/slots": "what runs is at /v1/lowtide/stats",
    "/tokenize": "tokens of a conversation are counted at /v1/messages/count_tokens",
}
"""Paths of other servers -> what to use instead."""


def unknown_path_message(path: str, address: str) -> str:
    """Return the message for an unknown path. address: this server's, as http://127.0.0.1:8000."""
    shown, found = f"No such path {path[:80]!r:.80}", path.rstrip("/")
    for other, instead in _NOT_SERVED.items():
        if found.endswith(other):
            return f"{shown}: {instead}."
    ends = [(end, base) for ends, base in _BASES.items() for end in ends if found.endswith(end)]
    if ends:
        _, (whose, base) = max(ends, key=lambda each: len(each[0]))
        return f"{shown}; {whose}'s clients want the base address {address}{base}."
    return f"{shown}; OpenAI's clients want the base address {address}/v1, all others {address}."
