"""Answer two prompts at once with a bundled model, in 9 MiB."""

from lowtide import LLM

with LLM("demo:autoregressive", host_memory="9MiB", context=256) as llm:
    for completion in llm.generate(["Sort 93 21 57 40 12", "Roman 148"], max_tokens=32):
        print(completion.text)
    print(f"{llm.stats()['hit_rate']:.0%} of the experts asked for were in memory")
