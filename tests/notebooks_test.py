"""The notebooks are short, hold no output and no logic, and run from the first cell to the last."""

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_form(path):
  book = json.loads(path.read_text(encoding="utf-8"))
  assert book["nbformat"] == 4 and len(book["cells"]) <= 25 and book["cells"][0]["cell_type"] == "markdown"
  for cell in book["cells"]:
    assert not cell.get("outputs") and cell.get("execution_count") is None
    if cell["cell_type"] == "code":
      assert not any(line.lstrip().startswith(("def ", "class ", "while ")) for line in cell["source"]), "logic belongs into the package"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path):
  nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")
  nbclient = pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")
  book = nbformat.read(path, as_version=4)
  nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
  printed = [o for cell in book.cells for o in cell.get("outputs", [])]
  assert printed and not any("Traceback" in str(o.get("text", "")) for o in printed)
