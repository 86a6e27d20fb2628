"""Manifests for Kubernetes, made from compose.yaml: `python -m docker.kubernetes` writes them beside this file."""
