"""The ranks of a stage: processes of one host that each compute a share of every layer (tensor
parallel)."""
