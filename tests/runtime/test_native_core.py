"""A native core that was built from other sources than the Python code is an error that says how to build it again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_comm.errors import StaleCore
from moe_comm.kernels.native import core
from moe_comm.runtime import doctor
from moe_comm.runtime.native_core import native, native_is_built

_C = pytest.importorskip("moe_comm._C", reason="the native core is not built")


@pytest.fixture(params=["other", None])
def _stale(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the core's hash by another one, or by none, as in builds before it had one."""
    caches = (native, native_is_built, core)
    for cache in caches:
        cache.cache_clear()
    if request.param:
        monkeypatch.setattr(_C, "interface", request.param)
    else:
        monkeypatch.delattr(_C, "interface")
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("_stale")
def test_a_core_of_other_sources_is_an_error_that_says_how_to_build_it() -> None:
    for load in (native, native_is_built, core):
        with pytest.raises(StaleCore, match="run `make build` in a checkout"):
            load()
    (finding,) = [finding for finding in doctor.examine().findings if finding.topic == "native core"]
    assert (finding.status, finding.advice[:10]) == ("broken", "make build")


def test_the_core_of_these_sources_is_loaded() -> None:
    assert native() is _C and core() is _C and native_is_built()
