"""Sparsity after quantizing a pruned model: the small Llama of this repository, 2:4, with the common tools.

Each tool quantizes in a separate process with the Python that has it (`--torchao`, `--bitsandbytes`,
`--llmcompressor`): llm-compressor requires an older transformers than this package. Then the layers are counted whose
files still have zeros at the 2:4 of the report. Perplexity is not measured here.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import parser, write

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo_model"
TEXTS = ("README.md", "moonshot_report.json")  # which tools keep next to the weights, or drop
TOOLS = {
    "rounding": ("int8", "fp8"),
    "torchao": ("int8", "fp8", "intx4"),
    "bitsandbytes": ("nf4", "fp4", "int8"),
    "llmcompressor": ("rounded int8", "rounded int4", "GPTQ int8", "GPTQ int4"),
}


def prune(folder: Path) -> None:
    """Create the 2:4 model in a folder."""
    sys.path.insert(0, str(ROOT))
    from optimum_moonshot import MoonshotConfig, MoonshotPruner

    config = MoonshotConfig(pattern="2:4", num_samples=32, sequence_length=128)
    pruner = MoonshotPruner.from_pretrained(DEMO, config)
    pruner.prune(DEMO / "calibration.txt", progress=False)
    pruner.save_pretrained(folder)


def by_rounding(how: str, source: Path, target: Path) -> None:
    """Round to the nearest value, with a scale per row; needs no tool."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        weight = tensors[name].float()
        largest, dtype = (127, torch.int8) if how == "int8" else (448, torch.float8_e4m3fn)
        scale = weight.abs().amax(1, keepdim=True) / largest
        scaled = weight / scale
        tensors[name] = (scaled.round() if how == "int8" else scaled).to(dtype)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def by_transformers(tool: str, how: str, source: Path, target: Path) -> None:
    """Quantize while transformers loads the model."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

    if tool == "bitsandbytes":
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": how}
        config = BitsAndBytesConfig(**({"load_in_8bit": True} if how == "int8" else four))
    else:
        from torchao import quantization as ao
        from torchao.quantization.granularity import PerGroup

        kinds = {
            "int8": lambda: ao.Int8WeightOnlyConfig(),
            "fp8": lambda: ao.Float8WeightOnlyConfig(),
            "intx4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        }
        config = TorchAoConfig(kinds[how]())
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(target)


def by_llmcompressor(how: str, source: Path, target: Path) -> None:
    """Round, or use GPTQ on the calibration text, in groups of 64 for 4 bits and per row for 8."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind, bits = how.split(" int")
    size = {"strategy": "group", "group_size": 64} if bits == "4" else {"strategy": "channel"}
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=int(bits), symmetric=True, **size)
    )
    modifier = GPTQModifier if kind == "GPTQ" else QuantizationModifier
    tokens = AutoTokenizer.from_pretrained(source)((DEMO / "calibration.txt").read_text(encoding="utf-8"))["input_ids"]
    data = Dataset.from_dict({"input_ids": [tokens[start : start + 128] for start in range(0, 32 * 128, 128)]})
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    recipe = modifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    given = {"dataset": data, "num_calibration_samples": 32, "max_seq_length": 128} if kind == "GPTQ" else {}
    oneshot(model=model, recipe=recipe, **given)
    model.save_pretrained(target, save_compressed=True)


def quantize(tool: str, how: str, source: Path, target: Path) -> None:
    """Quantize, and copy the text files that a user would keep next to the weights."""
    target.mkdir()
    if tool == "rounding":
        by_rounding(how, source, target)
    elif tool == "llmcompressor":
        by_llmcompressor(how, source, target)
    else:
        by_transformers(tool, how, source, target)
    for name in TEXTS:
        shutil.copy(source / name, target)


def version(python: str, tool: str) -> str:
    """Versions of a tool and of its transformers."""
    code = f"from importlib.metadata import version as v; print(v('{tool}') + ', transformers ' + v('transformers'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def zeros(tensors: dict[str, torch.Tensor], weight: str) -> tuple[torch.Tensor, str]:
    """True where a weight in a tool's files is zero, and the tool's representation.

    Integers with a zero point (`X.weight`, torchao's `X._weight_qdata`) are zero where they equal it; the 4 bits of
    bitsandbytes are indices into a code book, and those of compressed-tensors have an offset.
    """
    module = weight.removesuffix("weight")
    book = tensors.get(f"{weight}.quant_map")
    if book is not None and f"{weight}.absmax" in tensors:
        state = next(name for name in tensors if name.startswith(f"{weight}.quant_state.bitsandbytes__"))
        shape = json.loads(bytes(tensors[state].tolist()).decode())["shape"]
        codes = tensors[weight].flatten()
        codes = torch.stack((codes >> 4, codes & 15), 1).flatten()[: torch.Size(shape).numel()]
        return (book == 0)[codes.long()].view(shape), f"bitsandbytes {state.rpartition('__')[2]}"
    if f"{weight}_packed" in tensors:
        words, (_, d_in) = tensors[f"{weight}_packed"], tensors[f"{weight}_shape"].tolist()
        bits = 32 * words.shape[1] // d_in
        codes = words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32) & 2**bits - 1
        return codes.flatten(1) == 2 ** (bits - 1), f"compressed-tensors int{bits}"
    name = next(name for name in (weight, f"{module}_weight_qdata") if name in tensors)
    points = tensors.get(f"{module}_weight_zero_point", tensors.get(f"{weight}_zero_point"))
    codes, kind = tensors[name], str(tensors[name].dtype).removeprefix("torch.")
    kind = f"torchao {kind}" if name != weight else kind
    if codes.dtype.is_floating_point or points is None:
        return codes.float() == 0, kind
    for dim in range(2 if points.numel() > 1 else 0):
        points = points.repeat_interleave(codes.shape[dim] // points.shape[dim], dim)
    return codes == points, f"{kind} with zero points"


def check(folder: Path) -> dict:
    """Compare the files with the pattern of the report."""
    from safetensors.torch import load_file

    from optimum_moonshot import PruneReport
    from optimum_moonshot.masks import follows
    from optimum_moonshot.objective.patterns import NM

    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    masks, stored = {}, set()
    for layer in PruneReport.load(folder).layers:
        masks[layer.name], kind = zeros(tensors, f"{layer.name}.weight")
        stored.add(kind)
    return {
        "layers": len(masks),
        "layers_2_4": sum(follows(~mask, NM(2, 4)) for mask in masks.values()),
        "sparsity": sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values()),
        "stored": sorted(stored),
    }


def main() -> None:
    arguments = parser(__doc__)
    for tool in ("torchao", "bitsandbytes", "llmcompressor"):
        arguments.add_argument(
            f"--{tool}", metavar="PYTHON", help=f"of an environment with {tool}; else it is left out"
        )
    arguments.add_argument(
        "--quantize", nargs=4, metavar=("TOOL", "HOW", "FROM", "TO"), help="the script calls itself so"
    )
    options = arguments.parse_args()
    if options.quantize:
        tool, how, source, target = options.quantize
        quantize(tool, how, Path(source), Path(target))
        return
    results = {}
    with tempfile.TemporaryDirectory() as root:
        source = Path(root) / "2of4"
        prune(source)
        for tool, kinds in TOOLS.items():
            python = sys.executable if tool == "rounding" else getattr(options, tool)
            if python is None:
                continue
            tool_version = {} if tool == "rounding" else {"version": version(python, tool)}
            for how in kinds:
                target = Path(root) / f"{tool} {how}".replace(" ", "-")
                subprocess.run([python, __file__, "--quantize", tool, how, str(source), str(target)], check=True)
                results[f"{tool} {how}"] = {**tool_version, **check(target)}
                print(f"{tool} {how}: {results[f'{tool} {how}']}", flush=True)
    write("quantize_after", results)


if __name__ == "__main__":
    main()
