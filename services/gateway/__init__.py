"""The HTTP door: OpenAI's completions and a native jobs API, over the client. Never touches Redis
to submit."""
