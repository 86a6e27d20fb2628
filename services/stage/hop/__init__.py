"""Hops: how activations travel from stage to stage."""
