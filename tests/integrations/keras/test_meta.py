"""Models built under ``keras.device("meta")``: no rank ever holds more than its parts and one whole variable."""

from __future__ import annotations

import ctypes
import gc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import tpkernels as tpk
from tests.integrations.keras import models
from tests.integrations.keras.test_training import TIMEOUT
from tpkernels.testing.spawn import Pools, WorkerPool

pytest.importorskip("keras")
pytestmark = pytest.mark.gloo
WIDTH, PAIRS = 2000, 3
ONE = 4 * WIDTH * WIDTH
"""Bytes of the largest variable."""
COMPRESSED = ".compressed.keras"
M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


def deep(width: int) -> Any:
    keras = models.keras_on_torch()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    x = inputs = keras.Input((width,))
    for pair in range(PAIRS):
        h = keras.layers.Dense(width, "relu", name=f"up_{pair}")(x)
        h = keras.layers.Dropout(0.1, name=f"drop_{pair}")(h)
        x = keras.layers.Dense(width, name=f"down_{pair}")(h) + x
    return keras.Model(inputs, keras.layers.LayerNormalization(name="norm")(x))


def most_memory_during(work: Any) -> tuple[Any, int]:
    """What ``work`` returns, and by how many bytes the process grew at most meanwhile."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what is free already would serve, and not count
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what it is now

    def read(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    before = read("VmRSS")
    return work(), read("VmHWM") - before


def loaded(file: str, width: int) -> Any:
    keras = models.keras_on_torch()
    keras.utils.clear_session()  # not inside of the scope below, which it would end
    with keras.device("meta"):
        built = deep(width)
    model = tpk.keras.TensorParallel(built)
    x = np.ones((4, width), "float32")
    for early in (lambda: model(x), lambda: model.predict(x, verbose=0), lambda: model.save_weights(file)):
        with pytest.raises(ValueError, match="has no weights yet: call load_weights first"):
            early()
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    model.load_weights(file)
    return model


def saved(folder: str, kind: str) -> Any:
    keras = models.keras_on_torch()
    for width in (4, WIDTH):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        whole = deep(width)
        if kind.endswith(".keras"):
            whole.save(f"{folder}/{width}{kind}")
            if kind == COMPRESSED:
                compress(Path(f"{folder}/{width}{kind}"))
        else:  # with .json, in shards of two variables
            shards = {"max_shard_size": 2.5 * ONE / 2**30} if kind == ".weights.json" else {}
            whole.save_weights(f"{folder}/{width}{kind}", **shards)
    return whole.predict(np.ones((4, WIDTH), "float32"), verbose=0)


def compress(file: Path) -> None:
    """Write an archive anew, as somebody might who wants it small; Keras does not."""
    with zipfile.ZipFile(file) as plain:
        members = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as small:
        for name, content in members.items():
            small.writestr(name, content)


def from_meta(folder: str, kind: str) -> dict[str, Any]:
    models.keras_on_torch().utils.set_random_seed(dist.get_rank())
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, ONE // 4)  # what is freed is returned, and not kept for later
    loaded(f"{folder}/4{kind}", 4)  # whatever planning and loading import
    model, grown = most_memory_during(lambda: loaded(f"{folder}/{WIDTH}{kind}", WIDTH))
    assert not any(variable.value.is_meta for variable in model.variables)
    parts = sum(variable.value.nbytes for variable in model.variables)
    x = np.ones((4, WIDTH), "float32")
    predicted = model.predict(x, verbose=0)
    model.fit(x, x, verbose=0, batch_size=4)
    after = model.predict(x, verbose=0)
    return {"predicted": predicted, "grown": grown, "parts": parts, "after": after}


@pytest.mark.parametrize("kind", [".weights.h5", ".weights.json", ".keras", COMPRESSED])
@pytest.mark.slow("7 s")
def test_a_model_of_the_meta_device_loads_its_parts_of_a_file(
    ranks: Pools, tmp_path: Path, kind: str, full: bool
) -> None:
    if kind != ".weights.h5" and not full:
        pytest.skip("--full: the other kinds of files")
    (expected,) = ranks(1).run(saved, str(tmp_path), kind, timeout=TIMEOUT)
    with WorkerPool(2, forked=True) as fresh:  # ranks that ran other tests grow by other amounts
        first, second = fresh.run(from_meta, str(tmp_path), kind, timeout=TIMEOUT)
    whole = 2 * PAIRS * ONE
    for found in (first, second):
        models.assert_equal(found["predicted"], expected, bound=1e-5)
        assert 0.49 * whole < found["parts"] < 0.52 * whole
        said = f"whole {whole:,} bytes, parts {found['parts']:,}, one variable {ONE:,}, grown by {found['grown']:,}"
        print(said)
        # Growth has been the parts, the rank's half of a variable and 2 MB: 6 of the 16 MB of a variable are to spare.
        assert 0.95 * found["parts"] < found["grown"] < found["parts"] + ONE < whole, said
    assert np.array_equal(first["after"], second["after"]), "and it trains"
