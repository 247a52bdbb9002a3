"""The weight files of a checkpoint: their names, index and headers, and the names and description of their weights.

A dense checkpoint has transformers' names, ``model.safetensors`` or ``model-00001-of-00002.safetensors`` with an index.
A packed one has names that no other reader looks for, ``moonshot…``, and always an index: without this package,
transformers raises an error instead of initializing the missing weights at random.

``config.json`` of a packed checkpoint has ``quantization_config``: {quant_method: "moonshot", format: "packed",
version}. The metadata of a file has under "moonshot", as JSON: the version, `layers` (a `PackedLayer` each), the
SHA-256 (`sha256`) and the dtype and shape (`stored`, such as "bfloat16 [24, 16]") of every tensor in the file, the
number of weight files (`files`), and the SHA-256 of this entry (`checksum`).

For many architectures, the weights in the files have other names than those in the model: transformers renames them
when it loads them (ViT, vision-language models, …), and reverses that when it saves. In the functions below, `model` is
a `PreTrainedModel`, possibly on the meta device, and `stored` are names in the files of a dense checkpoint.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from reprlib import repr as short
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from ..errors import MoonshotError, check_choice, error_context, require
from ..packing import INPUTS, PackedLayer, suffixes, weight_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXPORT = "compressed-tensors"  # the format for other readers, and `quant_method` in config.json
METHOD = "moonshot"  # `quant_method` in config.json, and the key in the files' metadata
VERSION = 1
RUNTIMES = ("dense", "packed", "auto")
EXPLICIT = "transformers_weights"  # in config.json: a file that transformers reads instead of its usual ones
PACKED_INDEX = "moonshot.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors
_FIELDS = {"layers": dict, "sha256": dict, "stored": dict, "files": int}

Tensors = dict[str, Tensor]
Layers = dict[str, PackedLayer]


def check_runtime(runtime: str, inputs: str) -> None:
    """Raise `MoonshotError` unless weights can be in memory like `runtime`, with `inputs` of products."""
    check_choice("runtime", runtime, RUNTIMES)
    check_choice("inputs", inputs, INPUTS)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write config.json or an index, as transformers does."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def config_entry() -> dict[str, Any]:
    """`quantization_config` of a packed checkpoint."""
    return {"quant_method": METHOD, "format": "packed", "version": VERSION}


def check_config_entry(quantization: Mapping[str, Any]) -> None:
    """Raise `MoonshotError` unless this release reads a packed checkpoint with this `quantization_config`.

    An unknown field is refused because transformers would pass it on as if the caller had chosen it.
    """
    version, format = quantization.get("version"), quantization.get("format")
    if type(version) is not int or version != VERSION or format != "packed":
        raise MoonshotError(
            f"quantization_config={short(dict(quantization))} in config.json: this release reads format 'packed', "
            f"version {VERSION}; update it"
        )
    unknown = {name: value for name, value in quantization.items() if name not in config_entry()}
    require(not unknown, f"quantization_config in config.json has unknown fields: {short(unknown)}", hint="remove them")


class MoonshotPrunedCheckpoint(QuantizationConfigMixin):
    """The runtime of the layers of a pruned checkpoint, as `quantization_config` of `from_pretrained`.

    ```python
    config = MoonshotPrunedCheckpoint(runtime="auto")
    model = AutoModelForCausalLM.from_pretrained("Llama-3.2-1B-2of4-packed", quantization_config=config)
    ```

    transformers also builds it from the entry in config.json of a packed checkpoint, and names it in its error for a
    `MoonshotConfig` that is passed for an already pruned model. A model with packed layers has it as
    `model.config.quantization_config`.

    Args:
        runtime: "dense", "packed" or "auto"; see `load_pruned`.
        dequantize: True for runtime="dense", as transformers names it in other configurations.
        inputs: "int8" or "float"; see `load_pruned`.

    Raises:
        MoonshotError: another runtime, other inputs, or `dequantize` with a runtime other than "dense".
    """

    quant_method = cast(QuantizationMethod, METHOD)

    def __init__(self, runtime: str = "dense", dequantize: bool = False, inputs: str = INPUTS[0]):
        check_runtime(runtime, inputs)
        contradiction = dequantize and runtime != "dense"
        require(not contradiction, f"it contradicts runtime={runtime!r}", field="dequantize", value=dequantize)
        self.runtime, self.dequantize, self.inputs = runtime, dequantize, inputs
        self.verified: frozenset[str] = frozenset()  # absolute paths of files that `load_pruned` has checked

    @classmethod
    def from_dict(cls, config_dict: Any, *args: Any, **kwargs: Any) -> "MoonshotPrunedCheckpoint":
        """Read the entry in config.json; the runtime is the caller's choice, other arguments are ignored."""
        check_config_entry(config_dict)
        return cls()

    def to_dict(self) -> dict[str, Any]:
        return config_entry()

    def get_loading_attributes(self) -> dict[str, Any]:
        """Return the attributes that transformers copies to the configuration of config.json."""
        return {**vars(self)}


class StoredTensors(Mapping[str, Tensor]):
    """The tensors in safetensors files, each read on access; a context manager that closes the files.

    A header that cannot be read raises `SafetensorError`, a damaged description of packed weights `MoonshotError`.
    """

    def __init__(self, paths: Iterable[Path | str]):
        self.metadata: dict[str, str] = {}  # of all files
        self.layers = Layers()  # the packed weights
        self._files: dict[str, Any] = {}  # the open file of every tensor
        with ExitStack() as stack:
            for path in paths:
                file = stack.enter_context(safe_open(path, "pt"))
                metadata = file.metadata() or {}
                self.metadata |= metadata
                self.layers |= described_layers(metadata)
                self._files |= dict.fromkeys(file.keys(), file)
            self._opened = stack.pop_all()

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.close()

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def dtype(self, name: str) -> str:
        """The dtype of a tensor in safetensors' notation, such as "BF16"."""
        return self._files[name].get_slice(name).get_dtype()


def read_tensors(path: Path, names: Iterable[str]) -> Tensors:
    """Read the tensors with these names from a file."""
    with StoredTensors([path]) as stored:
        return {name: stored[name] for name in names}


def new_names(count: int, packed: bool) -> list[str]:
    """The names of `count` new weight files."""
    stem = METHOD if packed else "model"
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


class Header(NamedTuple):
    """The header of a safetensors file."""

    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]  # of all tensors, by name
    bytes: int  # of all tensors


def read_header(path: Path) -> Header:
    """Read the header of a file, also one whose name is not UTF-8, which safetensors does not open.

    `MoonshotError` if it is damaged, and with the first layer that is missing in a truncated file.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length) if length <= min(size, _LONGEST_HEADER) else b"")
        metadata = header.pop("__metadata__", None) or {}
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
        last = max(ends.values(), default=8 + length)
        strings = all(isinstance(value, str) for value in metadata.values())
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise MoonshotError(f"{path} is damaged: its header cannot be read") from None
    require(strings, f"{path} is damaged: its metadata contains other values than strings")
    cut = [name for name, end in sorted(ends.items(), key=lambda item: item[1]) if end > size]
    if cut:
        raise MoonshotError(
            f"{layer_of(cut[0])}: {path.name} is truncated, it has {size} of {last} bytes; {len(cut)} tensors are lost"
        )
    return Header(metadata, shapes, last - 8 - length)


def sort_metadata(path: Path) -> None:
    """Sort the metadata of a new file, so that equal weights are equal bytes: safetensors writes it in random order."""
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        require(len(text) <= length, f"{path}: safetensors wrote a header of {length} bytes for one of {len(text)}")
        file.seek(8)
        file.write(text.ljust(length))


def layer_of(stored: str) -> str:
    """The layer of a stored tensor, for messages."""
    return weight_of(stored).removesuffix(".weight")


@dataclass(frozen=True)
class Description:
    """The description of the tensors in a weight file."""

    layers: Layers  # by the names of the weights
    digests: dict[str, str]  # SHA-256 of every tensor
    stored: dict[str, str]  # `kind` of every tensor
    files: int  # number of weight files of the checkpoint
    intact: bool = True  # whether its own checksum is right

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], layers: Layers, files: int) -> "Description":
        """Describe the tensors of a file, which are in host memory, independently of their order."""
        names = sorted(tensors)
        digests = {name: tensor_digest(tensors[name]) for name in names}
        return cls(dict(sorted(layers.items())), digests, {name: kind(tensors[name]) for name in names}, files)

    def to_json(self) -> str:
        """The text for the file's metadata; `read` is the inverse."""
        values = {
            "version": VERSION,
            "layers": {name: layer.describe() for name, layer in self.layers.items()},
            "sha256": self.digests,
            "stored": self.stored,
            "files": self.files,
        }
        return json.dumps({**values, "checksum": _checksum(values)})

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> "Description | None":
        """The description in a file's metadata; None if it has none. `MoonshotError` names a damaged layer or field."""
        if METHOD not in metadata:
            return None
        try:
            values = json.loads(metadata[METHOD])
        except (ValueError, RecursionError) as error:
            raise MoonshotError(f"the metadata of the packed layers is damaged ({error})") from None
        require(isinstance(values, dict), "the metadata of the packed layers is damaged: it is not an object")
        version = values.get("version")
        same = type(version) is int and version == VERSION
        require(same, f"version={short(version)} of a packed file: this release reads {VERSION}; update it")
        for name, wanted in _FIELDS.items():
            valid = type(values.get(name)) is wanted
            require(valid, f"the metadata of the packed layers is damaged: {name}={short(values.get(name))}")
        layers = Layers()
        for name, entry in values["layers"].items():
            with error_context(name):
                layers[name] = PackedLayer.read(entry)
        checksum = values.pop("checksum", None)
        return cls(layers, values["sha256"], values["stored"], values["files"], checksum == _checksum(values))


def described_layers(metadata: Mapping[str, str] | None) -> Layers:
    """The packed layers that a file's metadata describes; none for a dense file. Raises like `Description.read`."""
    description = Description.read(metadata or {})
    return {} if description is None else description.layers


def _checksum(values: dict[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of the bytes, in row-major order, of a tensor in host memory."""
    content = tensor.contiguous().flatten()
    return sha256(content.view(torch.uint8).numpy().data if content.numel() else b"").hexdigest()


def kind(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, such as "bfloat16 [24, 16]"."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class Target(NamedTuple):
    """The parameter of the model that transformers loads a stored weight into."""

    weight: str  # the parameter; the first of several
    pattern: str | None  # of the weights that are merged, such as all experts' `w1`; None: it is only renamed
    converter: Any  # transformers' `WeightConverter`, where it is merged or split
    fused: bool = False  # whether the converter only merges weights into one fused parameter, such as experts

    def converted(self, stored: Iterable[tuple[str | None, Tensor]], model: Any) -> dict[str, Tensor]:
        """The parameters that the converter makes of stored weights, by their names.

        Args:
            stored: the weights with their patterns, in the order of their names.
            model: some operations compare with its shapes and configuration.
        """
        converter = deepcopy(self.converter)
        for number, (pattern, tensor) in enumerate(stored):
            converter.add_tensor(self.weight, str(number), pattern, tensor)
        converted: dict[str, Any] = converter.convert(self.weight, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def merged(self, shape: Sequence[int], config: Any, stored: Iterable[tuple[str | None, Tensor]]) -> Tensor:
        """Like `converted`, but for a single parameter of this shape, in a model with this configuration."""
        model = SimpleNamespace(get_parameter=lambda _: torch.empty(tuple(shape), device="meta"), config=config)
        return self.converted(stored, model)[self.weight]

    def row_order(
        self, shape: Sequence[int], config: Any, stored: Sequence[tuple[str | None, Sequence[int]]]
    ) -> Tensor | None:
        """The number of the stored row that each row of the parameter equals; None if it has other rows.

        The converter is applied to rows of four columns, 4r to 4r + 3 in row r: two would hide exchanged columns.

        Args:
            shape: of the parameter.
            config: of the model.
            stored: the pattern and the shape of every weight, in the order of their names.
        """
        sizes = [prod(size[:-1]) for _, size in stored]
        numbers = torch.arange(4 * sum(sizes), device="cpu").view(-1, 4)
        rows = zip(stored, numbers.split(sizes), strict=True)
        narrow = [(pattern, tensor.view(*size[:-1], 4)) for (pattern, size), tensor in rows]
        merged = self.merged((*shape[:-1], 4), config, narrow).flatten(0, -2)
        order = merged[:, 0] // 4
        return order if torch.equal(merged, numbers[order]) else None

    def keeps_rows(self, model: Any, shape: Sequence[int]) -> bool:
        """Whether the rows of stored weights of this shape stay whole rows of the parameter that they form."""
        parameter, patterns = model.get_parameter(self.weight).shape, self.converter.source_patterns
        count, rest = divmod(parameter.numel(), prod(shape) * len(patterns))  # weights of every pattern
        if not count or rest or shape[-1] != parameter[-1]:
            return False
        stored = [(pattern, shape) for pattern in patterns for _ in range(count)]
        return self.row_order(parameter, model.config, stored) is not None


class Conversion(NamedTuple):
    """Stored weights that transformers converts together, in other ways than renaming them or stacking experts."""

    sources: tuple[tuple[str, str], ...]  # their names, and the patterns of the converter that they match
    target: Target
    model: nn.Module  # some operations compare with its shapes and configuration

    def parameters(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's parameters that the loader makes of stored weights, or masks of such, by their names.

        Weights of other shapes than config.json declares may raise any error.
        """
        return self.target.converted(((pattern, tensors[name]) for name, pattern in self.sources), self.model)


def conversions(model: nn.Module, stored: Iterable[str]) -> list[Conversion]:
    """The conversions of stored weights, such as fused query, key and value, that `loaded_into` does not describe."""
    from transformers.core_model_loading import dot_natural_key  # late: transformers' quantizers import this package

    groups: dict[str, list[tuple[str, Target]]] = {}
    for name, target in _targets(model, sorted(stored, key=dot_natural_key)):
        if target.pattern is not None and not target.fused:
            groups.setdefault(target.weight, []).append((name, target))
    return [
        Conversion(tuple((name, str(target.pattern)) for name, target in group), group[0][1], model)
        for group in groups.values()
    ]


def parameter_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The name in `model.state_dict()` of every stored weight that transformers loads without splitting or merging."""
    state = model.state_dict()
    targets = _targets(model, stored)
    return {name: target.weight for name, target in targets if target.pattern is None and target.weight in state}


def merged_weights(model: nn.Module, stored: Iterable[str]) -> dict[str, Target]:
    """The stored weights that transformers merges into one fused parameter, such as the weights of single experts."""
    return {name: target for name, target in _targets(model, stored) if target.fused}


def _targets(model: nn.Module, stored: Iterable[str]) -> Iterator[tuple[str, Target]]:
    rename_source_key, renamings, converters = _mapping(model)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    fused = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    state = model.state_dict()
    for name in stored:
        weight, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        converter = by_pattern.get(pattern)
        single = converter is not None and len(converter.target_patterns) == 1
        yield name, Target(weight, pattern, converter, single and weight in fused)


def target_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The name in the model that transformers derives from the name of every stored weight, existing or not."""
    return {name: target.weight for name, target in _targets(model, stored)}


def loaded_into(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The name in `model.state_dict()` that every stored weight is loaded into, alone or merged with others."""
    stored = list(stored)
    merged = {name: target.weight for name, target in merged_weights(model, stored).items()}
    return parameter_names(model, stored) | merged


def followed_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """Like `parameter_names`, but only weights whose packed tensors, of any format, are renamed in the same way."""
    names = parameter_names(model, stored)
    new = renamed(model, (name + end for name in names for end in ("", *suffixes())))
    return {
        name: parameter
        for name, parameter in names.items()
        if all(new[name + suffix] == new[name] + suffix for suffix in suffixes())
    }


def renamed(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The names of stored tensors after transformers has renamed them, before it merges or splits any."""
    rename_source_key, renamings, _ = _mapping(model)
    return {name: rename_source_key(name, renamings, [])[0] for name in stored}


def conversions_of(model: nn.Module, stored: Iterable[str], others: Iterable[Any]) -> list[Any]:
    """The conversions that transformers must store in a loaded model, to reverse them when it saves.

    These are the conversions that any stored name needs, and `others`, which are stored already, each once, in
    transformers' order; conversions that are not of the model's type come first.
    """
    rename_source_key, renamings, converters = _mapping(model)
    for name in stored:
        rename_source_key(name, renamings, converters)
    used = [entry for entry in (*renamings, *converters) if hasattr(entry, "was_used") and entry.was_used()]
    order = {_signature(entry): index for index, entry in enumerate(_conversions(model))}
    entries = {_signature(entry): entry for entry in (*used, *others)}  # releases without `was_used` store all
    return [entries[signature] for signature in sorted(entries, key=lambda signature: order.get(signature, -1))]


def _signature(conversion: Any) -> tuple[Any, ...]:
    patterns = tuple(conversion.source_patterns), tuple(conversion.target_patterns)
    return type(conversion).__name__, *patterns, getattr(conversion, "scope_prefix", None)


def _mapping(model: nn.Module) -> tuple[Any, list[Any], list[Any]]:
    """transformers' function that renames weights, and the renamings and converters of a model."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key  # late, see above

    mapping = _conversions(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    return rename_source_key, renamings, [entry for entry in mapping if isinstance(entry, WeightConverter)]


def _conversions(model: nn.Module) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping  # late, see above

    return get_model_conversion_mapping(cast("PreTrainedModel", model))
