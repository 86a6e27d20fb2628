"""Manifests for Kubernetes, made from compose.yaml: `python -m docker.kubernetes` writes them next
to this file."""
