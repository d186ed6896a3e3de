# Licensed under the Apache License, Version 2.0; see the LICENSE file at the top of this repository.
"""What README.md and the pages in docs/ show is run, and gives what they show.

The Python blocks of a page run on two ranks, in the order of the page and in one namespace; in troubleshooting.md each
section has ranks and a namespace of its own. A `text` block right behind one holds what it writes to the terminal, the
errors that it ends with included: the lines of rank 0, and then those of rank 1 that rank 0 has not written. Where lines
are broken does not matter. `<!-- not run: reason -->` before a block leaves it out.

The blocks of recipes.md are run in tests/libraries, those of trainer.md in test_trainer.py, the commands there in
test_running.py and test_environment.py.
"""

import contextlib
import doctest
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.utils import compare_versions
from ranks import run

import accelerate_presharded
from tools.reference import reference


ROOT = Path(__file__).parent.parent
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
PAGES = {page.name: page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
RUN_ELSEWHERE = {"recipes.md", "trainer.md"}

BLOCK = re.compile(
    r"^(?P<left_out><!-- not run: .+ -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<text>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


def sections() -> dict[str, str]:
    """The pages, and the sections of the one that is read in parts."""
    found = {}
    for name, page in PAGES.items():
        text = page.read_text(encoding="utf-8")
        if name == "troubleshooting.md":
            for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
                found[f"{name}: {part.splitlines()[0]}"] = part
        elif name not in RUN_ELSEWHERE:
            found[name] = text
    return found


def blocks(text: str, language: str) -> list[tuple[str, str | None]]:
    """The code of each block, and what it is to write."""
    found = [match for match in BLOCK.finditer(text) if match["language"] == language and not match["left_out"]]
    return [(match["code"], match["text"]) for match in found]


def read_page(parts: list[tuple[str, str | None]], folder: str) -> list[list[str]]:
    """On a rank: run the blocks, and return the lines that each has written."""
    os.chdir(folder)
    names: dict = {"__name__": "__main__"}
    written = []
    for code, text in parts:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            before = set(names)
            try:
                exec(compile(code, "page", "exec"), names)
                for test in [name for name in set(names) - before if name.startswith("test_")]:
                    names[test]()
            except Exception as error:
                if text is None:
                    raise
                print(f"{type(error).__name__}: {error}")
        written.append(output.getvalue().splitlines())
    return written


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("name", [name for name, text in sections().items() if blocks(text, "python")])
def test_the_code_of_a_page_does_what_the_page_says(name, tmp_path):
    parts = blocks(sections()[name], "python")
    first, second = run(2, read_page, parts, str(tmp_path), env=ON_CPU)
    for (code, text), lines, more in zip(parts, first, second, strict=True):
        if text is not None:
            if compare_versions("accelerate", "<", "1.13"):  # its log does not name the rank
                text = text.replace("[RANK 0] ", "").replace("[RANK 1] ", "")
            written = [*lines, *(line for line in more if line not in lines)]
            assert words(written) == words(text.splitlines()), "\n".join([code, *written])


def test_the_command_of_the_audit_page(tmp_path):
    page = PAGES["audit.md"].read_text(encoding="utf-8")
    [source] = [code for code, _ in blocks(page, "python") if code.startswith("# loaders.py")]
    (tmp_path / "loaders.py").write_text(source)
    [(command, expected)] = blocks(page, "bash")
    name, *arguments = shlex.split(command)
    assert name == "accelerate-presharded"
    process = subprocess.run(
        [sys.executable, "-m", "accelerate_presharded", *arguments],
        text=True,
        capture_output=True,
        timeout=240,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    assert words(process.stdout.splitlines()) == words(expected.splitlines())
    assert (tmp_path / "seen.png").stat().st_size > 0


def test_the_options_of_the_audit_page(capsys):
    from accelerate_presharded.cli import main

    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    offered = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = PAGES["audit.md"].read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)) == offered


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name, page in (*PAGES.items(), ("CONTRIBUTING.md", ROOT / "CONTRIBUTING.md")):
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, name


def test_the_links_of_the_readme_lead_somewhere():
    # `make docs` looks at those of the other pages.
    links = re.findall(r"\]\(([\w./-]+)#?([\w-]*)\)", PAGES["README.md"].read_text(encoding="utf-8"))
    assert links
    for path, anchor in links:
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, (path, anchor)


def test_the_reference_has_everything_public_and_each_of_its_parameters():
    sections = dict(re.findall(r"^##+ `([\w.]+)` .+?$(.*?)(?=^##|\Z)", reference(), re.MULTILINE | re.DOTALL))
    assert set(accelerate_presharded.__all__) <= set(sections)
    documented = {
        name: getattr(accelerate_presharded, name)
        for name in accelerate_presharded.__all__
        if inspect.isfunction(getattr(accelerate_presharded, name))
    }
    for cls in (accelerate_presharded.Accelerator, accelerate_presharded.PreshardedDataLoader):
        methods = {name: method for name, method in vars(cls).items() if inspect.isfunction(method) and method.__doc__}
        documented.update(
            {f"{cls.__name__}.{name}": method for name, method in methods.items() if not name.startswith("_")}
        )
    for name, function in documented.items():
        for parameter in set(inspect.signature(function).parameters) - {"self"}:
            assert re.search(rf"^- \*\*(\\\*)*{parameter}\*\* \(.+?\) — \S", sections[name], re.MULTILINE), (
                name,
                parameter,
            )


def run_example(example: str, folder: str) -> str:
    """On a rank: run an example of a docstring, and return what is wrong with it."""
    os.chdir(folder)
    test = doctest.DocTestParser().get_doctest(example, {}, "example", None, None)
    wrong: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=wrong.append)
    return "".join(wrong)


def test_the_examples_of_the_reference(tmp_path):
    examples = [example for example, _ in blocks(reference(), "pycon")]
    assert len(examples) >= len(accelerate_presharded.__all__)
    for example in examples:
        assert run(1, run_example, example, str(tmp_path), env=ON_CPU) == [""], example
