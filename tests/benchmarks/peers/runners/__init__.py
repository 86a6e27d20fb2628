"""Programs that run in the environments of peers: plain JSON in and out, nothing of ours but
`wire`."""
