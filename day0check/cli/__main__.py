"""`python -m day0check.cli` is `day0check`."""

from day0check.cli.app import main

main()
