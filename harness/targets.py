"""Makes targets of a captured model: equal regions together, with reference, sizes, values and sampled inputs.

Every reference is executed on the captured inputs and must reproduce the captured outputs bit for bit; a region whose
reference does not is left out and said so.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from harness import wire
from harness.capture import Capture, CapturedGraph, Replay
from harness.kinds import TITLES, fusion_kind, fusion_title, kind_of
from harness.partition import Family, is_parameter
from harness.patterns import pattern_text
from harness.records import CallSite, ProfileReport, Role, Target, TensorSpec, ValueStatistics
from harness.reference import Written, write_reference
from harness.regions import Region, module_of, structural_key
from harness.roofline import region_bytes, region_flops
from harness.symbols import Symbols, symbolise

SAMPLE_LIMIT_BYTES = 64 * 2**20
STATISTICS_LIMIT = 1 << 20  # elements looked at per tensor


@dataclass
class Draft:
    """A target in the making: its sites, the first of which it is written from."""

    sites: list[tuple[int, Region]]
    written: Written
    pattern: Any
    symbols: Symbols | None
    kind: str
    id: str = ""
    values: dict[int, dict[int, ValueStatistics]] = field(default_factory=dict)  # site, input
    samples: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    mismatch: str = ""
    members: tuple[str, ...] = ()  # of a fusion: the target of each region that it is made of

    @property
    def region(self) -> Region:
        """The site the target is written from."""
        return self.sites[0][1]


Place = tuple[Any, ...]
Elsewhere = Sequence[Sequence[Mapping[Place, Region]]]  # by further size, then by graph


def draft_targets(found: Capture) -> list[Draft]:
    """Structurally equal regions of all graphs, in order of first occurrence."""
    groups: dict[tuple[str, ...], list[tuple[int, Region]]] = {}
    places: dict[int, Place] = {}
    elsewhere = [[by_place(graph.regions) for graph in graphs] for graphs in found.others]
    for number, graph in enumerate(found.graphs):
        for place, region in by_place(graph.regions).items():
            places[id(region)] = place
            key = (structural_key(region), *(_key_at(other[number], place) for other in elsewhere))
            groups.setdefault(key, []).append((number, region))
    drafts = [_draft(sites, places[id(sites[0][1])], found, elsewhere) for sites in groups.values()]
    _name(drafts)
    return drafts


def draft_fusions(found: Capture, drafts: Sequence[Draft]) -> list[Draft]:
    """Fusions of equal structure made of the same targets, those of `draft_targets`."""
    target_of = {id(region): draft.id for draft in drafts for _, region in draft.sites}
    kinds = {draft.id: draft.kind for draft in drafts}
    groups: dict[tuple[Any, ...], list[tuple[int, Region]]] = {}
    places: dict[int, Place] = {}
    elsewhere = [[by_place(graph.fusions) for graph in graphs] for graphs in found.others]
    for number, graph in enumerate(found.graphs):
        for place, region in by_place(graph.fusions).items():
            members = tuple(target_of[id(part)] for part in region.parts)
            places[id(region)] = place
            key = (members, structural_key(region), *(_key_at(other[number], place) for other in elsewhere))
            groups.setdefault(key, []).append((number, region))
    fusions = []
    for (members, *_), sites in groups.items():
        draft = _draft(sites, places[id(sites[0][1])], found, elsewhere)
        draft.members, draft.kind = members, fusion_kind([kinds[member] for member in members])
        fusions.append(draft)
    _name(fusions)
    return fusions


def by_place(regions: Sequence[Region]) -> dict[Place, Region]:
    """Regions by what stays the same at another size: module, operations, and their order among their like."""
    counts: dict[Place, int] = {}
    found: dict[Place, Region] = {}
    for region in regions:
        look = (region.module, region.family, tuple(node[0] for node in region.pattern["nodes"]), len(region.outputs))
        counts[look] = counts.get(look, 0) + 1
        found[(*look, counts[look])] = region
    return found


def _key_at(regions: Mapping[Place, Region], place: Place) -> str:
    other = regions.get(place)
    return "" if other is None else structural_key(other)


def _draft(sites: list[tuple[int, Region]], place: Place, found: Capture, elsewhere: Elsewhere) -> Draft:
    number, region = sites[0]
    others = [regions[number].get(place) for regions in elsewhere]
    sizes = [0, *(index + 1 for index, other in enumerate(others) if other is not None)]
    pattern, symbols = region.pattern, None
    if len(sizes) > 1:
        patterns = [region.pattern, *(other.pattern for other in others if other is not None)]
        merged = symbolise(patterns, _known(found, sizes))
        if merged is not None:
            pattern, symbols = merged
    written = write_reference(region, pattern, symbols)
    aten = region.facts.ops[region.nodes[0]] if region.family is Family.HEAVY else ()
    return Draft(sites, written, pattern, symbols, kind_of(written.graph, region.family, aten))


def _known(found: Capture, indexes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The batch and sequence sizes over some of the captured sizes, where they vary."""
    chosen = [found.sizes[index] for index in indexes]
    known: dict[str, tuple[int, ...]] = {}
    for name, sizes in (("B", [size.batch for size in chosen]), ("S", [size.length for size in chosen])):
        present = [size for size in sizes if size is not None]
        if len(present) == len(sizes) and len(set(present)) > 1:
            known[name] = tuple(present)
    return known


def _name(drafts: Sequence[Draft]) -> None:
    counts: dict[str, int] = {}
    for draft in drafts:
        counts[draft.kind] = counts.get(draft.kind, 0) + 1
        draft.id = f"{draft.kind}_{counts[draft.kind]}"


def observe(found: Capture, drafts: Sequence[Draft]) -> None:
    """Run the captured graphs on their real inputs: value statistics of every site, then samples and the references."""
    for number, graph in enumerate(found.graphs):
        own = [
            (draft, index, region)
            for draft in drafts
            for index, (place, region) in enumerate(draft.sites)
            if place == number
        ]
        for inputs in graph.calls[:1]:
            _watch_values(graph, inputs, own)
    for number, graph in enumerate(found.graphs):
        chosen = [
            (draft, draft.sites[index][1])
            for draft in drafts
            for index in _telling_sites(draft)
            if draft.sites[index][0] == number
        ]
        for inputs in graph.calls[:1]:
            _watch_samples(graph, inputs, chosen)


def _watch_values(graph: CapturedGraph, inputs: Sequence[Any], sites: Sequence[tuple[Draft, int, Region]]) -> None:
    readers: dict[Node, list[tuple[Draft, int, int]]] = {}
    for draft, index, region in sites:
        for position, node in enumerate(region.inputs):
            readers.setdefault(node, []).append((draft, index, position))

    def watch(node: Node, value: Any) -> None:
        if node in readers and isinstance(value, torch.Tensor):
            statistics = statistics_of(value)
            for draft, index, position in readers[node]:
                draft.values.setdefault(index, {})[position] = statistics

    _replay(graph, inputs, watch)


def _replay(graph: CapturedGraph, inputs: Sequence[Any], watch: Callable[[Node, Any], None]) -> None:
    """Run once, changing nothing."""
    with torch.no_grad(), unchanged(graph, inputs):
        Replay(graph.module, watch).run(*inputs)


@contextmanager
def unchanged(graph: CapturedGraph, inputs: Sequence[Any]) -> Iterator[None]:
    """Put back what running the graph on `inputs` writes to, and the random generators."""
    facts = graph.facts
    placeholders = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    saved = [
        (leaf, leaf.detach().clone())
        for node, leaf in zip(placeholders, inputs, strict=True)
        if isinstance(leaf, torch.Tensor) and facts.storages.get(node, frozenset()) & facts.mutated
    ]
    with torch.random.fork_rng(enabled=bool(facts.random)):
        yield
    with torch.no_grad():
        for leaf, before in saved:
            leaf.copy_(before)


def statistics_of(tensor: torch.Tensor) -> ValueStatistics:
    """Mean, standard deviation and range of the finite entries (of a regular sample of a very large tensor)."""
    flat = tensor.detach()
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    flat = flat.reshape(-1)
    if flat.numel() > STATISTICS_LIMIT and tensor.is_floating_point():
        flat = flat[:: flat.numel() // STATISTICS_LIMIT + 1]
    wide = flat.double() if flat.device.type == "cpu" else flat.float()
    if tensor.is_floating_point() or tensor.is_complex():
        wide = wide[torch.isfinite(wide)]
    if wide.numel() == 0:
        return ValueStatistics(0.0, 0.0, 0.0, 0.0)
    found = torch.stack([wide.mean(), wide.std(correction=0), wide.min(), wide.max()]).tolist()
    return ValueStatistics(*found)


def _telling_sites(draft: Draft) -> list[int]:
    """The first site, and the one whose activations differ most from it."""

    def distance(index: int) -> float:
        base, other = draft.values.get(0, {}), draft.values.get(index, {})
        spreads = [(base[p].std, other[p].std) for p in base if p in other and base[p].std > 0 and other[p].std > 0]
        return max((abs(math.log(one / two)) for one, two in spreads), default=0.0)

    if len(draft.sites) == 1:
        return [0]
    return [0, max(range(1, len(draft.sites)), key=distance)]


def _watch_samples(graph: CapturedGraph, inputs: Sequence[Any], chosen: Sequence[tuple[Draft, Region]]) -> None:
    order = {node: index for index, node in enumerate(graph.module.graph.nodes)}
    due: dict[Node, list[tuple[Draft, Region]]] = {}
    uses: dict[Node, int] = {}
    for draft, region in chosen:
        last = max((*region.nodes, *region.inputs), key=lambda node: order[node])
        due.setdefault(last, []).append((draft, region))
        for node in (*region.inputs, *region.outputs):
            uses[node] = uses.get(node, 0) + 1
    held: dict[Node, Any] = {}

    def watch(node: Node, value: Any) -> None:
        if node in uses:
            held[node] = value
        for draft, region in due.get(node, ()):
            _sample(draft, region, held)
            for used in (*region.inputs, *region.outputs):
                uses[used] -= 1
                if uses[used] == 0:
                    held.pop(used, None)

    _replay(graph, inputs, watch)


def _sample(draft: Draft, region: Region, held: Mapping[Node, Any]) -> None:
    arguments = tuple(held[node] for node in region.inputs)
    draft.mismatch = draft.mismatch or reference_mismatch(
        draft.written.source, arguments, [held[node] for node in region.outputs]
    )
    size = sum(extent(tensor) * tensor.element_size() for tensor in arguments)
    kept = sum(extent(tensor) * tensor.element_size() for sample in draft.samples for tensor in sample)
    if size + kept <= SAMPLE_LIMIT_BYTES:
        draft.samples.append(tuple(packed(tensor) for tensor in arguments))


def reference_mismatch(source: str, arguments: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    """Why the reference does not reproduce the captured outputs bit for bit, or ""."""
    scope: dict[str, Any] = {}
    try:
        exec(compile(source, "<reference>", "exec"), scope)  # noqa: S102 - our own generated text
        with torch.no_grad():
            found = scope["reference"](*arguments)
    except Exception as error:  # noqa: BLE001 - generated text may fail in any way; the target is then left out
        return f"its reference fails: {type(error).__name__}: {error}"
    outputs = found if isinstance(found, tuple) else (found,)
    if len(outputs) != len(expected):
        return f"its reference returns {len(outputs)} tensors instead of {len(expected)}"
    for one, two in zip(outputs, expected, strict=True):
        if one.shape != two.shape or one.dtype != two.dtype or one.stride() != two.stride():
            return f"its reference returns {one.dtype} {tuple(one.shape)} instead of {two.dtype} {tuple(two.shape)}"
        if not torch.equal(_bits(one), _bits(two)):
            return "its reference differs from the captured outputs"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that NaN equals NaN."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()]) if tensor.dim() else tensor.reshape(1)


def extent(tensor: torch.Tensor) -> int:
    """Elements between the first and the last one of a strided tensor, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy with the same strides that owns just the memory it shows."""
    source = tensor.detach()
    whole = torch.zeros(extent(source), dtype=source.dtype)
    shown = whole.as_strided(source.shape, source.stride())
    for dim, stride in enumerate(source.stride()):
        if stride == 0 and source.shape[dim] > 1:
            source, shown = source.narrow(dim, 0, 1), shown.narrow(dim, 0, 1)
    shown.copy_(source)
    return whole.as_strided(tensor.shape, tensor.stride())


def finish(draft: Draft, calls: Mapping[int, int]) -> Target:
    """The draft as a record, without times."""
    region = draft.region
    sites = tuple(
        site for number, each in draft.sites for site in [_call_site(number, each)] * max(1, calls.get(number, 1))
    )
    symbols = draft.symbols
    return Target(
        id=draft.id,
        kind=draft.kind,
        title=f"{_title(draft)} ×{len(sites)}",  # noqa: RUF001 - as people write it
        key=pattern_text(draft.pattern),
        inputs=tuple(_input_spec(draft, index) for index in range(len(region.inputs))),
        constants=draft.written.constants,
        outputs=tuple(_output_spec(draft, index) for index in range(len(region.outputs))),
        graph=draft.written.graph,
        results=draft.written.results,
        reference=draft.written.source,
        bindings=symbols.bindings() if symbols is not None else ({},),
        call_sites=sites,
        flops=region_flops(region),
        bytes=region_bytes(region),
        precision=_precision(draft),
        members=draft.members,
    )


def _call_site(number: int, region: Region) -> CallSite:
    return CallSite(number, region.module, source_of(region))


def source_of(region: Region) -> str:
    """The user's line that most of a region comes from, such as "llama.py:24"."""
    for node in region.nodes:
        trace = node.meta.get("stack_trace") or node.stack_trace
        frames = [line for line in (trace or "").splitlines() if line.strip().startswith("File ")]
        if frames:
            parts = frames[-1].split('"')
            line = parts[2].split("line ")[1].split(",")[0] if len(parts) > 2 and "line " in parts[2] else "?"
            return f"{Path(parts[1]).name}:{line}"
    return ""


def _title(draft: Draft) -> str:
    if draft.members:
        return fusion_title(draft.kind)
    title = TITLES[draft.kind]
    if draft.kind in ("rmsnorm", "layernorm", "groupnorm"):
        names = {module_of(region.nodes)[1] for _, region in draft.sites}
        return names.pop() or title if len(names) == 1 else title
    if draft.kind == "linear":
        shapes = [tuple(draft.region.facts.values[node].shape) for node in draft.region.inputs]
        matrices = [shape for shape in shapes[1:] if len(shape) == 2]
        if matrices:
            out = draft.region.facts.values[draft.region.outputs[0]].shape[-1]
            return f"linear {shapes[0][-1]}→{int(out)}"
    return title


def _input_spec(draft: Draft, index: int) -> TensorSpec:
    node = draft.region.inputs[index]
    tensor = draft.region.facts.values[node]
    dims = draft.symbols.dims[index] if draft.symbols is not None else tuple(int(size) for size in tensor.shape)
    values = _merged_values([site[index] for site in draft.values.values() if index in site])
    spec = _spec(draft.written.inputs[index], tensor, dims)
    return replace(spec, role=_role(draft, index, node, tensor, values), values=values)


def _spec(name: str, tensor: torch.Tensor, dims: tuple[int | str, ...]) -> TensorSpec:
    return TensorSpec(
        name,
        Role.ACTIVATION,
        str(tensor.dtype).removeprefix("torch."),
        tuple(int(size) for size in tensor.shape),
        tuple(int(stride) for stride in tensor.stride()),
        dims,
    )


def _merged_values(found: Sequence[ValueStatistics]) -> ValueStatistics | None:
    if not found:
        return None
    first = found[0]
    return ValueStatistics(
        first.mean, max(each.std for each in found), min(each.low for each in found), max(each.high for each in found)
    )


def _role(draft: Draft, index: int, node: Node, tensor: torch.Tensor, values: ValueStatistics | None) -> Role:
    if tensor.dtype is torch.bool:
        return Role.MASK
    if not tensor.is_floating_point() and not tensor.is_complex():
        return Role.INDEX
    fixed = draft.symbols is None or all(isinstance(dim, int) for dim in draft.symbols.dims[index])
    origin = _origin(node)
    if is_parameter(origin) or (origin.op in ("placeholder", "get_attr") and "_buffers_" in origin.name and fixed):
        return Role.WEIGHT
    extreme = values is not None and values.low < -1e4
    if draft.kind == "attention" and index >= 3 and (extreme or draft.written.inputs[index].startswith("mask")):
        return Role.MASK
    return Role.ACTIVATION


def _origin(node: Node) -> Node:
    """What a chain of one-argument operations (views, casts) starts from."""
    while node.op in ("call_function", "call_method") and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _output_spec(draft: Draft, index: int) -> TensorSpec:
    node = draft.region.outputs[index]
    tensor = draft.region.facts.values[node]
    dims: tuple[int | str, ...] = tuple(int(size) for size in tensor.shape)
    if draft.symbols is not None:
        sizes = draft.pattern["outputs"][index][1]
        dims = tuple(_dim_name(size, draft.symbols) for size in sizes)
    return _spec(draft.written.results[index], tensor, dims)


def _dim_name(size: int | str, symbols: Symbols) -> int | str:
    """A plain symbol by its name; a product by a name of its own where it has one, else by its expression."""
    if isinstance(size, int):
        return size
    expression = size[1:]
    if expression in symbols.values:
        return expression
    product = [math.prod(_factor(part, symbols, i) for part in expression.split("*")) for i in range(_count(symbols))]
    return next((name for name, values in symbols.values.items() if list(values) == product), expression)


def _factor(part: str, symbols: Symbols, index: int) -> int:
    return int(part) if part.isdigit() else symbols.values[part][index]


def _count(symbols: Symbols) -> int:
    return len(next(iter(symbols.values.values())))


def _precision(draft: Draft) -> str:
    """What the original's products really use on this device."""
    tensor = draft.region.facts.values[draft.region.outputs[0]]
    if tensor.device.type != "cuda" or draft.region.family is Family.LIGHT:
        return ""
    if tensor.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    if tensor.dtype is torch.bfloat16 and torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction:
        return "bf16 reduced-precision reductions"
    if tensor.dtype is torch.float16 and torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction:
        return "fp16 reduced-precision reductions"
    return ""


def save(folder: Path, report: ProfileReport, samples: Mapping[str, Sequence[tuple[torch.Tensor, ...]]]) -> None:
    """Write targets/ID.json, targets/ID.samples.pt and profile.json below a folder."""
    place = folder / "targets"
    place.mkdir(parents=True, exist_ok=True)
    for target in report.targets:
        (place / f"{target.id}.json").write_text(wire.to_json(target), encoding="utf-8")
        torch.save(list(samples.get(target.id, ())), place / f"{target.id}.samples.pt")
    (folder / "profile.json").write_text(wire.to_json(report), encoding="utf-8")
