"""What a worker of a fleet does apart from serving: membership, links, profiles, copies of
models."""
