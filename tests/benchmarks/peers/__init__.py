"""Shardline beside OpenVINO GenAI, vLLM and llama.cpp on one machine. `make bench-peers` runs
it."""
