"""Tests of whole stacks. A package: its `real_stack` ends with the last of its tests."""
