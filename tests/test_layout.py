"""The shape of the source: imports go one way, an op has its three files, files stay short, and `import seqzoo` stays cheap."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "seqzoo": ROOT / "seqzoo",
    "seqzoo_kernels": ROOT / "seqzoo_kernels",
    "seqzoo_plugins": ROOT / "plugins",
}
OPS = sorted(
    p
    for p in (ROOT / "seqzoo_kernels").iterdir()
    if p.is_dir() and not p.name.startswith("_") and p.name != "bench"
)
MAX_LINES = 350

# Who may import whom among our packages, and which parts of seqzoo a part may import; None: all.
PACKAGES = {
    "seqzoo_kernels": set(),
    "seqzoo": {"seqzoo_kernels"},
    "seqzoo_plugins": {"seqzoo", "seqzoo_kernels"},
}
TOP = {"lab", "testing", "cli", "__main__"}
MAY_IMPORT = {"mixers": {"mixer", "packing", "registry", "layers", "bounds", "states"}}
# What the parts that everyone imports may use beyond the standard library; the bench times other libraries' ops too.
LIGHT = {"torch", "numpy"}
KERNELS = LIGHT | {"triton", "xformers"}


def module_name(path):
    for package, folder in FOLDERS.items():
        if path.is_relative_to(folder):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    raise AssertionError(path)


SOURCES = {module_name(path): path for folder in FOLDERS.values() for path in sorted(folder.rglob("*.py"))}


def imports(module, *, everywhere):
    """Modules that `module` imports; those inside functions and under TYPE_CHECKING only if `everywhere`."""
    tree = ast.parse(SOURCES[module].read_text(encoding="utf-8"))
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    found, nodes = set(), [tree]
    while nodes:
        node = nodes.pop()
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        if everywhere or not deferred:
            nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *filter(None, [base])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in SOURCES else base)
    return found


def part(module):
    """The part of seqzoo that a module belongs to: "mixers" for seqzoo.mixers.gla, "" for seqzoo itself."""
    return (module.split(".") + [""])[1]


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_one_way(module):
    package = module.split(".")[0]
    for target in imports(module, everywhere=True):
        other = target.split(".")[0]
        if other in PACKAGES and other != package:
            assert other in PACKAGES[package], f"{module} imports {target}"
        if package == other == "seqzoo" and part(target) != part(module) not in TOP:
            assert part(target) not in TOP, f"{module} imports {target}, which sits on top"
            allowed = MAY_IMPORT.get(part(module))
            assert allowed is None or part(target) in allowed, (
                f"{module} imports {target}; allowed are {allowed}"
            )


@pytest.mark.parametrize(
    "module", [m for m in SOURCES if "plugins" not in m and part(m) not in TOP | {"bench"}]
)
def test_core_needs_torch_and_numpy_alone(module):
    allowed = KERNELS if module.startswith("seqzoo_kernels") else LIGHT
    roots = {target.split(".")[0] for target in imports(module, everywhere=True)}
    assert roots <= allowed | set(PACKAGES) | set(sys.stdlib_module_names)


def test_no_import_cycle():
    graph = {module: imports(module, everywhere=False) & SOURCES.keys() - {module} for module in SOURCES}
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


@pytest.mark.parametrize("op", OPS, ids=lambda path: path.name)
def test_op_has_its_files(op):
    missing = {"__init__.py", "reference.py", "eager.py"} - {path.name for path in op.iterdir()}
    assert not missing, f"{op.name} lacks {sorted(missing)}"


@pytest.mark.parametrize("module", SOURCES)
def test_file_is_short_and_says_what_it_is(module):
    text = SOURCES[module].read_text(encoding="utf-8")
    lines = len(text.splitlines())
    assert lines <= MAX_LINES, f"{module} has {lines} lines and wants to be two files"
    assert SOURCES[module].stem not in {"utils", "util", "helpers", "common", "misc"}
    assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"


def test_packages_are_typed():
    assert all((folder / "py.typed").exists() for folder in FOLDERS.values())


def test_import_is_light():
    heavy = "torchmetrics rich typer matplotlib safetensors xformers transformers lightning hypothesis pytest".split()
    code = f"import sys, seqzoo; print(*[m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.split() == []
