"""Word rules of byte-level tokenizers, by their names in GGUF files.

Files contain only a name; its meaning is in the `tokenizer.json` of the models that use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE_LETTERS = r"[^\r\n\p{L}\p{N}]?"

_CASED = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 "
    "1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb "
    "1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d "
    "212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a "
    "ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
"""Code points of DeepSeek's letters: those with upper and lower case when it was made."""


def _letters(ranges: str) -> str:
    """Write ranges of code points as the inside of a character class."""
    return "".join(
        "-".join(chr(int(code, 16)) for code in each.split("-")) for each in ranges.split()
    )


class WordRule(NamedTuple):
    """Rule that splits a text into words by consecutive patterns; by default GPT-2's.

    is_composed: the text is composed (NFC) first.
    ignores_merges: a word that is a token is taken whole.
    adds_bos: a text begins with a BOS token unless the file says otherwise.
    """

    patterns: tuple[str, ...] = ()
    is_composed: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def byte_level(
        self, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]
    ) -> tokenizers.Tokenizer:
        """Build byte-level BPE with this rule; merges are in order of priority."""
        model = models.BPE(dict(vocabulary), list(merges), ignore_merges=self.ignores_merges)
        backend = tokenizers.Tokenizer(model)
        normalizer = self.normalizer()
        if normalizer is not None:
            backend.normalizer = normalizer
        backend.pre_tokenizer = self.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        return backend

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if not self.patterns:
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        cuts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        return pre_tokenizers.Sequence(
            [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.is_composed else None


def merged_pair(merge: str) -> tuple[str, str] | None:
    """Split a merge of a file into its two tokens; None if it is malformed."""
    left, space, right = merge[1:].partition(" ")
    return (merge[:1] + left, right) if space else None


_LLAMA3 = (
    rf"{_CONTRACTIONS}|{_BEFORE_LETTERS}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    rf"|\s*[\r\n]+|{_SPACES}"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
_TEKKEN = (
    rf"{_BEFORE_LETTERS}[{_UPPER}]*[{_LOWER}]+|{_BEFORE_LETTERS}[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)
_GPT4O = (
    rf"{_BEFORE_LETTERS}[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|{_BEFORE_LETTERS}[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"
)
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = (
    rf"[\p{{Han}}]+|{_BEFORE_LETTERS}[{_UPPER}{_NO_HAN}]*[{_LOWER}{_NO_HAN}]+{_CONTRACTIONS}?"
    rf"|{_BEFORE_LETTERS}[{_UPPER}{_NO_HAN}]+[{_LOWER}{_NO_HAN}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    rf"|{_SPACES}"
)
_CHINESE = _letters("4e00-9fa5 800-4e00 ac00-d7ff")
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_letters(_CASED)}]+",
    rf"\s?[!-/:-~{_letters('ff01-ff0f ff1a-ff5e 2018-201f 3000-3002')}]+",
    r"\s+$",
    rf"[{_CHINESE}]+",
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"[{_CHINESE}]+", r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    rf"[{_letters('4e00-9fa5 3040-309f 30a0-30ff')}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}",
)
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")

_GPT2_RULE = WordRule()
_LLAMA3_RULE = WordRule((_LLAMA3,), ignores_merges=True, adds_bos=True)

_NAMES = {
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4 "
    "jais trillion granite-docling": _GPT2_RULE,
    "olmo mpt": WordRule(is_composed=True),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": WordRule(
        (r"\p{N}", _GPT2)
    ),
    "falcon": WordRule(_FALCON),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA3_RULE,
    "glm4 glm5": WordRule((_LLAMA3,), ignores_merges=True),
    "chatglm-bpe dbrx smaug-bpe": WordRule((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez": WordRule((_QWEN2,), is_composed=True),
    "hunyuan grok-2 solar-open": WordRule((_QWEN2,)),
    "qwen35": WordRule((_QWEN35,)),
    "tekken": WordRule((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": WordRule((_GPT4O,)),
    "kimi-k2": WordRule((_KIMI,)),
    "bailingmoe bailingmoe2 llada-moe": WordRule((_BAILING,)),
    "deepseek-llm": WordRule(_DEEPSEEK),
    "deepseek-coder": WordRule(_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense hy_v4 joyai-llm": WordRule(_DEEPSEEK3),
}
"""Names in files, which llama.cpp gave, by the rule that they stand for."""

WORD_RULES = {name: rule for names, rule in _NAMES.items() for name in names.split()}
"""Rules by `tokenizer.ggml.pre`."""
