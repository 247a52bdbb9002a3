"""The metadata that a folder declares about its weights, and the locations of the layers that it declares as pruned.

The metadata is in config.json, the report of the run, and the model card. The locations follow from the model on the
meta device.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from torch import Tensor, nn

from ..errors import MoonshotError, check_number, reason, require
from ..model.layers import find_structure, named_layers
from ..model.word_embeddings import word_embeddings
from ..objective.allocation_rules import PatternRules
from ..objective.grid import Grid
from ..reports.prune_report import REPORT_NAME, PruneReport
from ..reports.record import KEY, PruningRecord
from .card import read_entry
from .packed_files import pruned_layers, shared_names
from .pretrained import checkpoint_meta_model
from .stored_weights import Zeros
from .weight_files import Checkpoint
from .weight_names import Conversion, conversions, loaded_into

CONFIG, CARD = "config.json", "README.md"


@dataclass(frozen=True)
class Declaration:
    """The metadata of one file."""

    source: str  # name of the file
    pattern: str  # "n:m", "unstructured" or "structured"
    sparsity: float | None  # of all pruned layers together
    rules: PatternRules | None = None  # the pattern of every layer; None: `pattern` for all
    layers: Mapping[str, float] = field(default_factory=dict)  # the sparsity of every pruned layer
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # d_out, d_in of every pruned layer
    format: str | None = None  # of the checkpoint
    compacted: bool = False  # the zeros were removed
    bits: str | None = None  # of the surviving weights, if they are quantized

    def line(self) -> str:
        """One line of text."""
        sparsity = None if self.sparsity is None else f"sparsity {self.sparsity:.4f}"
        facts = (self.format, self.pattern, self.bits, sparsity, "compacted" if self.compacted else None)
        return f"{self.source}: {', '.join(fact for fact in facts if fact is not None)}"


@dataclass(frozen=True)
class DeclaredMetadata:
    """The declarations of a folder."""

    declarations: Mapping[str, Declaration]  # by their source
    damaged: tuple[str, ...]  # errors of files that cannot be read
    record: PruningRecord | None

    @property
    def compacted(self) -> bool:
        """Whether the zeros were removed from the model, so that none are declared."""
        return any(declaration.compacted for declaration in self.declarations.values())

    @property
    def report(self) -> Declaration | None:
        """The declaration of the report, the only one with every layer."""
        return self.declarations.get(REPORT_NAME)


def read_declared_metadata(checkpoint: Checkpoint) -> DeclaredMetadata:
    """Read the metadata of a folder; `MoonshotError` if its config.json is missing, or not a JSON object."""
    folder, entry, record, damaged = checkpoint.folder, checkpoint.config.get(KEY), None, []
    declarations: dict[str, Declaration] = {}

    def read(source: str, reading: Callable[[], Declaration | None]) -> None:
        try:
            declaration = reading()
        except Exception as error:  # the file may contain anything
            named = isinstance(error, MoonshotError) and source in str(error)
            damaged.append(reason(error) if named else f"{source} is damaged: {reason(error)}")
        else:
            declarations.update({} if declaration is None else {source: declaration})

    if entry is not None:
        try:
            record = PruningRecord.from_dict(entry)
        except MoonshotError as error:
            damaged.append(reason(error))
        else:
            read(CONFIG, lambda: _of_record(record))
    if (folder / REPORT_NAME).is_file():
        read(REPORT_NAME, lambda: _of_report(PruneReport.load(folder)))
    if (folder / CARD).is_file():
        read(CARD, lambda: _of_card(folder))
    return DeclaredMetadata(declarations, tuple(damaged), record)


def _of_record(record: PruningRecord) -> Declaration:
    rules, compacted = record.pattern_rules, record.compaction is not None
    numbers = [record.config.get("bits")] if record.bits is None else sorted(set(record.bits.values()))
    bits = None if None in numbers or not numbers else f"{', '.join(map(str, numbers))} bits"
    return Declaration(CONFIG, _pattern_name(record.config), record.sparsity, rules, compacted=compacted, bits=bits)


def _of_report(report: PruneReport) -> Declaration:
    config = report.config
    targets = {layer.name: layer.target_sparsity for layer in report.layers if layer.target_sparsity is not None}
    settings = (config["pattern"], config.get("sparsity"), config.get("group_size", 1))
    for layer in report.layers:
        check_number(f"sparsity of {layer.name}", layer.sparsity)
        require(len(layer.shape) == 2 and min(layer.shape) > 0, f"shape of {layer.name}: {layer.shape}")
    return Declaration(
        REPORT_NAME,
        _pattern_name(config),
        report.sparsity if report.layers else None,
        PatternRules.parse(*settings, config.get("allocation") or "uniform", targets),
        {layer.name: layer.sparsity for layer in report.layers},
        {layer.name: layer.shape for layer in report.layers},
        compacted=report.compaction is not None,
    )


def _of_card(folder: Path) -> Declaration | None:
    """The declaration of a card; None without an entry of this package."""
    card = ModelCard.load(folder / CARD, ignore_metadata_errors=True)
    if KEY not in card.data:
        return None
    entry = read_entry(card)
    sparsity = entry.get("sparsity")
    check_number("moonshot: sparsity", sparsity, optional=True)
    return Declaration(CARD, str(entry["pattern"]), sparsity, format=entry.get("format"))


def _pattern_name(config: Mapping[str, Any]) -> str:
    """The pattern of a configuration; "by layer" if an allocation gives every layer its own."""
    return "by layer" if isinstance(config.get("allocation"), Mapping) else str(config["pattern"])


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

    def layer_of(self, weight: str, conversion: Conversion | None) -> str | None:
        """The layer of a stored weight, the first of several; None if it is not pruned."""
        return self.weights.get(weight) if conversion is None else self.parameters.get(conversion.target.weight)

    def loaded(self, contents: Mapping[str, Zeros], conversion: Conversion | None) -> dict[str, Zeros]:
        """The weights of pruned layers that transformers makes of stored ones; zeros are moved like weights.

        Raises:
            MoonshotError: the stored weights have other shapes than config.json declares.
        """
        if conversion is None:
            return {self.weights[weight]: content for weight, content in contents.items() if weight in self.weights}
        first, sizes = next(iter(contents.values())), [content.bytes for content in contents.values()]
        weights = {weight: content.weight for weight, content in contents.items() if content.weight is not None}
        try:
            masks = conversion.parameters({weight: content.mask for weight, content in contents.items()})
            made = conversion.parameters(weights) if len(weights) == len(contents) else {}
        except Exception as error:  # of transformers' operations
            raise MoonshotError(f"transformers cannot convert it: {reason(error)}") from error
        stored_bytes, total = sum(size or 0 for size in sizes), sum(mask.numel() for mask in masks.values())

        def share(mask: Tensor) -> int | None:
            """The bytes of one of the parameters."""
            return None if None in sizes else round(stored_bytes * mask.numel() / total)

        return {
            self.parameters[name]: Zeros(mask, first.stored, made.get(name), share(mask))
            for name, mask in masks.items()
            if name in self.parameters
        }

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
        report = declared.report
        names = () if report is None or report.compacted else tuple(report.layers)
        by_name = {weight: weight.removesuffix(".weight") for weight in weights}
        note = f"the layers are those of the report: {reason(error)}"
        by_name = {weight: name for weight, name in by_name.items() if name in set(names)}
        return WeightLocations(names, by_name, notes=(note,))
    layers = _declared_layers(declared, model)
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
        tuple(layers),
        {weight: name for weight, name in places.items() if name},
        converted,
        {parameter: name for parameter, name in owners.items() if name},
        transposed,
        embeddings=_embeddings(declared, model, {weight: stored.get(weight, "") for weight in weights}),
    )


def _embeddings(declared: DeclaredMetadata, model: nn.Module, names: Mapping[str, str]) -> dict[str, Grid]:
    """The stored word embeddings that config.json declares as rounded, with their grid; `names`: stored → model's."""
    grid = None if declared.record is None else declared.record.embedding_grid
    if declared.record is None or grid is None:
        return {}
    layers = find_structure(model, declared.record.targets, declared.record.ignore).layers()
    tied = shared_names(model)
    embeddings = {name for embedding in word_embeddings(model, layers) for name in tied[embedding.name]}
    return {weight: grid for weight, name in names.items() if name in embeddings}


def _declared_layers(declared: DeclaredMetadata, model: nn.Module) -> list[str]:
    """The names of the pruned layers, by the report; without a report, by config.json and the architecture."""
    if declared.report is not None and not declared.report.compacted:
        return list(declared.report.layers)
    try:
        if declared.record is None:
            return [layer.name for layer in find_structure(model).layers()]
        pruned = pruned_layers(model)  # tied ones by every name
        selected = find_structure(model, declared.record.targets, declared.record.ignore).layers()
        return [layer.name for layer in selected if layer.weight_name in pruned]
    except MoonshotError:  # the model has no layer that can be pruned, or that the record names
        return []
