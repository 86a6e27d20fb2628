"""A head's jobs: claims, leases, checkpoints, ends. The one wing that writes rows. Knows no
pipeline and no tensor."""
