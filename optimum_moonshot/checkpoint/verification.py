"""What a folder really holds, layer by layer, against what its texts claim: read from the files, without a model."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..errors import MoonshotError, check_path, reason, require
from ..masks import follows
from ..objective.patterns import NM, parse_pattern
from ..reports.tables import text_table
from .declared_metadata import CARD, Claim, Claims, read_claims
from .file_integrity import check_alone
from .file_integrity import verify as check_files
from .loading import HUB_OPTIONS, local_folder
from .packed_format import METHOD
from .stored_weights import StoredWeights
from .weight_files import packed_version, read_config, weight_files
from .weight_locations import Places, find_places

_SPARSER = 0.01  # more zeros than were claimed, as a share of the weights, that are worth a note
_ROUNDED = 1e-6  # what texts lose of a sparsity
_UNREADABLE = (MoonshotError, SafetensorError, KeyError, ValueError, IndexError, RuntimeError)  # by damaged files


@dataclasses.dataclass(frozen=True)
class LayerFinding:
    """One pruned layer as the files have it. What could not be read is None, and `problem` says why."""

    name: str
    claimed: float | None  # its sparsity by the report
    pattern: str | None  # the n:m that is claimed for it
    shape: tuple[int, int] | None = None  # d_out, d_in
    stored: str | None = None  # how, such as "bfloat16" or "packed bfloat16"
    zeros: int | None = None
    sparsity: float | None = None
    follows: bool | None = None  # whether it is of that pattern
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found. It is true if every claim holds."""

    path: str
    format: str  # "dense", "packed", or the method of another tool that quantized it
    checksums: bool | None  # whether those of a packed checkpoint hold; a dense one has none
    layers: tuple[LayerFinding, ...]
    sparsity: float | None  # zeros among the weights of the pruned layers that can be read
    model_sparsity: float | None  # zeros among all weights in the files; None where some cannot be read
    parameters: int | None  # all weights in the files; likewise
    claims: tuple[str, ...]  # what each text says
    broken: tuple[str, ...]  # claims that do not hold, and damage
    notes: tuple[str, ...]  # what else is different from what was written

    def __bool__(self) -> bool:
        return not self.broken

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return {**dataclasses.asdict(self), "holds": bool(self)}

    def table(self, width: int = 120) -> str:
        """For people: a row per layer, then what the texts say and what differs.

        Args:
            width: characters of a line of the table.
        """
        headers = ["layer", "shape", "stored as", "claimed", "sparsity", "n:m"]
        table = text_table(headers, [_row(layer) for layer in self.layers], width, left=("stored as",))
        return "\n".join([*([table, ""] if self.layers else []), *self._summary()])

    def _summary(self) -> list[str]:
        sums = {True: "; every checksum holds", False: "; damaged", None: ""}[self.checksums]
        lines = [f"format      {self.format}{sums}"]
        if self.sparsity is not None:
            whole = "" if self.model_sparsity is None else f", {self.model_sparsity:.4f} of the whole model"
            lines.append(f"sparsity    {self.sparsity:.4f} over {len(self.layers)} layers{whole}")
        lines += [f"says        {claim}" for claim in self.claims]
        lines += [f"note        {note}" for note in self.notes]
        lines += [f"differs     {line}" for line in self.broken]
        count = len(self.broken)
        verdict = f"{count} claim{'s do' if count > 1 else ' does'} not hold" if count else "every claim holds"
        return [*lines, f"verdict     {verdict if self.claims or count else 'no text claims that it is pruned'}"]


def verify(name_or_path: str | os.PathLike, *, trust_remote_code: bool = False, **hub: Any) -> Verification:
    """Say what a checkpoint really holds, whoever wrote it last, and whether it is what its texts claim.

    Checked are the files (of a packed checkpoint every checksum), the zeros and the n:m of every pruned layer against
    config.json, the report and the model card, and that nothing else would be loaded. No model is loaded. More zeros
    than are claimed are a note, fewer are not what was claimed; nor is a weight whose zeros cannot be told.

    Args:
        name_or_path: a local folder or a Hub repository, dense, packed, or quantized afterwards by another tool.
        trust_remote_code: run code that comes with the model, to know its layers.
        hub: `revision`, `token`, `cache_dir` and `local_files_only` of a repository.

    Raises:
        MoonshotError: there is no checkpoint, or none in safetensors files.
    """
    check_path("name_or_path", name_or_path)
    unknown = sorted(hub.keys() - set(HUB_OPTIONS))
    require(not unknown, f"{', '.join(unknown)}: verify takes trust_remote_code, {', '.join(HUB_OPTIONS)}")
    folder = local_folder(name_or_path, whole=True, **hub)
    version, claims = packed_version(folder), read_claims(folder)
    files, damage, other = weight_files(folder, version), _damage(folder, version), _other_tool(folder)
    with _opened(folder, files, damage) as stored:
        places = find_places(folder, claims, stored.names(), trust_remote_code=trust_remote_code)
        reading = _Reading.of(stored, places, claims, other)
    broken = [*claims.damaged, *damage, *reading.broken(), *_wrong_format(claims, version)]
    notes = [*places.notes, *([f"config.json: another tool has quantized it ({other})"] if other else [])]
    return Verification(
        path=str(name_or_path),
        format=other or ("dense" if version is None else "packed"),
        checksums=None if version is None else not damage,
        layers=reading.layers,
        sparsity=reading.sparsity,
        model_sparsity=reading.model_sparsity,
        parameters=reading.parameters,
        claims=tuple(claim.line() for claim in claims.found.values()),
        broken=tuple(dict.fromkeys(broken)),
        notes=(*notes, *reading.notes()),
    )


def _damage(folder: Path, version: int | None) -> list[str]:
    """What is wrong with the files themselves, or beside them."""
    found = []
    for check in (check_files, check_alone):
        try:
            check(folder, version)
        except MoonshotError as error:
            found.append(reason(error))
    return found


def _opened(folder: Path, files: list[Path], damage: list[str]) -> StoredWeights:
    """The files; where they cannot be opened, the error says what is damaged."""
    try:
        return StoredWeights(files)
    except (MoonshotError, SafetensorError, OSError) as error:
        raise MoonshotError(damage[0] if damage else f"{folder} cannot be read: {reason(error)}") from None


def _other_tool(folder: Path) -> str | None:
    """The method by which another tool has quantized a checkpoint."""
    quantization = read_config(folder).get("quantization_config")
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else METHOD
    return None if method == METHOD else str(method)


def _wrong_format(claims: Claims, version: int | None) -> list[str]:
    claim, found = claims.found.get(CARD), "dense" if version is None else "packed"
    wrong = claim is not None and claim.format not in (None, found)
    return [f"{CARD} says that it is {claim.format}: it is {found}"] if wrong and claim else []


@dataclasses.dataclass
class _Reading:
    """What the weights in the files are, and what is claimed of them."""

    layers: tuple[LayerFinding, ...]
    parameters: int | None
    model_zeros: int
    claims: Claims
    patterns: Mapping[str, Mapping[str, NM]]  # source → layer → n:m
    held: Mapping[tuple[str, NM], bool]  # whether a layer is of a pattern

    @classmethod
    def of(cls, stored: StoredWeights, places: Places, claims: Claims, other: str | None) -> "_Reading":
        """One pass over all weights, one in memory at a time; `other` is the method of another tool."""
        by = f", quantized by {other}," if other else ""
        patterns = {claim.source: _patterns(claim, claims, places.layers) for claim in claims.found.values()}
        found, held, whole, zeros = {}, {}, 0, 0
        for weight in stored.names():
            name = places.weights.get(weight)
            try:
                mask, kind = stored.zeros(weight)
            except _UNREADABLE as error:
                whole = None
                if name is not None:
                    found[name] = {"problem": f"its weight{by} cannot be read: {reason(error)}"}
                continue
            count = int(mask.sum())
            whole, zeros = None if whole is None else whole + mask.numel(), zeros + count
            if name is not None:
                matrix = ~places.as_matrix(name, mask)
                for pattern in {rules[name] for rules in patterns.values() if name in rules}:
                    held[name, pattern] = held.get((name, pattern), True) and follows(matrix, pattern)
                found[name] = _with_part(found.get(name), matrix.shape, kind, count)
        lost = {"problem": "no file holds its weight"}
        layers = tuple(_finding(name, found.get(name, lost), claims, patterns, held) for name in places.layers)
        return cls(layers, whole, zeros, claims, patterns, held)

    @property
    def sparsity(self) -> float | None:
        read = [layer for layer in self.layers if layer.shape is not None]
        total = sum(layer.shape[0] * layer.shape[1] for layer in read)
        return sum(layer.zeros for layer in read) / total if total else None

    @property
    def model_sparsity(self) -> float | None:
        return self.model_zeros / self.parameters if self.parameters else None

    def broken(self) -> list[str]:
        """Claims that do not hold."""
        lines = []
        for claim in self.claims.found.values():
            lines += self._wrong_patterns(claim) + ([] if self.claims.compacted else self._wrong_sparsities(claim))
        lost = [layer for layer in self.layers if layer.problem]
        return [*lines, *_such(lost, lambda layer: f"{layer.name}: {layer.problem}", "layers differ")]

    def _wrong_patterns(self, claim: Claim) -> list[str]:
        patterns = self.patterns[claim.source]
        wrong = [name for name, pattern in patterns.items() if self.held.get((name, pattern)) is False]
        lines = []
        for pattern in dict.fromkeys(patterns[name] for name in wrong):
            names = [name for name in wrong if patterns[name] == pattern]
            of = sum(other == pattern for other in patterns.values())
            lines.append(f"{claim.source} says {pattern}: {len(names)} of {of} layers are not, such as {names[0]}")
        return lines

    def _wrong_sparsities(self, claim: Claim) -> list[str]:
        lines = []
        fewer = [layer for layer in self.layers if layer.name in claim.layers and _has_fewer(layer, claim)]
        if fewer:
            layer = fewer[0]
            lines.append(
                f"{claim.source}: {len(fewer)} of {len(claim.layers)} layers have fewer zeros than it says, such as "
                f"{layer.name} with {layer.sparsity:.4f} for {claim.layers[layer.name]:.4f}"
            )
        if claim.sparsity is not None and self.sparsity is not None and self.sparsity < claim.sparsity - _ROUNDED:
            lines.append(f"{claim.source} says sparsity {claim.sparsity:.4f}: the layers have {self.sparsity:.4f}")
        return lines

    def notes(self) -> list[str]:
        """What is no less than was claimed, but other."""
        if self.claims.compacted:
            return ["the model was made smaller: no zeros are claimed"]
        sparser = [each for each in self.layers if each.sparsity and each.claimed is not None]
        sparser = [each for each in sparser if each.sparsity > each.claimed + _SPARSER]
        line = "{0.name}: sparsity {0.sparsity:.4f}, more than the {0.claimed:.4f} that is claimed"
        return _such(sparser, line.format, "layers are sparser than is claimed")


def _with_part(known: dict[str, Any] | None, shape: torch.Size, kind: str, zeros: int) -> dict[str, Any]:
    """What was found of a layer, with one more of its weights: of another expert, the next rows."""
    if known is not None and known.get("problem"):
        return known
    if known is not None and known["shape"][1] != shape[1]:
        return {"problem": f"its experts have {known['shape'][1]} and {shape[1]} inputs"}
    rows, zeros = (0, zeros) if known is None else (known["shape"][0], known["zeros"] + zeros)
    whole = rows + shape[0], shape[1]
    return dict(shape=whole, stored=kind, zeros=zeros, sparsity=zeros / (whole[0] * whole[1]))


def _patterns(claim: Claim, claims: Claims, layers: tuple[str, ...]) -> dict[str, NM]:
    """The n:m of every layer, by one text."""
    if claims.compacted:
        return {}
    try:
        if claim.rules is not None:
            found = claim.rules.of(layers)
        elif any(other.rules is not None and other.rules.rules for other in claims.found.values()):
            return {}  # every layer has its own, which this text does not say
        else:
            found = dict.fromkeys(layers, parse_pattern(claim.pattern, None) if ":" in claim.pattern else None)
    except MoonshotError:  # rules for other layers, or a pattern that is none: its line shows it
        return {}
    return {name: pattern for name, pattern in found.items() if isinstance(pattern, NM)}


def _has_fewer(layer: LayerFinding, claim: Claim) -> bool:
    if layer.shape is None or layer.zeros is None:
        return False
    return layer.zeros < round(claim.layers[layer.name] * layer.shape[0] * layer.shape[1])


def _finding(
    name: str,
    found: dict[str, Any],
    claims: Claims,
    patterns: Mapping[str, Mapping[str, NM]],
    held: Mapping[tuple[str, NM], bool],
) -> LayerFinding:
    """One row, with the claims of the first text that makes any."""
    report = claims.report
    pattern = next((rules[name] for rules in patterns.values() if name in rules), None)
    told = None if report is None or claims.compacted else report.shapes.get(name)
    if told is not None and found.get("shape") not in (None, told):
        found = {**found, "problem": f"its shape is {list(found['shape'])}, the report says {list(told)}"}
    return LayerFinding(
        name=name,
        claimed=None if report is None or claims.compacted else report.layers.get(name),
        pattern=None if pattern is None else str(pattern),
        follows=None if pattern is None else held.get((name, pattern)),
        **found,
    )


def _such(items: list, line, what: str) -> list[str]:
    """The first of some lines, with how many there are."""
    more = f" ({len(items)} {what})" if len(items) > 1 else ""
    return [line(items[0]) + more] if items else []


def _row(layer: LayerFinding) -> list[str]:
    shape = "" if layer.shape is None else f"{layer.shape[0]}×{layer.shape[1]}"
    shares = ["" if share is None else f"{share:.4f}" for share in (layer.claimed, layer.sparsity)]
    fits = {True: layer.pattern or "", False: f"not {layer.pattern}", None: ""}[layer.follows]
    return [layer.name, shape, layer.stored or "", *shares, fits]
