"""Show the block that a diffusion model fills, once after each pass."""

import sys

from lowtide import LLM, DiffusionParams, Draft, Finished, SamplingParams

PARAMS = SamplingParams(max_tokens=64, diffusion=DiffusionParams(threshold=1.0, block_length=32))

with LLM("demo:diffusion", context=256) as llm:
    if llm.tokenizer is None:
        sys.exit("This model has no tokenizer, so its blocks cannot be shown.")
    for event in llm.stream("Sort 93 21 57 40 12", PARAMS):
        if isinstance(event, Draft):
            shown = zip(event.tokens[: event.num_shown], event.is_masked, strict=False)
            block = [
                "░" if is_masked else llm.tokenizer.decode([token], skip_special=False)
                for token, is_masked in shown
            ]
            print("".join(block))
        elif isinstance(event, Finished):
            print(f"{len(event.token_ids)} tokens in {event.num_forwards} passes")
