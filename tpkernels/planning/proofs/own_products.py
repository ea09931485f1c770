"""Which modules are cut by the parameters that their code multiplies by itself, as XLNet's attention is by heads.

It owns the way there.  Of a module's parameters that stand in products (:mod:`tpkernels.nn.parameter_products`), those
with a dimension of one size are cut along it: where that is a dimension of the result, as the weight of a column is,
and where the product sums over it, as that of a row is.  What else the parts meet as a whole, a bias for each head, is
cut with them.  A replay of the module decides, and one of the whole model beside all groups that hold.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

from tpkernels.planning.proofs.hypotheses import Proof, Slice
from tpkernels.planning.proofs.pair_proofs import roles_of
from tpkernels.planning.proofs.replay_checks import drawn_for_whole, half_partial
from tpkernels.planning.proofs.search_again import SearchAgain
from tpkernels.planning.proofs.whole_replays import Blamed, WholeReplays
from tpkernels.planning.replays.replay import Replay
from tpkernels.planning.replays.roles import unlike_ranks
from tpkernels.planning.runs.function_calls import ProductCall
from tpkernels.planning.runs.layer_groups import Group
from tpkernels.planning.runs.session import Scope
from tpkernels.planning.splits import Unproven

__all__ = ["DecidedProducts", "decide_products", "told"]

MOST_CUTS, MOST_NUMBERS, MOST_SLICES = 16, 8, 16
"""Attempts for one module: ways to cut its products, numbers that code reads, and parameters that are cut as well."""


@dataclass
class DecidedProducts:
    """Those that hold, and the replay of the whole model with them; None if there are none."""

    products: dict[Group, Proof] = field(default_factory=dict)
    replay: Replay | None = None


def decide_products(
    replays: WholeReplays, proven: Mapping[Group, Proof], pairs: Mapping[Group, Proof], barred: Container[str]
) -> DecidedProducts:
    """Cut modules by their products, as far as that holds beside ``proven`` and ``pairs``; none of ``barred``."""
    found: dict[Group, Proof] = {}
    for mode, recording in replays.observation.firsts:
        replays.shadow.set_mode(mode)
        taken = {_owner(group) for group in found}
        found |= _in_recording(SearchAgain(replays.shadow, recording, replays.world_size), barred, taken)
    replays.shadow.set_mode(replays.observation.mode)
    while found:
        groups = [*proven, *pairs, *found]
        try:
            replay = replays.run(proven, {**pairs, **found})
            guilty = {*half_partial(replay, replays.shadow.modules), *drawn_for_whole(replay, says_all=True)}
            if not guilty:
                return DecidedProducts(found, replay)
        except Blamed as blamed:
            guilty = {*blamed.groups}
        wrong = {groups[number] for number in guilty if number < len(groups)} & found.keys()
        found = {group: proof for group, proof in found.items() if wrong and group not in wrong}
    return DecidedProducts()


def told(products: Mapping[Group, Proof]) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    """What a plan says of them: by module, the parameters that its code multiplies by; and the dimension of each."""
    found, dims = dict[str, tuple[str, ...]](), dict[str, int]()
    for group, proof in products.items():
        names = (*group.multiplied, *group.summing)
        found[_owner(group)] = tuple(sorted(name.rpartition(".")[2] for name in names))
        dims |= {name: proof.slices[name].dim for name in names}
    return found, dims


def _owner(group: Group) -> str:
    return group.multiplied[0].rpartition(".")[0]


def _in_recording(search: SearchAgain, barred: Container[str], taken: Container[str]) -> dict[Group, Proof]:
    calls: dict[str, dict[str, list[ProductCall]]] = {}
    alone = search.shadow.own_tensors()
    for call in search.recording.product_calls.values():
        if call.name not in alone:  # another module has it as well
            continue
        calls.setdefault(call.name.rpartition(".")[0], {}).setdefault(call.name, []).append(call)
    scopes = {scope.name: scope for scope in reversed(search.recording.scopes)}
    known: dict[Any, tuple[Group, str, Proof] | None] = {}
    found: dict[Group, Proof] = {}
    for owner, products in calls.items():
        if owner not in scopes or owner in barred or owner in taken:
            continue
        scope = scopes[owner]
        shapes = str([event.outputs for event in search.recording.events[scope.start : scope.stop]])
        said = [(name[len(owner) :], [call.product.equation for call in some]) for name, some in products.items()]
        key = type(search.shadow.modules[owner]), str(said), shapes
        if key not in known:
            one = _proven(search, scope, products)
            known[key] = None if one is None else (one[0], owner, one[1])
        if (like := known[key]) is not None:
            group, first, proof = like
            moved = [tuple(owner + name[len(first) :] for name in some) for some in (group.multiplied, group.summing)]
            mine = Group((), (), group.random, multiplied=moved[0], summing=moved[1])
            found[mine] = proof.moved((group, first), (mine, owner))
    return found


def _proven(
    search: SearchAgain, scope: Scope, products: Mapping[str, Sequence[ProductCall]]
) -> tuple[Group, Proof] | None:
    for slices in islice(_cuts(search, products), MOST_CUTS):
        sums = {name: _places(products[name], cut.dim)[0][0] for name, cut in slices.items()}
        multiplied, summing = (tuple(name for name in slices if sums[name] is kind) for kind in (False, True))
        group = Group((), (), True, multiplied=multiplied, summing=summing)
        for attributes in islice(search.attribute_sets([scope], search.world_size), MOST_NUMBERS):
            tries = iter(range(MOST_SLICES))
            proof = _with_slices(search, scope, group, Proof({}, attributes, slices=slices), tries)
            if proof is not None:
                return group, proof
    return None


def _places(calls: Sequence[ProductCall], dim: int) -> list[tuple[bool, int]]:
    """What cutting the parameter there means in each of its products; empty if they do not agree on that."""
    places = [place for call in calls if (place := call.product.place(dim)) is not None]
    return places if len(places) == len(calls) and len({sums for sums, _ in places}) == 1 else []


def _cuts(search: SearchAgain, products: Mapping[str, Sequence[ProductCall]]) -> Iterator[dict[str, Slice]]:
    """Each parameter along a dimension of one size, of which every rank has as much; at least one of each kind."""
    shapes = {name: tuple(calls[0].product.weight.shape) for name, calls in products.items()}
    for size in dict.fromkeys(size for shape in shapes.values() for size in shape):
        if size % search.world_size:
            continue
        options = {
            name: dims for name, shape in shapes.items()
            if (dims := [dim for dim, one in enumerate(shape) if one == size and _places(products[name], dim)])
        }  # fmt: skip
        for chosen in product(*options.values()):
            kinds = {_places(products[name], dim)[0][0] for name, dim in zip(options, chosen, strict=True)}
            if len(kinds) == 2:
                yield {name: Slice(dim, (size,)) for name, dim in zip(options, chosen, strict=True)}


def _with_slices(search: SearchAgain, scope: Scope, group: Group, proof: Proof, tries: Iterator[int]) -> Proof | None:
    """The proof, if it holds in the module, or one with more parameters cut that met parts as a whole."""
    roles = roles_of(group, search.shadow, proof)
    try:
        for rank in unlike_ranks(roles, search.world_size):
            Replay(search.shadow, search.recording, roles, proof.attributes, search.world_size, rank).run_scope(scope)
    except Unproven as error:
        for more in search.more_slices(proof, error):
            if next(tries, None) is None:
                return None
            if (found := _with_slices(search, scope, group, more, tries)) is not None:
                return found
        return None
    return proof
