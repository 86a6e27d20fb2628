"""Everything on one machine without Docker: embedded servers, supervisor, demo."""
