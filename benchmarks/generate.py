"""Text generation with a packed model: tokens per second, time to the first token, memory, files; transformers, CPU.

    python benchmarks/generate.py                    # a random Llama of the shape of 1B, at 2:4 and 0.8
    python benchmarks/generate.py --layers 4         # a quarter of it
    python benchmarks/generate.py --quantized        # survivors in 8, 4 and 3 bits, and the layers of torch and torchao
    python benchmarks/generate.py --quantized --only dense "2:4 int4" "torchao int4" --threads 1
    python benchmarks/generate.py --model .venv/real/SmolLM2-135M-Instruct --only dense "int4 e16" "int4 e8" "int4 e4"
    python benchmarks/generate.py --model … --only dense int4 model.gguf    # a file in llama.cpp, by xllamacpp
    python benchmarks/generate.py --plot quantized_generate

"e16" is a packed model whose word embeddings and head stay in 16 bits; without it they have 8. Speed and memory do not
depend on the mask, so the weights are random, or those of a model, pruned by magnitude. Each setting is loaded in a
separate process, and all of these processes measure in turns, one at a time, so that other load affects all settings;
figures are medians over the rounds. Memory is the resident size that loading adds, once every weight has been read. The
alternatives of torch and torchao convert the dense checkpoint after loading; their files are those of `torch.save`.
"""

import argparse
import ctypes
import gc
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from alternatives import ALTERNATIVES, available, convert_layers, tensor_bytes
from checkpoint import memory
from common import RESULTS, parser, read, versions, write
from random_weights import Setting, imitate_pruning, save
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from optimum_moonshot import MoonshotConfig, MoonshotPruner, load_pruned
from optimum_moonshot.devices import wait_for

DENSE = "dense"
PACKED = ["2:4", "2:4 int8", "2:4 int4", "2:4 int3", "0.6 int8", "0.6 int4", "0.8", "0.8 int8", "0.8 int4", "int4"]
QUANTIZED = {"settings": [DENSE, *PACKED, *ALTERNATIVES], "prompt": 512, "name": "quantized_generate"}
SIZES = dict(hidden_size=2048, intermediate_size=8192, vocab_size=32_000, num_attention_heads=32, num_key_value_heads=8)
CONTEXT = multiprocessing.get_context("spawn")


class LlamaCpp:
    """A GGUF file in llama.cpp, with the calls of a model that this benchmark needs."""

    device, state_dict = torch.device("cpu"), dict

    def __init__(self, path: str):
        self.path, self.threads, self.server = path, 0, None
        self.config = argparse.Namespace(vocab_size=1000)  # of the tokens in a prompt

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **options: object) -> None:
        if self.threads != torch.get_num_threads():
            import xllamacpp  # not in the development environment

            settings, self.threads = xllamacpp.CommonParams(), torch.get_num_threads()
            settings.model.path, settings.n_ctx, settings.n_parallel = self.path, 1024, 1
            settings.warmup = settings.fit_params = False
            settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = self.threads
            self.server = xllamacpp.Server(settings)
            self.generate(ids[:, :1], 1)
        request = dict(prompt=ids[0].tolist(), n_predict=max_new_tokens, temperature=0, samplers=["temperature"])
        self.server.handle_completions({**request, "ignore_eos": True, "cache_prompt": False})


def runtime_of(setting: str) -> str:
    if setting.endswith(".gguf"):
        return "llama.cpp"
    return setting if setting in (DENSE, *ALTERNATIVES) else "packed"


def make(
    root: Path, settings: list[str], layers: int, source: str | None = None, sizes: dict[str, int] = SIZES
) -> None:
    """Save a checkpoint of each packed setting, and a dense one, in folders of `root` by their place in `settings`.

    They are those of the model in a folder, the `source`, or of a random one.
    """
    if source is not None:
        for place, setting in enumerate(settings):
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
            if setting == DENSE:
                model.save_pretrained(root / DENSE)
            elif runtime_of(setting) == "packed":
                pruner = MoonshotPruner(model, MoonshotConfig(solver="magnitude", **Setting.of(setting).options))
                pruner.prune(progress=False)
                pruner.save_pretrained(root / str(place), format="packed")
        return
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=2048, tie_word_embeddings=True)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    save(model, root / DENSE, "dense")
    for place, setting in enumerate(settings):
        if runtime_of(setting) == "packed":
            imitate_pruning(model, setting)
            save(model, root / str(place))


def load(setting: str, root: Path, place: int) -> torch.nn.Module | LlamaCpp:
    if runtime_of(setting) == "packed":
        return load_pruned(root / str(place), runtime="packed")
    if runtime_of(setting) == "llama.cpp":
        return LlamaCpp(setting)
    model = AutoModelForCausalLM.from_pretrained(root / DENSE, dtype="auto")
    if setting in ALTERNATIVES:
        convert_layers(setting, model)
        for parameter in model.parameters():
            if type(parameter.data) is torch.Tensor:
                parameter.data = parameter.data.clone()  # views keep the pages of the whole mapped file
    return model


def file_bytes(setting: str, root: Path, place: int, model: torch.nn.Module) -> int:
    if runtime_of(setting) == "llama.cpp":
        return Path(setting).stat().st_size
    folder = root / (DENSE if setting == DENSE else str(place))
    if setting not in ALTERNATIVES:
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with tempfile.NamedTemporaryFile(dir=root) as file:
        torch.save(model.state_dict(), file)
        return Path(file.name).stat().st_size


def serve(connection, setting: str, root: Path, place: int) -> None:
    """Load a setting, send its bytes, and then measure with the threads and tokens that are received, until None.

    Weights that are created in inference mode take a much slower path in torch, so that loading is outside of it.
    """
    before = memory("VmRSS")
    model = load(setting, root, place)
    generate(model, 4, 2)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    loaded = {"resident": memory("VmRSS") - before, "peak": memory("VmHWM") - before}
    loaded |= {"weights": tensor_bytes(model.state_dict().values()), "file": file_bytes(setting, root, place, model)}
    connection.send(loaded)
    while (request := connection.recv()) is not None:
        threads, prompt, new = request
        torch.set_num_threads(threads)
        generate(model, 4, 1)
        first, rate = generate(model, prompt, 1), new / generate(model, 4, new)
        connection.send({"tokens_per_second": rate, "first_token_seconds": first})


@torch.inference_mode()
def generate(model: torch.nn.Module | LlamaCpp, prompt: int, new: int) -> float:
    """Seconds of greedy decoding."""
    vocabulary = model.config.vocab_size
    ids = torch.randint(3, vocabulary, (1, prompt), generator=torch.Generator().manual_seed(0)).to(model.device)
    wait_for(model.device)
    started = time.perf_counter()
    model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None,
        attention_mask=torch.ones_like(ids),
    )  # fmt: skip
    wait_for(model.device)
    return time.perf_counter() - started


class Worker:
    """The process of a setting."""

    def __init__(self, setting: str, root: Path, place: int):
        self.setting = setting
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, setting, root, place), daemon=True)
        self.process.start()
        theirs.close()
        self.bytes = self.connection.recv()

    def measure(self, *request: int) -> dict[str, float]:
        self.connection.send(request)
        return self.connection.recv()

    def stop(self) -> None:
        self.connection.send(None)
        self.process.join()


def measure(options: argparse.Namespace, root: Path) -> list[dict]:
    """The figures of every setting and number of threads."""
    workers = []
    for place, setting in enumerate(options.settings):
        workers.append(Worker(setting, root, place))
        print(f"loaded {setting}: {workers[-1].bytes}", flush=True)
    runs: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for threads in options.threads:
            for worker in workers:
                figures = worker.measure(threads, options.prompt, options.new)
                runs.setdefault((worker.setting, threads), []).append(figures)
    for worker in workers:
        worker.stop()
    sizes = {worker.setting: worker.bytes for worker in workers}
    return [
        {"setting": setting, "threads": threads, "runtime": runtime_of(setting)}
        | {name: statistics.median(run[name] for run in rounds) for name in rounds[0]}
        | sizes[setting]
        for (setting, threads), rounds in runs.items()
    ]


def table(results: dict) -> str:
    """Markdown: speeds by the number of threads, and in brackets relative to dense."""
    runs, threads = results["runs"], results["options"]["threads"]
    prompt = results["options"]["prompt"]
    titles = [f"tokens/s, {count} thread{'s' * (count > 1)}" for count in threads]
    titles += [f"first token of {prompt}, {count} thread{'s' * (count > 1)}, s" for count in threads]
    lines = [f"| | file, MB | memory, MB | {' | '.join(titles)} |", "|---|" + "---|" * (2 + len(titles))]
    cells = {(run["setting"], run["threads"]): run for run in runs}
    for setting in dict.fromkeys(run["setting"] for run in runs):
        mine = [cells[setting, count] for count in threads]
        dense = [cells.get((DENSE, count)) for count in threads]
        shown = [f"{mine[0]['file'] / 1e6:.0f}", f"{mine[0]['resident'] / 1e6:.0f}"]
        for name, digits in (("tokens_per_second", 1), ("first_token_seconds", 2)):
            for run, other in zip(mine, dense, strict=True):
                times = "" if other is None else f" ({faster(name, run, other):.2f})"
                shown.append(f"{run[name]:.{digits}f}{times}")
        lines.append(f"| {setting} | {' | '.join(shown)} |")
    return "\n".join(lines)


def faster(name: str, run: dict, other: dict) -> float:
    """How many times as fast a run is as another."""
    ratio = run[name] / other[name]
    return ratio if name == "tokens_per_second" else 1 / ratio


def picture(results: dict, path: Path) -> None:
    """Plot tokens per second by the bytes of the weights in memory, a panel for each number of threads."""
    threads = results["options"]["threads"]
    figure, panels = plt.subplots(
        1, len(threads), figsize=(4.8 * len(threads), 3.8), layout="constrained", squeeze=False
    )
    for axes, count in zip(panels[0], threads, strict=True):
        for run in results["runs"]:
            if run["threads"] != count:
                continue
            colour = {"packed": "#b3361e", DENSE: "black"}.get(run["runtime"], "#3f6fa8")
            point = run["weights"] / 1e9, run["tokens_per_second"]
            axes.plot(*point, "o", color=colour, ms=5)
            axes.annotate(run["setting"], point, (4, 3), textcoords="offset points", fontsize=7, color=colour)
        axes.set(title=f"{count} thread{'s' * (count > 1)}", xlabel="weights in memory, GB", ylabel="tokens per second")
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def parse() -> argparse.Namespace:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", metavar="FOLDER", help="measure this model; default: a random Llama")
    arguments.add_argument("--layers", type=int, default=16, help="of the random Llama")
    kinds = "dense, packed settings such as 0.8 or 2:4 int4, and layers of torch and torchao"
    arguments.add_argument("--settings", "--only", nargs="+", default=[DENSE, "2:4", "0.8"], help=kinds)
    arguments.add_argument("--prompt", type=int, default=128, help="tokens before the first one is written")
    arguments.add_argument("--new", type=int, default=32)
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--name", default="generate", help="of the file in results/")
    arguments.add_argument("--quantized", action="store_true", help="other defaults: the table of quantized weights")
    arguments.add_argument("--plot", metavar="NAME", help="print the table and draw the picture of results/NAME.json")
    if arguments.parse_known_args()[0].quantized:
        arguments.set_defaults(**QUANTIZED)
    return arguments.parse_args()


def show(name: str) -> None:
    results = read(name)
    print(table(results))
    picture(results, RESULTS / f"{name}.png")


def main() -> None:
    logging.disable_progress_bar()
    options = parse()
    if options.plot:
        show(options.plot)
        return
    options.settings = available(options.settings)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        maker = CONTEXT.Process(target=make, args=(root, options.settings, options.layers, options.model))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise SystemExit(f"the checkpoints could not be made: exit code {maker.exitcode}")
        runs = measure(options, root)
    write(
        options.name, {"options": vars(options), "versions": versions("torch", "torchao", "transformers"), "runs": runs}
    )
    show(options.name)


if __name__ == "__main__":
    main()
