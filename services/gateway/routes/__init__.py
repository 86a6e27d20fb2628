"""The routes, one module for each door. They hold no logic: a route reads, calls and answers."""
