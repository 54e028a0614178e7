"""Imports go one way, importing does no work, and a name means one thing.

Covered: the order of the packages, who may touch ComfyUI and torch.distributed, no pickle, relative
imports in what ComfyUI loads; and, in a fresh interpreter, that importing writes no file, opens no
socket, and starts no process and no thread. The rules read the source, so they see imports inside
functions too. Not covered: modules that need a running ComfyUI are read but not imported here.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACK = "comfy_wan_dist"
WORKERS = "workers"
ROOMS = (
    f"{PACK}.ipc",
    f"{PACK}.mesh",
    f"{PACK}.model_file",
    f"{PACK}.solvers",
    f"{PACK}.group",
    f"{PACK}.planning",
    f"{PACK}.cli",
    f"{PACK}.comfyui",
    f"{PACK}.jobs",
    f"{PACK}.nodes",
    f"{PACK}.extension",
    f"{PACK}.__main__",
    f"{WORKERS}.model",
    f"{WORKERS}.vae",
    f"{WORKERS}.quant",
    f"{WORKERS}.parallel",
    f"{WORKERS}.checkpoint",
    f"{WORKERS}.sampling",
    f"{WORKERS}.job",
    f"{WORKERS}.resident",
    f"{WORKERS}.sample_job",
    f"{WORKERS}.forward_job",
    f"{WORKERS}.vae_job",
    f"{WORKERS}.runner",
    f"{WORKERS}.process",
)
"""A room imports only rooms before it and itself. docs/architecture.md prints this list."""
SHARED_WITH_WORKERS = {"ipc", "mesh", "model_file", "solvers"}
# ComfyUI's own top-level modules, but for comfy_api, which is made for packs.
COMFYUI = {
    "comfy",
    "comfy_execution",
    "comfy_extras",
    "execution",
    "folder_paths",
    "latent_preview",
    "node_helpers",
    "nodes",
    "server",
}
USES_COMFY_API = {"nodes", "extension"}
# Not importable without a ComfyUI; extension is, as it imports the nodes only when asked for them.
NEEDS_COMFYUI = (
    f"{PACK}.comfyui",
    f"{PACK}.nodes",
    f"{PACK}.jobs.forwards",
    f"{PACK}.jobs.session",
    f"{PACK}.jobs.sampling",
    f"{PACK}.jobs.vae",
)
PLAIN_MODULES = ("workers.model", "workers.vae")
PICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
PICKLING_CALLS = {"torch.load", "torch.save"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """One imported dotted name. `is_relative` tells how it was written; `name` is absolute."""

    name: str
    is_relative: bool

    def is_in(self, *packages: str) -> bool:
        return any(self.name == p or self.name.startswith(f"{p}.") for p in packages)


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    name: str
    is_package: bool
    tree: ast.Module

    @property
    def part(self) -> str:
        """The second component: group for comfy_wan_dist.group.client, "" for comfy_wan_dist."""
        return (self.name.split(".") + [""])[1]

    def imports(self) -> Iterator[Import]:
        """Each name that an import statement binds or loads, resolved to an absolute one."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(name=alias.name, is_relative=False)
            elif isinstance(node, ast.ImportFrom):
                origin = self._absolute(node)
                for alias in node.names:
                    yield Import(name=f"{origin}.{alias.name}", is_relative=node.level > 0)

    def attributes(self) -> Iterator[str]:
        """Each dotted name in the code, as in torch.distributed.all_reduce, and its last part."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                yield ast.unparse(node)
            elif isinstance(node, ast.Name):
                yield node.id

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parents = self.name.split(".")
        kept = len(parents) - node.level + self.is_package
        if kept < 1:
            return f"<outside of {parents[0]}>"
        return ".".join([*parents[:kept], *([node.module] if node.module else [])])


def load(path: Path, root: Path) -> Module:
    relative = path.relative_to(root).with_suffix("")
    is_package = relative.name == "__init__"
    parts = relative.parts[:-1] if is_package else relative.parts
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return Module(name=".".join(parts), is_package=is_package, tree=tree)


def modules_of(*packages: str) -> list[Module]:
    return [load(path, ROOT) for name in packages for path in sorted((ROOT / name).rglob("*.py"))]


def violations(module: Module) -> list[str]:
    """What `module` does against the rules of its place, one sentence each."""
    found = [*_imports_against_order(module), *_pickling(module)]
    return [f"{module.name} {what}" for what in found]


def _imports_against_order(module: Module) -> Iterator[str]:
    is_in_pack = module.name.split(".")[0] == PACK
    for item in module.imports():
        if item.is_in(PACK, WORKERS) or item.name.startswith("<outside"):
            rule = _pack_rule if is_in_pack else _workers_rule
            if not rule(module, item):
                yield f"imports {item.name}"
        if item.is_in(*COMFYUI) and not is_in(module.name, f"{PACK}.comfyui"):
            yield f"imports ComfyUI's {item.name}, which only comfyui/ may"
        if item.is_in("comfy_api") and not (is_in_pack and module.part in USES_COMFY_API):
            yield f"imports {item.name}, which only {sorted(USES_COMFY_API)} may"
    if is_in_pack or f"{module.name}.".startswith(tuple(f"{name}." for name in PLAIN_MODULES)):
        names = {item.name for item in module.imports()} | set(module.attributes())
        if any(f"{name}.".startswith("torch.distributed.") for name in names):
            yield "uses torch.distributed"


def is_in(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def room_of(name: str) -> int | None:
    """Number of the room that holds a dotted name, if one does."""
    found = [number for number, room in enumerate(ROOMS) if is_in(name, room)]
    return found[0] if found else None


def _is_downward(module: Module, item: Import) -> bool:
    here, there = room_of(module.name), room_of(item.name)
    # What is in no room may neither import nor be imported: name it in ROOMS first.
    return here is not None and there is not None and there <= here


def _pack_rule(module: Module, item: Import) -> bool:
    """Inside comfy_wan_dist: relative, and downward or to itself."""
    return item.is_relative and item.is_in(PACK) and _is_downward(module, item)


def _workers_rule(module: Module, item: Import) -> bool:
    """Inside workers: downward, and of the pack only what is shared."""
    if item.is_in(WORKERS):
        return _is_downward(module, item)
    return item.is_in(*(f"{PACK}.{part}" for part in SHARED_WITH_WORKERS))


def _pickling(module: Module) -> Iterator[str]:
    names = {item.name for item in module.imports()} | set(module.attributes())
    for name in sorted(names):
        last = name.rpartition(".")[2]
        if name.split(".")[0] in PICKLERS or name in PICKLING_CALLS:
            yield f"uses {name}, which can run what it reads"
        elif last.endswith(("_object", "_object_list")) and _is_collective(last):
            yield f"uses the pickling collective {last}"


def _is_collective(name: str) -> bool:
    """Whether torch.distributed has a function of this name."""
    import torch.distributed

    return hasattr(torch.distributed, name)


def test_every_module_keeps_to_its_place() -> None:
    modules = modules_of(PACK, WORKERS)
    assert {module.name for module in modules} > {PACK, f"{PACK}.ipc.errors", WORKERS}
    assert [what for module in modules for what in violations(module)] == []


def test_architecture_prints_the_rooms_in_their_order() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("<!-- rooms -->")[2].partition("<!-- end of rooms -->")[0]
    assert tuple(re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)) == ROOMS


def test_files_that_architecture_names_are_there() -> None:
    """Those with a folder: as the repository has them, or below one of its packages."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.(?:py|md))`", text))
    homes = [ROOT, ROOT / PACK, ROOT / WORKERS, ROOT / WORKERS / "parallel"]
    assert len(named) > 40
    assert [
        name for name in sorted(named) if not any((home / name).is_file() for home in homes)
    ] == []


def test_every_module_is_in_a_room() -> None:
    homeless = [m.name for m in modules_of(PACK, WORKERS) if room_of(m.name) is None]
    assert homeless == [PACK, WORKERS]


def test_modules_import_each_other_in_no_circle() -> None:
    modules = {module.name: module for module in modules_of(PACK, WORKERS)}
    assert (
        circle_in({name: imported_modules(module, modules) for name, module in modules.items()})
        == []
    )


def test_no_two_public_classes_have_one_name() -> None:
    assert namesakes(modules_of(PACK, WORKERS)) == []


def imported_modules(module: Module, known: Collection[str]) -> set[str]:
    """The modules of `known` that `module` imports, by whichever of their names."""
    names = {item.name for item in module.imports()}
    parents = {name.rpartition(".")[0] for name in names}
    return ((names & set(known)) | (parents & set(known))) - {module.name}


def circle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules on a way that leads back to where it began; empty if there is none."""
    left = dict(imports)
    while True:
        imported = set().union(*left.values()) if left else set()
        leaves = [
            name
            for name, targets in left.items()
            if not targets & set(left) or name not in imported
        ]
        if not leaves:
            return sorted(left)
        for name in leaves:
            del left[name]


def namesakes(modules: Sequence[Module]) -> list[str]:
    places: dict[str, list[str]] = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.name)
    return [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def test_a_circle_and_namesakes_are_seen(tmp_path: Path) -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    two = [_written(tmp_path / side, f"workers/{side}.py", "class Job: ...") for side in "xy"]
    assert namesakes(two) == ["Job: workers.x, workers.y"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("comfy_wan_dist/ipc/channel.py", "from ..mesh import layout"),
        ("comfy_wan_dist/ipc/channel.py", "from .. import mesh"),
        ("comfy_wan_dist/mesh/layout.py", "def f():\n    from ..group import client"),
        ("comfy_wan_dist/solvers/schedules.py", "from ..nodes import sampler"),
        ("comfy_wan_dist/group/client.py", "from comfy_wan_dist.ipc import errors"),
        ("comfy_wan_dist/nodes/sampler.py", "from ...workers import job"),
        ("comfy_wan_dist/nodes/sampler.py", "import workers.job"),
        ("comfy_wan_dist/nodes/sampler.py", "import folder_paths"),
        ("comfy_wan_dist/group/client.py", "import comfy.utils"),
        ("comfy_wan_dist/group/client.py", "from comfy_api.latest import io"),
        ("comfy_wan_dist/group/client.py", "from torch import distributed"),
        ("comfy_wan_dist/group/client.py", "import torch\ntorch.distributed.is_initialized()"),
        ("comfy_wan_dist/novelty.py", "from .ipc import errors"),
        ("workers/process/loop.py", "from comfy_wan_dist.group import client"),
        ("workers/process/loop.py", "from comfy_wan_dist import group"),
        ("workers/process/loop.py", "import comfy_wan_dist"),
        ("workers/process/loop.py", "import comfy"),
        ("workers/process/loop.py", "import pickle"),
        ("workers/process/loop.py", "import torch\ntorch.load('model.pt')"),
        (
            "workers/process/loop.py",
            "import torch.distributed as dist\ndist.broadcast_object_list([])",
        ),
        ("workers/process/loop.py", "from torch.distributed import all_gather_object"),
        ("workers/model/wan.py", "import torch.distributed as dist"),
        ("workers/model/wan.py", "from ..parallel import collectives"),
        ("workers/vae/__init__.py", "from ..parallel import spatial"),
    ],
)
def test_rules_see_a_violation(path: str, source: str, tmp_path: Path) -> None:
    assert len(violations(_written(tmp_path, path, source))) > 0


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("comfy_wan_dist/ipc/channel.py", "from . import errors\nfrom .errors import ConfigError"),
        ("comfy_wan_dist/ipc/__init__.py", "from .errors import ConfigError"),
        ("comfy_wan_dist/mesh/layout.py", "from ..ipc.errors import MeshError"),
        ("comfy_wan_dist/group/client.py", "from .. import model_file\nfrom ..ipc import channel"),
        ("comfy_wan_dist/comfyui/adapter.py", "import comfy.utils\nimport folder_paths"),
        ("comfy_wan_dist/nodes/sampler.py", "from comfy_api.latest import io\nfrom . import plan"),
        (
            "workers/process/loop.py",
            "from comfy_wan_dist.ipc import channel\nfrom comfy_wan_dist import mesh",
        ),
        (
            "workers/process/loop.py",
            "import torch.distributed as dist\nfrom .parallel import groups",
        ),
        ("workers/process/loop.py", "def is_plain_object(value): ..."),
        ("workers/parallel/tensor.py", "from ..model.wan import WanModel"),
        ("workers/model/wan.py", "import torch\nfrom .rope import rotate"),
    ],
)
def test_rules_allow_what_is_in_order(path: str, source: str, tmp_path: Path) -> None:
    assert violations(_written(tmp_path, path, source)) == []


def _written(root: Path, path: str, source: str) -> Module:
    file = root / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    return load(file, root)


# Arguments: third parties, which may do as they like, so they come before the hook; then ours.
THIRD_PARTIES = "torch torch.distributed torch._dynamo numpy safetensors.torch einops"
WATCHED_IMPORTS = """
import importlib, os, sys, threading
for third_party in sys.argv[1].split():
    importlib.import_module(third_party)
before = set(sys.modules)
seen = []

def watch(event, args):
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        seen.append(f"opens {args[0]} for writing")
    elif event in {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.mkdir", "socket.__new__",
                   "os.putenv", "_thread.start_new_thread"}:
        seen.append(event)

threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
sys.addaudithook(watch)
for name in sys.argv[2].split():
    importlib.import_module(name)
    if threading.active_count() > 1:
        seen.append("threads after " + name)
if threads and len(os.listdir("/proc/self/task")) > threads:
    seen.append("threads of native code")
loaded = set(sys.modules) - before
seen += [f"loads {name}" for name in loaded if name.split(".")[0] in {"comfy", "folder_paths"}]
for line in seen:
    print(line)
"""


def watched_import(names: list[str], *, path: Path, after: str = "") -> list[str]:
    """Import `names` from `path` in a fresh interpreter after `after`; returns what they did."""
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORTS, after, " ".join(names)],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_does_no_work() -> None:
    """Every module, except what only a running ComfyUI can import."""
    names = [
        module.name
        for module in modules_of(PACK, WORKERS)
        if not any(is_in(module.name, name) for name in NEEDS_COMFYUI)
    ]
    assert watched_import(names, path=ROOT, after=THIRD_PARTIES) == []


def test_importing_the_pack_by_any_folder_name_does_no_work(tmp_path: Path) -> None:
    """As ComfyUI does: a package whose name is not ours, before any third party."""
    (tmp_path / "some_folder").symlink_to(ROOT, target_is_directory=True)
    assert watched_import(["some_folder"], path=tmp_path) == []


@pytest.mark.parametrize(
    "source",
    [
        "open(__file__ + '.log', 'w').close()",
        "import subprocess\nsubprocess.run(['true'])",
        "import socket\nsocket.socket().close()",
        "import threading\nthreading.Timer(1, print).start()",
        "import os\nos.environ['X'] = '1'",
    ],
)
def test_watched_import_sees_work(source: str, tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(source)
    assert watched_import(["busy"], path=tmp_path) != []
