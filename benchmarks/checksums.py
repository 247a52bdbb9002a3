"""Cost of verifying checksums at load: `from_pretrained` of a packed checkpoint with and without MOONSHOT_VERIFY=0.

A random Llama of 117M parameters in bfloat16, its layers 2:4; the file is in the page cache. A dense checkpoint has no
checksums and serves as a control. The figure is the minimum processor time of several loads, alternating with and
without: it is robust to other load, and includes the time of hashing threads.
"""

import os
import tempfile
import time
from pathlib import Path

import torch
from checkpoint import build
from common import parser, write
from transformers import AutoModelForCausalLM


def load(folder: Path, verify: bool) -> float:
    """Processor seconds until every weight was read once."""
    os.environ["MOONSHOT_VERIFY"] = str(int(verify))
    started = time.process_time()
    for tensor in AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict().values():
        tensor.clone()
    return time.process_time() - started


def least(folder: Path, repeats: int) -> dict[str, float]:
    """Summary of all loads, with the ratio due to checksums."""
    load(folder, True)
    times = [(load(folder, True), load(folder, False)) for _ in range(repeats)]
    compared, not_compared = (min(pair[which] for pair in times) for which in (0, 1))
    return {"seconds": compared, "seconds_without": not_compared, "ratio": compared / not_compared}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=10)
    arguments.add_argument("--layers", type=int, default=4)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    pruner, results = build(options.layers), {}
    with tempfile.TemporaryDirectory() as root:
        for format in ("dense", "packed"):
            folder = Path(root) / format
            pruner.save_pretrained(folder, format=format)
            size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            results[format] = {"bytes": size, **least(folder, options.repeats)}
            print(format, results[format])
    write("checksums", results)


if __name__ == "__main__":
    main()
