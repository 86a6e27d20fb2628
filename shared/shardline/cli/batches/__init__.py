"""The command run-batch, and the doors through which it runs a file."""
