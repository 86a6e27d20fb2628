"""What planners and stages agree on: splits, lanes, memory, layers that stay together, tables."""
