"""Products of matrices: weights in the layouts of the kernels, and the choice of a kernel by
rows."""
