"""Sparsity after quantizing a pruned model: the small Llama of this repository, 2:4, with the common tools.

Each tool quantizes in a separate process with the Python that has it (`--torchao`, `--bitsandbytes`,
`--llmcompressor`): llm-compressor requires an older transformers than this package. Then `verify` counts the layers
whose files still have the n:m declared in config.json, report and card. Perplexity is not measured here.
"""

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


def check(folder: Path) -> dict:
    """Compare the files with their declared pattern."""
    from optimum_moonshot import verify

    checked = verify(folder)
    return {
        "layers": len(checked.layers),
        "layers_2_4": sum(layer.follows is True for layer in checked.layers),
        "unreadable": sum(bool(layer.problem) for layer in checked.layers),
        "sparsity": checked.sparsity,
        "stored": sorted({layer.stored for layer in checked.layers if layer.stored}),
        "matches": bool(checked),
        "first_problem": next((layer.problem for layer in checked.layers if layer.problem), ""),
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
