"""Removal of single blocks from a tiny random model of every family in the installed transformers.

    python benchmarks/depth_architectures.py                     # results/depth_architectures.json
    python benchmarks/depth_architectures.py --only llama t5      # run a few again

The default configuration of a family is shrunk as in architectures.py, with four blocks instead of two where it can be
created so. Every block is removed alone. A family counts as whole if all of these removals succeed, as partial if some
do; the reasons for the others are kept.
"""

import json
import os
import resource
import signal
import time
from collections import Counter

import tiny_configs
import torch
import transformers
from architectures import KINDS, LIMIT, batches, families
from common import RESULTS, parser, write

from optimum_moonshot import MoonshotError
from optimum_moonshot.model.depth import remove_blocks
from optimum_moonshot.model.layers import find_blocks

BLOCKS = 4
_COUNT = next(index for index, (expression, _) in enumerate(tiny_configs.RULES) if "_layers$" in expression)


def deeper(model_type: str, class_name: str):
    """A tiny model, with `BLOCKS` blocks if the family allows it."""
    rules, kinds = tiny_configs.RULES, tiny_configs._kinds
    deep = (*rules[:_COUNT], (rules[_COUNT][0], BLOCKS), *rules[_COUNT + 1 :])
    for tiny_configs.RULES, tiny_configs._kinds in ((deep, lambda types: kinds(types) * 2), (rules, kinds)):
        try:
            return getattr(transformers, class_name)(tiny_configs.tiny_config(model_type, class_name)).eval()
        except Exception as error:  # inconsistent sizes, or a package that is not installed
            reason = error
    raise MoonshotError(f"not made: {reason}")


def survey(kind: str, model_type: str, class_name: str) -> dict:
    torch.manual_seed(0)
    model = deeper(model_type, class_name)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    names = [name for name, _ in find_blocks(model)]
    inputs = {name: value for name, value in batches(kind, model)[0].items() if name != "labels"}
    if getattr(model.config, "is_encoder_decoder", False) and "input_ids" in inputs:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    refused = {}
    for block, name in enumerate(names):
        try:
            remove_blocks(model, [block], inputs)
        except MoonshotError as error:
            refused[name] = str(error)
    return {"blocks": len(names), "refused": refused}


def isolated(family: tuple[str, str, str], limit: int) -> dict:
    """`survey` in a separate process, killed after `limit` seconds."""
    reading, writing = os.pipe()
    started = time.perf_counter()
    if os.fork() == 0:
        os.close(reading)
        signal.alarm(limit)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        try:
            result = survey(*family)
        except MoonshotError as error:
            result = {"not made": str(error)[:300]}
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"[:300]}
        with os.fdopen(writing, "w") as out:
            json.dump(result, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as source:
        text = source.read()
    os.wait()
    result = json.loads(text) if text else {"error": "ended by a signal"}
    head = dict(zip(("kind", "family", "class"), family, strict=True))
    return {**head, **result, "seconds": round(time.perf_counter() - started, 1)}


def outcome(result: dict) -> str:
    for field in ("not made", "error"):
        if field in result:
            return field
    refused = len(result["refused"])
    return "whole" if not refused else "partial" if refused < result["blocks"] else "refused"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--kinds", nargs="*", default=["causal", "masked", "image"], choices=list(KINDS))
    arguments.add_argument("--only", nargs="*", help="model types; their entries in the file are replaced")
    arguments.add_argument("--seconds", type=int, default=120, help="for one model")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    stored = RESULTS / "depth_architectures.json"
    previous = json.loads(stored.read_text())["results"]["families"] if given.only else []
    results = {(each["kind"], each["class"]): each for each in previous}
    for family in families(given.kinds):
        if not given.only or family[1] in given.only:
            result = results[family[0], family[2]] = isolated(family, given.seconds)
            reasons = {str(reason)[:200] for reason in result.get("refused", {}).values()}
            print(family[:2], outcome(result), result["seconds"], result.get("error", ""), *reasons)
    entries = list(results.values())
    counts = {kind: Counter(outcome(each) for each in entries if each["kind"] == kind) for kind in given.kinds}
    print(counts)
    write("depth_architectures", {"transformers": transformers.__version__, "counts": counts, "families": entries})


if __name__ == "__main__":
    main()
