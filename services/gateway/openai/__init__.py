"""OpenAI's API: its requests become jobs, and jobs its answers."""
