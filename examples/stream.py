"""Print the second answer of a conversation while it is written."""

from lowtide import LLM, Finished

with LLM("demo:autoregressive", context=256) as llm:
    question = {"role": "user", "content": "Sort 93 21 57 40 12"}
    [answer] = llm.chat([question])
    talk = [
        question,
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "47 + 85"},
    ]
    for event in llm.stream(talk, max_tokens=32):
        print(event.text, end="", flush=True)
        if isinstance(event, Finished):
            print(f"\n{event.num_resumed} tokens of the prompt were computed for the first answer")
