"""State in original names: whole state dicts, Hugging Face checkpoints read by slices, optimizers, clipping, damage."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tpkernels as tpk
from tests.models import zoo
from tests.models.compare import held_bytes
from tests.nn.reference import LIMIT_S, plan_once, tp_mesh
from tests.state.test_snapshots import pairs
from tpkernels.nn.packed import PackedColumnParallelLinear
from tpkernels.state.originals import Part
from tpkernels.testing.spawn import Pools

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.gloo

ONE_BLOCK = {"gpt2": {"n_layer": 1}, "mistral": {"num_hidden_layers": 1}, "bert": {"num_hidden_layers": 1}}


def build(name: str, **changes: Any) -> nn.Module:
    return zoo.build(name, torch.float32, **(ONE_BLOCK.get(name.removesuffix(" 10"), {}) | changes))


def parallel(name: str, sequence: bool = False, **changes: Any) -> nn.Module:
    model = build(name, **changes)
    return tpk.parallelize(model, tp_mesh(), plan_once(model, tp_mesh(), sequence_parallel=sequence))


def unlike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names out of order, and tensors that are not equal bit by bit."""
    if list(found) != list(expected):
        return [f"names {sorted(set(found) ^ set(expected))} or their order"]
    return [
        f"{name}: {tuple(found[name].shape)}, {tuple(tensor.shape)} expected"
        for name, tensor in expected.items()
        if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)
    ]


def whole_states(cases: list[tuple[str, bool]]) -> dict[str, list[str]]:
    """Out of the model and back into one with other values."""
    wrong = {}
    for name, sequence in cases:
        plain, model = build(name), parallel(name, sequence)
        expected = plain.state_dict()
        found = tpk.full_state_dict(model)
        wrong[name] = unlike(found, expected)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        tpk.load_full_state_dict(model, expected)
        wrong[name] += unlike(tpk.full_state_dict(model), expected)
        only = tpk.full_state_dict(model, rank=1)
        wrong[name] += unlike(only, expected if dist.get_rank() == 1 else {})
        parameters = dict(model.named_parameters())
        wrong[name] += [f"{key} is no DTensor" for key, p in parameters.items() if not isinstance(p, DTensor)]
    return wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [("gpt2", True), ("mistral", False), ("conv_lstm", False)]),
        (3, [("bert 10", True), ("transformer 10", False), ("gpt2 10", False), ("gpt2", False)]),
    ],
)
def test_a_whole_state_dict_is_the_unsharded_models_and_loads_back(
    ranks: Pools, world: int, cases: list[tuple[str, bool]], full: bool
) -> None:
    """Packed and transposed layers, tied heads, copied heads, torch's attention, buffers; the residual cut or not.

    Of gpt2's four heads three ranks have 2, 1 and 1, and places for two.
    """
    if full:
        cases = [
            (name, sequence)
            for name in (*zoo.FAMILIES, *zoo.UNEVEN, "nested", "attention 10")
            for sequence in (False, True)
        ]
    for wrong in ranks(world).run(whole_states, cases, timeout=2 * LIMIT_S):
        assert not any(wrong.values()), wrong


def test_units_are_found_in_the_places_that_a_rank_has() -> None:
    """Also where FSDP2 has cut these again: a part of a rank's places has the first of its units, or later ones; and
    where a rank has the places of several blocks, as with `same_bits`."""
    part = Part(torch.arange(24.0).view(6, 2, 2), 0, 0, (2, 1, 1))
    assert part.shape == (8, 2) and part.whole()[:, 0].tolist() == [0, 2, 4, 6, 8, 10, 16, 18]
    assert [part._units_in(2 * rank, 2) for rank in range(3)] == [(0, 2), (2, 1), (3, 1)]
    assert [part._units_in(place, 1) for place in range(6)] == [(0, 1), (1, 1), (2, 1), (3, 0), (3, 1), (4, 0)]
    assert part._units_in(1, 4) == (1, 3) and torch.equal(part.local, part.whole())
    assert part.placed(torch.ones(8, 2)).sum((1, 2)).tolist() == [4, 4, 4, 0, 4, 0]


def reversed_parts() -> list[str]:
    plain, model = build("gpt2"), parallel("gpt2")
    true = PackedColumnParallelLinear.packed_parameters
    fault = {"packed_parameters": lambda self: {key: (dim, keys[::-1]) for key, (dim, keys) in true(self).items()}}
    try:
        PackedColumnParallelLinear.packed_parameters = fault["packed_parameters"]  # type: ignore[assignment]
        return unlike(tpk.full_state_dict(model), plain.state_dict())
    finally:
        PackedColumnParallelLinear.packed_parameters = true  # type: ignore[method-assign]


def test_a_packed_parameter_in_the_wrong_order_is_noticed(ranks: Pools) -> None:
    """The comparison of these tests can fail."""
    for wrong in ranks(2).run(reversed_parts, timeout=LIMIT_S):
        assert len(wrong) == 2 and all("c_attn" in one or "names" in one for one in wrong), wrong


def from_meta(name: str, folder: str, exported: str, dtype: torch.dtype) -> list[str]:
    """A model that never had weights, filled from a checkpoint, beside one that had them; then written anew."""
    plain: Any = zoo.build(name, dtype, **ONE_BLOCK[name.removesuffix(" 10")])
    real = type(plain).from_pretrained(folder, dtype=dtype).eval()
    plan = plan_once(real, tp_mesh())
    tpk.parallelize(real, tp_mesh(), plan)
    with torch.device("meta"):
        model = type(plain)._from_config(plain.config, dtype=dtype).eval()
    tpk.parallelize(model, tp_mesh(), plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrong = []
    loaded = tpk.load_pretrained(model, folder)
    wrong += unlike(tpk.full_state_dict(model), plain.state_dict())
    if loaded.bytes_read != held_bytes(model) or loaded.bytes_read >= loaded.checkpoint_bytes:
        wrong.append(f"read {loaded} bytes, holds {held_bytes(model)}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        wrong.append("something is on the meta device")
    given = zoo.inputs(name, dtype)
    outputs = [zoo.output(net(**given)) for net in (model, real)]
    if not torch.equal(*outputs):
        wrong.append("gives another output")
    outputs[0].float().sum().backward()
    optimizer.step()
    if not unlike(tpk.full_state_dict(model), plain.state_dict()):
        wrong.append("an optimizer made before loading has lost its parameters")
    tpk.save_pretrained(real, exported, max_file_bytes=8_000)
    return wrong


@pytest.mark.sample(2)
@pytest.mark.parametrize(("world", "name"), [(2, "gpt2"), (2, "mistral"), (3, "bert 10")])
def test_a_model_without_weights_reads_its_slices_alone_and_writes_a_checkpoint_for_transformers(
    ranks: Pools, tmp_path: Path, world: int, name: str
) -> None:
    dtype = torch.bfloat16 if name == "mistral" else torch.float32
    plain: Any = zoo.build(name, dtype, **ONE_BLOCK[name.removesuffix(" 10")])
    folder, exported = tmp_path / "given", tmp_path / "exported"
    plain.save_pretrained(folder, max_shard_size="8KB" if name == "mistral" else "5GB")
    for wrong in ranks(world).run(from_meta, name, str(folder), str(exported), dtype, timeout=LIMIT_S):
        assert not wrong
    assert len(list(exported.glob("*.safetensors"))) > 1
    transformers = importlib.import_module("transformers")
    again = getattr(transformers, type(plain).__name__).from_pretrained(exported, dtype=dtype)
    assert not unlike(again.state_dict(), plain.state_dict())
    assert transformers.AutoConfig.from_pretrained(exported).architectures == [type(plain).__name__]


Change = Callable[[dict[str, Tensor]], Any]
STATES: dict[str, tuple[Change, str]] = {
    "missing": (lambda sd: sd.pop("0.bias"), "missing 0.bias; nothing unexpected"),
    "unexpected": (lambda sd: sd.update(extra=torch.zeros(2)), "nothing missing; unexpected extra"),
    "misshaped": (lambda sd: sd.update({"0.weight": sd["0.weight"].T}), r"0.weight is torch.float32 \(6, 13\)"),
    "integers": (lambda sd: sd.update({"0.bias": sd["0.bias"].int()}), "0.bias is torch.int32"),
    "no tensor": (lambda sd: sd.update({"0.bias": [1.0]}), "must be a whole tensor with values, it is a list"),  # type: ignore[dict-item]
    "one rank": (lambda sd: sd["0.weight"].add_(dist.get_rank()), "the ranks have different checkpoints"),
    "one rank lacks": (lambda sd: sd.pop("0.bias") if dist.get_rank() else None, "rank 1: .*missing 0.bias"),
}


def refused(model: nn.Module, call: Callable[[], Any]) -> tuple[str, bool]:
    """What a call raised, and whether the model is as it was."""
    before = tpk.full_state_dict(model)
    try:
        call()
        said = "nothing"
    except ValueError as error:
        said = str(error)
    return said, not unlike(tpk.full_state_dict(model), before)


def bad_states() -> dict[str, tuple[str, bool]]:
    model = parallel("mlp")
    said = {}
    for kind, (change, _) in STATES.items():
        state = {name: tensor + 1 for name, tensor in build("mlp").state_dict().items()}
        change(state)
        said[kind] = refused(model, lambda given=state: tpk.load_full_state_dict(model, given))  # type: ignore[misc]
    said["plain"] = refused(model, lambda: tpk.full_state_dict(build("mlp")))
    return said


def check_said(said: dict[str, tuple[str, bool]], expected: dict[str, str]) -> None:
    for kind, pattern in expected.items():
        text, untouched = said[kind]
        assert untouched, kind
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(text)


def test_a_wrong_state_dict_is_refused_on_every_rank_and_changes_nothing(ranks: Pools) -> None:
    expected = {kind: text for kind, (_, text) in STATES.items()} | {"plain": "is not parallelized"}
    for said in ranks(2).run(bad_states, timeout=LIMIT_S):
        check_said(said, expected)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(path: Path, **changes: str) -> None:
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


INDEX = "model.safetensors.index.json"
FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (lambda f: flip(sorted(f.glob("*.safetensors"))[0], -1), "files were changed or damaged"),
    "cut off": (
        lambda f: sorted(f.glob("*.safetensors"))[1].write_bytes(b"short"),
        "damaged, cut off or no safetensors",
    ),
    "gone": (lambda f: sorted(f.glob("*.safetensors"))[0].unlink(), "which is not a file of that folder"),
    "outside": (lambda f: edit(f / INDEX, **{"0.bias": "../x.safetensors"}), "which is not a file of that folder"),
    "swapped": (lambda f: edit(f / INDEX, **{"4.bias": "model-00001-of-00002.safetensors"}), "which the index has in"),
    "no index": (lambda f: (f / INDEX).write_text("{"), "is damaged or was cut off"),
    "pickled": (lambda f: [(f / INDEX).unlink(), (f / "pytorch_model.bin").touch()], "are pickled"),
    "no folder": (shutil.rmtree, "there is no folder or file"),
}


def exports(folder: str) -> None:
    model = parallel("mlp")
    tpk.save_pretrained(model, folder, max_file_bytes=1000)


def bad_files(folder: str) -> dict[str, tuple[str, bool]]:
    model = parallel("mlp")
    with torch.no_grad():
        model.get_parameter("0.weight").zero_()
    said = {
        kind: refused(model, lambda path=f"{folder}/{kind}": tpk.load_pretrained(model, path))  # type: ignore[misc]
        for kind in (*FILES, "other")
    }
    mine = f"{folder}/{'good' if dist.get_rank() else 'nowhere'}"
    said["one rank"] = refused(model, lambda: tpk.load_pretrained(model, mine))
    said["used"] = refused(model, lambda: tpk.save_pretrained(model, f"{folder}/good"))
    with torch.device("meta"):
        empty = tpk.parallelize(nn.Sequential(nn.Linear(6, 13), Frequencies()), tp_mesh(), {"0": "column_gather"})
    said["buffer"] = refused(model, lambda: tpk.load_full_state_dict(empty, nn.Linear(6, 13).state_dict(prefix="0.")))
    tpk.load_pretrained(model, f"{folder}/good")
    said["good"] = str(unlike(tpk.full_state_dict(model), build("mlp").state_dict())), True
    return said


class Frequencies(nn.Module):
    """Has a buffer that no checkpoint has, and nobody who computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)


def test_a_damaged_checkpoint_is_refused_on_every_rank_and_changes_nothing(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(exports, str(tmp_path / "good"), timeout=LIMIT_S)
    for kind, (damage, _) in FILES.items():
        shutil.copytree(tmp_path / "good", tmp_path / kind)
        damage(tmp_path / kind)
    (tmp_path / "other").mkdir()
    save_file({"0.weight": torch.zeros(2, 2)}, tmp_path / "other" / "model.safetensors")
    expected = {kind: text for kind, (_, text) in FILES.items()} | {
        "other": "not a checkpoint of the Sequential: missing 0.bias, .* and 4 more; nothing unexpected",
        "one rank": "rank 0: there is no folder or file",
        "used": "holds a checkpoint",
        "buffer": r"1 has buffers \['frequencies'\] that are in no checkpoint",
        "good": r"^\[\]$",
    }
    for said in ranks(2).run(bad_files, str(tmp_path), timeout=LIMIT_S):
        check_said(said, expected)


STEPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


def steps_and_norms(name: str) -> list[str]:
    """Optimizers and clipping on gradients that are parts of the unsharded model's, bit by bit."""
    wrong = []
    for kind, make in STEPS.items():
        plain, model = build(name), parallel(name)
        optimizers = [make(net.parameters()) for net in (plain, model)]
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in plain.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            for p, part, place in pairs(model, plain):
                assert p.grad is not None
                cut = DTensor.from_local(
                    place(p.grad).clone(), part.device_mesh, part.placements, run_check=False,
                    shape=part.shape, stride=part.stride(),
                )  # fmt: skip
                part.grad = cut
            for optimizer in optimizers:
                optimizer.step()
        for key, (p, part, place) in enumerate(pairs(model, plain)):
            mine, theirs = part.to_local(), place(p)
            # The fused kernel rounds otherwise where a vector of numbers ends, and a shard ends elsewhere.
            near = kind == "adamw fused" and bool(((mine - theirs).abs() <= 2**-20 * (theirs.abs() + 0.01)).all())
            if not near and not torch.equal(mine, theirs):
                wrong.append(f"{kind}: parameter {key}")
            for slot, value in optimizers[1].state[part].items():
                if value.dim() and value.to_local().shape != part.to_local().shape:
                    wrong.append(f"{kind}: {slot} of parameter {key} is {tuple(value.to_local().shape)}")
    exact = [p.grad.double() for p in plain.parameters() if p.grad is not None]
    local = [part.grad.to_local() for part in model.parameters() if isinstance(part.grad, DTensor)]
    for p in (1.0, 2.0, 3.5, float("inf")):
        expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in exact]), p)
        own = torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in local]), p)
        found = tpk.clip_grad_norm_(model.parameters(), 1e9, p)
        torchs = nn.utils.clip_grad_norm_(model.parameters(), 1e9, p)
        for what, norm in (
            ("ours", found),
            ("torch's", torchs.full_tensor() if isinstance(torchs, DTensor) else torchs),
        ):
            if abs(float(norm) / float(expected) - 1) > 1e-5:
                wrong.append(f"{what} norm of order {p} is {float(norm)}, {float(expected)} expected")
        if p < 10 and abs(float(own) / float(expected) - 1) < 1e-3:
            wrong.append("a rank's own norm would pass")
    for foreach in (None, False):
        before = [grad.clone() for grad in local]
        norm = tpk.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        factor = 0.5 / (float(norm) + 1e-6)
        # a rounding of the factor, one of the product
        if any(
            ((a.double() - b.double() * factor).abs() > 2**-22 * b.abs() * factor).any()
            for a, b in zip(local, before, strict=True)
        ):
            wrong.append(f"foreach={foreach} scales by something else than {factor}")
        for grad, old in zip(local, before, strict=True):
            grad.copy_(old)
    local[0].view(-1)[:1] = float("nan")
    try:
        tpk.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True)
        wrong.append("a NaN passes")
    except RuntimeError as error:
        if "error_if_nonfinite" not in str(error):
            wrong.append(str(error))
    return wrong


def test_optimizers_step_as_unsharded_bit_by_bit_and_norms_are_the_whole_models(ranks: Pools, full: bool) -> None:
    for world, name in ((3, "mistral 10"), *(((2, "gpt2"),) if full else ())):
        for wrong in ranks(world).run(steps_and_norms, name, timeout=LIMIT_S):
            assert not wrong, (world, wrong)
