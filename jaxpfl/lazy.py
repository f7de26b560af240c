"""Imports of our packages, and of slow and optional libraries, that wait until their first use."""

import ast
import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxpfl.errors import InputError


def face(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package whose `__init__` calls it.

    The one list of its names is the `if TYPE_CHECKING:` block of that file, which editors and type
    checkers read as ever: `from package.module import name as name`.
    """
    module = sys.modules[package]
    source = Path(str(module.__file__)).read_text("utf-8")
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    statements = [x for b in blocks if ast.unparse(b.test) == "TYPE_CHECKING" for x in b.body]
    imports = [statement for statement in statements if isinstance(statement, ast.ImportFrom)]
    homes = {alias.name: str(line.module) for line in imports for alias in line.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    class Face(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            # Python binds a module in its package once it is loaded, but a function that has its
            # module's name is what the face promises.
            if isinstance(value, ModuleType) and homes.get(name, package) != package:
                value = getattr(value, name)
            super().__setattr__(name, value)

    module.__class__ = Face
    return get, lambda: sorted({*vars(module), *homes}), sorted(homes)


def later(package: str, light: str) -> None:
    """Lets `import package` succeed at once, with the names of its module `light`.

    The package itself is loaded when another of its names is first used.
    """
    spec: Any = importlib.util.find_spec(package)
    if spec is None or package in sys.modules:
        return  # if it is absent, the import that needs it says so
    module: Any = importlib.util.module_from_spec(spec)
    loading, begun = threading.RLock(), False

    def get(name: str) -> Any:
        nonlocal begun
        if not name.startswith("__") or name == "__all__":  # of `from package import *`
            names = vars(importlib.import_module(f"{package}.{light}"))
            if name in names:
                return names[name]
            with loading:
                if not begun:
                    begun = True
                    spec.loader.exec_module(module)
            if name in vars(module):
                return vars(module)[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    module.__getattr__ = get
    sys.modules[package] = module


def require(module: str, extra: str) -> Any:
    """Imports a library of an optional extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        how = f"({error}): pip install 'jaxpfl[{extra}]'"
        raise InputError(f"this needs {module}, which cannot be imported {how}") from error
