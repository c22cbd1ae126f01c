"""The README's Python runs, and its promises about size hold."""

import pathlib
import re

import jax
import pytest

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs(block):
    names = {}
    exec(block, names)
    leaves = jax.tree.leaves(names["gradients"])
    assert len(leaves) == 5
    assert all(jax.numpy.any(leaf != 0) for leaf in leaves)


def test_module_example_is_short():
    (block,) = BLOCKS
    start = block.index("class MyModel")
    assert len(block[start:].splitlines()) < 20
    assert "SparseFFN" in block
