"""OpenAI's files: uploads that become chunks in Postgres as they come, and contents on their way
out."""
