"""Kernels for packed matrices: in C for CPUs, in Triton for GPUs; the solvers' loops over columns, in C."""
