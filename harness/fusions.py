"""Fusions: a heavy region with the light ones around it, offered beside the disjoint cover of a graph.

    linear + GELU, convolution + norm + activation, matmul + scale      products into what reads them
    linear + residual + norm, queries and keys + RoPE                   the same
    norm + linears                                                      a norm into the products that read it
    gate and up + SiLU·up + down                                        both ends of a gated MLP

A fusion is convex and made of whole regions; what lies between them is read by nobody else. Fusions overlap each other
and the cover: which of them are applied is decided by what is kept (agent/selection.py).
"""

from collections.abc import Iterator, Mapping, Sequence

from torch.fx import Node

from harness.partition import Family, Flow, Group, joined

PRODUCT_OPS = ("mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "convolution", "conv")
NORM_OPS = ("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm", "native_group_norm", "mean", "rsqrt")
MAX_PRODUCTS = 4


def fusion_groups(flow: Flow, groups: Sequence[Group]) -> Iterator[tuple[Group, tuple[Group, ...]]]:
    """Each fusion as one group, with the groups that it is made of."""
    owner = {node: group for group in groups for node in group.nodes}
    seen: set[frozenset[int]] = set()
    for light in groups:
        if light.family is not Family.LIGHT:
            continue
        for parts in _around(light, owner, flow):
            key = frozenset(id(part) for part in parts)
            whole = None if key in seen else joined(parts, owner, flow)
            seen.add(key)
            if whole is not None:
                yield whole, tuple(sorted(parts, key=lambda part: part.last))


def _around(light: Group, owner: Mapping[Node, Group], flow: Flow) -> Iterator[list[Group]]:
    before = _products_into(light, owner, flow)
    after = _products_from(light, owner, flow)
    if before and len(before) <= MAX_PRODUCTS:
        yield [*before, light]
    if len(before) > 1 and len(after) == 1 and _reads_alone(after, light, owner, flow):
        yield [*before, light, *after]
    if after and len(after) <= MAX_PRODUCTS and _is_norm(light, flow):
        yield [light, *after]


def _products_into(light: Group, owner: Mapping[Node, Group], flow: Flow) -> list[Group]:
    """The products whose results only this group reads."""
    found: dict[int, Group] = {}
    for node in light.nodes:
        for source in flow.sources(node):
            group = owner.get(source)
            if group is not None and _is_product(group, flow) and _readers(group, flow) <= light.nodes:
                found[id(group)] = group
    return list(found.values())


def _products_from(light: Group, owner: Mapping[Node, Group], flow: Flow) -> list[Group]:
    """The products that read this group, where nothing but products does (another output of it may leave)."""
    readers = [owner.get(user) for user in _readers(light, flow)]
    return list({id(group): group for group in readers if group is not None and _is_product(group, flow)}.values())


def _reads_alone(products: Sequence[Group], light: Group, owner: Mapping[Node, Group], flow: Flow) -> bool:
    return {id(owner.get(user)) for user in _readers(light, flow)} == {id(group) for group in products}


def _readers(group: Group, flow: Flow) -> set[Node]:
    return {user for node in group.nodes for user in flow.users(node)} - group.nodes


def _is_product(group: Group, flow: Flow) -> bool:
    if group.family is not Family.HEAVY or len(group.nodes) != 1:
        return False
    names = [name for node in group.nodes for name in flow.facts.ops[node]]
    return any(name in PRODUCT_OPS or "convolution" in name for name in names) and not any(
        "attention" in name for name in names
    )


def _is_norm(group: Group, flow: Flow) -> bool:
    names = {name for node in group.nodes for name in flow.facts.ops[node]}
    return not names.isdisjoint(NORM_OPS)
