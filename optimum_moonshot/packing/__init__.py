"""The packed format of a matrix."""
