"""Numbers of weights, summed over the layers of a report."""


def total_size(report):
    return sum(layer.shape[0] * layer.shape[1] for layer in report.layers)


def target_zeros(report):
    """The zeros that the target sparsities require."""
    return sum(layer.target_sparsity * layer.shape[0] * layer.shape[1] for layer in report.layers)
