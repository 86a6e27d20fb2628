"""C++ kernels for CPU and their build, and what loads kernels in Triton. Imports nothing of
ours."""
