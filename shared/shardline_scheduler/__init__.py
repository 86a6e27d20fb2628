"""What runs in the next step: sequences, KV blocks, the plan of a step. Pure Python: knows no
torch."""
