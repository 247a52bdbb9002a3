"""The packed format written out weight by weight, without any batching."""

import torch


def pack(matrix, n=None, m=None):
    """Values and bytes, a list per row each; n:m rows are padded with zeros."""
    values, meta = [], []
    for row in matrix.tolist():
        keep = [weight != 0 for weight in row]
        for start in range(0, len(row), m) if m else ():
            group = range(start, start + m)
            for place in group:
                if sum(keep[other] for other in group) < n and not keep[place]:
                    keep[place] = True
        values.append([weight if weight != 0 else 0.0 for weight, kept in zip(row, keep, strict=True) if kept])
        padded = keep + [False] * (-len(keep) % 8)
        meta.append([sum(bit << j for j, bit in enumerate(padded[b : b + 8])) for b in range(0, len(padded), 8)])
    return values, meta


def unpack(values, meta, d_in):
    """The inverse of `pack`: the dense matrix, a list per row."""
    rows = []
    for stored, row in zip(values, meta, strict=True):
        stored = iter(stored)
        bits = [row[i // 8] >> (i % 8) & 1 for i in range(d_in)]
        rows.append([next(stored) if bit else 0.0 for bit in bits])
    return rows


def random_matrix(d_out, d_in, pattern, dtype, seed=0):
    """Exactly n:m, or about half zeros, with an empty group, a group with an additional zero, and a −0.0."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(d_out, d_in, generator=generator).sign() * (1 + torch.rand(d_out, d_in, generator=generator))
    scores = torch.rand(d_out, d_in, generator=generator)
    keep = scores < 0.5 if pattern is None else pattern.keep(scores)
    matrix = torch.where(keep, matrix, 0).to(dtype)
    size = pattern.m if pattern else 8
    matrix[0, :size] = 0
    matrix[0, 0] = -0.0
    matrix[1, matrix[1].nonzero()[0]] = -0.0
    return matrix
