"""What counts as a patch that a scope has left behind."""

from __future__ import annotations

import types
import warnings

from amanda.testing import watched


def test_warnings_of_a_module_are_no_patches() -> None:
    """A module that has warned, where Python notes it, is as it was; a new function is not."""
    module = types.ModuleType("framework")
    exec("import warnings\ndef warn(): warnings.warn('old', stacklevel=1)", vars(module))
    before = watched.snapshot([module])
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("default")
        module.warn()
    assert "__warningregistry__" in vars(module)
    assert watched.differences([module], before, watched.snapshot([module])) == []
    module.__dict__["warn"] = print
    changed = watched.differences([module], before, watched.snapshot([module]))
    assert changed == ["framework.warn"]
