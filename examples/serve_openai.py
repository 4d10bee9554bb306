"""Serve a bundled model and ask it with OpenAI's client (`pip install -e '.[serve]' openai`)."""

import re
import subprocess
import sys

from openai import OpenAI

SERVE = [sys.executable, "-m", "lowtide", "serve", "demo:autoregressive"]
OPTIONS = ["--port", "0", "--context", "256"]  # port 0: any that is free

with subprocess.Popen([*SERVE, *OPTIONS], stderr=subprocess.PIPE, text=True) as server:
    found = None
    for line in server.stderr or ():
        found = re.search(r"served at (http://\S+)", line)
        if found:
            break
        print(line, end="", file=sys.stderr)
    try:
        if found is None:
            sys.exit("The server has not started.")
        client = OpenAI(base_url=f"{found[1]}/v1", api_key="lowtide")
        [model] = client.models.list().data
        stream = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "Sort 93 21 57 40 12"}],
            stream=True,
        )
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
    finally:
        server.terminate()
