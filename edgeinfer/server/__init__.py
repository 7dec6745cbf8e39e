"""The HTTP server: the APIs of OpenAI, ollama and Anthropic over the engine."""
