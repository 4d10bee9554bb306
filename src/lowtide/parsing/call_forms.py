"""Finds the form of a model's tool calls: by its chat template, else by its tokens."""

from __future__ import annotations

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.call_form import CallForm
from lowtide.parsing.literal_forms import GemmaCalls, PythonCalls
from lowtide.parsing.mistral_calls import MistralCalls
from lowtide.parsing.sectioned_calls import DeepSeekCalls, KimiCalls
from lowtide.parsing.tagged_calls import GlmCalls, MiniMaxCalls, TaggedCalls

CALL_FORMS: tuple[type[CallForm], ...] = (
    DeepSeekCalls,
    KimiCalls,
    MistralCalls,
    PythonCalls,
    GemmaCalls,
    MiniMaxCalls,
    GlmCalls,
    TaggedCalls,
)
"""All forms, those first whose mark no other form has."""


def call_form_of(tokenizer: Tokenizer) -> CallForm:
    """Return the form of a model's calls; by default Qwen's, the most common one."""
    for is_named in (tokenizer.template_names, lambda mark: tokenizer.token_id(mark) is not None):
        for form in CALL_FORMS:
            if is_named(form.sign or form.begin):
                return form(tokenizer)
    return TaggedCalls(tokenizer)
