"""The metadata that a folder declares about its weights, and the layers to which the weights in its files belong.

The metadata is in config.json, the report of the run, and the model card. The layers follow from the model on the meta
device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import ModelCard
from torch import Tensor, nn

from ..config import PatternRules
from ..errors import MoonshotError, check_number, reason
from ..model.layers import find_structure, named_layers
from ..model.word_embeddings import word_embeddings
from ..objective.grid import Grid
from ..reports.prune_report import REPORT_NAME, PruneReport
from ..reports.record import KEY, PruningRecord
from .base_card import read_entry
from .folder import Checkpoint
from .loading import checkpoint_meta_model
from .packed_files import pruned_layers, shared_names
from .weight_files import Conversion, conversions, loaded_into

CONFIG, CARD = "config.json", "README.md"


class Declaration(NamedTuple):
    """The metadata of one file."""

    pattern: str  # "n:m", "unstructured", "structured" or "by layer"
    sparsity: float | None  # of all pruned layers together
    rules: PatternRules | None = None  # the pattern of every layer; None: `pattern` for all
    compacted: bool = False  # the zeros were removed
    bits: str = ""  # of the surviving weights, if they are quantized
    format: str = ""  # of the checkpoint

    def __str__(self) -> str:
        sparsity = "" if self.sparsity is None else f"sparsity {self.sparsity:.4f}"
        facts = (self.format, self.pattern, self.bits, sparsity, "compacted" if self.compacted else "")
        return ", ".join(filter(None, facts))


@dataclass
class DeclaredMetadata:
    """The metadata of a folder; a file that is missing or damaged declares nothing."""

    declarations: dict[str, Declaration] = field(default_factory=dict)  # by the name of their file
    damaged: list[str] = field(default_factory=list)  # errors of files that cannot be read
    record: PruningRecord | None = None
    report: PruneReport | None = None

    @property
    def compacted(self) -> bool:
        """Whether the zeros were removed from the model, so that none are declared."""
        return any(declaration.compacted for declaration in self.declarations.values())


def read_declared_metadata(checkpoint: Checkpoint) -> DeclaredMetadata:
    """Read the metadata of a folder with a valid config.json."""
    declared = DeclaredMetadata()
    for source, read in ((CONFIG, _read_record), (REPORT_NAME, _read_report), (CARD, _read_card)):
        try:
            declaration = read(checkpoint, declared)
        except Exception as error:  # the file may contain anything
            named = isinstance(error, MoonshotError) and source in str(error)
            declared.damaged.append(reason(error) if named else f"{source} is damaged: {reason(error)}")
        else:
            declared.declarations |= {} if declaration is None else {source: declaration}
    return declared


def _read_record(checkpoint: Checkpoint, declared: DeclaredMetadata) -> Declaration | None:
    entry = checkpoint.config.get(KEY)
    if entry is None:
        return None
    record = declared.record = PruningRecord.from_dict(entry)
    numbers = [record.config["bits"]] if record.bits is None else sorted(set(record.bits.values()))
    bits = "" if None in numbers or not numbers else f"{', '.join(map(str, numbers))} bits"
    compacted = record.compaction is not None
    return Declaration(_pattern_name(record.config), record.sparsity, record.pattern_rules, compacted, bits)


def _read_report(checkpoint: Checkpoint, declared: DeclaredMetadata) -> Declaration | None:
    if not (checkpoint.folder / REPORT_NAME).is_file():
        return None
    report = PruneReport.load(checkpoint.folder)
    config = report.config
    targets = {layer.name: layer.target_sparsity for layer in report.layers if layer.target_sparsity is not None}
    settings = (config["pattern"], config["sparsity"], config["group_size"], config["allocation"])
    rules = PatternRules.parse(*settings, targets)
    declared.report = report
    return Declaration(_pattern_name(config), report.sparsity, rules, report.compaction is not None)


def _read_card(checkpoint: Checkpoint, declared: DeclaredMetadata) -> Declaration | None:
    if not (checkpoint.folder / CARD).is_file():
        return None
    card = ModelCard.load(checkpoint.folder / CARD, ignore_metadata_errors=True)
    if KEY not in card.data:  # of another program
        return None
    entry = read_entry(card)
    check_number("moonshot: sparsity", entry.get("sparsity"), optional=True)
    return Declaration(str(entry["pattern"]), entry.get("sparsity"), format=str(entry.get("format") or ""))


def _pattern_name(config: Mapping[str, Any]) -> str:
    """The pattern of a configuration; "by layer" if an allocation gives every layer its own."""
    return "by layer" if isinstance(config["allocation"], Mapping) else str(config["pattern"])


@dataclass(frozen=True)
class WeightLocations:
    """The pruned layers, in the model's order, and their weights in the files: one each, or one per expert."""

    layers: tuple[str, ...]
    weights: Mapping[str, str]  # name in the files → layer
    # Weights that transformers splits or merges, and the layers of the resulting parameters.
    converted: tuple[Conversion, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()  # layers that are stored [d_in, d_out], or [experts, d_in, d_out]
    notes: tuple[str, ...] = ()
    embeddings: Mapping[str, Grid] = field(default_factory=dict)  # name in the files of word embeddings → their grid

    def together(self, weights: list[str]) -> Iterator[tuple[tuple[str, ...], Conversion | None]]:
        """The stored weights, each alone or with the weights that transformers converts together with it."""
        converted = {weight for conversion in self.converted for weight, _ in conversion.sources}
        yield from (((weight,), None) for weight in weights if weight not in converted)
        for conversion in self.converted:
            yield tuple(weight for weight, _ in conversion.sources), conversion

    def loaded(self, contents: Mapping[str, Tensor], conversion: Conversion | None) -> dict[str, Tensor]:
        """The parameters that transformers makes of stored weights, by the pruned layer, which may be none.

        `MoonshotError` if the weights have other shapes than config.json declares.
        """
        if conversion is None:
            return {self.weights[weight]: content for weight, content in contents.items() if weight in self.weights}
        try:
            converted = conversion.parameters(contents)
        except Exception as error:  # of transformers' operations
            raise MoonshotError(f"transformers cannot convert it: {reason(error)}") from error
        return {self.parameters[name]: tensor for name, tensor in converted.items() if name in self.parameters}

    def as_matrix(self, layer: str, tensor: Tensor) -> Tensor:
        """Convert a tensor from the layout of a layer's weight in the files to [d_out, d_in]."""
        if tensor.ndim < 2:
            return tensor[None]
        if tensor.ndim == 3:
            return (tensor.mT if layer in self.transposed else tensor).flatten(0, 1)
        return tensor.T if layer in self.transposed else tensor.flatten(1)


def locate_weights(folder: Path, declared: DeclaredMetadata, weights: list[str], **options: Any) -> WeightLocations:
    """Find the layers that are declared as pruned, or all prunable ones without a declaration, in the files.

    Without a model, they are found by the names in the report. `options` are for the model's classes.
    """
    try:
        model = checkpoint_meta_model(folder, **options)
    except MoonshotError as error:
        names = _reported_layers(declared)
        by_name = {weight: weight.removesuffix(".weight") for weight in weights}
        by_name = {weight: name for weight, name in by_name.items() if name in set(names)}
        return WeightLocations(names, by_name, notes=(f"the layers are those of the report: {reason(error)}",))
    layers = _reported_layers(declared) or _declared_layers(declared.record, model)
    selected = set(layers)
    pruned = {name: layer for name, _, layer in named_layers(model) if name in selected and layer is not None}
    names_by_weight = {id(layer.module._parameters.get(layer.key)): name for name, layer in pruned.items()}
    parameters, stored = dict(model.named_parameters(remove_duplicate=False)), loaded_into(model, weights)
    converted = tuple(conversions(model, weights))
    separate = {weight for conversion in converted for weight, _ in conversion.sources}
    owners = {name: names_by_weight.get(id(parameter)) for name, parameter in parameters.items()}
    places = {weight: owners.get(stored.get(weight, "")) for weight in weights if weight not in separate}
    # Single experts are stored [d_out, d_in]: transformers transposes them when it merges them.
    transposed = frozenset(name for name, layer in pruned.items() if layer.axes in ((1, 0), (2, 1)))
    return WeightLocations(
        layers,
        {weight: name for weight, name in places.items() if name},
        converted,
        {parameter: name for parameter, name in owners.items() if name},
        transposed,
        embeddings=_embeddings(declared.record, model, {weight: stored.get(weight, "") for weight in weights}),
    )


def _reported_layers(declared: DeclaredMetadata) -> tuple[str, ...]:
    """The names of the pruned layers in the report; none without a report, or after a compaction."""
    report = declared.report
    return () if report is None or report.compaction else tuple(layer.name for layer in report.layers)


def _declared_layers(record: PruningRecord | None, model: nn.Module) -> tuple[str, ...]:
    """The names of the pruned layers by config.json and the architecture."""
    try:
        if record is None:
            return tuple(layer.name for layer in find_structure(model).layers())
        pruned = pruned_layers(model)  # tied ones by every name
        selected = find_structure(model, record.targets, record.ignore).layers()
        return tuple(layer.name for layer in selected if layer.weight_name in pruned)
    except MoonshotError:  # the model has no layer that can be pruned, or that the record names
        return ()


def _embeddings(record: PruningRecord | None, model: nn.Module, names: Mapping[str, str]) -> dict[str, Grid]:
    """The stored word embeddings that config.json declares as rounded, with their grid; `names`: stored → model's."""
    grid = None if record is None else record.embedding_grid
    if record is None or grid is None:
        return {}
    layers = find_structure(model, record.targets, record.ignore).layers()
    tied = shared_names(model)
    embeddings = {name for embedding in word_embeddings(model, layers) for name in tied[embedding.name]}
    return {weight: grid for weight, name in names.items() if name in embeddings}
