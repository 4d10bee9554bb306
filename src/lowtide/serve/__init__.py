"""`lowtide serve`: a model behind HTTP, in the forms of OpenAI, Anthropic and Ollama."""
