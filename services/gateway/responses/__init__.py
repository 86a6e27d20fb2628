"""OpenAI's responses: jobs whose every event can be read again, from Postgres alone."""
