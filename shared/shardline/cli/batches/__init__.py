"""The command run-batch and its doors."""
