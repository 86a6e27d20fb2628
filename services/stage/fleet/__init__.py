"""What a worker of a fleet does besides serving: membership, links, profiles, copies of models."""
