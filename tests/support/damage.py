"""Random damage of a folder, from a seed, and the outcome of every reader.

A damaged packed folder loads with its original weights or is refused. A dense one has no checksums: its readers must
not fail in another way, but its weights may differ. A run that resumes from damaged results ends with the weights and
the report of an undisturbed run, or is refused; so does one that rotates before it prunes, and one that shrinks.

As a program it covers more seeds than the test:  python tests/support/damage.py --count 10000
"""

import argparse
import collections
import contextlib
import io
import json
import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers as hf
from quantized_models import quantize
from safetensors.torch import load_file

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner, convert, load_pruned, verify
from optimum_moonshot.runtime.packed_layers import PackedLinear

PACKED = ("packed", "quantized", "experts")
READERS = {
    **dict.fromkeys(PACKED, ("load_pruned", "load_pruned, packed", "convert", "from_pretrained", "verify")),
    "dense": ("load_pruned", "convert", "verify"),
    **dict.fromkeys(("run", "rotation", "shrink"), ("resume",)),
}
# Settings of the runs whose results are damaged; the first writes weights and recovered blocks.
RUN = {"solver": "wanda", "pattern": "2:4", "lam": 1.0, "recover": "blockwise", "recover_steps": 2, "num_samples": 2}
RUNS = {
    "run": RUN,
    "rotation": {**RUN, "recover": None, "rotation": "learned", "rotation_steps": 4},
    "shrink": {"solver": "osscar", "pattern": "structured", "sparsity": 0.0, "num_samples": 2},
}
DEEP = "deep"  # stands for 100,000 nested brackets
VALUES = [
    None, True, False, -1, 0, 1, 7, 2**31, 2**70, 1.5, float("inf"), "", "x", "../x", "/x", "F16", "float16", [], [1],
    {}, DEEP,
]  # fmt: skip
# transformers builds this many layers before any check.
COUNT, COUNTS = "num_hidden_layers", (None, "2", 0, 1, 3, -1)


def make_folder(folder, format="packed"):
    """Save a pruned model of two layers, some matrices square, in several files; returns its weights.

    For the format "quantized": packed integer codes; for "experts": a mixture. For a run: the folder of a finished one;
    returns its report with the weights.
    """
    if format in RUNS:
        return _resume(folder, format)
    model = make_model(format)
    rules = {"q_proj": "2:4", "mlp": "1:4", "[kvo]_proj": 0.6}
    pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", pattern="unstructured", allocation=rules))
    pruner.prune(progress=False)
    if format == "quantized":
        quantize(pruner)
    pruner.save_pretrained(folder, format="dense" if format == "dense" else "packed", max_shard_size="6KB")
    for name in ("README.md", "moonshot_report.png", "moonshot_report.json"):
        (folder / name).unlink()
    assert len(list(folder.glob("*.safetensors"))) > 1
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def make_model(format="packed"):
    """The dense model."""
    torch.manual_seed(0)
    config = dict(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    if format == "experts":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**config, num_local_experts=2, num_experts_per_tok=1))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**config))
    return model.bfloat16().eval()


def _resume(folder, format):
    """The weights of a run in this folder, with its report."""
    pruner = MoonshotPruner(make_model(), MoonshotConfig(**RUNS[format]))
    data = {"calibration": [{"input_ids": torch.arange(3, 27).view(2, 12)}], "progress": False, "resume_dir": folder}
    if format == "shrink":
        pruner.shrink(**data, parameters=0.8)
    else:
        pruner.prune(**data)
    return pruner.model.state_dict() | _report_tensors(pruner.report)


def _report_tensors(report):
    """The fields of a report that do not depend on time, as tensors to add to the weights."""
    layers = {each.name: (each.sparsity, each.reconstruction, each.loss) for each in report.layers}
    layers |= {each.name: (each.loss_before, each.loss_after, each.steps) for each in report.recovery}
    if report.rotation is not None:
        layers["the rotation"] = report.rotation.objective_before, report.rotation.objective_after
    if report.shrink is not None:
        layers |= {name: (loss,) for name, loss in report.shrink.measured.items()}
    return {f"report of {name}": torch.tensor(values) for name, values in layers.items()}


def damage(folder, rng):
    """Damage a folder in one way; returns a description, and whether a file of weights changed."""
    files = sorted(folder.rglob("*.safetensors"))
    others = [path for path in sorted(folder.glob("*.json")) if path.name != "generation_config.json"]
    kind = rng.choice(["bit", "bit", "bytes", "cut", "json", "json", "json", "described", "described", "files"])
    if kind == "files":
        return _mix_up(files, rng), True
    path = rng.choice([*files, *files, *others])
    content = path.read_bytes()
    if kind == "bit":
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
    elif kind == "bytes":
        position, length = rng.randrange(len(content)), rng.choice([1, 4, 64])
        new = rng.choice([bytes(length), rng.randbytes(length), b""])
        path.write_bytes(content[:position] + new + content[position + length :])
    elif kind == "cut":
        path.write_bytes(content[: rng.choice([0, 7, 8, 9, rng.randrange(len(content)), len(content) - 1])])
    elif path.suffix == ".json":
        path.write_text(_write(_mutate(json.loads(content), rng)))
    else:
        _rewrite_header(path, content, kind == "described", rng)
    return f"{kind} in {path.name}", path.suffix != ".json"


def _mix_up(files, rng):
    how = rng.choice(["swapped", "copied", "gone"])
    first, second = rng.sample(files, 2)
    if how == "gone":
        first.unlink()
    elif how == "copied":
        shutil.copy(first, second)
    else:
        other = first.with_suffix(".other")
        first.rename(other)
        second.rename(first)
        other.rename(second)
    return f"files {how}"


def _rewrite_header(path, content, described, rng):
    """Change a value in the header, or in its metadata about the tensors."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    inside = [name for name in ("moonshot", "report") if name in header.get("__metadata__", {})]
    if described and inside:
        inner = json.loads(header["__metadata__"][inside[0]])
        header["__metadata__"][inside[0]] = _write(_mutate(inner, rng))
        text = json.dumps(header)
    else:
        text = _write(_mutate(header, rng))
    new = text.encode("utf-8", "surrogatepass")
    path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])


def _write(values):
    return json.dumps(values).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)


def _nodes(values, parent=None, key=None):
    """The container and key of every nested value."""
    if parent is not None:
        yield parent, key
    for inner in list(values) if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ():
        yield from _nodes(values[inner], values, inner)


def _mutate(values, rng):
    """The JSON with one value changed, deleted, swapped with another, or renamed."""
    parent, key = rng.choice(list(_nodes(values)))
    how = rng.choice(["value", "value", "value", "near", "gone", "moved", "named"])
    if how == "gone":
        del parent[key]
    elif how == "moved":
        other, place = rng.choice(list(_nodes(values)))
        parent[key], other[place] = other[place], parent[key]
        with contextlib.suppress(ValueError):
            json.dumps(values)
            return values
        return None  # one contains the other
    elif how == "named" and isinstance(parent, dict):
        parent[rng.choice(["x", key + "x", key[:-1]])] = parent.pop(key)
    elif how == "near" and isinstance(parent[key], int | str) and parent[key] not in ("", True, False):
        parent[key] = parent[key] + rng.choice([-1, 1]) if isinstance(parent[key], int) else _near(parent[key], rng)
    else:
        parent[key] = rng.choice(COUNTS if key == COUNT else VALUES)
    return values


def _near(text, rng):
    place = rng.randrange(len(text))
    return text[:place] + rng.choice("0123456789abcxyzABF:/.") + text[place + 1 :]


def read(reader, folder, output, format):
    """The weights from one reader."""
    if reader == "from_pretrained":
        return hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    if reader == "resume":
        return _resume(folder, format)
    if reader == "load_pruned":
        return load_pruned(folder).state_dict()
    if reader == "convert":
        convert(folder, output, "dense" if format in PACKED else "packed")
        if format in ("dense", "experts"):  # experts are separate in files
            return load_pruned(output).state_dict()
        return {name: tensor for path in output.glob("*.safetensors") for name, tensor in load_file(path).items()}
    model = load_pruned(folder, runtime="packed")
    if format == "experts":
        pruner = MoonshotPruner(model, MoonshotConfig(pattern="2:4"))
        pruner.to_runtime("dense")
        return pruner.model.state_dict()
    dense = {name: module.weight for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    state = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in dense}
    return {**state, **{f"{name}.weight": weight for name, weight in dense.items()}}


def verdict(reader, folder, output, expected, weights_hit, format):
    """The outcome of one reader: "same weights", "refused", or an error."""
    try:
        if reader == "verify":
            return "holds" if verify(folder) else "refused"
        weights = read(reader, folder, output, format)
    except MoonshotError:
        return "refused"
    except Exception as error:
        if reader == "from_pretrained" and not weights_hit:
            return "transformers refused"  # it reads config.json and the index before it calls this package
        return f"WRONG: {type(error).__name__}: {error}"
    wrong = "other weights" if format == "dense" else "WRONG"
    if weights.keys() != expected.keys():
        return f"{wrong}: {sorted(weights.keys() ^ expected.keys())[:3]}"
    for name, tensor in expected.items():  # config.json may ask for another dtype
        if not torch.equal(weights[name], tensor.to(weights[name].dtype)):
            return f"{wrong}: {name} differs"
    return "same weights"


def trial(intact, expected, seed, root, format="packed"):
    """Damage a copy once; returns the description and the verdict of every reader."""
    folder, output = root / "damaged", root / "out"
    for path in (folder, output):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(intact, folder)
    what, weights_hit = damage(folder, random.Random(seed))
    verdicts = {}
    for reader in READERS[format]:
        with contextlib.redirect_stderr(io.StringIO()):
            verdicts[reader] = verdict(reader, folder, output, expected, weights_hit, format)
    sound = [outcome for reader, outcome in verdicts.items() if reader.startswith("load_pruned")]
    if format in PACKED and verdicts["verify"] == "holds" and weights_hit and "same weights" not in sound:
        verdicts["verify"] = "WRONG: verified"
    return what, verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--format", choices=READERS, default="packed")
    parser.add_argument("--json", type=Path, help="file of the counts; those of other formats are kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    hf.utils.logging.disable_progress_bar()
    counts = collections.Counter()
    with tempfile.TemporaryDirectory() as root:
        intact = Path(root) / "intact"
        expected = make_folder(intact, options.format)
        for seed in range(options.first, options.first + options.count):
            what, verdicts = trial(intact, expected, seed, Path(root), options.format)
            for reader, outcome in verdicts.items():
                counts[reader, outcome.partition(":")[0]] += 1
                if outcome.startswith("WRONG"):
                    print(f"seed {seed}, {what}, {reader}: {outcome}", flush=True)
    for (reader, outcome), count in sorted(counts.items()):
        print(f"{count:7} {reader}: {outcome}")
    if options.json:
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        results[options.format] = {"damages": options.count, **{f"{r}: {v}": n for (r, v), n in sorted(counts.items())}}
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return any(outcome == "WRONG" for _, outcome in counts)


def flip(path, seed=0):
    """Flip one bit of one tensor."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    generator = torch.Generator().manual_seed(seed)
    position = start + int(torch.randint(len(content) - start, (1,), generator=generator))
    content[position] ^= 1 << int(torch.randint(8, (1,), generator=generator))
    path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
