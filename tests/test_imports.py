"""Imports go one way, and importing does no work.

Covered: the order of the packages, who may touch ComfyUI and torch.distributed, no pickle, relative
imports in what ComfyUI loads; and, in a fresh interpreter, that importing writes no file, opens no
socket, and starts no process and no thread. The rules read the source, so they see imports inside
functions too. Not covered: modules that need a running ComfyUI are read but not imported here.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACK = "comfy_wan_dist"
WORKERS = "workers"
# A part imports only parts of a lower rank, and itself.
RANK = {
    "ipc": 0,
    "mesh": 1,
    "model_file": 2,
    "group": 3,
    "handle": 3,
    "model_list": 3,
    "schedules": 3,
    "conditioning_file": 3,
    "plan_chart": 3,
    "doctor": 3,
    "calibrate": 3,
    "cli": 4,
    "__main__": 5,
    "experts": 4,
    "comfy_adapter": 4,
    "prompts": 5,
    "session": 5,
    "sampling_pieces": 6,
    "nodes": 7,
    "extension": 8,
}
SHARED_WITH_WORKERS = {"ipc", "mesh", "model_file"}
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
USES_COMFY_API = {"comfy_adapter", "nodes", "extension"}
# Not importable without a ComfyUI; extension is, as it imports the nodes only when asked for them.
NEEDS_COMFYUI = {"comfy_adapter", "prompts", "session", "sampling_pieces", "nodes"}
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
        if item.is_in(*COMFYUI) and module.name != f"{PACK}.comfy_adapter":
            yield f"imports ComfyUI's {item.name}, which only comfy_adapter may"
        if item.is_in("comfy_api") and not (is_in_pack and module.part in USES_COMFY_API):
            yield f"imports {item.name}, which only {sorted(USES_COMFY_API)} may"
    if is_in_pack or f"{module.name}.".startswith(tuple(f"{name}." for name in PLAIN_MODULES)):
        names = {item.name for item in module.imports()} | set(module.attributes())
        if any(f"{name}.".startswith("torch.distributed.") for name in names):
            yield "uses torch.distributed"


def _pack_rule(module: Module, item: Import) -> bool:
    """Inside comfy_wan_dist: relative, and downward or to itself."""
    if not item.is_relative or not item.is_in(PACK):
        return False
    target = (item.name.split(".") + [""])[1]
    if target == module.part:
        return True
    # An unknown part has no rank: name it in RANK first.
    return module.part in RANK and target in RANK and RANK[target] < RANK[module.part]


def _workers_rule(module: Module, item: Import) -> bool:
    """Inside workers: anything of workers, but plain modules know no parallelism."""
    if item.is_in(WORKERS):
        is_plain = f"{module.name}.".startswith(tuple(f"{name}." for name in PLAIN_MODULES))
        return not (is_plain and item.is_in(f"{WORKERS}.parallel"))
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


def test_every_part_of_the_pack_has_a_rank() -> None:
    assert {module.part for module in modules_of(PACK)} <= {*RANK, ""}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("comfy_wan_dist/ipc/channel.py", "from ..mesh import layout"),
        ("comfy_wan_dist/ipc/channel.py", "from .. import mesh"),
        ("comfy_wan_dist/mesh/layout.py", "def f():\n    from ..group import client"),
        ("comfy_wan_dist/schedules.py", "from .nodes import sampler"),
        ("comfy_wan_dist/group/client.py", "from comfy_wan_dist.ipc import errors"),
        ("comfy_wan_dist/nodes/sampler.py", "from ...workers import loop"),
        ("comfy_wan_dist/nodes/sampler.py", "import workers.loop"),
        ("comfy_wan_dist/nodes/sampler.py", "import folder_paths"),
        ("comfy_wan_dist/group/client.py", "import comfy.utils"),
        ("comfy_wan_dist/group/client.py", "from comfy_api.latest import io"),
        ("comfy_wan_dist/group/client.py", "from torch import distributed"),
        ("comfy_wan_dist/group/client.py", "import torch\ntorch.distributed.is_initialized()"),
        ("comfy_wan_dist/novelty.py", "from .ipc import errors"),
        ("workers/loop.py", "from comfy_wan_dist.group import client"),
        ("workers/loop.py", "from comfy_wan_dist import group"),
        ("workers/loop.py", "import comfy_wan_dist"),
        ("workers/loop.py", "import comfy"),
        ("workers/loop.py", "import pickle"),
        ("workers/loop.py", "import torch\ntorch.load('model.pt')"),
        ("workers/loop.py", "import torch.distributed as dist\ndist.broadcast_object_list([])"),
        ("workers/loop.py", "from torch.distributed import all_gather_object"),
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
        ("comfy_wan_dist/comfy_adapter.py", "import comfy.utils\nimport folder_paths"),
        ("comfy_wan_dist/nodes/sampler.py", "from comfy_api.latest import io\nfrom . import plan"),
        (
            "workers/loop.py",
            "from comfy_wan_dist.ipc import channel\nfrom comfy_wan_dist import mesh",
        ),
        ("workers/loop.py", "import torch.distributed as dist\nfrom .parallel import groups"),
        ("workers/loop.py", "def is_plain_object(value): ..."),
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
        if not (module.name.startswith(f"{PACK}.") and module.part in NEEDS_COMFYUI)
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
