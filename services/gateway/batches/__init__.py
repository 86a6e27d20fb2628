"""OpenAI's batches: lines of a file become jobs, and jobs the lines of its output."""
