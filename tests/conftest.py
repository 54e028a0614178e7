"""Fixtures that hand tests a real ComfyUI, and the settings that all tests share."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from devtools.comfy_server import PACK_FOLDER, TEST_PACK, ComfyServer, find_comfyui
from devtools.rank_pool import RankPool

if TYPE_CHECKING:
    from comfy_wan_dist.group.registry import GroupRegistry

ROOT = Path(__file__).resolve().parent.parent
# What stands behind these: a ComfyUI, processes that act as ranks, worker groups, other machines.
OUTSIDE_THE_TEST = frozenset(
    {"comfyui_path", "rank_pool", "registry", "served", "private", "runner_path"}
)


class RootIsPlainDir:
    """The repository is a ComfyUI pack with an __init__.py: keep pytest from importing it."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(
        self, path: Path, parent: pytest.Collector
    ) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="all samplers with all schedulers and so on, instead of all pairs of some; takes minutes",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RootIsPlainDir(), "root-is-plain-dir")
    # Before torch is imported here or in a child: many processes share few cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The same examples each time, however busy the machine is, and no files left behind.
    hypothesis.settings.register_profile(
        "repeatable", derandomize=True, deadline=None, database=None
    )
    hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as quick what uses none of OUTSIDE_THE_TEST, also through another fixture; and what needs a ComfyUI."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if OUTSIDE_THE_TEST.isdisjoint(fixtures):
            item.add_marker("quick")
        if "comfyui_path" in fixtures:
            item.add_marker("comfyui")


def pytest_collection_finish(session: pytest.Session) -> None:
    # All test modules are imported now. Jobs and tests collect what they leave, many times.
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of ComfyUI's log with a failed test that used the shared server."""
    report = yield
    server = getattr(item, "funcargs", {}).get("comfy")
    if report.failed and isinstance(server, ComfyServer):
        report.sections.append(("ComfyUI log", server.log[-4000:]))
    return report


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Processes that act as ranks, started on first use and shared by all tests."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def comfyui_path() -> Path:
    """The ComfyUI source tree; without one tests are skipped, except in CI."""
    try:
        return find_comfyui(ROOT)
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def comfy(comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """One ComfyUI for the whole session with this pack and the tests' own nodes in it, started on first use."""
    base = tmp_path_factory.mktemp("comfyui")
    packs = {PACK_FOLDER: ROOT, "test-pack": TEST_PACK}
    with ComfyServer(comfyui=comfyui_path, base=base, packs=packs) as server:
        yield server


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that no other test uses: ComfyUI would answer a graph that it has seen from its cache."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def comfy_server_factory(
    comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., ComfyServer]]:
    """Start servers of one's own, to be killed or given other arguments; stopped after the test."""
    with contextlib.ExitStack() as running:

        def start(
            *,
            base: Path | None = None,
            extra_args: Sequence[str] = (),
            env: Mapping[str, str] | None = None,
        ) -> ComfyServer:
            server = ComfyServer(
                comfyui=comfyui_path,
                base=base or tmp_path_factory.mktemp("comfyui-own"),
                packs={PACK_FOLDER: ROOT},
                extra_args=extra_args,
                env=env or {},
            )
            return running.enter_context(server)

        yield start


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process's groups make their folders. After tmp_path, whose own place must not be in it."""
    with tempfile.TemporaryDirectory(prefix="wdt-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def registry(private: Path) -> Iterator[GroupRegistry]:
    """Ends its groups after the test, of which nothing may stay."""
    # Here, because torch comes with them: see pytest_configure.
    from group_kit import assert_nothing_left

    from comfy_wan_dist.group.registry import GroupRegistry

    registry = GroupRegistry()
    yield registry
    registry.stop_all()
    assert_nothing_left(private)
