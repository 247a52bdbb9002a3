"""Seconds of learning a rotation: steps at the shapes of a model, with random weights.

Every decoder layer has its matrices, q, k, v and o with heads, gate, up and down, and the inverse Gram matrices of
their inputs; objective and step are those of `rotation="learned"`. With --layers only some decoder layers are built,
and the result is extrapolated. --rows limits the rows used per matrix, like `rotation_rows`.
"""

import sys
import time
from pathlib import Path

import torch
from common import parser, write
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from optimum_moonshot.devices import is_gpu, peak_bytes, wait_for
from optimum_moonshot.model.layer_kinds import LinearLayer
from optimum_moonshot.objective.patterns import Pattern, parse_pattern
from optimum_moonshot.rotate.learning import learn
from optimum_moonshot.rotate.objective import Coordinates, Group, Matrix, Objective, set_totals
from optimum_moonshot.rotate.spaces import Space

# hidden, MLP, query heads, key-value heads, head size, decoder layers
SHAPES = {
    "llama-3-8b": (4096, 14336, 32, 8, 128, 32),
    "llama-3.2-1b": (2048, 8192, 32, 8, 64, 16),
    "demo": (256, 704, 4, 2, 64, 4),
}


def make(shape: tuple[int, ...], pattern: Pattern, device: str, dtype: torch.dtype):
    """The objective and the spaces of a model with random weights."""
    hidden, inner, heads, kv, width, layers = shape
    generator = torch.Generator(device).manual_seed(0)

    def matrix(name: str, d_out: int, d_in: int, *gives: Coordinates) -> Matrix:
        module = nn.Linear(1, 1, bias=False)
        weight = torch.randn(d_out, d_in, generator=generator, device=device) / d_in**0.5
        module.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        return Matrix(LinearLayer(name, (module,), False), (pattern,), gives)

    def inverse() -> torch.Tensor:
        scale = torch.rand(hidden, generator=generator, device=device) + 0.1
        factor = torch.randn(hidden, hidden, generator=generator, device=device) / hidden**0.5
        return factor @ factor.T + torch.diag(scale)

    stream = Space("residual stream", hidden, 1, False, ())
    reads = Coordinates(stream, None)
    spaces, blocks = [stream], []
    for i in range(layers):
        head = Space(f"{i} heads", width, kv, False, ())
        spaces.append(head)
        values = Coordinates(head, torch.arange(kv * width).view(kv, 1, width))
        columns = Coordinates(head, torch.arange(heads * width).view(kv, heads // kv, width))
        blocks_of_heads = torch.eye(width, device=device).repeat(kv, heads // kv, 1, 1)
        groups = [
            Group(
                [
                    matrix(f"{i}.q", heads * width, hidden),
                    matrix(f"{i}.k", kv * width, hidden),
                    matrix(f"{i}.v", kv * width, hidden, values),
                ],
                reads,
                inverse(),
                [],
            ),
            Group([matrix(f"{i}.o", hidden, heads * width, reads)], columns, blocks_of_heads, []),
            Group([matrix(f"{i}.gate", inner, hidden), matrix(f"{i}.up", inner, hidden)], reads, inverse(), []),
            Group([matrix(f"{i}.down", hidden, inner, reads)], None, torch.ones(inner, device=device), []),
        ]
        blocks.append((None, groups))
    objective = Objective(blocks)
    set_totals(objective, None)
    return objective, spaces


def measure(
    shapes: str, layers: int | None, steps: int, rows: int | None, pattern: str, device: str, dtype: str
) -> dict:
    """Seconds of a step for all decoder layers, and the peak bytes on a GPU."""
    whole, place = SHAPES[shapes], torch.device(device)
    made = layers or whole[-1]
    parsed = parse_pattern(pattern, None if ":" in pattern else 0.7)
    objective, spaces = make((*whole[:-1], made), parsed, device, getattr(torch, dtype))
    learn(objective, spaces, 1, 0.01, place, rows=rows)
    wait_for(place)
    started, done = time.perf_counter(), 0

    def count(state) -> None:
        nonlocal done
        done = state.steps

    learn(objective, spaces, steps, 0.01, place, rows=rows, step_done=count)
    wait_for(place)
    step = (time.perf_counter() - started) / done * whole[-1] / made
    return {"step": step, "peak": peak_bytes(place) if is_gpu(place) else None}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--shapes", choices=SHAPES, default="demo", help="of which model")
    arguments.add_argument("--layers", type=int, help="decoder layers that are made; all")
    arguments.add_argument("--steps", type=int, default=10, help="that are timed, after one that is not")
    arguments.add_argument("--rows", type=int, help="of each matrix that a step uses; all")
    arguments.add_argument("--pattern", default="2:4", help="n:m, or unstructured at 0.7")
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the weights")
    args = arguments.parse_args()
    row = measure(**vars(args))
    print(f"{args.shapes}: {row['step']:.3f} s a step, {100 * row['step']:.1f} s for 100 steps", end="")
    print("" if row["peak"] is None else f", at most {row['peak'] / 2**30:.1f} GiB")
    write(f"rotation-{args.shapes}-{args.device.partition(':')[0]}", {**vars(args), **row})


if __name__ == "__main__":
    main()
