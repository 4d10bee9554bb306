"""`lowtide serve`: one model behind the HTTP APIs of OpenAI, Anthropic and Ollama."""
