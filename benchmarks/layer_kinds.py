"""Decoding with layers of other kinds than plain attention, in memory, beside llama.cpp.

    python benchmarks/layer_kinds.py --models gpt_oss --depths 64 4096

Six published layers and a vocabulary of 50,000: gpt-oss-20b's windows, sinks and clamped experts in
MXFP4, and DeepSeek-V2-Lite's latents in Q4_0. Both engines read the same file, in turn. Answers
behind prompts of each depth, with the bytes that a token goes through (weights once, keys and
values as far as layers see) over the rate at which memory is read; and prompts of 512 tokens.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from common.arguments import make_parser, run_script
from common.beside_llama import rows_in_memory, weight_bytes_of_token
from common.layer_files import FILES, NUM_LAYERS, NUM_WORDS
from common.models import cache_folder
from common.record import Recorder, say

from lowtide.errors import UsageError

NUM_PROMPT = 512  # of the prompt that is timed


def main() -> None:
    if find_spec("gguf") is None:
        raise UsageError("The files are written with the package gguf: pip install gguf.")
    options = _options()
    settings = {"num_new": options.new, "repeats": options.repeats}
    sizes = {"num_layers": NUM_LAYERS, "num_words": NUM_WORDS}
    recorder = Recorder("layer_kinds", {**sizes, **settings}, options.out)
    for model in options.models:
        shape = FILES[model]
        file = cache_folder() / f"{model}-{NUM_LAYERS}-layers.gguf"
        if not file.exists():
            say(f"Writing {file} ...")
        shape.write(file)
        weight_bytes = weight_bytes_of_token(file, shape.share_of_experts)
        for num_prompt in (NUM_PROMPT, *options.depths):
            token_bytes = weight_bytes + shape.cache_bytes(num_prompt)
            for row in rows_in_memory(file, num_prompt, token_bytes, settings):
                recorder.write(f"prompt of {num_prompt}", {"model": model, **row})


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--depths", nargs="+", type=int, default=[64, 4096])
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5, help="answers, the first one cold")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
