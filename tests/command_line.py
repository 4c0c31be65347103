"""The command line, called in this process."""

from typing import Any

from fastmlm.cli import main


def refused(capsys: Any, argv: list[str], *named: str) -> None:
    """Assert that a command ends with code 2 and one line on stderr, in which all of these stand."""
    capsys.readouterr()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fastmlm: error: ")
    assert err.count("\n") == 1
    for name in named:
        assert name in err
