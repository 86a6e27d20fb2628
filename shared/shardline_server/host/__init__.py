"""What a process asks of its machine: cores, threads, signals, private files."""
