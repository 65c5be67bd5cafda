"""`day0check serve` before anything is loaded: names, operators files, addresses."""

import pytest
from click.testing import CliRunner

from day0check.cli.serve import check_open, make_service, serve
from day0check.errors import UsageError


def given(**changes):
    """The options of the command as they are by default."""
    defaults = serve.make_context("serve", []).params
    return {**defaults, "model": "fault-dsa", **changes}


def test_an_operators_file_reaches_the_server(tmp_path):
    """Catches --ops that is read and not used, and one that names nothing of the server."""
    path = tmp_path / "ops.py"
    path.write_text("import day0check\n@day0check.operator.wrap('serve.stop')\ndef f(g, *a, **k): return g(*a, **k)\n")
    service = make_service(given(ops=str(path), served_model_name="mine"))
    assert service.engine.operators.replaced == ("serve.stop",)
    assert service.options.name == "mine"
    path.write_text(path.read_text().replace("serve.stop", "serve.nothing"))
    with pytest.raises(UsageError, match=r"serve\.nothing"):
        make_service(given(ops=str(path)))


@pytest.mark.parametrize(
    "changes", [{"model": "nosuch"}, {"profile": "fp8"}, {"device": "nosuch"}, {"ops": "nosuch.py"}]
)
def test_bad_names_are_usage_errors(changes):
    """Catches a server that starts with something else than was asked for."""
    with pytest.raises(UsageError):
        make_service(given(**changes))


def test_it_listens_on_loopback_unless_told_otherwise(capsys):
    """Catches a server that strangers reach by default, and one that is open without a word."""
    assert given()["host"] == "127.0.0.1"
    check_open("127.0.0.1", None)
    check_open("::1", None)
    check_open("localhost", None)
    check_open("0.0.0.0", "key")
    assert capsys.readouterr().err == ""
    check_open("0.0.0.0", None)
    assert "--api-key" in capsys.readouterr().err
    with pytest.raises(UsageError):
        check_open("127.0.0.1", "")


def test_bad_options_are_told():
    """Catches a value out of range that is taken."""
    for bad in (["--port", "70000"], ["--max-batch", "0"], ["--drain", "0"], ["--foo"]):
        assert CliRunner().invoke(serve, bad).exit_code == 2
