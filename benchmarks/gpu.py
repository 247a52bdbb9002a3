"""Measure on a GPU everything that has only been measured on CPUs: tests, runs at real shapes, kernels, NCCL, plans.

    python benchmarks/gpu.py                        # all pieces, the most valuable first
    python benchmarks/gpu.py --minutes 9            # as many as fit; call it again for the rest
    python benchmarks/gpu.py --only 1b kernels      # pieces whose names begin like this, also if they failed before
    python benchmarks/gpu.py --tiny                 # everything with tiny shapes; the default without a GPU
    python benchmarks/gpu.py --show

Each piece has a process, at most 8 minutes, and an entry in results/gpu.json, written when it ends. A piece that fails
has its error there, with the figures until then; a piece that is done is not repeated. Nothing is downloaded: weights,
tokens and images are random. The package need not be installed. Without a GPU, results are in outputs/gpu-tiny.json.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import machine, parser, versions
from gpu_pieces import ROOT, Piece, pieces

LIMIT = 480  # seconds of a piece
LEAST = 30  # seconds in which a piece may begin
ERROR = 1500  # characters of an error


def run_child(command: list[str], limit: float) -> dict:
    """The last row that a process printed, and its seconds; with the error if it failed or exceeded its limit."""
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        try:
            output, timed_out = child.communicate(timeout=limit)[0], False
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, timed_out = child.communicate()[0], True
        errors.seek(0)
        error = errors.read()[-ERROR:]
    rows = [line for line in output.splitlines() if line.startswith('{"')]
    row = json.loads(rows[-1]) if rows else {}
    if timed_out:
        row["error"] = f"it exceeded {limit:.0f} s"
    elif child.returncode:
        row["error"] = error or f"exit status {child.returncode}"
    return {**row, "took": time.perf_counter() - started}


def run_all(options, results: dict) -> None:
    """Run the pieces that are not done, within the minutes, and write the results after each."""
    deadline = time.perf_counter() + 60 * options.minutes
    for name in pieces():
        entry = results.get(name)
        chosen = not options.only or name.startswith(tuple(options.only))
        if not chosen or (entry and ("error" not in entry or not options.only)):
            continue
        left = deadline - time.perf_counter()
        if left < LEAST:
            print(f"no time for {name}", flush=True)
            continue
        print(f"{name} …", flush=True)
        command = [sys.executable, __file__, "--piece", name, *(["--tiny"] if options.tiny else [])]
        row = run_child(command, min(LIMIT, left))
        if row.get("error", "").startswith("it exceeded") and left < LIMIT:
            continue  # for lack of minutes, which is no result
        results[name] = row
        document = {"machine": machine(), "versions": versions("torch", "triton", "transformers"), "results": results}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(line(name, row, pieces()[name]), flush=True)


def truncated_repr(value: float | None, unit: float = 1, digits: int = 1) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def line(name: str, row: dict, piece: Piece) -> str:
    """A row of the table."""
    aim = "" if piece.aim is None else f"{piece.aim:.0f}"
    seconds = truncated_repr(row.get("seconds")), aim, truncated_repr(row.get("planned_seconds"))
    memory = (truncated_repr(row.get(key), 2**30) for key in ("peak", "planned_peak"))
    error = row.get("error") or row.get("plan_error") or ""
    notes = [row.get("summary", ""), *(["error: " + error.strip().splitlines()[-1][:160]] if error else [])]
    return f"| {' | '.join([name, *seconds, *memory, '; '.join(filter(None, notes))])} |"


def table(results: dict) -> str:
    """Markdown: all pieces, then the products with packed weights."""
    lines = ["| piece | seconds | aim | planned | peak, GiB | planned | |", "|---|---:|---:|---:|---:|---:|---|"]
    lines += [line(name, results[name], piece) for name, piece in pieces().items() if name in results]
    cells = [cell for name in results if name.startswith("kernels-") for cell in results[name].get("cells", [])]
    if cells:
        lines += ["", "| product | matrix | rows | error | µs, eager | µs, graph | over dense, eager | graph |"]
        lines += ["|---|---|---:|---:|---:|---:|---:|---:|"]
    for cell in cells:
        first = [cell["kind"], "×".join(map(str, cell["shape"])), str(cell["rows"]), f"{cell['error']:.1e}"]
        keys = ("eager_us", "graph_us", "eager_over_dense", "graph_over_dense")
        lines.append(f"| {' | '.join([*first, *(truncated_repr(cell.get(key), digits=2) for key in keys)])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict:
    options = parser(__doc__)
    options.add_argument("--minutes", type=float, default=1e6, help="in all; the rest is left for the next call")
    options.add_argument("--only", nargs="+", help=f"of {' '.join(pieces())}")
    options.add_argument("--tiny", action="store_true", default=not torch.cuda.is_available(), help="tiny shapes")
    options.add_argument("--output", type=Path, help="the JSON file")
    options.add_argument("--show", action="store_true", help="print the table of an earlier call alone")
    options.add_argument("--piece", help="(of this file itself) one piece, here")
    options = options.parse_args(arguments)
    if options.piece:
        for row in pieces()[options.piece].run(options.tiny):
            print(json.dumps(row), flush=True)
        return {}
    usual = ROOT / ("outputs/gpu-tiny.json" if options.tiny else "benchmarks/results/gpu.json")
    options.output = options.output or usual
    results = json.loads(options.output.read_text(encoding="utf-8"))["results"] if options.output.exists() else {}
    if not options.show:
        run_all(options, results)
    print(table(results))
    return results


if __name__ == "__main__":
    main()
