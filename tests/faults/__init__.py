"""Tests of single faults. A package: its stack `hurt` ends with the last of its tests."""
