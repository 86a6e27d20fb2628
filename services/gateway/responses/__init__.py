"""OpenAI's responses: jobs with a stream of events that Postgres alone can replay."""
