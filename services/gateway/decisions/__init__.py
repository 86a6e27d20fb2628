"""OpenAI's decisions: a request's questions become jobs, and their results its answers."""
