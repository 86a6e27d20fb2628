"""The HTTP door: OpenAI's and Anthropic's APIs and a native jobs API, over the client. Never
touches Redis to submit."""
