"""What is solved: the multi-objective quadratic, patterns, rules of allocation, linear algebra."""
