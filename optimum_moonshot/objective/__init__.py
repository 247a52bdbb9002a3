"""The pruning problem: the multi-objective quadratic, patterns, allocation of sparsity, linear algebra."""
