"""Writes the golden cases next to it: ``cd tests && python -m golden.make``.

Expected values come from `reference` in float64, on inputs rounded to float32 first, which is what a file holds.
`layer` also makes the inputs of the other solver tests.
"""

import json
from pathlib import Path

import reference
import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
UNSTRUCTURED = {"pattern": "unstructured", "sparsity": 0.7}


def layer(
    d_out: int, d_in: int, samples: int, seed: int = 0, dead: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """weight, gram, gradients in float32, as a trained layer has them: inputs correlated, a few directions strong."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens, latent = 6, max(2, d_in // 3)
    strength = torch.arange(1, latent + 1, dtype=torch.float64) ** -0.7
    inputs = normal(max(samples * tokens, 2 * d_in), latent) * strength @ normal(latent, d_in)
    inputs += 0.2 * normal(*inputs.shape)
    inputs[:, list(dead)] = 0
    deltas = normal(samples, tokens, 2) @ normal(2, d_out) + normal(samples, tokens, d_out)
    gradients = deltas.mT @ inputs[: samples * tokens].view(samples, tokens, d_in) / tokens
    weight = normal(d_out, d_in) / d_in**0.5
    return weight.float(), (inputs.T @ inputs).float(), gradients.float()


def grouped_layer(groups: int, rows: int, d_in: int, samples: int, seed: int = 0, dead: tuple[int, ...] = ()):
    """The same for a grouped convolution: gram is [groups, d_in, d_in], one for each `rows` rows."""
    parts = [layer(rows, d_in, samples, 100 * seed + group, dead) for group in range(groups)]
    weights, grams, gradients = zip(*parts, strict=True)
    return torch.cat(weights), torch.stack(grams), torch.cat(gradients, 1)


def case(name: str, shape: tuple[int, int, int], seed: int, dead: tuple[int, ...] = (), **config) -> None:
    weight, gram, gradients = layer(*shape, seed=seed, dead=dead)
    lam, pattern = config["lam"], config["pattern"]
    choice = {name: config[name] for name in ("sparsity", "block_size", "group_size") if name in config}
    if ":" in pattern:
        choice["nm"] = tuple(map(int, pattern.split(":")))
    solve = getattr(reference, config["solver"])
    pruned, keep = solve(weight.double(), gram.double(), gradients.double() if lam < 1 else None, lam, **choice)
    tensors = {"weight": weight, "gram": gram, "expected_weight": pruned.float(), "expected_keep": keep}
    if lam < 1:
        tensors["gradients"] = gradients
    save_file(tensors, HERE / f"{name}.safetensors", metadata={"config": json.dumps(config)})


def main() -> None:
    seed = 0
    for solver, more in (("wanda", {}), ("sparsegpt", {"block_size": 16})):
        for label, pattern in (
            ("0.6", {"pattern": "unstructured", "sparsity": 0.6}),
            ("2of4", {"pattern": "2:4"}),
        ):
            for lam in (0.0, 0.5, 0.9, 1.0):
                seed += 1
                case(f"{solver}-{label}-lam{lam}", (6, 24, 5), seed, solver=solver, lam=lam, **pattern, **more)
    half = {"pattern": "unstructured", "sparsity": 0.6, "lam": 0.5}
    case("wanda-dead-input", (6, 24, 5), 30, dead=(3, 17), solver="wanda", **half)
    case("sparsegpt-dead-input", (6, 24, 5), 31, dead=(3, 17), solver="sparsegpt", block_size=16, **half)
    case("sparsegpt-many-samples", (4, 12, 20), 32, solver="sparsegpt", **half)
    case("sparsegpt-wide", (3, 68, 4), 33, solver="sparsegpt", **half)
    greedy()


def greedy() -> None:
    """The solvers that remove one weight, or one group of columns, at a time."""
    shape, dead = (5, 24, 6), (3, 17)
    for seed, lam in enumerate((0.0, 0.5, 1.0), start=40):
        for solver, more in (("obc", {}), ("cap", {"block_size": 12})):
            case(f"{solver}-0.7-lam{lam}", shape, seed, dead, solver=solver, lam=lam, **UNSTRUCTURED, **more)
            case(f"{solver}-2of4-lam{lam}", shape, seed, dead, solver=solver, lam=lam, pattern="2:4", **more)
        for group in (1, 4):
            columns = {"pattern": "structured", "sparsity": 0.5, "group_size": group}
            case(f"osscar-{group}-lam{lam}", shape, seed, dead, solver="osscar", lam=lam, **columns)
    for seed, solver in enumerate(("obc", "cap"), start=50):
        case(f"{solver}-many-samples", (4, 12, 20), seed, solver=solver, lam=0.5, **UNSTRUCTURED)
    columns = {"pattern": "structured", "sparsity": 0.5, "group_size": 2}
    case("osscar-many-samples", (4, 12, 20), 52, solver="osscar", lam=0.5, **columns)


if __name__ == "__main__":
    main()
