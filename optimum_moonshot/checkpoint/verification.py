"""Compare the weights in a folder's files, layer by layer, with its declared metadata, without loading the model."""

import dataclasses
import os
from functools import cached_property
from typing import Any

from safetensors import SafetensorError

from ..errors import MoonshotError, check_path, reason, require
from ..masks import follows
from ..objective.grid import Grid
from ..objective.patterns import NM, parse_pattern
from ..packing import Quantized
from ..reports.tables import text_table
from .declared_metadata import (
    CARD,
    CONFIG,
    Declaration,
    DeclaredMetadata,
    WeightLocations,
    locate_weights,
    read_declared_metadata,
)
from .file_integrity import check_files, check_no_other_weights
from .hub import HUB_OPTIONS, local_folder
from .stored_weights import StoredWeights, Zeros
from .weight_files import Checkpoint

_SPARSER = 0.01  # difference of sparsities that is worth a note
_ROUNDED = 1e-6  # rounding error of a declared sparsity
_UNREADABLE = (MoonshotError, SafetensorError, KeyError, ValueError, IndexError, RuntimeError)  # of damaged files


@dataclasses.dataclass(frozen=True)
class LayerFinding:
    """One pruned layer in the files. Fields that could not be read are None, for the reason in `problem`."""

    name: str
    declared: float | None  # the sparsity in the report
    pattern: str | None  # the declared n:m
    shape: tuple[int, int] | None = None  # d_out, d_in
    stored: str | None = None  # representation, such as "bfloat16" or "packed bfloat16"
    zeros: int | None = None
    sparsity: float | None = None
    follows: bool | None = None  # whether its zeros have that pattern
    bits: int | None = None  # the declared bits of a surviving weight
    on_grid: bool | None = None  # whether its weights are on the declared grid
    bits_per_weight: float | None = None  # stored, of all its weights; None if another tool has quantized it
    problem: str = ""

    def row(self) -> list[str]:
        """The row of the table."""
        shape = "" if self.shape is None else f"{self.shape[0]}×{self.shape[1]}"
        sparsities = ["" if value is None else f"{value:.4f}" for value in (self.declared, self.sparsity)]
        fits = {True: self.pattern or "", False: f"not {self.pattern}", None: ""}[self.follows]
        bits = "" if self.bits_per_weight is None else f"{self.bits_per_weight:.3f}"
        return [self.name, shape, self.stored or "", *sparsities, fits, bits]


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`. It is true if everything matches the declared metadata."""

    path: str
    format: str  # "dense", "packed", or the method of another tool that has quantized it
    checksums: bool | None  # whether a packed checkpoint's are right; None for a dense one
    layers: tuple[LayerFinding, ...]
    sparsity: float | None  # zeros among the weights of the pruned layers that can be read
    model_sparsity: float | None  # zeros among all weights in the files; None where some cannot be read
    parameters: int | None  # all weights in the files; None where some cannot be read
    bits_per_weight: float | None  # stored bits of the pruned layers per weight; None if another tool quantized them
    model_bits_per_weight: float | None  # of all weights in the files; None likewise
    declared: tuple[str, ...]  # the metadata of each file
    mismatches: tuple[str, ...]  # differences from it, and damage
    notes: tuple[str, ...]  # other differences from the files as they were written

    def __bool__(self) -> bool:
        return not self.mismatches

    def to_dict(self) -> dict[str, Any]:
        """Convert the result to JSON types."""
        return {**dataclasses.asdict(self), "matches": bool(self)}

    def table(self, width: int = 120) -> str:
        """A text table, `width` characters wide, of the layers, then the declared metadata and the mismatches."""
        headers = ["layer", "shape", "stored as", "declared", "sparsity", "n:m", "bits"]
        table = text_table(headers, [layer.row() for layer in self.layers], width, left=("stored as",))
        sums = {True: "; every checksum is right", False: "; damaged", None: ""}[self.checksums]
        lines = [f"format      {self.format}{sums}"]
        if self.sparsity is not None:
            whole = "" if self.model_sparsity is None else f", {self.model_sparsity:.4f} of the whole model"
            lines.append(f"sparsity    {self.sparsity:.4f} over {len(self.layers)} layers{whole}")
        if self.bits_per_weight is not None:
            bits = self.model_bits_per_weight
            whole = "" if bits is None else f", {bits:.3f} of the whole model"
            lines.append(f"bits        {self.bits_per_weight:.3f} per weight of these layers{whole}")
        lines += [f"declared    {line}" for line in self.declared]
        lines += [f"note        {note}" for note in self.notes]
        lines += [f"mismatch    {line}" for line in self.mismatches]
        count = len(self.mismatches)
        verdict = f"{count} mismatch{'es' if count > 1 else ''}" if count else "matches its metadata"
        lines.append(f"verdict     {verdict if self.declared or count else 'no metadata declares that it is pruned'}")
        return "\n".join([*([table, ""] if self.layers else []), *lines])


def verify(name_or_path: str | os.PathLike[str], *, trust_remote_code: bool = False, **hub: Any) -> Verification:
    """Compare the weights of a checkpoint with its declared metadata, whichever tool wrote it last.

    This checks the files (of a packed checkpoint, every checksum), the zeros, the n:m and the grid of every pruned
    layer against config.json, the report and the model card, and that transformers would load no other files. No model
    is loaded. More zeros than declared are a note; fewer zeros, or a weight whose zeros cannot be determined, are a
    mismatch.

    Args:
        name_or_path: a local folder or a Hub repository, dense, packed, or quantized afterwards by another tool.
        trust_remote_code: run the model's own code, to find its layers.
        hub: `revision`, `token`, `cache_dir` and `local_files_only` of a repository.

    Raises:
        MoonshotError: there is no checkpoint, or none in safetensors files.
    """
    check_path("name_or_path", name_or_path)
    unknown = sorted(hub.keys() - set(HUB_OPTIONS))
    supported = f"the options of verify are trust_remote_code, {', '.join(HUB_OPTIONS)}"
    require(not unknown, supported, field=", ".join(unknown))
    checkpoint = Checkpoint(local_folder(name_or_path, whole=True, **hub))
    declared, damage = read_declared_metadata(checkpoint), _damage(checkpoint)
    format = "packed" if checkpoint.packed else "dense"
    other = None if checkpoint.packed else checkpoint.quant_method  # of another tool
    try:
        tensors = checkpoint.open()
    except (MoonshotError, SafetensorError, OSError) as error:
        raise MoonshotError(damage[0] if damage else f"{checkpoint.folder} cannot be read: {reason(error)}") from None
    with tensors:
        stored = StoredWeights(tensors)
        locations = locate_weights(checkpoint.folder, declared, stored.names(), trust_remote_code=trust_remote_code)
        comparison = _Comparison(locations, declared)
        comparison.read(stored, f", quantized by {other}," if other else "")
    mismatches = [*declared.damaged, *damage, *comparison.mismatches()]
    card = declared.declarations.get(CARD)
    if card is not None and card.format not in (None, format, other):
        mismatches.append(f"{CARD} says that it is {card.format}: it is {format}")
    exported = card is not None and card.format == other
    note = f"config.json: another tool has quantized it ({other})"
    notes = [*locations.notes, *([note] if other and not exported else [])]
    parameters = comparison.parameters
    return Verification(
        path=str(name_or_path),
        format=other or format,
        checksums=not damage if checkpoint.packed else None,
        layers=comparison.layers,
        sparsity=comparison.sparsity,
        model_sparsity=comparison.zeros / parameters if parameters else None,
        parameters=parameters,
        bits_per_weight=comparison.bits_per_weight,
        model_bits_per_weight=8 * comparison.bytes / parameters if parameters and comparison.bytes else None,
        declared=tuple(declaration.line() for declaration in declared.declarations.values()),
        mismatches=tuple(dict.fromkeys(mismatches)),
        notes=(*notes, *comparison.notes()),
    )


def _damage(checkpoint: Checkpoint) -> list[str]:
    """The errors of the integrity checks of the files; raises `MoonshotError` if there are no files."""
    errors, checks = [], [check_files, check_no_other_weights] if checkpoint.files else []
    for check in checks:
        try:
            check(checkpoint)
        except MoonshotError as error:
            errors.append(reason(error))
    return errors


class _Comparison:
    """The weights in the files, and the metadata to compare them with."""

    def __init__(self, locations: WeightLocations, declared: DeclaredMetadata):
        self.locations, self.declared, names = locations, declared, locations.layers
        declarations = declared.declarations.items()
        self.patterns = {source: _patterns(entry, declared, names) for source, entry in declarations}
        self.grids = {} if declared.record is None else declared.record.layer_grids(names)
        self.stored: dict[str, _StoredLayer] = {}
        self.problems: dict[str, str] = {}  # layer → why it cannot be compared
        self.matches: dict[tuple[str, NM], bool] = {}  # whether a layer has a pattern
        self.parameters: int | None = 0  # all weights in the files; None where some cannot be read
        self.zeros = 0  # zeros among these weights
        self.bytes: int | None = 0  # stored bytes of these weights; None also where another tool has quantized some
        self.moved: list[str] = []  # word embeddings that are not on their grid

    def read(self, stored: StoredWeights, by: str) -> None:
        """Read all weights, one in memory at a time; `by` names the tool that has quantized them, in messages."""
        for weights, conversion in self.locations.together(stored.names()):
            try:
                contents = {weight: stored.zeros(weight) for weight in weights}
                loaded = self.locations.loaded(contents, conversion)
            except _UNREADABLE as error:
                self.parameters = self.bytes = None
                name = self.locations.layer_of(weights[0], conversion)
                if name is not None:
                    self.problems[name] = f"its weight{by} cannot be read: {reason(error)}"
                continue
            for content in contents.values():
                self.parameters = _added(self.parameters, content.mask.numel())
                self.zeros += int(content.mask.sum())
                self.bytes = _added(self.bytes, content.bytes)
            for weight in contents.keys() & self.locations.embeddings.keys():
                on_grid = _is_on_grid(contents[weight], self.locations, weight, self.locations.embeddings[weight])
                self.moved += [weight] if on_grid is False else []
            for name, content in loaded.items():
                self._add(name, content)

    def _add(self, name: str, content: Zeros) -> None:
        """Compare the weight of a layer, or of one of its experts, with the declared patterns and grid."""
        keep, grid = ~self.locations.as_matrix(name, content.mask), self.grids.get(name)
        for pattern in {rules[name] for rules in self.patterns.values() if name in rules}:
            self.matches[name, pattern] = self.matches.get((name, pattern), True) and follows(keep, pattern)
        on_grid = None if grid is None else _is_on_grid(content, self.locations, name, grid)
        shape = keep.shape[0], keep.shape[1]
        layer = _StoredLayer(shape, content.stored, int(content.mask.sum()), content.bytes, on_grid)
        previous = self.stored.setdefault(name, layer)
        if previous.shape[1] != shape[1]:
            self.problems.setdefault(name, f"its experts have {previous.shape[1]} and {shape[1]} inputs")
        elif previous is not layer:
            previous.append(layer)

    @cached_property
    def layers(self) -> tuple[LayerFinding, ...]:
        """The findings of all pruned layers."""
        return tuple(map(self._finding, self.locations.layers))

    def _finding(self, name: str) -> LayerFinding:
        report = None if self.declared.compacted else self.declared.report
        problem = self.problems.get(name, "" if name in self.stored else "its weight is in no file")
        values = {} if problem else self.stored[name].values()
        expected = None if report is None else report.shapes.get(name)
        if values and expected not in (None, values["shape"]):
            problem = f"its shape is {list(values['shape'])}, the report says {list(expected or ())}"
        grid = self.grids.get(name)
        pattern = next((rules[name] for rules in self.patterns.values() if name in rules), None)
        return LayerFinding(
            name,
            declared=None if report is None else report.layers.get(name),
            pattern=None if pattern is None else str(pattern),
            follows=None if pattern is None else self.matches.get((name, pattern)),
            bits=None if grid is None else grid.bits,
            problem=problem,
            **values,
        )

    @property
    def sparsity(self) -> float | None:
        total = sum(layer.shape[0] * layer.shape[1] for layer in self.layers if layer.shape is not None)
        return sum(layer.zeros or 0 for layer in self.layers) / total if total else None

    @property
    def bits_per_weight(self) -> float | None:
        sizes = [(layer.shape, layer.bits_per_weight) for layer in self.layers]
        complete = [(shape[0] * shape[1], bits) for shape, bits in sizes if shape is not None and bits is not None]
        if not complete or len(complete) < len(sizes):
            return None
        return sum(count * bits for count, bits in complete) / sum(count for count, _ in complete)

    def mismatches(self) -> list[str]:
        """Differences from the declared metadata."""
        lines = []
        for declaration in self.declared.declarations.values():
            lines += self._wrong_patterns(declaration)
            lines += [] if self.declared.compacted else self._wrong_sparsities(declaration)
        for bits in sorted({layer.bits for layer in self.layers if layer.bits}):
            quantized = [layer for layer in self.layers if layer.bits == bits]
            off = [layer.name for layer in quantized if layer.on_grid is False]
            if off:
                line = f"{CONFIG} says {bits} bits: {len(off)} of {len(quantized)} layers are not on their grid"
                lines.append(f"{line}, such as {off[0]}")
        for weight in self.moved:
            bits = self.locations.embeddings[weight].bits
            lines.append(f"{CONFIG} says {bits} bits of the word embeddings: {weight} is not on their grid")
        problems = [f"{layer.name}: {layer.problem}" for layer in self.layers if layer.problem]
        return [*lines, *_first(problems, "layers differ")]

    def _wrong_patterns(self, declaration: Declaration) -> list[str]:
        source, patterns = declaration.source, self.patterns[declaration.source]
        wrong = [name for name, pattern in patterns.items() if self.matches.get((name, pattern)) is False]
        lines = []
        for pattern in dict.fromkeys(patterns[name] for name in wrong):
            names = [name for name in wrong if patterns[name] == pattern]
            of = sum(other == pattern for other in patterns.values())
            lines.append(f"{source} says {pattern}: {len(names)} of {of} layers are not, such as {names[0]}")
        return lines

    def _wrong_sparsities(self, declaration: Declaration) -> list[str]:
        lines, declared = [], declaration.layers
        fewer = [
            layer
            for layer in self.layers
            if layer.name in declared and layer.shape is not None and layer.zeros is not None
            if layer.zeros < round(declared[layer.name] * layer.shape[0] * layer.shape[1])
        ]
        if fewer:
            layer = fewer[0]
            lines.append(
                f"{declaration.source}: {len(fewer)} of {len(declared)} layers have fewer zeros than it says, such as "
                f"{layer.name} with {layer.sparsity:.4f} for {declared[layer.name]:.4f}"
            )
        expected, sparsity = declaration.sparsity, self.sparsity
        if expected is not None and sparsity is not None and sparsity < expected - _ROUNDED:
            digits = next(digits for digits in range(4, 18) if f"{expected:.{digits}f}" != f"{sparsity:.{digits}f}")
            says = f"{declaration.source} says sparsity {expected:.{digits}f}"
            lines.append(f"{says}: the layers have {sparsity:.{digits}f}")
        return lines

    def notes(self) -> list[str]:
        """Differences that are not mismatches."""
        if self.declared.compacted:
            return ["the model was compacted: no zeros are declared"]
        lines = [
            f"{layer.name}: sparsity {layer.sparsity:.4f}, more than the declared {layer.declared:.4f}"
            for layer in self.layers
            if layer.sparsity and layer.declared is not None and layer.sparsity > layer.declared + _SPARSER
        ]
        return _first(lines, "layers are sparser than declared")


@dataclasses.dataclass
class _StoredLayer:
    """The weight of a layer in the files, or the weights of its experts, one below another."""

    shape: tuple[int, int]  # d_out, d_in
    stored: str
    zeros: int
    bytes: int | None
    on_grid: bool | None

    def append(self, expert: "_StoredLayer") -> None:
        """Add the weight of the next expert."""
        self.shape, self.stored = (self.shape[0] + expert.shape[0], self.shape[1]), expert.stored
        self.zeros += expert.zeros
        self.bytes = _added(self.bytes, expert.bytes)
        self.on_grid = self.on_grid if self.on_grid is False else expert.on_grid

    def values(self) -> dict[str, Any]:
        """The fields of a `LayerFinding`."""
        count, bits = self.shape[0] * self.shape[1], None if self.bytes is None else 8 * self.bytes
        values = {name: value for name, value in vars(self).items() if name != "bytes"}
        return {**values, "sparsity": self.zeros / count, "bits_per_weight": None if bits is None else bits / count}


def _added(total: int | None, number: int | None) -> int | None:
    """The sum; None if one of the two is unknown."""
    return None if total is None or number is None else total + number


def _is_on_grid(content: Zeros, locations: WeightLocations, layer: str, grid: Grid) -> bool | None:
    """Whether a weight is on the declared grid; None if another tool has quantized it."""
    if content.weight is None or content.format == Quantized.of(grid).name:
        return None if content.weight is None else True
    try:
        Quantized.of(grid).pack(locations.as_matrix(layer, content.weight), None)
    except MoonshotError:
        return False
    return True


def _patterns(declaration: Declaration, declared: DeclaredMetadata, layers: tuple[str, ...]) -> dict[str, NM]:
    """The n:m of every layer, by one declaration."""
    if declared.compacted:
        return {}
    try:
        if declaration.rules is not None:
            by_rules = declaration.rules.of(layers)
            return {name: pattern for name, pattern in by_rules.items() if isinstance(pattern, NM)}
        if any(other.rules is not None and other.rules.rules for other in declared.declarations.values()):
            return {}  # every layer has its own, which this file does not declare
        pattern = parse_pattern(declaration.pattern, None) if ":" in declaration.pattern else None
        return dict.fromkeys(layers, pattern) if isinstance(pattern, NM) else {}
    except MoonshotError:  # rules for other layers, or not a pattern: its line shows it
        return {}


def _first(lines: list[str], problem: str) -> list[str]:
    """The first of the lines, followed by their number; empty without lines."""
    more = f" ({len(lines)} {problem})" if len(lines) > 1 else ""
    return [lines[0] + more] if lines else []
