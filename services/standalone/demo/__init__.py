"""The demo: prompts with known answers through every door, what came of them, and the model clerk
that answers.

Knows the supervisor as a command only; the supervisor knows nothing of the demo.
"""
