"""Reloads of all model families: a tiny model of each is pruned, rotated or not, saved, and loaded by transformers.

    python benchmarks/reloads.py                          # all of them; results/reloads.json
    python benchmarks/reloads.py --only llama t5 vit      # run a few again

The models are those of architectures.py, in float32 and bfloat16, with distinct gains and biases, pruned to 2:4. Each
is saved dense and packed; plain `from_pretrained` must report no missing or unexpected weight, and compute the same.
"""

import copy
import json
import tempfile
from collections import Counter
from functools import lru_cache
from itertools import product
from pathlib import Path
from unittest import mock

import torch
import transformers
from architectures import KINDS, batches, families, isolated, with_images
from common import RESULTS, machine, parser
from tiny_configs import tiny_config
from torch.utils._pytree import tree_leaves

from optimum_moonshot import MoonshotConfig, MoonshotError, MoonshotPruner
from optimum_moonshot.checkpoint import saving
from optimum_moonshot.model.calls import run_model

DTYPES = ("float32", "bfloat16")
FORMATS = ("dense", "packed")
LOAD = transformers.PreTrainedModel.from_pretrained.__func__  # some classes read other files too
NO_SMALLER = "packing makes no layer smaller"  # an error of some tiny models


@torch.no_grad()
def outputs(model, batch) -> list[torch.Tensor]:
    """The floating-point outputs of a model."""
    return [leaf for leaf in tree_leaves(run_model(model, batch)) if torch.is_tensor(leaf) and leaf.is_floating_point()]


def difference(model, batch, expected) -> float:
    """The largest relative difference of a model's outputs from the expected ones."""
    pairs = zip(outputs(model, batch), expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs)


@lru_cache(maxsize=1)
def tiny_model(kind: str, model_type: str, class_name: str, dtype: str = "float32"):
    """A tiny model with distinct gains and biases, and batches of its inputs."""
    torch.manual_seed(0)
    cls = getattr(transformers, class_name)
    model = cls._from_config(tiny_config(model_type, class_name), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    if dtype != "float32":
        # `to` would round weights and buffers that transformers keeps in float32.
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = LOAD(cls, folder, dtype=getattr(torch, dtype)).eval()
    data = batches(kind, model)
    try:
        outputs(model, data[0])
    except MoonshotError:
        if kind != "multimodal":
            raise
        data = [with_images(batch, model) for batch in data]
    return model, data


def reload(kind: str, model_type: str, class_name: str, dtype: str, rotated: bool) -> dict:
    """Prune, save and load a tiny model; for each format the difference, and the weights that loading reports."""
    try:
        model, data = copy.deepcopy(tiny_model(kind, model_type, class_name, dtype))
    except MoonshotError:
        raise
    except Exception as error:  # inconsistent sizes, or a package that is not installed
        return {"not made": f"{type(error).__name__}: {error}".strip()[:200]}
    rotation = dict(rotation="learned", rotation_steps=1, rotation_weights="equal") if rotated else {}
    config = MoonshotConfig(solver="magnitude", pattern="2:4", lam=1.0, num_samples=4, batch_size=2, **rotation)
    pruner = MoonshotPruner(model, config)
    report = pruner.prune(data, progress=False)
    expected, result = outputs(model, data[0]), {}
    if rotated:
        result["untied bytes"] = report.rotation.untied_bytes
    for format in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with mock.patch.multiple(saving, write_card=mock.DEFAULT, Facts=mock.DEFAULT):
                    pruner.save_pretrained(folder, format=format)  # the card's picture takes two thirds of the time
            except MoonshotError as error:
                result[format] = {"not saved": str(error)}
                continue
            loaded, info = LOAD(type(model), folder, dtype="auto", output_loading_info=True)
            reported = {name: sorted(map(str, names)) for name, names in info.items() if names}
            # Kernels may round according to the alignment of weights, which in mapped files is arbitrary.
            aligned = copy.deepcopy(loaded.eval())
            result[format] = {"difference": difference(aligned, data[0], expected), **reported}
    return result


def failed(result: dict) -> bool:
    """Whether a model was saved that plain transformers does not load, or that then computes something else."""
    if "error" in result:
        return True
    for saved in (result[format] for format in FORMATS if format in result):
        exact = saved.keys() == {"difference"} and saved["difference"] == 0
        if not exact and NO_SMALLER not in saved.get("not saved", ""):
            return True
    return False


def settings(kind: str, model_type: str, class_name: str) -> dict[str, dict]:
    """The results of one family in all settings."""
    results = {}
    for dtype, rotated in product(DTYPES, (False, True)):
        try:
            result = reload(kind, model_type, class_name, dtype, rotated)
        except MoonshotError as error:
            result = {"refused": str(error)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:600]}
        results[f"{dtype}, {'rotated' if rotated else 'unrotated'}"] = result
    return {"settings": results}


def outcome(result: dict) -> str:
    """How a model is counted in a setting."""
    if failed(result):
        return "failed"
    return next((field for field in ("not made", "refused") if field in result), "reloaded")


def outcomes(result: dict) -> dict[str, str]:
    """How a family is counted in each setting; in "all" if its process was killed."""
    return {name: outcome(each) for name, each in result.get("settings", {"all": result}).items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="*", help="model types; their entries in the file are replaced")
    arguments.add_argument("--seconds", type=int, default=300, help="for one family")
    arguments.add_argument("--output", default=str(RESULTS / "reloads.json"))
    given = arguments.parse_args()
    torch.set_num_threads(1)
    output = Path(given.output)
    previous = json.loads(output.read_text(encoding="utf-8"))["results"] if given.only and output.exists() else []
    everything = {(each["kind"], each["class"]): each for each in previous}
    for family in families(list(KINDS)):
        if not given.only or family[1] in given.only:
            result = isolated(family, given.seconds, False, settings)
            everything[family[0], family[2]] = result
            print(f"{family[2]:50} {result['seconds']:5} {outcomes(result)}", flush=True)
    results = list(everything.values())
    text = {"machine": machine(), "transformers": transformers.__version__, "results": results}
    output.write_text(json.dumps(text, indent=1), encoding="utf-8")
    counts = Counter(item for result in results for item in outcomes(result).items())
    for (name, counted), count in sorted(counts.items()):
        print(f"{name}: {counted} {count}")


if __name__ == "__main__":
    main()
