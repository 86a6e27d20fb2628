"""C++ kernels for CPU, and their build. Imports nothing of ours."""
