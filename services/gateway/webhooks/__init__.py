"""OpenAI's webhook endpoints, and what they have heard: bodies of their routes."""
